"""What holds a waiting request: each hold by a scene that reaches it and one that lets go, and the kept slots."""

import math
import random
from typing import Any

import pytest

from sluicegate_core.controller import Controller
from sluicegate_core.effects import Start, Truth
from sluicegate_core.engine import UNLEARNED_PENDING
from sluicegate_core.policy import ClassPolicy, EngineSpec, Policy, Slo
from sluicegate_core.request import Request
from sluicegate_core.vocabulary import EngineStatus, Hold


def controller_for(
    *classes: ClassPolicy, slots: int | None = None, seconds_a_token: float | None = 0.001
) -> Controller:
    controller = Controller(
        Policy(engine=EngineSpec(slots=slots), classes=classes), now=0.0, rng=random.Random(1)
    )
    if seconds_a_token is not None:
        for i in range(32):
            controller.predictor.service.add(100.0 + 10 * i, seconds_a_token * (100.0 + 10 * i))
        controller.engine.allow_backlog(controller.predictor.service.slope)
    return controller


def prompt(tokens: int = 1, **facts: Any) -> Request:
    return Request(known_prompt_tokens=tokens, max_output_tokens=1, **facts)


def start(controller: Controller, now: float, request: Request, *, stream: bool = True) -> Request:
    effects = controller.arrive(now, request)
    assert [type(e) for e in effects] == [Start], controller.hold(now, request)
    if stream:
        controller.first_token(now, request)
    return request


def wait(controller: Controller, now: float, request: Request) -> Hold:
    assert not controller.arrive(now, request)
    hold = controller.hold(now, request)
    assert hold is not None
    return hold


PATIENT = ClassPolicy("c", max_queue_time_s=math.inf)


def test_an_engine_that_is_down_holds_and_lets_go_when_it_is_up() -> None:
    controller = controller_for(PATIENT, slots=1)
    inside = start(controller, 0.0, prompt())
    waiting = prompt()
    assert wait(controller, 0.0, waiting) is Hold.SLOTS
    for status in (EngineStatus.DOWN, EngineStatus.LOADING):
        controller.engine_status(0.0, status)
        assert controller.hold(0.0, waiting) is Hold.ENGINE_DOWN
    assert not controller.finish(1.0, inside, Truth())
    assert controller.engine_status(2.0, EngineStatus.UP) == [Start(waiting)]


def test_slots_hold_and_one_that_frees_lets_one_go() -> None:
    controller = controller_for(PATIENT, slots=3)
    inside = [start(controller, 0.0, prompt()) for _ in range(3)]
    waiting = [prompt() for _ in range(2)]
    assert [wait(controller, 0.0, w) for w in waiting] == [Hold.SLOTS, Hold.SLOTS]
    assert controller.finish(1.0, inside[0], Truth()) == [Start(waiting[0])]


def test_unlearned_prompts_hold_until_their_first_tokens() -> None:
    controller = controller_for(PATIENT, seconds_a_token=None)
    first = [start(controller, 0.0, prompt(), stream=False) for _ in range(UNLEARNED_PENDING)]
    waiting = prompt()
    assert wait(controller, 0.0, waiting) is Hold.BACKLOG
    assert controller.first_token(0.1, first[0]) == [Start(waiting)]


def test_the_backlog_holds_at_its_bound() -> None:
    controller = controller_for(PATIENT, seconds_a_token=0.001)
    assert controller.engine.backlog_bound == pytest.approx(100.0)
    first = start(controller, 0.0, prompt(100), stream=False)
    waiting = prompt(1)
    assert wait(controller, 0.0, waiting) is Hold.BACKLOG
    assert controller.first_token(0.1, first) == [Start(waiting)]


def test_a_prompt_that_would_be_too_much_waits_and_keeps_its_turn() -> None:
    """Others of its class and of other classes wait behind it, and it goes once all that went before has begun."""
    controller = controller_for(PATIENT, ClassPolicy("d", max_queue_time_s=math.inf))
    first = start(controller, 0.0, prompt(60), stream=False)
    long = prompt(2_000)
    assert wait(controller, 0.0, long) is Hold.PROMPT
    small, other = prompt(1, client="x"), prompt(1, class_index=1)
    assert not controller.arrive(0.0, small)
    assert not controller.arrive(0.0, other)
    assert controller.hold(0.0, small) is Hold.TURN
    assert controller.hold(0.0, other) is Hold.TURN
    effects = controller.first_token(0.1, first)
    assert Start(long) in effects
    assert controller.hold(0.1, small) is Hold.BACKLOG


def test_a_prompt_that_does_not_begin_holds_the_others() -> None:
    controller = controller_for(PATIENT)
    start(controller, 0.0, prompt())
    start(controller, 0.0, prompt(10), stream=False)
    waiting = prompt(1)
    assert controller.arrive(0.01, waiting) == (Start(waiting),)
    late = prompt(1)
    assert wait(controller, 2.0, late) in (Hold.STALLED, Hold.SLOTS)


def test_a_cap_holds_its_class_and_no_other() -> None:
    capped = ClassPolicy("c", max_queue_time_s=math.inf, max_concurrency=2)
    controller = controller_for(capped, ClassPolicy("d", max_queue_time_s=math.inf))
    inside = [start(controller, 0.0, prompt()) for _ in range(2)]
    waiting = prompt()
    assert wait(controller, 0.0, waiting) is Hold.CLASS_CAP
    for _ in range(5):
        start(controller, 0.0, prompt(class_index=1))
    assert controller.hold(0.0, waiting) is Hold.CLASS_CAP
    assert controller.finish(1.0, inside[1], Truth()) == [Start(waiting)]


