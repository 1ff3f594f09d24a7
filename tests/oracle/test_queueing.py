"""Predicted waits against the recursions and closed forms of queueing theory.

A queue with `c` servers is built out of the controller itself: an engine of `c` stated slots, requests whose first
token comes at once and whose end comes after their holding time. What the controller predicts at each arrival is
compared with what that request then waited, and both with theory. Everything is seeded: nothing here can flake.
"""

import math
import random
from collections.abc import Callable
from heapq import heappop, heappush

import pytest

from sluicegate_core.controller import Controller
from sluicegate_core.effects import Start, Truth
from sluicegate_core.policy import ClassPolicy, EngineSpec, Policy
from sluicegate_core.request import Request, Stage


class Queue:
    """Arrivals through the controller; who may start holds a slot for its own holding time."""

    def __init__(self, servers: int) -> None:
        policy = Policy(
            engine=EngineSpec(slots=servers), classes=(ClassPolicy("all", max_queue_time_s=math.inf),)
        )
        self.controller = Controller(policy, now=0.0, rng=random.Random(1))
        self.ends: list[tuple[float, int, Request]] = []
        self.holding_s: dict[Request, float] = {}
        self.waits: list[
            tuple[float, float | None, float]
        ] = []  # at, predicted, actual; of those that waited

    def started(self, now: float, request: Request) -> None:
        heappush(self.ends, (now + self.holding_s[request], request.sequence, request))
        if request.was_queued:
            self.waits.append((now, request.predicted_ttft_s, now - request.arrived_at))

    def took(self, now: float, effects: object) -> None:
        for effect in effects:  # type: ignore[attr-defined]
            assert isinstance(effect, Start)
            self.started(now, effect.request)
            self.took(now, self.controller.first_token(now, effect.request))

    def until(self, now: float) -> None:
        while self.ends and self.ends[0][0] <= now:
            at, _, request = heappop(self.ends)
            self.took(at, self.controller.finish(at, request, Truth(1, 1)))

    def arrive(self, now: float, holding_s: float) -> Request:
        self.until(now)
        request = Request(client="a", known_prompt_tokens=1, max_output_tokens=1)
        self.holding_s[request] = holding_s
        self.took(now, self.controller.arrive(now, request))
        return request

    def simulate(self, rate: float, holding: Callable[[], float], count: int, seed: int) -> None:
        rng = random.Random(seed)
        now = 0.0
        for _ in range(count):
            now += rng.expovariate(rate)
            self.arrive(now, holding())
        self.until(math.inf)

    def means(self) -> tuple[float, float]:
        """(predicted, actual) mean wait of those that waited, without the beginning."""
        known = [(p, a) for _, p, a in self.waits[100:] if p is not None]
        assert len(known) > 0.99 * len(self.waits[100:])
        return sum(p for p, _ in known) / len(known), sum(a for _, a in known) / len(known)


def erlang_c(servers: int, load: float) -> float:
    """Probability of waiting in M/M/c (Erlang 1917), by the recursion of Erlang B."""
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return blocked / (1.0 - load / servers * (1.0 - blocked))


def test_erlang_c_against_published_values() -> None:
    assert erlang_c(1, 0.7) == pytest.approx(0.7)  # M/M/1 waits with probability rho
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(10, 8.0) == pytest.approx(0.4092, abs=1e-4)


@pytest.mark.parametrize(
    ("servers", "rho", "count"),
    [
        (1, 0.7, 10_000),
        (4, 0.8, 10_000),
        *(
            pytest.param(servers, rho, 60_000, marks=pytest.mark.slow)
            for servers in (1, 4, 16)
            for rho in (0.8, 0.9)
        ),
    ],
)
def test_m_m_c(servers: int, rho: float, count: int) -> None:
    """Mean wait of those that wait: 1 / (c mu - lambda); share of those: Erlang C."""
    holding_s = 1.0
    queue = Queue(servers)
    rng = random.Random(10 * servers)
    queue.simulate(rho * servers / holding_s, lambda: rng.expovariate(1 / holding_s), count, seed=2)
    predicted_s, actual_s = queue.means()
    exact_s = holding_s / (servers * (1.0 - rho))
    assert len(queue.waits) / count == pytest.approx(erlang_c(servers, rho * servers), rel=0.1)
    assert actual_s == pytest.approx(exact_s, rel=0.2)  # the simulation is the queue it claims to be
    assert predicted_s == pytest.approx(actual_s, rel=0.15)
    assert predicted_s == pytest.approx(exact_s, rel=0.25)


@pytest.mark.parametrize(
    ("rho", "count"),
    [(0.7, 10_000), *(pytest.param(rho, 60_000, marks=pytest.mark.slow) for rho in (0.8, 0.9))],
)
def test_m_d_1(rho: float, count: int) -> None:
    """Pollaczek and Khinchine: mean wait rho D / (2 (1 - rho)); of those that wait, D / (2 (1 - rho)).

    The prediction counts the one in service as a whole one, where half of it is left on the mean: up to D / 2
    more.
    """
    queue = Queue(1)
    queue.simulate(rho, lambda: 1.0, count, seed=5)
    predicted_s, actual_s = queue.means()
    exact_s = 1.0 / (2.0 * (1.0 - rho))
    assert actual_s == pytest.approx(exact_s, rel=0.15)
    assert actual_s * 0.95 <= predicted_s <= (actual_s + 0.5) * 1.05


@pytest.mark.parametrize(("every_s", "holding_s", "servers"), [(0.5, 1.0, 1), (0.1, 0.3, 2), (0.2, 1.0, 4)])
def test_d_d_c(every_s: float, holding_s: float, servers: int) -> None:
    """Regular arrivals past capacity: each wait follows from the exact recursion over the slots' free times, and
    each prediction is right to within one hand-over."""
    queue = Queue(servers)
    free_at = [0.0] * servers
    exact: dict[Request, float] = {}
    for n in range(400):
        now = n * every_s
        begins = max(now, min(free_at))
        free_at[free_at.index(min(free_at))] = begins + holding_s
        exact[queue.arrive(now, holding_s)] = begins - now
    queue.until(math.inf)
    turn_s = holding_s / servers
    compared = 0
    for request, wait_s in exact.items():
        assert request.stage is Stage.ENDED
        assert request.started_at - request.arrived_at == pytest.approx(wait_s, abs=1e-9)
        if request.was_queued and request.arrived_at > 40 * every_s:
            assert request.predicted_ttft_s == pytest.approx(wait_s, abs=servers * turn_s + 0.05 * wait_s)
            compared += 1
    assert compared > 200


@pytest.mark.slow
def test_a_single_prediction_is_unbiased_at_every_queue_length() -> None:
    """Not only the mean over all: in M/M/4 the prediction for a wait behind n others is that wait's mean,
    (n + 1) / (c mu), for short and for long lines."""
    queue = Queue(4)
    rng = random.Random(1)
    queue.simulate(0.93 * 4, lambda: rng.expovariate(1.0), 60_000, seed=3)
    known = [(p, a) for _, p, a in queue.waits[100:] if p is not None]
    for low, high in ((0.0, 1.0), (1.0, 3.0), (3.0, 6.0)):
        band = [(p, a) for p, a in known if low <= p < high]
        assert len(band) > 500
        mean_actual_s = sum(a for _, a in band) / len(band)
        assert sum(p for p, _ in band) / len(band) == pytest.approx(mean_actual_s, rel=0.2, abs=0.1)
