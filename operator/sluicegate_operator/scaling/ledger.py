"""The ledger: what all gates of a policy were offered and did, over time.

Each poll hands in what every replica said; the ledger books the differences to what the same process said before, so
a restarted gate, a new pod and a pod that has gone are all counted once and never backwards. A process that began
while the ledger was watching is booked from zero; one that is older is booked from its first report on, since when
its counts came about is not known.

Two windows are read off it: a short one that a surge shows in, and a long one that keeps what the surge needed until
it has been gone for minutes. Bounded: `MAX_ENTRIES` polls, and replicas that have not been handed in for `LONG_S`
are forgotten.

Pure: `now` comes in. What follows from the figures is `demand`'s.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from sluicegate_operator.scaling.report import ClassReport, GateReport

#: A surge has to last about so long before it orders a replica; a cold start takes longer than this anyway.
SHORT_S: Final = 30.0
#: What the busiest half minute needed is kept for so long: an HPA's own default for taking replicas away.
LONG_S: Final = 300.0
#: How often the gates are polled: a surge shows within a few of these, and a hundred gates cost nothing.
POLL_EVERY_S: Final = 5.0
#: A report older than this says nothing about now.
FRESH_S: Final = 3 * POLL_EVERY_S
#: Polls that are remembered: one a second over the long window, and some.
MAX_ENTRIES: Final = 400
#: Refused or evicted for want of room: another replica would have served them.
FOR_WANT_OF_ROOM: Final = ("ttft", "queue_time", "queue_full", "deadline")
#: Estimates are corrected by what they proved to be, within these bounds: beyond them something else is wrong.
MIN_CORRECTION, MAX_CORRECTION = 0.02, 50.0
#: Work served, in the estimates' own measure, before they are corrected by it: a few requests of usual size.
ENOUGH_TO_CORRECT: Final = 1000.0


class ReplicaState(StrEnum):
    """What a pod that the policy selects is doing, by its own conditions."""

    STARTING = "starting"  # not ready yet: capacity to come
    READY = "ready"  # in its Services
    LEAVING = "leaving"  # being deleted: its offered work counts, its capacity does not


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One pod, as it was found at a poll.

    Attributes:
        uid: of the pod.
        state: by the pod's conditions.
        gated: a gate was injected.
        report: the last one that its gate gave; None where it never gave any.
        reported_at: when that was, s on the ledger's clock.
    """

    uid: str
    state: ReplicaState
    gated: bool = True
    report: GateReport | None = None
    reported_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """How many replicas there are, by what is known of them.

    `ready` are all that are in their Services; of them `silent` have a gate without a fresh report and `ungated` none.
    """

    ready: int = 0
    starting: int = 0
    leaving: int = 0
    silent: int = 0
    ungated: int = 0

    @property
    def current(self) -> int:
        """Replicas that serve or will."""
        return self.ready + self.starting


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What came in over one window. Work is as it proves to be, not as it was estimated.

    Attributes:
        span_s: seconds that the window covers by now.
        work_per_s: offered, each demand once however often it was retried.
        arrivals: requests that came, retries included.
        turned_away: those of them that were refused or evicted for want of room.
        pressed_share: of the ready replicas' time, the share in which they had as much as they can take.
    """

    span_s: float
    work_per_s: float
    arrivals: float
    turned_away: float
    pressed_share: float

    @property
    def turned_away_share(self) -> float:
        """Of what came; 0.0 where nothing did."""
        return self.turned_away / self.arrivals if self.arrivals > 0.0 else 0.0


@dataclass(slots=True)
class _Work:
    """Offered, and what those served were estimated at and proved to be."""

    offered: float = 0.0
    predicted: float = 0.0
    served: float = 0.0

    def add(self, other: "_Work") -> None:
        self.offered += other.offered
        self.predicted += other.predicted
        self.served += other.served

    @property
    def correction(self) -> float | None:
        """What an estimate is to be multiplied with; None where too little was served to tell."""
        if self.predicted < ENOUGH_TO_CORRECT:
            return None
        return min(max(self.served / self.predicted, MIN_CORRECTION), MAX_CORRECTION)


@dataclass(slots=True)
class _Entry:
    """What was booked at one poll, for the time since the one before."""

    at: float
    span_s: float
    ready: int
    arrivals: float = 0.0
    turned_away: float = 0.0
    pressed_s: float = 0.0
    work: dict[str, _Work] = field(default_factory=dict)


@dataclass(slots=True)
class _Seen:
    """The last report of one pod that was booked."""

    report: GateReport
    reported_at: float
    handed_in_at: float


class Ledger:
    """Books the reports of one policy's gates. One task owns it."""

    def __init__(self, now: float) -> None:
        self.began_at = now
        self.fleet = Fleet()
        #: When the number of ready replicas last grew; what was turned away before says nothing about those now.
        self.grew_at = now
        self._seen: dict[str, _Seen] = {}
        self._entries: deque[_Entry] = deque(maxlen=MAX_ENTRIES)
        self._booked_at = now
        self._capacity: tuple[float, float] | None = None

    def book(self, now: float, replicas: Sequence[Replica]) -> None:
        """Take in one poll: all pods that the policy selects, those that did not answer included."""
        fresh = {r.uid for r in replicas if r.report is not None and now - r.reported_at <= FRESH_S}
        fleet = _fleet(replicas, fresh)
        if fleet.ready > self.fleet.ready:
            self.grew_at = now
        self.fleet = fleet
        entry = _Entry(at=now, span_s=now - self._booked_at, ready=fleet.ready)
        self._booked_at = now
        for replica in replicas:
            if replica.report is not None and replica.uid in fresh:
                self._book_one(now, entry, replica.uid, replica.report, replica.reported_at)
        self._entries.append(entry)
        while self._entries and self._entries[0].at <= now - LONG_S:
            self._entries.popleft()
        for uid in [uid for uid, seen in self._seen.items() if seen.handed_in_at < now - LONG_S]:
            del self._seen[uid]
        self._measure(r.report for r in replicas if r.report is not None and r.uid in fresh)

    def _book_one(self, now: float, entry: _Entry, uid: str, report: GateReport, reported_at: float) -> None:
        seen = self._seen.get(uid)
        if seen is not None and reported_at <= seen.reported_at:
            seen.handed_in_at = now  # booked already
            return
        if seen is not None and seen.report.instance == report.instance:
            # After a long silence, what came in it is taken at its mean rate: all at once it would be a surge.
            silent_s = reported_at - seen.reported_at
            share = 1.0 if silent_s <= FRESH_S else min(1.0, entry.span_s / silent_s)
            _book_difference(entry, report, seen.report, share)
        elif report.uptime_s <= reported_at - self.began_at:
            _book_difference(entry, report, None, 1.0)
        self._seen[uid] = _Seen(report, reported_at, now)

    def _measure(self, reports: Iterable[GateReport]) -> None:
        """Pool what the replicas were measured to do, each by the time that it was measured for."""
        work = pressed_s = 0.0
        for report in reports:
            measured = report.capacity
            if measured.work_per_s:
                work += measured.work_per_s * measured.pressed_s
                pressed_s += measured.pressed_s
        if pressed_s > 0.0:
            self._capacity = work / pressed_s, pressed_s

    @property
    def capacity_per_s(self) -> float | None:
        """Work a second of one replica that has as much as it can take; None while none was measured.

        What was measured outlives the pods that it was measured on, until others are.
        """
        return None if self._capacity is None else self._capacity[0]

    @property
    def work_waiting(self) -> float:
        """Estimated work in the lines of the gates that were handed in last."""
        return sum(s.report.work_waiting for s in self._seen.values() if s.handed_in_at == self._booked_at)

    def flow(self, window_s: float, *, since: float | None = None) -> Flow:
        """What came in over the last `window_s`, but not before `since`."""
        begins = self._booked_at - window_s
        if since is not None and since > begins:
            begins = since
        entries = [entry for entry in self._entries if entry.at > begins]
        span_s = sum(entry.span_s for entry in entries)
        work: dict[str, _Work] = {}
        for entry in entries:
            for name, one in entry.work.items():
                work.setdefault(name, _Work()).add(one)
        offered = sum(one.offered * self._correction(name, one) for name, one in work.items())
        ready_s = sum(entry.ready * entry.span_s for entry in entries)
        return Flow(
            span_s=span_s,
            work_per_s=offered / span_s if span_s > 0.0 else 0.0,
            arrivals=sum(entry.arrivals for entry in entries),
            turned_away=sum(entry.turned_away for entry in entries),
            pressed_share=sum(entry.pressed_s for entry in entries) / ready_s if ready_s > 0.0 else 0.0,
        )

    def _correction(self, name: str, work: _Work) -> float:
        """Of a class's estimates: by the window's own, else by all that the gates remember of it, else none."""
        if work.correction is not None:
            return work.correction
        whole = _Work()
        for seen in self._seen.values():
            one = seen.report.classes.get(name)
            if one is not None:
                whole.add(_Work(one.work_offered, one.work_predicted, one.work_served))
        return whole.correction or 1.0


