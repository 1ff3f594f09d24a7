"""The demand in replicas, rule by rule: given what was seen, the number, or why there is none."""

from dataclasses import replace

import pytest

from sluicegate_operator.scaling.demand import (
    BACKLOG_S,
    HPA_TOLERANCE,
    MAX_SILENT_SHARE,
    TARGET_UTILISATION,
    Bounds,
    Demand,
    Situation,
    Unknown,
    Why,
    demand,
)
from sluicegate_operator.scaling.ledger import Fleet, Flow

FREE = Bounds(min_replicas=1, max_replicas=None)


def flow(
    work_per_s: float = 0.0, *, turned_away: float = 0.0, pressed: float = 0.0, span_s: float = 30.0
) -> Flow:
    """A window in which 100 requests came."""
    return Flow(
        span_s=span_s, work_per_s=work_per_s, arrivals=100.0, turned_away=turned_away, pressed_share=pressed
    )


def seen(
    *,
    ready: int = 1,
    starting: int = 0,
    work_per_s: float = 0.0,
    capacity: float | None = 100.0,
    pressed: float = 1.0,
    turned_away: float = 0.0,
    waiting: float = 0.0,
) -> Situation:
    """The same for minutes: both windows agree."""
    one = flow(work_per_s, turned_away=turned_away, pressed=pressed)
    return Situation(
        fleet=Fleet(ready=ready, starting=starting),
        short=one,
        long=replace(one, span_s=300.0),
        lately=one,
        work_waiting=waiting,
        capacity_per_s=capacity,
    )


def told(situation: Situation, bounds: Bounds = FREE) -> Demand:
    answer = demand(situation, bounds)
    assert isinstance(answer, Demand), answer
    return answer


def untold(situation: Situation) -> Unknown:
    answer = demand(situation, FREE)
    assert isinstance(answer, Unknown), answer
    return answer


# What is needed.


@pytest.mark.parametrize(
    ("work_per_s", "capacity", "replicas"),
    [(80.0, 100.0, 1.0), (200.0, 100.0, 2.5), (8.0, 100.0, 0.1), (1e6, 100.0, 12_500.0)],
)
def test_offered_work_over_the_work_of_a_replica_at_its_target(
    work_per_s: float, capacity: float, replicas: float
) -> None:
    answer = told(seen(work_per_s=work_per_s, capacity=capacity))
    assert answer.replicas == pytest.approx(replicas)
    assert answer.why is Why.MEASURED


@pytest.mark.parametrize("starting", [0, 1, 7])
def test_replicas_that_start_are_not_ordered_again(starting: int) -> None:
    """The number is absolute: what is on its way changes nothing about it."""
    assert told(seen(work_per_s=240.0, starting=starting)).replicas == pytest.approx(3.0)


def test_work_that_waits_is_to_be_done_in_a_minute() -> None:
    waits = told(seen(work_per_s=80.0, waiting=80.0 * BACKLOG_S))
    assert waits.replicas == pytest.approx(2.0)
    only_waits = told(seen(work_per_s=0.0, waiting=80.0 * BACKLOG_S))
    assert only_waits.replicas == pytest.approx(1.0)


def test_the_greater_window_counts() -> None:
    surge = replace(seen(work_per_s=80.0), short=flow(400.0, pressed=1.0))
    assert told(surge).replicas == pytest.approx(5.0)
    lull = replace(seen(work_per_s=400.0, ready=5), short=flow(0.0, pressed=1.0))
    assert told(lull).replicas == pytest.approx(5.0)


def test_nothing_offered_needs_nothing_whatever_is_known_of_capacity() -> None:
    for capacity in (None, 100.0):
        answer = told(seen(ready=3, capacity=capacity, pressed=0.0), Bounds(min_replicas=2, max_replicas=8))
        assert (answer.replicas, answer.wanted, answer.why) == (0.0, 2, Why.IDLE)


# What is needed while no replica has had as much as it can take.


def test_without_a_capacity_what_there_is_is_enough_while_all_is_served() -> None:
    answer = told(seen(ready=2, starting=1, work_per_s=50.0, capacity=None, pressed=0.0))
    assert (answer.replicas, answer.why) == (3.0, Why.HOLDING)


def test_without_a_capacity_one_more_while_requests_are_turned_away() -> None:
    answer = told(seen(ready=2, work_per_s=50.0, capacity=None, turned_away=30.0))
    assert (answer.replicas, answer.why) == (3.0, Why.TURNED_AWAY)


# What a measurement cannot be right about.


@pytest.mark.parametrize(("starting", "replicas"), [(0, 4.0), (2, 6.0), (80, 50.0)])
def test_what_is_served_at_once_needs_no_more_than_there_is(starting: int, replicas: float) -> None:
    answer = told(seen(ready=4, starting=starting, work_per_s=4000.0, pressed=0.01))
    assert answer.replicas == pytest.approx(replicas)
    assert answer.why is Why.AT_EASE


