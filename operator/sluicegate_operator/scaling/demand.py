"""Demand: how many replicas does what is offered need?

    demand = (offered work a second + waiting work / BACKLOG_S) / (work a second of one replica x TARGET_UTILISATION)

Offered is all that came: admitted, queued and refused, each demand counted once however often its client retried.
Not what is refused alone: that falls to nothing once the size is right, and flaps. The work of a replica is what the
gates measured while it had as much as it can take; the target leaves it room for the bursts in which requests wait.
The greater of a short and a long window counts: a surge shows within `SHORT_S`, and what it needed is kept until it
has been over for `LONG_S`.

The number is absolute. Replicas that are still starting change nothing about it, so they are not ordered again;
whatever is derived from the present number of replicas starts from those that are ready.

While no replica has ever had as much as it can take, its capacity is not known, and the demand is bounded by what is
seen instead: nothing offered needs nothing; what is served with nobody turned away needs no more than there is. A
measured capacity was measured on other requests, so two things hold against it: where all is served at once, there
are enough replicas; and where requests are turned away lastingly, one more is needed than serve now. One more in a
step that an HPA takes: it does nothing within 10 % of where it is.

What cannot be told is `Unknown`, with the reason: never a low number.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from sluicegate_operator.scaling.ledger import LONG_S, SHORT_S, Fleet, Flow, Ledger

#: Of a replica's measured work, how much is planned with. Above 0.8 to 0.9 waits grow steeply (M/M/c), and an HPA's
#: tolerance alone may leave 10 % too few.
TARGET_UTILISATION: Final = 0.8
#: Waiting work is to be done within so long: a queue longer than this is not ridden out.
BACKLOG_S: Final = 60.0
#: Change within which an HPA does nothing (`--horizontal-pod-autoscaler-tolerance`).
HPA_TOLERANCE: Final = 0.1
#: Watched for less than this, rates are too rough to scale on: two polls of five seconds.
ENOUGH_S: Final = 10.0
#: Replicas whose gates may be silent, of all that are ready: they count as busy as the others. With more missing,
#: or with one of few, nothing is said.
MAX_SILENT_SHARE: Final = 0.1
#: Turned away lastingly: this share of what came, over at least so long since the replicas last grew.
TURNED_AWAY_SHARE: Final = 0.01
TURNED_AWAY_S: Final = 20.0
#: Replicas that have just come first work off what has piled up and comes back; that says nothing of them yet.
WORKED_OFF_S: Final = 10.0
#: Below this share of pressed time the replicas have no trouble with what they are offered.
AT_EASE_SHARE: Final = 0.05


class Why(StrEnum):
    """What a demand rests on, or why there is none: one word for conditions, metrics and JSON."""

    # Known.
    IDLE = "Idle"  # nothing is offered
    MEASURED = "Measured"  # offered work over measured work
    AT_EASE = "AtEase"  # all is served at once: no more is needed than there is
    TURNED_AWAY = "TurnedAway"  # requests are turned away lastingly: one more, whatever was measured
    HOLDING = "Holding"  # nothing is turned away and no capacity was measured: what there is, is enough

    # Unknown.
    NO_REPLICAS = "NoReplicas"
    NONE_READY = "NoneReady"
    GATES_SILENT = "GatesSilent"
    NOT_GATED = "NotGated"
    JUST_STARTED = "JustStarted"
    STALE = "Stale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that the demand follows from.

    Attributes:
        fleet: the replicas.
        short, long: what came in, over the two windows.
        lately: the same over the short window, but not before the ready replicas last grew, and some seconds.
        work_waiting: estimated work in the lines of the gates.
        capacity_per_s: work a second of one replica that has as much as it can take; None while not measured.
    """

    fleet: Fleet
    short: Flow
    long: Flow
    lately: Flow
    work_waiting: float
    capacity_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The policy's. `max_replicas` None: nobody scales, and nothing bounds what is needed."""

    min_replicas: int = 1
    max_replicas: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is needed, in replicas.

    Attributes:
        replicas: needed, fractions and all; not cut to the policy's bounds.
        wanted: whole replicas that an autoscaler would run on it: within the bounds, and as many as there are now
            where the difference is within its tolerance.
        fleet: the replicas that it was told from.
        work_per_s: offered work a second.
        capacity_per_s: of one replica; None where not measured.
        why: what it rests on.
    """

    replicas: float
    wanted: int
    fleet: Fleet
    work_per_s: float
    capacity_per_s: float | None
    why: Why

    @property
    def message(self) -> str:
        """One sentence for people."""
        fleet = self.fleet
        have = f"{fleet.ready} ready, {fleet.starting} starting"
        return f"{_WORDS[self.why]}: {self.replicas:.2f} replicas needed, {have}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """No number, and why."""

    why: Why
    message: str
    fleet: Fleet


_WORDS: Final = {
    Why.IDLE: "nothing is offered",
    Why.MEASURED: "offered work over the measured work of a replica",
    Why.AT_EASE: "all that is offered is served without a wait",
    Why.TURNED_AWAY: "requests are turned away for want of room",
    Why.HOLDING: "nobody is turned away, and no replica has yet had as much as it can take",
}


def situation(ledger: Ledger) -> Situation:
    """What a ledger says now."""
    return Situation(
        fleet=ledger.fleet,
        short=ledger.flow(SHORT_S),
        long=ledger.flow(LONG_S),
        lately=ledger.flow(SHORT_S, since=ledger.grew_at + WORKED_OFF_S),
        work_waiting=ledger.work_waiting,
        capacity_per_s=ledger.capacity_per_s,
    )


def demand(seen: Situation, bounds: Bounds) -> Demand | Unknown:
    """The demand that follows, or why it cannot be told."""
    unknown = _unknown(seen)
    if unknown is not None:
        return unknown
    fleet = seen.fleet
    # A silent replica is taken to be as busy as the mean of the others.
    unseen = fleet.ready / (fleet.ready - fleet.silent - fleet.ungated)
    offered_per_s = max(seen.short.work_per_s, seen.long.work_per_s) * unseen
    due_per_s = offered_per_s + seen.work_waiting * unseen / BACKLOG_S
    replicas, why = _needed(seen, due_per_s)
    return Demand(
        replicas=replicas,
        wanted=_wanted(replicas, fleet.current, bounds),
        fleet=fleet,
        work_per_s=offered_per_s,
        capacity_per_s=seen.capacity_per_s,
        why=why,
    )


def _unknown(seen: Situation) -> Unknown | None:
    fleet = seen.fleet

    def because(why: Why, message: str) -> Unknown:
        return Unknown(why=why, message=message, fleet=fleet)

    if not fleet.current:
        return because(Why.NO_REPLICAS, "no pod matches the policy's selector")
    if not fleet.ready:
        return because(Why.NONE_READY, f"none of {fleet.starting} replicas is ready yet")
    unseen = fleet.silent + fleet.ungated
    if unseen > MAX_SILENT_SHARE * fleet.ready:
        if fleet.silent:
            return because(Why.GATES_SILENT, f"{fleet.silent} of {fleet.ready} ready gates do not answer")
        message = (
            f"{fleet.ungated} of {fleet.ready} ready pods have no gate: restart them to have it injected"
        )
        return because(Why.NOT_GATED, message)
    if seen.short.span_s < ENOUGH_S:
        message = f"the gates have been watched for {seen.short.span_s:.0f} s, and it takes {ENOUGH_S:.0f} s"
        return because(Why.JUST_STARTED, message)
    return None


def _needed(seen: Situation, due_per_s: float) -> tuple[float, Why]:
    ready = float(seen.fleet.ready)
    lately = seen.lately
    turned_away = lately.span_s >= TURNED_AWAY_S and lately.turned_away_share >= TURNED_AWAY_SHARE
    at_ease = seen.short.pressed_share < AT_EASE_SHARE and not seen.short.turned_away

    if due_per_s <= 0.0:
        return 0.0, Why.IDLE
    if seen.capacity_per_s is None:
        replicas, why = float(seen.fleet.current), Why.HOLDING
    else:
        replicas, why = due_per_s / (seen.capacity_per_s * TARGET_UTILISATION), Why.MEASURED
        if at_ease and replicas > ready:
            # All of it is being served, so it is no more than these do: what was measured is too little. With any
            # more than these, each new replica would be at ease as well, and order another.
            replicas, why = min(replicas, float(seen.fleet.current)), Why.AT_EASE
    if turned_away:
        one_more = max(_step_above(ready), float(seen.fleet.current))
        if replicas < one_more:
            replicas, why = one_more, Why.TURNED_AWAY
    return replicas, why


def _step_above(replicas: float) -> float:
    """One more at least, and so many that an HPA does not pass it over as within its tolerance."""
    return math.floor(replicas * (1.0 + HPA_TOLERANCE)) + 1.0


def _wanted(replicas: float, current: int, bounds: Bounds) -> int:
    wanted = math.ceil(replicas)
    if current and abs(replicas / current - 1.0) <= HPA_TOLERANCE:
        wanted = current
    if bounds.max_replicas is not None:
        wanted = min(wanted, bounds.max_replicas)
    return max(wanted, bounds.min_replicas)
