"""The world: virtual time, and the one loop in which clients, a front and an engine meet.

A *front* is what stands before the engine: the gate (`gate`), or a rival (`rivals`). It is told what happens and
answers by `World.start` and `World.refuse`. Runs of engine steps end where something else is due, so that every event
finds the engine at its own time; within a step, arrivals and timers come in their order, and what they start enters
with the next step, as in a real engine.

At the end of a step its tokens are counted first, then those who end, then first tokens: all come within the same
millisecond, and hand-over must not see half of them.

Invariant: every demand's every attempt ends in exactly one record; the run is over when nothing is left to happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from heapq import heappop, heappush
from math import nan
from typing import Final, Protocol

from sluicegate_core.effects import EngineSnapshot
from sluicegate_core.vocabulary import EngineStatus
from sluicegate_lab.sim.clients import Clients, Habits
from sluicegate_lab.sim.engine import GONE, Engine, EngineModel
from sluicegate_lab.sim.engine import Sequence as Inside
from sluicegate_lab.sim.workload import Workload

NEVER: Final = float("inf")
#: How often the gate asks the engine for its own word, s.
POLL_S: Final = 1.0


class Fate(IntEnum):
    """How an attempt ended."""

    SERVED = 0
    REFUSED = 1  # at arrival
    EVICTED = 2  # from the front's line
    LEFT = 3  # its client lost patience
    FAILED = 4  # the engine could not take it


class Attempt:
    """One try of one demand.

    Attributes:
        demand: index in the workload.
        tries: which try of it this is, from 1.
        handle: the front's own.
        inside: the sequence in the engine; None while it waits in front of it.
        predicted_ttft_s: by the front; None where it makes none.
    """

    __slots__ = (
        "arrived_at", "class_index", "demand", "ended", "first_at", "handle", "inside", "output_tokens",
        "predicted_ttft_s", "prompt_tokens", "started_at", "streams", "tries",
    )  # fmt: skip

    def __init__(self, now: float, demand: int, tries: int, workload: Workload) -> None:
        self.arrived_at = now
        self.demand = demand
        self.tries = tries
        self.class_index = workload.class_index[demand]
        self.prompt_tokens = workload.prompt_tokens[demand]
        self.output_tokens = workload.output_tokens[demand]
        self.streams = workload.streams[demand]
        self.handle: object = None
        self.inside: Inside | None = None
        self.started_at = self.first_at = nan
        self.predicted_ttft_s: float | None = None
        self.ended = False


class Front(Protocol):
    """What stands before the engine. Times are the world's.

    Attributes:
        wake_at: when `tick` is due.
        look_at: when `tokens` wants to be called at the latest; steps may run on until then.
    """

    @property
    def wake_at(self) -> float: ...

    @property
    def look_at(self) -> float: ...

    def attach(self, world: World) -> None: ...

    def arrive(self, now: float, attempt: Attempt) -> None: ...

    def first_token(self, now: float, attempt: Attempt) -> None: ...

    def tokens(self, now: float, steps: int, decoding_of: Sequence[int]) -> None:
        """So many steps gave each decoding sequence a token each; `decoding_of` by class, silent ones last."""

    def finish(self, now: float, attempt: Attempt) -> None: ...

    def cancel(self, now: float, attempt: Attempt) -> None:
        """Its client left, whether it waits in the front or is in the engine."""

    def fail(self, now: float, attempt: Attempt) -> None:
        """The engine did not take it."""

    def tick(self, now: float) -> None: ...

    def status(self, now: float, status: EngineStatus) -> None: ...

    def poll(self, now: float, snapshot: EngineSnapshot) -> None: ...


class Records:
    """What became of every attempt, in parallel lists in the order of their ends."""

    def __init__(self) -> None:
        self.demand: list[int] = []
        self.tries: list[int] = []
        self.fate: list[int] = []
        self.reason: list[str] = []
        self.arrived_at: list[float] = []
        self.started_at: list[float] = []
        self.first_at: list[float] = []
        self.ended_at: list[float] = []
        self.predicted_ttft_s: list[float] = []
        self.tokens_out: list[int] = []
        self.computed: list[int] = []
        self.recomputed: list[int] = []
        self.saved: list[int] = []

    def add(self, now: float, attempt: Attempt, fate: Fate, reason: str, tokens_out: int) -> None:
        self.demand.append(attempt.demand)
        self.tries.append(attempt.tries)
        self.fate.append(fate)
        self.reason.append(reason)
        self.arrived_at.append(attempt.arrived_at)
        self.started_at.append(attempt.started_at)
        self.first_at.append(attempt.first_at)
        self.ended_at.append(now)
        predicted = attempt.predicted_ttft_s
        self.predicted_ttft_s.append(nan if predicted is None else predicted)
        self.tokens_out.append(tokens_out)
        inside = attempt.inside
        self.computed.append(inside.computed_tokens if inside is not None else 0)
        self.recomputed.append(inside.recomputed_tokens if inside is not None else 0)
        self.saved.append(inside.saved_tokens if inside is not None else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """From `at_s` on the engine is another one (a new model behind the port, other hardware, other settings)."""

    at_s: float
    model: EngineModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What came out of one simulation.

    Attributes:
        idle_refusals: demands refused while the engine had nothing to do, and the TTFT each would have had, s.
    """

    workload: Workload
    model: EngineModel
    records: Records
    end_s: float
    busy_s: float
    steps: int
    preempted: int
    idle_refusals: list[tuple[int, float]]


