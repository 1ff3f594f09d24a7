"""What the engine at hand can do, measured before anything is replayed: a minute's work in ten seconds.

Two short runs, straight at the engine:
1. *idle*: single requests with a short and a long prompt in turn. The difference of their times to the first
   token, over the difference of their lengths, is what a prompt token costs.
2. *full*: a closed loop that keeps every slot busy with requests of the very mix that is replayed later. The
   engine is busy all the while, so what the prompts do not explain is what the answers cost:
   `output_token_s = (elapsed - prompt tokens x prompt_token_s) / output tokens`.

In that unit a busy engine does one second of work a second by definition, and an overload of 2.5 is 2.5
seconds of work offered each second. The split matters little: it weighs prompts against answers when a
stretch of the trace is cut, and an error in it cancels over the stretch.

Assumes that the engine's throughput with all slots busy is its capacity, which holds for llama.cpp's slots; for
an engine that batches without slots, `slots` is the number of streams at which it is called full.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sluicegate_lab.demo_engine import Engine
from sluicegate_lab.load import Outcome, Patience, Record, Replay, Target, Wording
from sluicegate_lab.traffic import BATCH, INTERACTIVE, Request, TraceRow, WorkCost, scaled_lengths

IDLE_ROUNDS = 4
SHORT_WORDS = 8
LONG_WORDS = 200
IDLE_OUTPUT_TOKENS = 8
"""The idle run: eight requests, a few seconds on a small engine."""

FULL_S = 8.0
TEACH_S = 8.0
"""Some twenty requests each on a small engine: enough for rates, short enough for three minutes in all."""

PATIENCE = Patience({INTERACTIVE: 60.0, BATCH: 60.0}, drain_s=60.0)
"""Nobody leaves while the engine is measured."""

LEAST_COST_S = 1e-7
"""Floor of what a token costs: ten million tokens a second, beyond any engine that this client could drive."""


class CalibrationError(Exception):
    """The engine did not answer as an engine does; the message is one line."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What was measured. Times in seconds; rates of the full engine, for the mix that is replayed."""

    cost: WorkCost
    idle_ttft_s: float
    full_gap_s: float
    requests_per_s: float
    output_tokens_per_s: float
    mean_output_tokens: float


async def measure(
    engine: Engine, trace: Sequence[TraceRow], *, seed: int, progress: Callable[[str], None]
) -> Capacity:
    """Measures the engine. Raises `CalibrationError` where requests fail."""
    progress("measuring the idle engine")
    idle = await _idle(engine)
    short_s = statistics.median(_ttft_s(record) for record in idle[0::2])
    long_s = statistics.median(_ttft_s(record) for record in idle[1::2])
    prompt_token_s = max((long_s - short_s) / (LONG_WORDS - SHORT_WORDS), LEAST_COST_S)

    progress(f"measuring the full engine: {engine.slots} requests at a time for {FULL_S:.0f} s")
    replay = Replay(engine.target, Wording("full", engine.counts_down), PATIENCE)
    await replay.run_closed(_mix(trace, seed), concurrency=engine.slots, seconds=FULL_S)
    done = _served(replay.records)
    elapsed_s = max(record.ended_s or 0.0 for record in done)
    prompt_tokens = sum(record.prompt_tokens or record.request.prompt_words for record in done)
    output_tokens = sum(tokens_of(record) for record in done)
    # Between the last arrival and the last end the engine empties: half of that time counts as busy.
    busy_s = elapsed_s - max(0.0, elapsed_s - FULL_S) / 2
    output_token_s = (busy_s - prompt_tokens * prompt_token_s) / output_tokens
    if output_token_s <= 0:
        # The idle prefill was slower than all of the full run: no split can be told from these numbers.
        prompt_token_s, output_token_s = LEAST_COST_S, busy_s / output_tokens
    median_words = statistics.median(scaled_lengths(row)[0] for row in trace)
    return Capacity(
        cost=WorkCost(prompt_token_s, max(output_token_s, LEAST_COST_S)),
        idle_ttft_s=short_s + (median_words - SHORT_WORDS) * prompt_token_s,
        full_gap_s=statistics.median(record.mean_gap_s or 0.0 for record in done),
        requests_per_s=len(done) / busy_s,
        output_tokens_per_s=output_tokens / busy_s,
        mean_output_tokens=output_tokens / len(done),
    )


async def teach(engine: Engine, gate: Target, trace: Sequence[TraceRow], *, seed: int) -> None:
    """A closed loop of the same mix through the gate, so that it learns the engine's rates."""
    replay = Replay(gate, Wording("teach", engine.counts_down), PATIENCE)
    await replay.run_closed(_mix(trace, seed + 1), concurrency=engine.slots, seconds=TEACH_S)


async def empty(engine: Engine) -> None:
    """Returns once a request sent now has been served: those before it were served, or have left."""
    probe = Replay(engine.target, Wording("probe", engine.counts_down), PATIENCE)
    _served([await probe.send(Request(0, 0.0, INTERACTIVE, "calibration", SHORT_WORDS, 2))])


def tokens_of(record: Record) -> int:
    """The tokens of an answer: as the engine counted them, else as they were seen to arrive."""
    return record.served_tokens or len(record.token_at_s)


def _mix(trace: Sequence[TraceRow], seed: int) -> Iterator[Request]:
    """Requests drawn from all of the trace, classes in their shares, without end."""
    rng = random.Random(seed)
    index = 0
    while True:
        words, output = scaled_lengths(rng.choice(trace))
        class_name = INTERACTIVE if index % 10 < 7 else BATCH
        yield Request(index, 0.0, class_name, "calibration", words, output)
        index += 1


async def _idle(engine: Engine) -> list[Record]:
    replay = Replay(engine.target, Wording("idle", engine.counts_down), PATIENCE)
    for index in range(2 * IDLE_ROUNDS):
        words = LONG_WORDS if index % 2 else SHORT_WORDS
        await replay.send(Request(index, 0.0, INTERACTIVE, "calibration", words, IDLE_OUTPUT_TOKENS))
    return _served(replay.records)


def _served(records: Sequence[Record]) -> list[Record]:
    """The records, if all were served; an engine that fails unloaded cannot be compared with anything."""
    if not records:
        raise CalibrationError("the engine was given nothing to do")
    for record in records:
        if record.outcome is not Outcome.SERVED or not record.token_at_s:
            status = f"status {record.status}" if record.status else "no answer"
            said = f": {record.reason}" if record.reason else ""
            raise CalibrationError(f"the engine failed while it was measured ({status}){said}"[:300])
    return list(records)


def _ttft_s(record: Record) -> float:
    return record.token_at_s[0] - record.offered_s
