"""The line against the fluid it approximates: exact shares, computed in fractions, and proven bounds.

Generalised processor sharing serves everybody at once, by weight. For requests that are all there from the start
it has a closed form: after `work` units, one who brought `total` has had `min(total, weight x level)`, and the
level is the one at which these add up to `work`. Start-time fair queueing hands over whole requests instead. With
`l` the longest request of each: one who still waits has had between `weight x v` and `weight x v + l` at virtual
time `v`, so it is never ahead of the fluid by more than its own `l`, nor behind by more than the sum of all `l`.
"""

import random
from fractions import Fraction

import pytest

from sluicegate_core.line import Line
from sluicegate_core.request import Request

ROUNDING = Fraction(1, 10**6)  # tags are floats


def never(_: int) -> bool:
    return False


def request(class_index: int, client: str, cost: int) -> Request:
    one = Request(class_index=class_index, client=client)
    one.cost = float(cost)
    return one


def fluid_shares(totals: dict[str, int], weights: dict[str, int], work: int) -> dict[str, Fraction]:
    """What each has had of `work`, by water-filling."""
    level = Fraction(0)
    open_ = {name for name, total in totals.items() if total}
    left = Fraction(work)
    while open_ and left:
        rate = sum(weights[name] for name in open_)
        to_next = min(Fraction(totals[name], weights[name]) - level for name in open_)
        step = min(to_next, left / rate)
        level += step
        left -= step * rate
        open_ = {name for name in open_ if Fraction(totals[name], weights[name]) > level}
    return {name: min(Fraction(total), weights[name] * level) for name, total in totals.items()}


def test_the_oracle_itself() -> None:
    shares = fluid_shares({"a": 10, "b": 100, "c": 0}, {"a": 1, "b": 3, "c": 5}, 60)
    assert shares == {"a": 10, "b": 50, "c": 0}
    assert fluid_shares({"a": 3, "b": 3}, {"a": 1, "b": 2}, 3) == {"a": 1, "b": 2}


@pytest.mark.parametrize("seed", range(20))
def test_classes_follow_the_fluid(seed: int) -> None:
    rng = random.Random(seed)
    names = [str(i) for i in range(rng.randint(2, 6))]
    weights = {name: rng.choice((1, 2, 3, 7, 10, 100)) for name in names}
    line = Line([weights[name] for name in names])
    costs = {name: [rng.randint(1, 5_000) for _ in range(rng.randint(0, 150))] for name in names}
    for name in names:
        for cost in costs[name]:
            line.append(request(int(name), rng.choice("abc"), cost))
    follow(line, costs, weights, lambda one: str(one.class_index))


@pytest.mark.parametrize("seed", range(20))
def test_clients_of_a_class_follow_the_fluid_in_equal_shares(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"client-{i}" for i in range(rng.randint(2, 12))]
    line = Line([3])
    costs = {name: [rng.randint(1, 5_000) for _ in range(rng.randint(0, 80))] for name in names}
    everything = [(name, cost) for name in names for cost in costs[name]]
    rng.shuffle(everything)
    for name, cost in everything:
        line.append(request(0, name, cost))
    follow(line, costs, dict.fromkeys(names, 1), lambda one: one.client)


def follow(line: Line, costs: dict[str, list[int]], weights: dict[str, int], name_of: object) -> None:
    totals = {name: sum(c) for name, c in costs.items()}
    longest = {name: max(c, default=0) for name, c in costs.items()}
    had = dict.fromkeys(costs, 0)
    while (one := line.next(never)) is not None:
        line.take(one)
        had[name_of(one)] += int(one.cost)  # type: ignore[operator]
        fluid = fluid_shares(totals, weights, sum(had.values()))
        for name in costs:
            assert had[name] <= fluid[name] + longest[name] + ROUNDING
            assert had[name] >= fluid[name] - sum(longest.values()) - ROUNDING
    assert had == totals
    assert line.count == 0


def test_both_levels_at_once() -> None:
    """Classes share by weight whatever their clients do, and clients share their class whatever it got."""
    rng = random.Random(5)
    line = Line([1, 4])
    for _ in range(400):
        for class_index, clients in ((0, "ab"), (1, "cdefgh")):
            for client in clients:
                line.append(request(class_index, client, rng.randint(1, 1_000)))
    had = dict.fromkeys("abcdefgh", 0.0)
    for _ in range(1_500):
        one = line.next(never)
        assert one is not None
        line.take(one)
        had[one.client] += one.cost
    first, second = sum(had[c] for c in "ab"), sum(had[c] for c in "cdefgh")
    assert abs(first / 1 - second / 4) <= 1_000 + 1_000 / 4
    assert abs(had["a"] - had["b"]) <= 2_000
    assert max(had[c] for c in "cdefgh") - min(had[c] for c in "cdefgh") <= 2_000


@pytest.mark.parametrize("overestimated", [1, 5, 20])
def test_what_was_charged_too_much_is_given_back(overestimated: int) -> None:
    """One class's estimates are far too high, the other's right; both always have requests waiting and a number
    of them inside. Settled at their ends, they share the true work in equal parts all the same."""
    line = Line([1, 1])
    true_cost = 100.0
    inside: list[Request] = []
    had = [0.0, 0.0]
    for _ in range(100):
        line.append(request(0, "a", int(true_cost * overestimated)))
        line.append(request(1, "b", int(true_cost)))
    for _ in range(20_000):
        one = line.next(never)
        assert one is not None
        line.take(one)
        inside.append(one)
        if len(inside) > 8:
            oldest = inside.pop(0)
            line.settle(oldest, true_cost)
            had[oldest.class_index] += true_cost
        line.append(request(one.class_index, one.client, int(one.cost)))
    assert had[0] / sum(had) == pytest.approx(0.5, abs=0.05)