class World:
    """One simulation. `run` may be called once.

    Attributes:
        engine: the fronts read its line where the real thing could (an engine's own caps).
        in_engine: attempts started and not yet ended.
    """

    def __init__(
        self,
        workload: Workload,
        model: EngineModel,
        front: Front,
        habits: Habits,
        *,
        seed: int,
        changes: Sequence[Change] = (),
        polls: bool = True,
    ) -> None:
        self.workload = workload
        self.model = model
        self.front = front
        self.classes = 1 + max(workload.class_index, default=0)
        self.classes = max(self.classes, len(habits.patience_s))
        self.engine = Engine(model, self.classes + 1, workload.block_tokens)
        self.records = Records()
        self.in_engine = 0
        self.now = 0.0
        self.idle_refusals: list[tuple[int, float]] = []
        self._clients = Clients(habits, seed=seed)
        self._patience_s = habits.patience_s
        self._events: list[tuple[float, int, int, object]] = []
        self._order = 0
        self._open = 0  # demands not yet at their end
        self._next = 0  # of the workload
        self._at_s = workload.at_s
        self._loading_until = model.loading_s
        self.engine.warm_at = model.loading_s + model.warming_s
        front.attach(self)
        if habits.users is not None:
            self._at_s = []
            for _ in range(min(habits.users, len(workload))):
                self._next_demand(self._clients.think_s())
        for change in changes:
            self._push(change.at_s, _CHANGE, change.model)
        if model.loading_s > 0.0:
            front.status(0.0, EngineStatus.LOADING)
            self._push(model.loading_s, _UP, None)
        else:
            front.status(0.0, EngineStatus.UP)
        if polls:
            self._push(POLL_S, _POLL, None)

    # Time.

    def run(self) -> Run:
        """Until nothing is left to happen."""
        engine, front = self.engine, self.front
        while True:
            at = self._due()
            if not engine.busy or self.now < self._loading_until:
                if at == NEVER:
                    break
                self._step_to(at)
                continue
            look_at = front.look_at
            ends_at = engine.begin(self.now, at if at < look_at else look_at)
            while at < ends_at:
                self._step_to(at)
                at = self._due()
            self.now = ends_at
            self._steps_end(engine.end())
        return Run(
            workload=self.workload,
            model=self.model,
            records=self.records,
            end_s=self.now,
            busy_s=engine.busy_s,
            steps=engine.steps,
            preempted=engine.preempted,
            idle_refusals=self.idle_refusals,
        )

    def _due(self) -> float:
        """When the next thing happens besides the engine's steps."""
        at = self.front.wake_at
        if self._next < len(self._at_s) and self._at_s[self._next] < at:
            at = self._at_s[self._next]
        if self._events and self._events[0][0] < at:
            at = self._events[0][0]
        return at

    def _step_to(self, at: float) -> None:
        """Let one thing happen."""
        if at > self.now:
            self.now = at
        if self._events and self._events[0][0] <= at:
            _, _, kind, what = heappop(self._events)
            self._happens(kind, what)
        elif self._next < len(self._at_s) and self._at_s[self._next] <= at:
            self._next += 1
            self._open += 1
            self._arrive(self._next - 1, 1)
        else:
            self.front.tick(self.now)

    def _push(self, at: float, kind: int, what: object) -> None:
        self._order += 1
        heappush(self._events, (at, self._order, kind, what))

    def _happens(self, kind: int, what: object) -> None:
        if kind == _LEAVES:
            assert isinstance(what, Attempt)
            if not what.ended and what.first_at != what.first_at:  # nan: no token yet
                self._leave(what)
        elif kind == _COMES:
            assert isinstance(what, tuple)
            self._arrive(*what)
        elif kind == _FAILS:
            assert isinstance(what, Attempt)
            if not what.ended:
                self.front.fail(self.now, what)
                self._end(what, Fate.FAILED, "engine", 0)
        elif kind == _CHANGE:
            assert isinstance(what, EngineModel)
            self.engine.change(what)
        elif kind == _UP:
            self.front.status(self.now, EngineStatus.UP)
        else:
            self._poll()

    def _poll(self) -> None:
        engine = self.engine
        if self.now >= self._loading_until:
            model = engine.model
            snapshot = EngineSnapshot(
                slots=model.max_sequences if model.reports_slots else None,
                running=len(engine.running),
                waiting=engine.waiting_count,
                kv_capacity_tokens=None if model.reports_slots else model.kv_tokens,
                kv_used=None if model.reports_slots else engine.kv_used,
            )
            self.front.poll(self.now, snapshot)
        if self._open or self._next < len(self._at_s):
            self._push(self.now + POLL_S, _POLL, None)

    # Demands.

    def _next_demand(self, delay_s: float) -> None:
        """A user of a closed loop asks again."""
        if self._next < len(self.workload):
            self._open += 1
            self._push(self.now + delay_s, _COMES, (self._next, 1))
            self._next += 1

    def _arrive(self, demand: int, tries: int) -> None:
        attempt = Attempt(self.now, demand, tries, self.workload)
        self.front.arrive(self.now, attempt)
        if not attempt.ended:
            self._push(self.now + self._patience_s[attempt.class_index], _LEAVES, attempt)

    def _leave(self, attempt: Attempt) -> None:
        inside = attempt.inside
        if inside is not None:
            self.engine.abort(inside)
            self.in_engine -= 1
        self.front.cancel(self.now, attempt)
        self._end(attempt, Fate.LEFT, "client_gone", 0)
        delay_s = self._clients.returns_in_s(
            attempt.tries, refused=False, retry_after_s=None, should_retry=True
        )
        self._again(attempt, delay_s)

    def _again(self, attempt: Attempt, delay_s: float | None) -> None:
        if delay_s is not None:
            self._push(self.now + delay_s, _COMES, (attempt.demand, attempt.tries + 1))
            return
        self._open -= 1
        if self._clients.habits.users is not None:
            self._next_demand(self._clients.think_s())

    def _end(self, attempt: Attempt, fate: Fate, reason: str, tokens_out: int) -> None:
        attempt.ended = True
        self.records.add(self.now, attempt, fate, reason, tokens_out)
        if fate is Fate.SERVED or fate is Fate.FAILED:
            self._again(attempt, None)

    # What a front asks for.

    def start(self, attempt: Attempt) -> None:
        """Hand an attempt to the engine."""
        attempt.started_at = self.now
        lane = attempt.class_index if attempt.streams else self.classes
        inside = attempt.inside = Inside(
            attempt,
            lane,
            attempt.prompt_tokens,
            attempt.output_tokens,
            self.workload.prefixes[attempt.demand],
        )
        too_long = attempt.prompt_tokens + attempt.output_tokens > self.engine.model.kv_tokens
        if too_long or self.now < self._loading_until:
            attempt.inside = None
            self._push(self.now, _FAILS, attempt)
            return
        self.in_engine += 1
        self.engine.submit(inside)

    def refuse(
        self, attempt: Attempt, reason: str, *, retry_after_s: float | None = None, should_retry: bool = True
    ) -> None:
        """Refuse an attempt, at its arrival or out of the front's line."""
        at_arrival = self.now == attempt.arrived_at
        if at_arrival and not self.engine.busy and self.now >= self._loading_until:
            self.refused_idle(attempt)
        self._end(attempt, Fate.REFUSED if at_arrival else Fate.EVICTED, reason, 0)
        self._again(
            attempt,
            self._clients.returns_in_s(
                attempt.tries, refused=True, retry_after_s=retry_after_s, should_retry=should_retry
            ),
        )

    def refused_idle(self, attempt: Attempt) -> None:
        """It was refused although the engine had nothing to do: kept with the TTFT that it would have had."""
        self.idle_refusals.append((attempt.demand, self.engine.model.alone_ttft_s(attempt.prompt_tokens)))

    # The engine's word.

    def _steps_end(self, steps: int) -> None:
        engine, front, now = self.engine, self.front, self.now
        front.tokens(now, steps, engine.gave)
        for inside in engine.finished:
            attempt = inside.owner
            assert isinstance(attempt, Attempt)
            if attempt.first_at == attempt.first_at:  # else its first token is its last
                self._finish(attempt, inside)
        for inside in engine.first:
            attempt = inside.owner
            assert isinstance(attempt, Attempt)
            attempt.first_at = now
            if attempt.streams:
                front.first_token(now, attempt)
            if inside.state is GONE:
                self._finish(attempt, inside)

    def _finish(self, attempt: Attempt, inside: Inside) -> None:
        self.in_engine -= 1
        self.front.finish(self.now, attempt)
        self._end(attempt, Fate.SERVED, "", inside.tokens_out)


_LEAVES: Final = 0
_COMES: Final = 1
_FAILS: Final = 2
_CHANGE: Final = 3
_UP: Final = 4
_POLL: Final = 5
