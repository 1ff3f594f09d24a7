"""The whole second clock in a fluid model: gates, operator, an HPA by its documented rules, and slow cold starts.

Replicas serve what they can and turn the rest away; clients come back. The autoscaler is written from the
Kubernetes documentation (desired = ceil(usage / target), nothing within the tolerance, the greatest recommendation
of the stabilisation window on the way down), not from ours. What is needed is known: load over capacity.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.unit.test_scaling_ledger import Gate

from sluicegate_operator.scaling.demand import (
    HPA_TOLERANCE,
    TARGET_UTILISATION,
    Bounds,
    Demand,
    demand,
    situation,
)
from sluicegate_operator.scaling.ledger import Ledger, ReplicaState
from sluicegate_operator.scaling.report import CapacityReport

CAPACITY = 100.0  # work a second of one replica
REQUEST = 10.0  # work of one request
POLL_S = 5
SYNC_S = 15
DOWN_WINDOW_S = 300


class Pod(Gate):
    """A replica: capacity to come until it has started."""

    def __init__(self, number: int, now: float, ready_at: float) -> None:
        super().__init__(f"pod {number}", began_at=now, state=ReplicaState.STARTING)
        self.ready_at = ready_at
        self.pressed_time_s = 0.0

    def second(self, now: float, offered: float, retries: float) -> float:
        """One second of traffic; what is turned away comes back."""
        arrived = offered + retries
        served = min(arrived, CAPACITY)
        turned_away = arrived - served
        old = self.counts
        self.counts = replace(
            old,
            offered=old.offered + round(arrived / REQUEST),
            retries=old.retries + round(retries / REQUEST),
            rejected={"ttft": old.rejected.get("ttft", 0) + math.ceil(turned_away / REQUEST)},
            work_offered=old.work_offered + offered,
            work_predicted=old.work_predicted + served,
            work_served=old.work_served + served,
        )
        if arrived >= CAPACITY:
            self.pressed_s += 1.0
            self.pressed_time_s += 1.0
        if self.pressed_time_s >= 5.0:
            self.capacity = CapacityReport(
                work_per_s=CAPACITY, pressed_s=self.pressed_time_s, ended=9.0, age_s=0.0
            )
        return turned_away


class Loop:
    """Seconds pass; each is written down as (time, needed, replicas, ready, turned away)."""

    #: Of what is turned away, the share that comes back.
    RETRIED = 0.7

    def __init__(self, load: Callable[[int], float], *, cold_start_s: int, replicas: int = 1) -> None:
        self.load, self.cold_start_s = load, cold_start_s
        self.pods = [Pod(n, 0.0, 0.0) for n in range(replicas)]
        self.made = replicas
        self.ledger = Ledger(0.0)
        self.answer: float | None = None
        self.recommended: deque[tuple[int, int]] = deque()
        self.history: list[tuple[int, float, int, int, float]] = []
        self.coming_back = 0.0
        self.breaks: Callable[[int], bool] = lambda now: False

    def run(self, seconds: int, begins: int = 0) -> "Loop":
        for now in range(begins + 1, begins + seconds + 1):
            ready = [pod for pod in self.pods if pod.ready_at <= now]
            for pod in ready:
                pod.state = ReplicaState.READY
            offered, retries = self.load(now), self.RETRIED * self.coming_back
            self.coming_back = sum(
                pod.second(now, offered / len(ready), retries / len(ready)) for pod in ready
            )
            if now % POLL_S == 0:
                self.poll(now)
            if now % SYNC_S == 0:
                self.sync(now)
            needed = offered / CAPACITY
            self.history.append((now, needed, len(self.pods), len(ready), self.coming_back))
        return self

    def poll(self, now: int) -> None:
        self.ledger.book(now, [pod.found(now) for pod in self.pods])
        told = demand(situation(self.ledger), Bounds())
        self.answer = told.replicas if isinstance(told, Demand) and not self.breaks(now) else None

    def sync(self, now: int) -> None:
        """autoscaling/v2 with one external metric of AverageValue 1; none is taken away without a metric."""
        if self.answer is None:
            return
        current = len(self.pods)
        desired = current if abs(self.answer / current - 1.0) <= HPA_TOLERANCE else math.ceil(self.answer)
        self.recommended.append((now, max(1, desired)))
        while self.recommended[0][0] < now - DOWN_WINDOW_S:
            self.recommended.popleft()
        desired = max(1, desired)
        if desired < current:
            desired = min(current, max(wanted for _, wanted in self.recommended))
        for _ in range(desired - current):
            self.pods.append(Pod(self.made, now, now + self.cold_start_s))
            self.made += 1
        del self.pods[max(1, desired) :]

    def replicas(self, since: int = 0) -> list[int]:
        return [replicas for now, _, replicas, _, _ in self.history if now > since]


def step(at: int, before: float, after: float) -> Callable[[int], float]:
    return lambda now: CAPACITY * (before if now < at else after)


@pytest.mark.parametrize("cold_start_s", [15, 60, 300, 1200])
@pytest.mark.parametrize("surge", [1.6, 3.0, 7.5])
def test_a_surge_gets_what_it_needs_once_however_long_replicas_take_to_start(
    surge: float, cold_start_s: int
) -> None:
    loop = Loop(step(100, 0.5, surge), cold_start_s=cold_start_s).run(2400)
    enough = math.ceil(surge / TARGET_UTILISATION)
    assert max(loop.replicas()) <= enough  # never 2, 4, 8, 16
    assert loop.history[-1][4] == 0.0  # nobody is turned away in the end
    assert loop.history[-1][2] >= surge
    changes = sum(a != b for a, b in zip(loop.replicas(), loop.replicas()[1:], strict=False))
    assert changes <= enough + 2  # it does not flap


def test_it_takes_about_a_minute_until_a_surge_has_its_replicas_ordered() -> None:
    loop = Loop(step(100, 0.5, 4.0), cold_start_s=600).run(400)
    ordered = {now: replicas for now, _, replicas, _, _ in loop.history}
    assert ordered[100] == 1
    assert ordered[170] == math.ceil(4.0 / TARGET_UTILISATION)


def test_after_the_surge_they_go_after_minutes_and_not_before() -> None:
    surge = 4.0
    loop = Loop(lambda now: CAPACITY * (surge if 100 <= now < 700 else 0.5), cold_start_s=30).run(2000)
    until = {now: replicas for now, _, replicas, _, _ in loop.history}
    assert until[699 + 240] == until[699] >= surge
    assert loop.replicas()[-1] == 1


def test_a_capacity_that_is_far_too_low_orders_nothing_while_all_is_served() -> None:
    loop = Loop(lambda now: CAPACITY * 0.7, cold_start_s=15)
    loop.pods[0].capacity = CapacityReport(work_per_s=CAPACITY / 10, pressed_s=30.0, ended=50.0, age_s=0.0)
    loop.run(1200)
    assert set(loop.replicas()) == {1}


@pytest.mark.parametrize("swing", [0.02, 0.1, 0.3])
def test_a_load_that_swings_makes_no_replicas_come_and_go(swing: float) -> None:
    """A sine of two minutes around a number that sits on the edge between three replicas and four."""
    edge = 3.0 * TARGET_UTILISATION
    loop = Loop(
        lambda now: CAPACITY * edge * (1.0 + swing * math.sin(now / 19.0)), cold_start_s=30, replicas=3
    )
    # Measured before: each has been pressed once.
    for pod in loop.pods:
        pod.capacity = CapacityReport(work_per_s=CAPACITY, pressed_s=30.0, ended=50.0, age_s=0.0)
    loop.run(3600)
    after = loop.replicas(since=600)
    assert max(after) - min(after) == 0


def test_while_the_signal_is_broken_nothing_is_taken_away() -> None:
    loop = Loop(lambda now: CAPACITY * (4.0 if now < 600 else 0.2), cold_start_s=30)
    loop.breaks = lambda now: now >= 600
    loop.run(2400)
    assert len(set(loop.replicas(since=600))) == 1
    assert loop.replicas()[-1] >= 4


def test_after_a_restart_of_the_operator_nothing_is_taken_away_for_want_of_memory() -> None:
    loop = Loop(lambda now: CAPACITY * 4.0, cold_start_s=30).run(600)
    before = loop.replicas()[-1]
    loop.ledger = Ledger(600.0)
    loop.history.clear()
    loop.run(300, begins=600)
    assert set(loop.replicas()) == {before}
