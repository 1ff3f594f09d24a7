"""The arrivals of the demo: a stretch of a real trace, scaled to the engine at hand.

Three things come from the trace and are kept as they are: the order of arrivals, the pattern of the gaps
between them, and which long prompt goes with which answer. Three things are scaled, and said so wherever a
result is shown:

- **time**: the stretch is squeezed or stretched as a whole, until the work it offers in `seconds` is the
  chosen multiple of what the engine was measured to do;
- **lengths**: prompts by 1/16 and answers by 1/4, within bounds, so that one request takes a small engine on
  one core from a few tenths of a second to a few seconds;
- **who asks**: the trace names neither classes nor clients, so both are drawn from the seed.

Invariants: a schedule is a function of its arguments alone; the two replays of a demo share one schedule;
their texts differ (`salt`) while every length stays equal, so that an engine which remembers prompts gains
nothing in the second. The true length of an answer is written into the prompt's last word (see
`tiny_model.py`) and in no field of the request.
"""

from __future__ import annotations

import bisect
import csv
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from sluicegate_lab.tiny_model import WORDS, prompt_of

INTERACTIVE = "interactive"
BATCH = "batch"
CLASSES = (INTERACTIVE, BATCH)

INTERACTIVE_SHARE = 0.7
"""Of the requests; the rest is batch."""

CLIENTS = {
    INTERACTIVE: (("chat-web", 5), ("chat-mobile", 3), ("assistant", 2)),
    BATCH: (("nightly-eval", 2), ("summaries", 1)),
}
"""A handful of clients for each class, with the weights by which requests are drawn for them."""

PROMPT_DIVISOR = 16
PROMPT_BOUNDS = (8, 400)
OUTPUT_DIVISOR = 4
OUTPUT_BOUNDS = (4, 250)
"""Tokens. The trace's median of 1,020 in and 129 out becomes 64 in and 32 out; its longest prompts become 388
and its longest answers 250."""

MAX_TOKENS = {INTERACTIVE: 512, BATCH: 512}
"""What every client of a class sends as `max_tokens`: a generous cap, as real clients send, and no hint."""

MAX_REQUESTS = 5_000
"""The longest schedule: a faster engine than that is shown in fewer seconds."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of the trace, unscaled: seconds since the start of the cut, and tokens."""

    offset_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a schedule: when it is offered, for whom, and how much it asks.

    `prompt_words` words make `prompt_words + 2` tokens for the demo's own model, about as many for others.
    `output_tokens` is the true length of the answer where the engine runs the demo's own model.
    """

    index: int
    offset_s: float
    class_name: str
    client: str
    prompt_words: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class WorkCost:
    """Seconds of a busy engine that a token of a prompt and a token of an answer take up, as measured."""

    prompt_token_s: float
    output_token_s: float

    def of(self, prompt_tokens: float, output_tokens: float) -> float:
        """The work of one request in seconds of the engine."""
        return prompt_tokens * self.prompt_token_s + output_tokens * self.output_token_s


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is offered in one replay.

    `work_s` is the work of all requests in seconds of the engine; over `seconds` it is the overload, which
    differs from the one asked for by less than one request.
    """

    requests: tuple[Request, ...]
    seconds: float
    work_s: float

    @property
    def overload(self) -> float:
        return self.work_s / self.seconds


def load_trace() -> tuple[TraceRow, ...]:
    """The cut of the Azure 2023 conversation trace that the package carries (see `data/PROVENANCE.md`)."""
    text = resources.files("sluicegate_lab").joinpath("data/azure_conv_2023.csv").read_text()
    return tuple(
        TraceRow(float(row["offset_s"]), int(row["prompt_tokens"]), int(row["output_tokens"]))
        for row in csv.DictReader(text.splitlines())
    )


def scaled_lengths(row: TraceRow) -> tuple[int, int]:
    """Words of the prompt and tokens of the answer, for a small engine."""

    def scale(tokens: int, divisor: int, bounds: tuple[int, int]) -> int:
        return min(max(round(tokens / divisor), bounds[0]), bounds[1])

    return (
        scale(row.prompt_tokens, PROMPT_DIVISOR, PROMPT_BOUNDS),
        scale(row.output_tokens, OUTPUT_DIVISOR, OUTPUT_BOUNDS),
    )


def make_schedule(
    trace: Sequence[TraceRow],
    *,
    cost: WorkCost,
    overload: float,
    seconds: float,
    seed: int,
    expected_output_tokens: float | None = None,
) -> Schedule:
    """A stretch of the trace that offers `overload` x `seconds` seconds of work within `seconds`.

    The stretch begins at a row drawn from the seed and goes on from the cut's beginning where it ends.
    `expected_output_tokens` stands for the length of every answer when the engine's own model decides it
    and nobody knows (an engine that is not the demo's). A schedule that would need more than `MAX_REQUESTS`
    is cut there, in time too, so that the overload holds.
    """
    rng = random.Random(seed)
    start = rng.randrange(len(trace))
    target_s = overload * seconds
    rows: list[tuple[int, int]] = []
    works_s: list[float] = []
    for row in itertools.islice(itertools.cycle(trace), start, start + MAX_REQUESTS):
        words, output = scaled_lengths(row)
        rows.append((words, output))
        works_s.append(cost.of(words + 2, expected_output_tokens or output))
    reached_s = list(itertools.accumulate(works_s))
    count = min(bisect.bisect_left(reached_s, target_s) + 1, MAX_REQUESTS)
    if reached_s[count - 1] < target_s:
        seconds *= reached_s[count - 1] / target_s
    offsets_s = _stretched(trace, start, count, seconds)
    requests = tuple(
        _request(rng, index, offset_s, words, output)
        for index, (offset_s, (words, output)) in enumerate(zip(offsets_s, rows[:count], strict=True))
    )
    return Schedule(requests, seconds, reached_s[count - 1])


def _stretched(trace: Sequence[TraceRow], start: int, count: int, seconds: float) -> list[float]:
    """The arrival times of `count` rows from `start` on, over [0, seconds); gaps keep their proportions."""
    lap_s = trace[-1].offset_s + trace[-1].offset_s / len(trace)

    def at(position: int) -> float:
        laps, index = divmod(position, len(trace))
        return laps * lap_s + trace[index].offset_s

    first_s, last_s = at(start), at(start + count - 1)
    # Some rows share a millisecond: the stretch ends with the first row that comes after its last one.
    end_s = next(time_s for time_s in map(at, itertools.count(start + count)) if time_s > last_s)
    return [(at(start + step) - first_s) * seconds / (end_s - first_s) for step in range(count)]


def _request(rng: random.Random, index: int, offset_s: float, words: int, output: int) -> Request:
    class_name = INTERACTIVE if rng.random() < INTERACTIVE_SHARE else BATCH
    names, weights = zip(*CLIENTS[class_name], strict=True)
    client: str = rng.choices(names, weights)[0]
    return Request(index, offset_s, class_name, client, words, output)


def prompt_text(request: Request, *, salt: str, counts_down: bool) -> str:
    """The text of a request's prompt; `salt` tells the replays apart without changing a length.

    `counts_down`: the engine runs the demo's own model, whose answer has the length that the last word
    says. Any other model gets a plain instruction there, and answers as it will.
    """
    words = random.Random(f"{salt}:{request.index}").choices(WORDS, k=request.prompt_words)
    if counts_down:
        return prompt_of(words, request.output_tokens)
    return " ".join([*words, "- tell a story with these words."])
