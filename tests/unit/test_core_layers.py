"""The layers of the decision, each by a table, their order, and every reason reached through the controller."""

import math
import random
from typing import Any

import pytest

from sluicegate_core import layers
from sluicegate_core.controller import Controller
from sluicegate_core.effects import Evict, Reject, Start, Truth
from sluicegate_core.layers import LAYERS, MAX_WAITING, PROBE_EVERY_S, Scene, decide
from sluicegate_core.policy import ClassPolicy, EngineSpec, Mode, Policy, Slo
from sluicegate_core.request import Request, Stage
from sluicegate_core.vocabulary import EngineStatus, Hold, Reason


def scene(**changes: Any) -> Scene:
    """Somebody who has to wait a little, and would be in time."""
    return Scene(
        request=Request(),
        policy=ClassPolicy("c", slo=Slo(ttft_s=2.0), max_queue_time_s=1.5),
        status=EngineStatus.UP,
        draining=False,
        idle=False,
        probe_due=False,
        waiting=5,
        hold=Hold.SLOTS,
        wait_s=0.5,
        service_s=0.5,
        alone_s=0.4,
    )._replace(**changes)


NO_SLO = ClassPolicy("c", max_queue_time_s=1.5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"draining": True}, Reason.DRAINING),
        ({"status": EngineStatus.DOWN}, Reason.ENGINE_DOWN),
        ({"status": EngineStatus.LOADING}, Reason.ENGINE_DOWN),
        ({"status": EngineStatus.UNKNOWN}, None),
        ({"draining": True, "status": EngineStatus.DOWN}, Reason.DRAINING),
    ],
)
def test_availability(changes: dict[str, Any], reason: Reason | None) -> None:
    assert layers.availability(scene(**changes)) is reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"wait_s": 1.5}, None),  # 2.0 s is within 2 s
        ({"wait_s": 1.51}, Reason.TTFT),
        ({"wait_s": 0.0, "hold": None, "service_s": 30.0}, None),  # at once: never refused on averages
        ({"wait_s": 9.0, "hold": None}, Reason.TTFT),  # room for it, but others are ahead
        ({"wait_s": 9.0, "policy": NO_SLO}, None),  # nothing promised
        ({"wait_s": None}, None),  # unknown passes
        ({"service_s": None, "alone_s": None, "wait_s": 9.0}, None),
        ({"alone_s": 2.0}, None),
        ({"alone_s": 2.01}, Reason.SLO_UNREACHABLE),
        ({"alone_s": 2.01, "wait_s": 0.0, "hold": None}, Reason.SLO_UNREACHABLE),
        ({"alone_s": 2.01, "idle": True, "wait_s": 0.0, "hold": None}, Reason.SLO_UNREACHABLE),
        ({"alone_s": 2.01, "idle": True, "probe_due": True, "wait_s": 0.0, "hold": None}, None),
        ({"alone_s": 2.01, "idle": False, "probe_due": True}, Reason.SLO_UNREACHABLE),
    ],
)
def test_time(changes: dict[str, Any], reason: Reason | None) -> None:
    assert layers.time(scene(**changes)) is reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"wait_s": 1.5}, None),
        ({"wait_s": 1.51}, Reason.QUEUE_TIME),
        ({"wait_s": None}, None),
        ({"waiting": MAX_WAITING - 1}, None),
        ({"waiting": MAX_WAITING}, Reason.QUEUE_FULL),
        ({"waiting": MAX_WAITING, "hold": None}, Reason.QUEUE_FULL),  # others are ahead
        ({"waiting": MAX_WAITING, "hold": None, "wait_s": 0.0}, None),
        ({"waiting": MAX_WAITING, "wait_s": 9.0}, Reason.QUEUE_FULL),
    ],
)
def test_queue(changes: dict[str, Any], reason: Reason | None) -> None:
    assert layers.queue(scene(**changes)) is reason


def test_the_layers_stand_in_the_order_of_the_design() -> None:
    """Someone who fails at all of them is told the first; mended one by one, each in turn."""
    assert list(LAYERS) == [layers.availability, layers.time, layers.queue]
    worst = scene(draining=True, alone_s=9.0, wait_s=9.0, waiting=MAX_WAITING)
    assert decide(worst) is Reason.DRAINING
    worst = worst._replace(draining=False)
    assert decide(worst) is Reason.SLO_UNREACHABLE
    worst = worst._replace(alone_s=0.4)
    assert decide(worst) is Reason.TTFT
    worst = worst._replace(policy=NO_SLO)
    assert decide(worst) is Reason.QUEUE_FULL
    worst = worst._replace(waiting=5)
    assert decide(worst) is Reason.QUEUE_TIME
    assert decide(worst._replace(wait_s=1.0)) is None