def _fleet(replicas: Sequence[Replica], fresh: set[str]) -> Fleet:
    ready = [replica for replica in replicas if replica.state is ReplicaState.READY]
    return Fleet(
        ready=len(ready),
        starting=sum(replica.state is ReplicaState.STARTING for replica in replicas),
        leaving=sum(replica.state is ReplicaState.LEAVING for replica in replicas),
        silent=sum(replica.gated and replica.uid not in fresh for replica in ready),
        ungated=sum(not replica.gated for replica in ready),
    )


def _book_difference(entry: _Entry, report: GateReport, before: GateReport | None, share: float) -> None:
    """What happened from one report of a process to the next; from its start where there was none before."""
    for name, one in report.classes.items():
        old = _NOTHING if before is None else before.classes.get(name, _NOTHING)
        entry.work.setdefault(name, _Work()).add(
            _Work(
                _grown(one.work_offered, old.work_offered) * share,
                _grown(one.work_predicted, old.work_predicted) * share,
                _grown(one.work_served, old.work_served) * share,
            )
        )
        entry.arrivals += _grown(one.offered, old.offered) * share
        entry.turned_away += _grown(_turned_away(one), _turned_away(old)) * share
    entry.pressed_s += _grown(report.pressed_s, 0.0 if before is None else before.pressed_s) * share


def _grown(after: float, before: float) -> float:
    """Of a count that only grows; one that does not is not believed."""
    return max(0.0, after - before)


def _turned_away(one: ClassReport) -> int:
    return sum(one.rejected.get(reason, 0) + one.evicted.get(reason, 0) for reason in FOR_WANT_OF_ROOM)


_NOTHING: Final = ClassReport(
    offered=0, retries=0, admitted=0, queued=0, served=0, served_in_slo=0, rejected={}, evicted={}, failed={},
    waiting=0, running=0, work_offered=0.0, work_predicted=0.0, work_served=0.0, work_failed=0.0,
)  # fmt: skip
