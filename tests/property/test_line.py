"""The line under random arrivals, hand-overs, departures and holds: fairness bounds and plain bookkeeping.

The bound is that of Goyal, Vin and Cheng (SIGCOMM 1996, theorem 1): over any interval in which two both have
requests waiting, the work they were given, over their weights, differs by at most one longest request of each.
It holds whatever the server does in between, so a hold that stops everybody changes nothing.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluicegate_core.line import MAX_FLOWS, OVERFLOW_FLOWS, Line
from sluicegate_core.request import Request

WEIGHTS = [1, 3, 10]
CLIENTS = "abcd"
ROUNDING = 1e-6


def request(class_index: int, client: str, cost: int) -> Request:
    one = Request(class_index=class_index, client=client)
    one.cost = float(cost)
    return one


def nobody_held(_: int) -> bool:
    return False


@dataclass
class Pair:
    """Two competitors while both wait: normalised difference of the work given, and its range so far."""

    weights: tuple[float, float]
    difference: float = 0.0
    least: float = 0.0
    most: float = 0.0

    def given(self, which: int, cost: float) -> None:
        share = cost / self.weights[which]
        self.difference += share if which == 0 else -share
        self.least, self.most = min(self.least, self.difference), max(self.most, self.difference)

    def check(self, longest: tuple[float, float]) -> None:
        bound = sum(cost / weight for cost, weight in zip(longest, self.weights, strict=True))
        assert self.most - self.least <= bound + ROUNDING, (self, longest)


class Referee:
    """Keeps a `Pair` for any two competitors that both wait and are both free to go."""

    def __init__(self, weights: dict[object, float]) -> None:
        self.weights = weights
        self.longest = dict.fromkeys(weights, 0.0)  # ever: the last one before an interval counts in it
        self.pairs: dict[tuple[object, object], Pair] = {}

    def competing(self, now: set[object]) -> None:
        """Called whenever that may have changed: an interrupted competition begins anew."""
        for pair in [p for p in self.pairs if not set(p) <= now]:
            del self.pairs[pair]
        for pair in combinations(sorted(now, key=str), 2):
            self.pairs.setdefault(pair, Pair((self.weights[pair[0]], self.weights[pair[1]])))

    def given(self, who: object, cost: float) -> None:
        self.longest[who] = max(self.longest[who], cost)
        for names, pair in self.pairs.items():
            if who in names:
                pair.given(names.index(who), cost)
                pair.check((self.longest[names[0]], self.longest[names[1]]))


arrivals = st.tuples(
    st.just("arrive"), st.integers(0, 2), st.sampled_from(CLIENTS), st.integers(1, 5_000), st.integers(1, 4)
)
steps = st.lists(
    arrivals
    | st.tuples(st.just("serve"), st.integers(1, 8))
    | st.tuples(st.just("leave"), st.integers(0, 100))
    | st.tuples(st.just("hold"), st.integers(0, 2)),
    min_size=20,
    max_size=120,
)


class Script:
    """Runs steps through a line, with plain lists beside it."""

    def __init__(self) -> None:
        self.line = Line(WEIGHTS)
        self.waiting: list[Request] = []
        self.held: set[int] = set()
        self.classes = Referee({i: float(w) for i, w in enumerate(WEIGHTS)})
        self.flows = [Referee(dict.fromkeys(CLIENTS, 1.0)) for _ in WEIGHTS]

    def run(self, script: list[tuple[object, ...]]) -> None:
        for kind, *what in script:
            getattr(self, str(kind))(*what)
            self.judge()
            self.check()

    def judge(self) -> None:
        self.classes.competing({r.class_index for r in self.waiting} - self.held)
        for index, flows in enumerate(self.flows):
            flows.competing({r.client for r in self.waiting if r.class_index == index})

    def arrive(self, class_index: int, client: str, cost: int, count: int) -> None:
        for _ in range(count):
            one = request(class_index, client, cost)
            self.waiting.append(one)
            self.line.append(one)

    def serve(self, count: int) -> None:
        for _ in range(count):
            one = self.line.next(lambda index: index in self.held)
            if one is None:
                assert not [r for r in self.waiting if r.class_index not in self.held]
                return
            assert one.class_index not in self.held
            mine = [r for r in self.waiting if (r.class_index, r.client) == (one.class_index, one.client)]
            assert mine[0] is one, "overtook its own client"
            self.line.take(one)
            self.waiting.remove(one)
            self.classes.given(one.class_index, one.cost)
            self.flows[one.class_index].given(one.client, one.cost)
            self.judge()

    def leave(self, which: int) -> None:
        if self.waiting:
            self.line.remove(self.waiting.pop(which % len(self.waiting)))

    def hold(self, class_index: int) -> None:
        self.held ^= {class_index}

    def check(self) -> None:
        assert self.line.count == len(self.waiting)
        assert {id(r) for r in self.line} == {id(r) for r in self.waiting}
        for index, queue in enumerate(self.line.queues):
            mine = [r for r in self.waiting if r.class_index == index]
            assert queue.count == len(mine)
            assert queue.cost == sum(r.cost for r in mine)
            assert queue.active_flows == len({r.client for r in mine})
            assert len(queue._heap) <= len(queue.flows)


@settings(max_examples=150, deadline=None)
@given(steps)
def test_two_who_wait_differ_by_one_request_of_each(script: list[tuple[object, ...]]) -> None:
    Script().run(script)


def served(line: Line, held: int | None = None) -> Request:
    one = line.next(lambda index: index == held)
    assert one is not None
    line.take(one)
    return one


@pytest.mark.parametrize("level", ["class", "client"])
def test_who_was_idle_banks_nothing(level: str) -> None:
    """Alone for a thousand requests, then joined by one who never came before: from then on turn by turn."""
    line = Line([1, 1])
    place = {"class": (1, "a"), "client": (0, "b")}[level]
    for _ in range(1_100):
        line.append(request(0, "a", 100))
    for _ in range(1_000):
        served(line)
    for _ in range(100):
        line.append(request(*place, 100))
    turns = [(one.class_index, one.client) == place for one in (served(line) for _ in range(40))]
    assert sum(turns) == 20
    assert all(one != other for one, other in pairwise(turns))


def test_who_was_refunded_while_alone_banks_nothing() -> None:
    """A class alone was charged far too much, and gets it back once another has joined: it gets back what it
    was charged against that other, not what it was charged while alone."""
    line = Line([1, 1])
    for _ in range(400):
        line.append(request(0, "a", 1_000))
    inside = [served(line) for _ in range(100)]
    for one in inside[:99]:
        line.settle(one, 10.0)
    for _ in range(100):
        line.append(request(1, "b", 1_000))
    ahead = 0
    while served(line).class_index == 0:
        ahead += 1
    assert ahead <= 2


def test_a_class_at_its_cap_banks_nothing() -> None:
    line = Line([1, 1])
    for _ in range(300):
        line.append(request(0, "a", 100))
        line.append(request(1, "b", 100))
    for _ in range(100):
        assert served(line, held=1).class_index == 0
    assert sum(served(line).class_index for _ in range(40)) == 20


def test_who_cost_more_than_charged_goes_later() -> None:
    """Settled upwards while its next request waits, a client stands back until the others have had as much."""
    line = Line([1])
    for _ in range(6):
        line.append(request(0, "a", 100))
        line.append(request(0, "b", 100))
    first = served(line)
    line.settle(first, 400.0)
    other = "b" if first.client == "a" else "a"
    assert [served(line).client for _ in range(4)] == [other] * 4


def test_who_left_and_came_back_finds_no_turn_kept() -> None:
    line = Line([1])
    early = request(0, "early", 100)
    line.append(early)
    line.append(request(0, "a", 100))
    line.remove(early)
    for _ in range(9):
        line.append(request(0, "a", 100))
    for _ in range(8):
        assert served(line).client == "a"
    for _ in range(2):
        line.append(request(0, "early", 100))
    assert {served(line).client, served(line).client} == {"a", "early"}


def test_the_least_weight_is_not_starved() -> None:
    """Against a thousand times its weight and requests without end, one goes within its proven bound."""
    line = Line([1, 1_000])
    for _ in range(3):
        line.append(request(1, "rich", 50))
    line.append(request(0, "poor", 100))
    given = 0.0
    line.append(request(0, "poor", 100))
    for _ in range(2):
        while (one := served(line)).class_index == 1:
            given += one.cost
            line.append(request(1, "rich", 50))
    assert given <= 1_000 * (100 + 50 / 1_000)


def test_leaving_from_anywhere_keeps_the_order_of_the_rest() -> None:
    for gone in ([0], [4], [2], [0, 1, 2], [2, 3, 4], [1, 3], [0, 1, 2, 3]):
        line = Line([1])
        members = [request(0, "a", i + 1) for i in range(5)]
        for one in members:
            line.append(one)
        for i in gone:
            line.remove(members[i])
        rest = [m for i, m in enumerate(members) if i not in gone]
        assert list(line) == rest
        assert line.queues[0].cost == sum(m.cost for m in rest)
        assert [served(line) for _ in rest] == rest
        assert line.next(nobody_held) is None


def test_a_refund_never_makes_a_tag_negative() -> None:
    line = Line([2])
    line.append(request(0, "a", 100))
    one = served(line)
    line.settle(one, 0.0)
    line.settle(one, 0.0)
    assert line.queues[0].tag == 0.0
    assert line.queues[0].flows["a"].tag == 0.0


def test_more_clients_than_flows_share_what_is_left_and_are_all_served() -> None:
    line = Line([1])
    queue = line.queues[0]
    number = MAX_FLOWS + 1_000
    for i in range(number):
        line.append(request(0, f"client-{i}", 10))
    assert len(queue.flows) <= MAX_FLOWS + OVERFLOW_FLOWS
    assert len(queue._heap) <= MAX_FLOWS + OVERFLOW_FLOWS
    assert len({served(line).client for _ in range(number)}) == number


@pytest.mark.parametrize("known", [1, 10, 10**9], ids=["one client", "ten clients", "ever new clients"])
def test_arriving_and_leaving_without_end_leaves_nothing_behind(known: int) -> None:
    """Somebody at the head is held all the while, so that nothing is ever handed over."""
    line = Line([1, 1])
    line.append(request(0, "head", 10))
    for i in range(50_000):
        one = request(0, f"client-{i % known}", 10)
        line.append(one)
        line.remove(one)
    queue = line.queues[0]
    assert list(line) == [queue.next_flow().head]
    assert len(queue._heap) <= min(known, MAX_FLOWS + OVERFLOW_FLOWS) + 1
    assert len(queue.flows) <= min(known, MAX_FLOWS + OVERFLOW_FLOWS) + 1


def test_clients_served_and_gone_are_forgotten() -> None:
    line = Line([1])
    for i in range(30_000):
        line.append(request(0, f"client-{i}", 10))
        line.settle(served(line), 10.0)
    assert len(line.queues[0].flows) <= MAX_FLOWS + OVERFLOW_FLOWS


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(CLIENTS), st.integers(1, 5)), max_size=12),
    st.integers(0, 10),
    st.sampled_from(CLIENTS + "z"),
)
def test_work_ahead_is_what_goes_before(
    waiting: list[tuple[str, int]], served_before: int, client: str
) -> None:
    """With requests of one size, at most one of each client more than predicted goes before a newcomer. It may be
    fewer: the prediction takes others to have as many as the newcomer's client, as long as all together have."""
    line = Line([1])
    for other, count in waiting:
        for _ in range(count):
            line.append(request(0, other, 100))
    for _ in range(min(served_before, line.count)):
        served(line)
    cost, requests = line.ahead_of(0, client, 100.0)
    others = {r.client for r in line} - {client}
    newcomer = request(0, client, 100)
    line.append(newcomer)
    before = 0
    while served(line) is not newcomer:
        before += 1
    assert cost == requests * 100
    assert before <= requests + len(others)
    if all(n == 1 for n in Counter(c for c, _ in waiting).values()) and not served_before:
        assert requests <= len(others) * (1 + dict(waiting).get(client, 0)) + dict(waiting).get(client, 0)