@pytest.mark.parametrize(
    ("ahead", "ttft_s", "reason"), [(1_100, 1.583, None), (1_600, 2.0, None), (2_400, 2.667, Reason.TTFT)]
)
def test_the_example_of_the_design(ahead: int, ttft_s: float, reason: Reason | None) -> None:
    """1,200 tokens/s, an 800-token prompt, an SLO of 2 s; so many tokens ahead of it."""
    rate = 1_200.0
    one = scene(
        wait_s=ahead / rate, service_s=800 / rate, alone_s=800 / rate, policy=ClassPolicy("c", Slo(2.0))
    )
    assert one.ttft_s == pytest.approx(ttft_s, abs=1e-3)
    assert decide(one) is reason


# The same through the controller.


def learned(policy: Policy, *, seconds_a_token: float = 0.001) -> Controller:
    """A controller that knows the service of its engine."""
    controller = Controller(policy, now=0.0, rng=random.Random(1))
    for i in range(32):
        controller.predictor.service.add(100.0 + 10 * i, seconds_a_token * (100.0 + 10 * i))
    controller.engine.allow_backlog(controller.predictor.service.slope)
    return controller


def prompt(tokens: int, **facts: Any) -> Request:
    return Request(known_prompt_tokens=tokens, max_output_tokens=1, **facts)


def reason_of(effects: Any) -> Reason:
    (effect,) = effects
    assert isinstance(effect, Reject | Evict)
    return effect.refusal.reason


def busy(controller: Controller, now: float, count: int) -> list[Request]:
    """`count` streams inside."""
    inside = [prompt(1) for _ in range(count)]
    for one in inside:
        (effect,) = controller.arrive(now, one)
        assert isinstance(effect, Start)
        controller.first_token(now, one)
    return inside


ONE_SLOT = EngineSpec(slots=1)


def test_every_reason_for_a_refusal_at_arrival_is_reached() -> None:
    policy = Policy(engine=ONE_SLOT, classes=(ClassPolicy("c", Slo(2.0), max_queue_time_s=1.0),))
    controller = learned(policy)
    controller.engine_status(0.0, EngineStatus.DOWN)
    assert reason_of(controller.arrive(0.0, prompt(10))) is Reason.ENGINE_DOWN
    controller.engine_status(0.0, EngineStatus.UP)
    busy(controller, 0.0, 1)
    assert reason_of(controller.arrive(0.0, prompt(5_000))) is Reason.SLO_UNREACHABLE
    for _ in range(8):  # ends each 0.4 s: the pace of the line is learned
        controller.predictor.learn_holding(0, 0.4)
    assert not controller.arrive(0.0, prompt(10))
    assert not controller.arrive(0.0, prompt(10))
    assert reason_of(controller.arrive(0.0, prompt(10))) is Reason.QUEUE_TIME
    assert reason_of(controller.arrive(0.0, prompt(1_500))) is Reason.TTFT
    controller.drain(0.0)
    assert reason_of(controller.arrive(0.0, prompt(10))) is Reason.DRAINING
    stats = controller.stats["c"]
    assert stats.in_flight == 3
    assert stats.rejected.total() == 5


def test_every_reason_for_leaving_the_line_is_reached() -> None:
    controller = learned(Policy(engine=ONE_SLOT, classes=(ClassPolicy("c", max_queue_time_s=1.0),)))
    busy(controller, 0.0, 1)
    late, gone, drained = prompt(10), prompt(10), prompt(10)
    controller.arrive(0.0, late)
    controller.arrive(0.5, gone)
    controller.arrive(0.5, drained)
    assert reason_of(controller.tick(1.0)) is Reason.DEADLINE
    assert not controller.cancel(1.1, gone)
    assert reason_of(controller.give_up_line(1.2)) is Reason.DRAINED
    assert {r: n for r, n in controller.stats["c"].evicted.items() if n} == {
        Reason.DEADLINE: 1,
        Reason.CLIENT_GONE: 1,
        Reason.DRAINED: 1,
    }