@pytest.mark.parametrize("how", [{"pressed": 0.06}, {"pressed": 0.0, "turned_away": 0.5}])
def test_what_is_not_served_at_once_does(how: dict[str, float]) -> None:
    answer = told(seen(ready=4, work_per_s=4000.0, **how))
    assert (answer.replicas, answer.why) == (50.0, Why.MEASURED)


def test_turned_away_lastingly_needs_one_more_even_if_the_measured_capacity_denies_it() -> None:
    answer = told(seen(ready=3, work_per_s=10.0, turned_away=1.0))
    assert (answer.replicas, answer.why) == (4.0, Why.TURNED_AWAY)


@pytest.mark.parametrize("ready", [1, 5, 9, 10, 11, 20, 55, 200])
def test_one_more_is_a_step_that_an_hpa_takes(ready: int) -> None:
    """autoscaling/v2: nothing is done while |usage / (target x replicas) - 1| <= tolerance; else ceil(usage)."""
    replicas = told(seen(ready=ready, work_per_s=10.0, turned_away=5.0)).replicas
    assert replicas / ready - 1.0 > HPA_TOLERANCE
    assert replicas >= ready + 1
    assert replicas <= 1.1 * ready + 2


def test_while_one_starts_the_one_more_is_on_its_way() -> None:
    answer = told(seen(ready=1, starting=1, work_per_s=10.0, turned_away=50.0))
    assert answer.replicas == 2.0
    answer = told(seen(ready=1, starting=4, work_per_s=10.0, turned_away=50.0))
    assert answer.replicas == 5.0  # and none is taken back


@pytest.mark.parametrize(
    "lately",
    [flow(10.0, turned_away=50.0, span_s=10.0), flow(10.0, turned_away=0.5)],
    ids=["not long enough since the replicas grew", "hardly anybody"],
)
def test_a_burst_orders_nothing(lately: Flow) -> None:
    answer = told(replace(seen(ready=2, work_per_s=80.0), lately=lately))
    assert (answer.replicas, answer.why) == (1.0, Why.MEASURED)


# What an autoscaler makes of it.


@pytest.mark.parametrize(
    ("replicas", "current", "bounds", "wanted"),
    [
        (2.4, 1, FREE, 3),
        (3.2, 3, FREE, 3),  # within 10 %
        (3.4, 3, FREE, 4),
        (2.75, 3, FREE, 3),
        (2.6, 3, FREE, 3),  # rounded up
        (1.9, 3, FREE, 2),
        (9.0, 2, Bounds(min_replicas=1, max_replicas=4), 4),
        (0.1, 2, Bounds(min_replicas=2, max_replicas=4), 2),
        (0.1, 2, FREE, 1),
    ],
)
def test_wanted_replicas(replicas: float, current: int, bounds: Bounds, wanted: int) -> None:
    offered = replicas * 100.0 * TARGET_UTILISATION
    answer = told(seen(ready=current, work_per_s=offered), bounds)
    assert answer.replicas == pytest.approx(replicas)
    assert answer.wanted == wanted


# What is not known is never a number.


@pytest.mark.parametrize(
    ("fleet", "why", "says"),
    [
        (Fleet(), Why.NO_REPLICAS, "no pod"),
        (Fleet(starting=2), Why.NONE_READY, "none of 2"),
        (Fleet(ready=1, silent=1), Why.GATES_SILENT, "1 of 1 ready gates do not answer"),
        (Fleet(ready=9, silent=1), Why.GATES_SILENT, "1 of 9"),
        (Fleet(ready=20, silent=3), Why.GATES_SILENT, "3 of 20"),
        (Fleet(ready=3, ungated=1), Why.NOT_GATED, "1 of 3 ready pods have no gate"),
        (Fleet(ready=20, silent=1, ungated=2), Why.GATES_SILENT, "1 of 20"),
    ],
)
def test_missing_gates_are_no_number(fleet: Fleet, why: Why, says: str) -> None:
    answer = untold(replace(seen(work_per_s=10.0), fleet=fleet))
    assert answer.why is why
    assert says in answer.message
    assert answer.fleet is fleet


@pytest.mark.parametrize(("silent", "ungated"), [(2, 0), (0, 2), (1, 1)])
def test_a_few_unseen_ones_of_many_are_as_busy_as_the_others(silent: int, ungated: int) -> None:
    assert silent + ungated <= MAX_SILENT_SHARE * 20
    fleet = Fleet(ready=20, silent=silent, ungated=ungated)
    answer = told(replace(seen(work_per_s=360.0, waiting=360.0 * BACKLOG_S), fleet=fleet))
    assert answer.work_per_s == pytest.approx(360.0 * 20 / 18)
    assert answer.replicas == pytest.approx(10.0)


def test_a_glance_is_no_rate() -> None:
    glance = flow(80.0, span_s=5.0)
    answer = untold(replace(seen(), short=glance, long=glance))
    assert answer.why is Why.JUST_STARTED
    assert "watched for 5 s" in answer.message


def test_a_demand_says_what_it_rests_on() -> None:
    answer = told(seen(ready=1, starting=2, work_per_s=240.0))
    assert answer.message == (
        "offered work over the measured work of a replica: 3.00 replicas needed, 1 ready, 2 starting"
    )
