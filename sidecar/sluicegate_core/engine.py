"""The engine as the gate sees it: what it was given, what it has begun, and what it says of itself.

The gate's own counters lead. What the engine reports corrects them (slots, a queue of its own), and is dropped
when it is older than `SNAPSHOT_FRESH_S`. Slots that nobody reports are found out: an engine that holds a prompt
far longer than its prefill takes, while others stream, has no room, and the number of streams then is what it
runs at once. Time passes and one more is tried, ever more rarely while the answer stays the same, so that a wrong
number does not stay either. A prompt that does not begin although there is a slot for it says nothing of the
engine, and holds nobody: a single request that hangs must not stop the gate.

Owned by the `Controller`. When to hand over is `handover`'s question; what it costs, `predict`'s.
"""

from heapq import heappop, heappush
from typing import Final

from sluicegate_core.effects import EngineSnapshot
from sluicegate_core.request import Request
from sluicegate_core.vocabulary import EngineStatus

#: Age at which the engine's own word is no longer believed: three polls of a second, with a margin.
SNAPSHOT_FRESH_S: Final = 3.5
#: A prompt is stalled when it has had this many times its predicted service, and this long beyond.
STALLED_FACTOR: Final = 3.0
STALLED_GRACE_S: Final = 0.5
#: A number of slots that was found out is raised by one after so long without new evidence; doubled each time
#: the evidence comes again, up to the second figure.
SLOT_RETRY_S: Final = 10.0
MAX_SLOT_RETRY_S: Final = 160.0
#: Prompts that may be with the engine at once while nothing is known of its service: enough to keep it busy,
#: and few enough that the first samples are of service, not of waiting inside.
UNLEARNED_PENDING: Final = 2
#: Prefill handed over ahead of what is done, in time at the measured rate, and its bounds in tokens. It must
#: cover a step of the engine, or its batches go out half full; every token more is one that cannot be
#: reordered. About a thousand tokens did best in simulation, and twice or half as many nearly as well.
BACKLOG_S: Final = 0.1
MIN_BACKLOG_TOKENS: Final = 64
MAX_BACKLOG_TOKENS: Final = 8192
UNLEARNED_BACKLOG_TOKENS: Final = 1024


