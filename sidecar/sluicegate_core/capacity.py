"""Capacity: how much work this replica gets done in a second when it has as much as it can take.

It is the denominator of the demand for replicas. Nothing here is on the path of a request: the shell samples the
controller twice a second, and work is measured between samples, by what was settled and what the running requests
have got so far. So it needs no word from the engine, and no model of it.

Only *pressed* time counts: from one sample to the next somebody waited, or was refused for want of room, or the
engine was full by whatever is known of it. The first `SETTLE_S` of each such run are left out, for an engine that
is just filling up does less. A class at its own `maxConcurrency` presses nobody: it waits for itself. A rate that is
measured so is the one under the policy: where a class's inter-token SLO keeps the batch small, it is the rate at that
batch. Its memory is `MEMORY_S` of pressed time, not of the clock: a quiet night does not make it forget.

Unknown is None: before `ENOUGH_S` of pressed time and `ENOUGH_ENDED` ends in it, nothing is said. An engine that does
no work at all for `HUNG_S` while pressed is broken, not slow: that time is dropped, or one hung pod would order a
hundred others.

What is done with the number lives in the operator.
"""

from typing import Final, NamedTuple

from sluicegate_core.controller import Controller
from sluicegate_core.request import DECODE, OUTPUT_TOKEN_COST
from sluicegate_core.stats import ClassStats
from sluicegate_core.vocabulary import NOT_READY, Reason

#: How often the shell samples, s: a run of pressed time is seen within a second, at the cost of a sum over the
#: running requests.
SAMPLE_EVERY_S: Final = 0.5
#: A sample that comes later than this proves nothing about the time before it.
MAX_GAP_S: Final = 2.0
#: Of each run of pressed time, left out at its beginning.
SETTLE_S: Final = 1.0
#: Pressed time that is remembered.
MEMORY_S: Final = 60.0
#: Evidence before the rate is told: several samples, and ends enough that one long request does not decide.
ENOUGH_S: Final = 5.0
ENOUGH_ENDED: Final = 4
#: Pressed time without any work after which the engine counts as hung.
HUNG_S: Final = 10.0

#: Refused or evicted for want of room: another replica would have served them.
FOR_WANT_OF_ROOM: Final = (Reason.TTFT, Reason.QUEUE_TIME, Reason.QUEUE_FULL, Reason.DEADLINE)


class Capacity(NamedTuple):
    """What has been measured.

    Attributes:
        work_per_s: work a second while pressed; None until there is evidence enough.
        pressed_s: pressed time that it is the mean of, at most `MEMORY_S`.
        ended: requests that ended in that time.
        age_s: since the end of that time; None before any.
    """

    work_per_s: float | None
    pressed_s: float
    ended: float
    age_s: float | None


class CapacityMeter:
    """Samples one controller."""

    __slots__ = (
        "_done", "_ended", "_ended_memory", "_hung_s", "_pressed", "_refused", "_run_s", "_sampled_at", "_time_s",
        "_updated_at", "_work", "pressed_s",
    )  # fmt: skip

    def __init__(self) -> None:
        #: All pressed time since the start, s, that which was left out included.
        self.pressed_s = 0.0
        self._sampled_at: float | None = None
        self._pressed = False
        self._run_s = 0.0
        self._hung_s = 0.0
        self._done = self._work = self._time_s = self._ended_memory = 0.0
        self._ended = 0
        self._refused: dict[str, int] = {}
        self._updated_at: float | None = None

    @property
    def pressed(self) -> bool:
        """Whether the engine had as much as it can take when it was last looked at."""
        return self._pressed

    def sample(self, now: float, controller: Controller) -> None:
        """Look at the controller; call each `SAMPLE_EVERY_S`, between two events."""
        done, ended = work_done(now, controller)
        refused = {name: _refused(stats) for name, stats in controller.stats.items()}
        pressed = _is_pressed(now, controller, self._refused, refused)
        before = self._sampled_at
        if before is not None and pressed and self._pressed and 0.0 < now - before <= MAX_GAP_S:
            self._pressed_time(now, now - before, done - self._done, ended - self._ended)
        else:
            self._run_s = self._hung_s = 0.0
        self._sampled_at, self._pressed = now, pressed
        self._done, self._ended, self._refused = done, ended, refused

    def capacity(self, now: float) -> Capacity:
        """What is known now."""
        known = self._time_s >= ENOUGH_S and self._ended_memory >= ENOUGH_ENDED and self._work > 0.0
        return Capacity(
            work_per_s=self._work / self._time_s if known else None,
            pressed_s=self._time_s,
            ended=self._ended_memory,
            age_s=None if self._updated_at is None else now - self._updated_at,
        )

    def _pressed_time(self, now: float, passed_s: float, work: float, ended: int) -> None:
        self.pressed_s += passed_s
        self._run_s += passed_s
        if self._run_s <= SETTLE_S:
            return
        if work <= 0.0 and not ended:
            self._hung_s += passed_s
            return
        if 0.0 < self._hung_s < HUNG_S:
            passed_s += self._hung_s  # slow after all
        self._hung_s = 0.0
        self._work += work
        self._time_s += passed_s
        self._ended_memory += ended
        self._updated_at = now
        if self._time_s > MEMORY_S:
            keep = MEMORY_S / self._time_s
            self._work *= keep
            self._time_s *= keep
            self._ended_memory *= keep


def _is_pressed(now: float, controller: Controller, before: dict[str, int], refused: dict[str, int]) -> bool:
    engine = controller.engine
    if engine.status in NOT_READY or not engine.running:
        return False
    for index, policy in enumerate(controller.policy.classes):
        cap = policy.max_concurrency
        if cap is not None and engine.running_of[index] >= cap:
            continue
        if controller.line.queues[index].count or refused[policy.name] > before.get(policy.name, 0):
            return True
    slots = engine.slots(now)
    if slots is not None and engine.running >= slots:
        return True
    reported = engine.fresh_snapshot(now)
    if reported is not None and reported.waiting:
        return True
    return controller.pace.hold(now) is not None


def _refused(stats: ClassStats) -> int:
    return sum(stats.rejected[reason] + stats.evicted[reason] for reason in FOR_WANT_OF_ROOM)


def work_done(now: float, controller: Controller) -> tuple[float, int]:
    """Work done since the start, and requests ended with the engine.

    The work of one that is running is what it has got so far: its prompt once the first token is there, and its
    tokens; of an answer that is not streamed, the share of its predicted work that its time so far is of the time
    such requests take.
    """
    done, ended = 0.0, 0
    for stats in controller.stats.values():
        done += work_served(stats) + stats.work_failed
        ended += stats.served + stats.failed.total()
    classes = controller.predictor.classes
    for request in controller.running_requests:
        if request.stage is DECODE:
            done += request.prompt_tokens + OUTPUT_TOKEN_COST * request.tokens_out
        elif not request.streams:
            holding_s = classes[request.class_index].holding_s.value
            if holding_s:
                done += request.cost * min((now - request.started_at) / holding_s, 1.0)
    return done, ended


def work_served(stats: ClassStats) -> float:
    """Work of the requests served, as the engine reported it."""
    return stats.tokens_in + OUTPUT_TOKEN_COST * stats.tokens_out