@pytest.mark.parametrize(
    ("reason", "nobody_home"),
    [(r, r in (Reason.DRAINING, Reason.ENGINE_DOWN, Reason.DRAINED)) for r in Reason],
)
def test_only_nobody_home_sends_a_router_away_for_good(reason: Reason, nobody_home: bool) -> None:
    assert reason.nobody_home is nobody_home


def test_the_line_has_a_hard_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "MAX_WAITING", 50)
    controller = learned(Policy(engine=ONE_SLOT, classes=(ClassPolicy("c", max_queue_time_s=math.inf),)))
    busy(controller, 0.0, 1)
    for _ in range(50):
        assert not controller.arrive(0.0, prompt(10))
    assert reason_of(controller.arrive(0.0, prompt(10))) is Reason.QUEUE_FULL
    assert controller.waiting == 50


def test_newcomers_behind_a_long_prompt_are_judged_by_their_wait() -> None:
    """There would be room for each of them, were it its turn: it is not, and the line stays within its SLO."""
    controller = learned(Policy(classes=(ClassPolicy("c", Slo(2.0)),)))
    controller.arrive(0.0, prompt(60))
    controller.first_token(0.06, next(iter(controller.running_requests)))
    for n in range(8):  # each 0.2 s one is done: the drain is learned
        now = 0.1 + 0.2 * n
        controller.arrive(now, prompt(60))
        waiting = prompt(60)
        controller.arrive(now, waiting)
        inside = [r for r in controller.running_requests if r.stage is Stage.PREFILL]
        for one in inside:
            controller.first_token(now + 0.2, one)
            controller.finish(now + 0.2, one, Truth(60, 1))
    controller.tick(5.0)
    for one in list(controller.running_requests):
        controller.finish(5.0, one, Truth(60, 1))
    assert controller.running == controller.waiting == 0
    controller.arrive(5.0, prompt(60))
    controller.arrive(5.0, prompt(1_500))
    assert controller.waiting == 1
    for _ in range(1_000):
        controller.arrive(5.0, prompt(1))
    assert controller.waiting < 60
    assert controller.stats["c"].rejected[Reason.TTFT] > 900


def test_an_idle_engine_is_tried_each_half_minute_with_what_seems_too_long() -> None:
    controller = learned(Policy(classes=(ClassPolicy("c", Slo(2.0)),)))
    passed = []
    for second in range(0, 100, 10):
        (effect,) = controller.arrive(float(second), one := prompt(5_000))
        if isinstance(effect, Start):
            passed.append(second)
            controller.first_token(second + 5.0, one)  # it was too long indeed
            controller.finish(second + 5.1, one, Truth(5_000, 1))
        else:
            assert effect.refusal.reason is Reason.SLO_UNREACHABLE
            assert not effect.refusal.should_retry
            assert effect.refusal.retry_after_s > 60.0
    assert passed == [0, 30, 60, 90]
    assert PROBE_EVERY_S == 30.0


def test_what_passes_as_a_trial_teaches() -> None:
    """Refused for good, an engine that has become ten times faster would never be known to be."""
    controller = learned(Policy(classes=(ClassPolicy("c", Slo(2.0)),)))
    refused_at = []
    for second in range(0, 120, 2):
        (effect,) = controller.arrive(float(second), one := prompt(5_000))
        if isinstance(effect, Start):
            controller.first_token(second + 0.5, one)
            controller.finish(second + 0.6, one, Truth(5_000, 1))
        else:
            refused_at.append(second)
    assert all(at < 90 for at in refused_at)


def test_a_busy_engine_is_not_tried() -> None:
    controller = learned(Policy(classes=(ClassPolicy("c", Slo(2.0)),)))
    busy(controller, 0.0, 1)
    assert reason_of(controller.arrive(100.0, prompt(5_000))) is Reason.SLO_UNREACHABLE


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.SHADOW])
def test_who_does_not_enforce_lets_everything_pass_at_once(mode: Mode) -> None:
    policy = Policy(
        mode=mode,
        engine=ONE_SLOT,
        classes=(ClassPolicy("c", Slo(0.001, 0.001), max_concurrency=1, max_queue_time_s=0.0),),
    )
    controller = learned(policy)
    controller.engine_status(0.0, EngineStatus.DOWN)
    for _ in range(50):
        (effect,) = controller.arrive(0.0, prompt(9_000))
        assert isinstance(effect, Start)
    assert controller.running == 50