class EngineView:
    """Occupancy, backlog and slots of the engine."""

    __slots__ = (
        "_departed_at", "_found_at", "_found_before", "_found_slots", "_left", "_left_at", "_retry_s", "_snapshot",
        "_snapshot_at", "_stated_slots", "backlog_bound", "expected", "pending", "pending_tokens", "running",
        "running_of", "status",
    )  # fmt: skip

    def __init__(self, classes: int, stated_slots: int | None) -> None:
        self.status = EngineStatus.UNKNOWN
        #: Prefill tokens that may be with the engine at once, beyond a single request.
        self.backlog_bound: float = UNLEARNED_BACKLOG_TOKENS
        self.running = 0
        self.running_of = [0] * classes
        self.pending_tokens = 0
        self.pending: dict[Request, None] = {}  # with the engine, prefill not done; oldest first
        self.expected: list[tuple[float, int, Request]] = []  # when a silent request's prefill is done
        self._stated_slots = stated_slots
        self._found_slots: int | None = None
        self._found_at = 0.0
        self._retry_s = SLOT_RETRY_S
        self._departed_at = 0.0
        self._left = (
            0  # slots left since the oldest prompt became the oldest: it could have begun in any of them
        )
        self._left_at = 0.0  # when the first of those was
        self._found_before: tuple[int | None, float] | None = (
            None  # what the oldest prompt's stall has replaced
        )
        self._snapshot: EngineSnapshot | None = None
        self._snapshot_at = 0.0

    def reconfigure(self, classes: int, moved: list[int], stated_slots: int | None) -> None:
        old = self.running_of
        self.running_of = [0] * classes
        for index, running in enumerate(old):
            self.running_of[moved[index]] += running
        self._stated_slots = stated_slots

    def started(self, request: Request, expected_service_s: float | None) -> None:
        """The request was handed over. One that will not stream is silent until it ends: its prefill counts
        as done when it should be."""
        self.running += 1
        self.running_of[request.class_index] += 1
        self.pending_tokens += request.prompt_tokens
        self.pending[request] = None
        if not request.streams and expected_service_s is not None:
            done_at = request.started_at + expected_service_s
            heappush(self.expected, (done_at, request.sequence, request))

    def begun(self, now: float, request: Request) -> None:
        """The first token came.

        An overdue prompt that is overtaken so is held up by itself, not by the engine. One that is overdue and
        began when a slot had been left was waiting for it: the engine is full again.
        """
        if request not in self.pending:
            return
        oldest = next(iter(self.pending))
        left = self._left
        if not self._overdue(now, oldest, oldest.started_at):
            self._no_longer_pending(request)
        elif oldest is not request:
            self._hangs_by_itself(oldest)
            self._no_longer_pending(request)
        else:
            self._no_longer_pending(request)
            if left:
                self._find_slots(now, self.running - len(self.pending) + left - 1)

    def _no_longer_pending(self, request: Request) -> None:
        """It is in a slot, or counts as if it were, or has gone."""
        if next(iter(self.pending)) is request:  # another is the oldest from now on
            self._left = 0
            self._found_before = None
        del self.pending[request]
        self.pending_tokens -= request.prompt_tokens

    def ended(self, now: float, request: Request) -> None:
        if request in self.pending:
            self._no_longer_pending(request)
        else:
            if not self._left:
                self._left_at = now
            self._left += 1
        self._departed_at = now
        self.running -= 1
        self.running_of[request.class_index] -= 1

    def advance(self, now: float) -> None:
        """Let silent requests' prefill be done when its time has come."""
        expected = self.expected
        while expected and expected[0][0] <= now:
            request = heappop(expected)[2]
            if request in self.pending:
                self._no_longer_pending(request)

    def snapshot(self, now: float, snapshot: EngineSnapshot) -> None:
        """The engine's own word. A queue of its own, seen twice running, says that what runs is all it can run;
        once is no evidence, since each burst stands there until the engine's next step."""
        before = self.fresh_snapshot(now)
        self._snapshot = snapshot
        self._snapshot_at = now
        if snapshot.waiting and snapshot.running and before is not None and before.waiting and before.running:
            self._find_slots(now, max(snapshot.running, before.running))

    def fresh_snapshot(self, now: float) -> EngineSnapshot | None:
        if self._snapshot is None or now - self._snapshot_at > SNAPSHOT_FRESH_S:
            return None
        return self._snapshot

    def snapshot_age_s(self, now: float) -> float | None:
        """Age of the engine's last word, s, believed or not; None before the first."""
        return None if self._snapshot is None else now - self._snapshot_at

    def _find_slots(self, now: float, slots: int) -> None:
        if self._found_slots is not None and slots < self._found_slots:
            self._retry_s = min(2.0 * self._retry_s, MAX_SLOT_RETRY_S)
        self._found_slots = slots
        self._found_at = now

    @staticmethod
    def _overdue(now: float, request: Request, since: float) -> bool:
        """Has this prompt had far more time than its prefill takes?"""
        if request.predicted_service_s is None:
            return False
        return now - since > STALLED_FACTOR * request.predicted_service_s + STALLED_GRACE_S

    def stalled(self, now: float) -> bool:
        """True while the oldest prompt handed over is overdue: the engine has no room for it.

        A full engine begins it as soon as a slot is left. One that has all its time after that, too, and does not
        begin, hangs by itself: it holds nobody any more, and was no evidence of the number of slots.
        """
        while self.pending:
            oldest = next(iter(self.pending))
            if not self._overdue(now, oldest, oldest.started_at):
                return False
            if not self._left:
                streaming = self.running - len(self.pending)
                if streaming:
                    if self._found_before is None:
                        self._found_before = self._found_slots, self._retry_s
                    self._find_slots(now, streaming)
                return True
            if not self._overdue(now, oldest, self._left_at):
                return True
            self._hangs_by_itself(oldest)
        return False

    def _hangs_by_itself(self, request: Request) -> None:
        """The oldest prompt counts as begun; what was concluded from it is taken back."""
        if self._found_before is not None:
            self._found_slots, self._retry_s = self._found_before
        self._no_longer_pending(request)

    def own_service_s(self, now: float, request: Request) -> float:
        """Service of a request whose first token has just come, s, without a wait for a slot inside the engine.

        An overdue prompt before whose first token another request left has waited for that one's slot: its
        service began then.
        """
        if self._departed_at > request.started_at and self._overdue(now, request, request.started_at):
            return now - self._departed_at
        return now - request.started_at

    def slots(self, now: float) -> int | None:
        """Sequences the engine runs at once: as the policy states, as the engine reports, or as found out;
        None where nothing limits what has been seen."""
        if self._stated_slots is not None:
            return self._stated_slots
        snapshot = self._snapshot  # a number of slots does not age with the scrape
        if snapshot is not None and snapshot.slots is not None:
            return snapshot.slots
        if self._found_slots is None:
            return None
        if now - self._found_at > self._retry_s:
            self._found_slots += 1
            self._found_at = now
            if self._found_slots > 2 * self.running + 4:  # nothing has been near it for long
                self._found_slots = None
                self._retry_s = SLOT_RETRY_S
        return self._found_slots

    def allow_backlog(self, seconds_per_token: float) -> None:
        """Set `backlog_bound` from the measured prefill rate; 0.0 s means that it is not known."""
        if seconds_per_token > 0.0:
            self.backlog_bound = min(
                max(BACKLOG_S / seconds_per_token, MIN_BACKLOG_TOKENS), MAX_BACKLOG_TOKENS
            )

    def state(self, now: float) -> dict[str, object]:
        """For `/debug/state`."""
        snapshot = self.fresh_snapshot(now)
        return {
            "status": self.status.value,
            "running": self.running,
            "prefilling": len(self.pending),
            "prefill_backlog_tokens": self.pending_tokens,
            "slots": self.slots(now),
            "slots_source": "policy"
            if self._stated_slots is not None
            else "engine"
            if self._snapshot is not None and self._snapshot.slots is not None
            else "found out"
            if self._found_slots is not None
            else None,
            "reported": snapshot._asdict() if snapshot is not None else None,
            "reported_age_s": self.snapshot_age_s(now),
        }
