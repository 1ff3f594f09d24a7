"""Demands: who asks when for how much. Made from a trace or from a generator; the same for every policy compared.

Three things come from the trace as they are: the order, the pattern of the gaps, and which prompt goes with which
answer. Time as a whole is squeezed or stretched until the offered work is `overload` times what the engine can do
(`work` says what that is). What the trace does not name (classes, clients) is drawn from the seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from sluicegate_lab.sim.engine import EngineModel
from sluicegate_lab.sim.traces import Trace, TraceError
from sluicegate_lab.sim.work import work_s

#: Clients of a class where the trace names none, with the weights by which requests are drawn for them: a few
#: large ones and several small ones.
CLIENT_WEIGHTS: Final = (8, 5, 3, 2, 1, 1)
#: Bytes of a prompt token: a mean of English prose and code, and how much requests differ (sigma of the logarithm).
BYTES_A_TOKEN: Final = 4.2
BYTES_SIGMA: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Parallel lists, one entry a demand, in the order of arrival.

    Attributes:
        class_index: in the policy's order.
        clients: names; a client belongs to one class.
        prompt_bytes: what a gate sees of the prompt.
        prefixes: ids of the prompt's leading blocks (`Trace.prefixes`).
        streams: whether the answer is streamed.
        work_s: what each demand is worth.
        span_s: time over which they come.
    """

    name: str
    at_s: list[float]
    prompt_tokens: list[int]
    output_tokens: list[int]
    class_index: list[int]
    clients: list[str]
    prompt_bytes: list[int]
    prefixes: list[tuple[int, ...]]
    streams: list[bool]
    work_s: list[float]
    span_s: float
    block_tokens: int

    def __len__(self) -> int:
        return len(self.at_s)

    @property
    def overload(self) -> float:
        """Offered work a second of a full engine."""
        return sum(self.work_s) / self.span_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """How demands are made of a trace.

    Attributes:
        shares: share of the requests of each class, by name; for traces without classes. Their order is the policy's.
        overload: offered work, in seconds of the engine a second; None leaves the times as they are.
        start, count: the stretch of the trace, in requests; None: to its end.
        silent_share: share of answers that are not streamed.
    """

    shares: Mapping[str, float]
    overload: float | None = None
    start: int = 0
    count: int | None = None
    silent_share: float = 0.0
    clients: Sequence[int] = field(default=CLIENT_WEIGHTS)


def make_workload(trace: Trace, model: EngineModel, mix: Mix, *, seed: int) -> Workload:
    """Demands from a trace. Raises `TraceError` where a class of the trace is not in the policy."""
    stop = len(trace) if mix.count is None else min(mix.start + mix.count, len(trace))
    rows = range(mix.start, stop)
    if not rows:
        raise TraceError(f"{trace.name}: no requests from {mix.start} on")
    prompt = [trace.prompt_tokens[row] for row in rows]
    output = [trace.output_tokens[row] for row in rows]
    work = [float(one) for one in work_s(model, prompt, output)]
    at_s = [trace.at_s[row] - trace.at_s[mix.start] for row in rows]
    # One mean gap follows the last arrival, or a single request would come at an infinite rate.
    span_s = at_s[-1] * (1.0 + 1.0 / max(len(rows) - 1, 1)) or 1.0
    if mix.overload is not None:
        wanted_s = sum(work) / mix.overload
        at_s = [at * wanted_s / span_s for at in at_s]
        span_s = wanted_s
    rng = random.Random(f"{seed} workload")
    classes = _classes(trace, rows, mix, rng)
    clients = _clients(trace, rows, mix, classes, rng)
    prefixes = trace.prefixes() if model.prefix_cache else []
    return Workload(
        name=trace.name,
        at_s=at_s,
        prompt_tokens=prompt,
        output_tokens=output,
        class_index=classes,
        clients=clients,
        prompt_bytes=[
            max(1, round(tokens * BYTES_A_TOKEN * math.exp(rng.gauss(0.0, BYTES_SIGMA)))) for tokens in prompt
        ],
        prefixes=[prefixes[row] for row in rows] if prefixes else [()] * len(rows),
        streams=[rng.random() >= mix.silent_share for _ in rows],
        work_s=work,
        span_s=span_s,
        block_tokens=trace.block_tokens,
    )


def _classes(trace: Trace, rows: range, mix: Mix, rng: random.Random) -> list[int]:
    index_of = {name: index for index, name in enumerate(mix.shares)}
    if trace.classes:
        unknown = sorted({trace.classes[row] for row in rows} - set(index_of))
        if unknown:
            raise TraceError(
                f"{trace.name}: class {unknown[0]!r} is not in the policy; it has {', '.join(index_of)}"
            )
        return [index_of[trace.classes[row]] for row in rows]
    bounds = list(accumulate(mix.shares.values()))
    drawn = []
    for _ in rows:
        point = rng.random() * bounds[-1]
        drawn.append(
            next(index for index, bound in enumerate(bounds) if point < bound or bound == bounds[-1])
        )
    return drawn


def _clients(trace: Trace, rows: range, mix: Mix, classes: Sequence[int], rng: random.Random) -> list[str]:
    if trace.clients:
        return [trace.clients[row] for row in rows]
    names = list(mix.shares)
    numbers = rng.choices(range(len(mix.clients)), mix.clients, k=len(rows))
    return [f"{names[one]}-{number}" for one, number in zip(classes, numbers, strict=True)]