def test_residents_at_the_limit_of_their_slo_hold_the_rest() -> None:
    controller = controller_for(ClassPolicy("c", Slo(itl_s=0.05), max_queue_time_s=math.inf))
    inside = start(controller, 0.0, prompt())
    for n in range(1, 30):
        controller.progress(0.06 * n, inside, 1)
    waiting = prompt()
    assert wait(controller, 1.75, waiting) in (Hold.GAP, Hold.NEXT_GAP)
    assert controller.finish(1.8, inside, Truth()) == [Start(waiting)]


# Kept slots.

TOP = ClassPolicy("top", Slo(2.0), weight=10, max_queue_time_s=math.inf)
BATCH = ClassPolicy("batch", weight=1, max_queue_time_s=math.inf)


def with_reserved(reserved: int | None) -> ClassPolicy:
    return ClassPolicy("top", Slo(2.0), weight=10, max_queue_time_s=math.inf, reserved_slots=reserved)


def fill(controller: Controller, class_index: int) -> int:
    """How many of a class get in, of more than would fit."""
    for _ in range(20):
        one = prompt(class_index=class_index)
        for effect in controller.arrive(0.0, one):
            controller.first_token(0.0, effect.request)
    return controller.engine.running_of[class_index]


@pytest.mark.parametrize(
    ("reserved", "slots", "batch"), [(0, 4, 4), (1, 4, 3), (3, 4, 1), (4, 4, 1), (99, 4, 1), (1, 1, 1)]
)
def test_stated_slots_are_kept_and_batch_has_the_rest_and_at_least_one(
    reserved: int, slots: int, batch: int
) -> None:
    controller = controller_for(with_reserved(reserved), BATCH, slots=slots)
    assert fill(controller, 1) == batch
    assert fill(controller, 0) == slots - batch


def test_one_slot_is_left_to_batch_whatever_the_class_above_runs() -> None:
    controller = controller_for(with_reserved(4), BATCH, slots=4)
    for _ in range(3):
        start(controller, 0.0, prompt())
    start(controller, 0.0, prompt(class_index=1))
    assert wait(controller, 0.0, prompt(class_index=1)) is Hold.SLOTS


def test_two_classes_above_keep_no_more_than_all_but_one() -> None:
    middle = ClassPolicy("middle", weight=5, max_queue_time_s=math.inf, reserved_slots=3)
    controller = controller_for(with_reserved(3), middle, BATCH, slots=4)
    assert fill(controller, 2) == 1
    waiting = next(iter(controller.line))
    assert controller.hold(0.0, waiting) is Hold.RESERVED
    assert controller.finish(1.0, next(iter(controller.running_requests)), Truth()) == [Start(waiting)]


def test_the_class_above_takes_every_slot_if_it_is_first() -> None:
    controller = controller_for(with_reserved(1), BATCH, slots=4)
    assert fill(controller, 0) == 4


def test_classes_of_one_weight_keep_nothing_from_each_other() -> None:
    same = ClassPolicy("same", weight=10, max_queue_time_s=math.inf, reserved_slots=3)
    controller = controller_for(with_reserved(3), same, slots=4)
    assert fill(controller, 1) == 4


def offered(controller: Controller, class_index: int, rate: float, holding_s: float) -> float:
    """Requests of a class at a steady rate, for long enough; returns the time."""
    times = controller.predictor.classes[class_index]
    for _ in range(200):
        controller.predictor.learn_holding(class_index, holding_s)
    for n in range(int(200 * rate)):
        times.arrived(n / rate)
    return 200.0


@pytest.mark.parametrize(
    ("rate", "holding_s", "kept"),
    [(0.001, 1.0, 0), (0.5, 1.0, 2), (0.8, 4.0, 5), (3.1, 4.0, 16), (50.0, 4.0, 31)],
)
def test_slots_are_sized_by_the_square_root_of_the_load(rate: float, holding_s: float, kept: int) -> None:
    """Load in Erlangs plus its square root, rounded up; nothing for a class that hardly comes; never all of them.

    By hand: 0.5 + 0.71 -> 2; 3.2 + 1.79 = 4.99 -> 5; 12.4 + 3.52 = 15.92 -> 16; 200 of 32 -> 31.
    """
    controller = controller_for(TOP, BATCH, slots=32)
    now = offered(controller, 0, rate, holding_s)
    assert controller.predictor.load(now, 0) == pytest.approx(rate * holding_s, rel=0.15, abs=0.01)
    assert controller.kept_slots(now, 0) in (kept, kept + (0 < kept < 31))


def test_sized_slots_hold_batch_and_let_the_class_above_in() -> None:
    controller = controller_for(TOP, BATCH, slots=4)
    now = offered(controller, 0, 0.5, 1.0)
    assert controller.kept_slots(now, 0) == 2
    for _ in range(2):
        start(controller, now, prompt(class_index=1))
    assert wait(controller, now, prompt(class_index=1)) is Hold.RESERVED
    start(controller, now, prompt())
    start(controller, now, prompt())
    # Minutes later nobody of that class comes any more, and batch has all of it.
    later = now + 600.0
    assert controller.kept_slots(later, 0) == 0


def test_slots_that_nobody_knows_are_kept_for_nobody() -> None:
    controller = controller_for(with_reserved(3), BATCH)
    assert controller.kept_slots(0.0, 0) is None
    assert fill(controller, 1) == 20
