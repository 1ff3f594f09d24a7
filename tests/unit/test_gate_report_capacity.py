"""The capacity's meter, sample by sample, on a gate whose clock is moved: what counts as pressed, and for how long."""

from collections.abc import Callable

import pytest
from tests.unit.observed import BATCH, INTERACTIVE, Observed

from sluicegate_core.capacity import (
    ENOUGH_S,
    HUNG_S,
    MAX_GAP_S,
    MEMORY_S,
    SAMPLE_EVERY_S,
    SETTLE_S,
    CapacityMeter,
)
from sluicegate_core.effects import EngineSnapshot
from sluicegate_core.policy import ClassPolicy, EngineSpec, Mode, Policy
from sluicegate_core.request import Request, Stage
from sluicegate_core.vocabulary import EngineStatus

WORK = 100 + 2 * 8
"""Of one request as `Observed.finishes` settles it: 100 prompt tokens and 8 of output, which count twice."""


class Metered:
    """A gate with two slots (unless told otherwise), sampled each half second."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.gate = Observed() if policy is None else Observed(policy=policy)
        self.meter = CapacityMeter()
        self.requests: list[Request] = []

    def arrives(self, count: int, class_index: int = BATCH) -> None:
        self.requests += [self.gate.arrives(class_index) for _ in range(count)]

    def serves(self, count: int) -> None:
        """So many are served at this moment, and as many come in their place."""
        for _ in range(count):
            begun = next(one for one in self.requests if one.stage is Stage.PREFILL)
            self.gate.controller.first_token(self.gate.clock.now, begun)
            self.gate.finishes(begun)
        self.arrives(count)

    def passes(self, seconds: float, each: Callable[[], None] = lambda: None) -> None:
        for _ in range(round(seconds / SAMPLE_EVERY_S)):
            self.gate.clock.now += SAMPLE_EVERY_S
            each()
            self.meter.sample(self.gate.clock.now, self.gate.controller)

    def works(self, seconds: float, a_sample: int = 1) -> None:
        self.passes(seconds, lambda: self.serves(a_sample))

    @property
    def measured_s(self) -> float:
        return self.meter.capacity(self.gate.clock.now).pressed_s

    @property
    def rate(self) -> float | None:
        return self.meter.capacity(self.gate.clock.now).work_per_s


def patient(mode: Mode = Mode.ENFORCE, slots: int | None = 2) -> Policy:
    """One class whose requests are neither refused nor evicted within a test, BATCH's index included."""
    classes = (ClassPolicy("interactive", max_queue_time_s=1e6), ClassPolicy("batch", max_queue_time_s=1e6))
    return Policy(mode=mode, engine=EngineSpec(slots=slots), classes=classes)


@pytest.fixture
def metered() -> Metered:
    one = Metered(patient())
    one.gate.controller.engine_status(one.gate.clock.now, EngineStatus.UP)
    return one


def test_the_rate_is_the_work_of_those_served_in_it(metered: Metered) -> None:
    metered.arrives(6)
    metered.works(20.0, a_sample=2)
    assert metered.rate == pytest.approx(2 * WORK / SAMPLE_EVERY_S)


def test_the_beginning_of_a_run_is_left_out(metered: Metered) -> None:
    metered.arrives(6)
    metered.works(20.0)
    # From the first sample on, but for what settles.
    assert metered.measured_s == pytest.approx(20.0 - SAMPLE_EVERY_S - SETTLE_S)
    assert metered.meter.pressed_s == pytest.approx(20.0 - SAMPLE_EVERY_S)


def test_before_there_is_evidence_there_is_no_rate(metered: Metered) -> None:
    metered.arrives(6)
    metered.works(SAMPLE_EVERY_S + SETTLE_S + ENOUGH_S - SAMPLE_EVERY_S)
    assert metered.rate is None
    metered.works(SAMPLE_EVERY_S)
    assert metered.rate is not None


def test_nobody_presses_an_idle_engine_nor_one_that_has_a_slot_free(metered: Metered) -> None:
    metered.passes(20.0)
    metered.arrives(1)
    metered.passes(20.0)
    assert not metered.meter.pressed
    assert metered.meter.pressed_s == 0.0


@pytest.mark.parametrize("status", [EngineStatus.DOWN, EngineStatus.LOADING])
def test_who_waits_for_an_engine_that_is_not_there_says_nothing_of_its_capacity(
    metered: Metered, status: EngineStatus
) -> None:
    metered.arrives(6)
    metered.works(10.0)
    before = metered.meter.pressed_s
    metered.gate.controller.engine_status(metered.gate.clock.now, status)
    metered.passes(20.0)
    assert metered.gate.controller.waiting
    assert metered.meter.pressed_s == before
    assert not metered.meter.pressed


def test_a_queue_of_the_engines_own_presses() -> None:
    metered = Metered(patient(Mode.SHADOW, slots=None))
    controller = metered.gate.controller
    metered.arrives(6)

    def says(waiting: int) -> Callable[[], None]:
        def step() -> None:
            controller.engine_snapshot(metered.gate.clock.now, EngineSnapshot(None, 4, waiting, None, None))
            metered.serves(1)

        return step

    metered.passes(10.0, says(0))
    assert metered.meter.pressed_s == 0.0
    metered.passes(10.0, says(2))
    assert metered.meter.pressed_s == pytest.approx(10.0 - SAMPLE_EVERY_S)


def test_whoever_is_refused_for_want_of_room_presses() -> None:
    """A class that does not wait: its line is empty, and the engine has no known number of slots."""
    classes = (ClassPolicy("interactive", max_queue_time_s=0.0), ClassPolicy("batch", max_queue_time_s=0.0))
    metered = Metered(Policy(engine=EngineSpec(slots=3), classes=classes))
    metered.arrives(2, INTERACTIVE)
    refused = metered.gate.controller.stats["interactive"].rejected

    def refuse() -> None:
        metered.arrives(2, INTERACTIVE)
        running = [one for one in metered.requests if one.stage is Stage.PREFILL]
        metered.gate.finishes(running[-1])  # a slot is free again when the sample is taken

    metered.passes(10.0, refuse)
    assert refused.total() > 0
    assert metered.meter.pressed_s > 8.0  # all but the first, in which nothing is known yet


def test_a_stream_counts_by_its_tokens_as_they_come(metered: Metered) -> None:
    """Nobody ends for ten seconds, and the work of those is not missed."""
    metered.arrives(4)
    gate = metered.gate
    streams = [one for one in metered.requests if one.stage is Stage.PREFILL]
    for one in streams:
        gate.controller.first_token(gate.clock.now, one)

    def tokens() -> None:
        for one in streams:
            gate.controller.progress(gate.clock.now, one, 5)

    metered.passes(10.0, tokens)
    assert metered.rate is None  # too few have ended to be sure
    for one in streams:
        gate.finishes(one, prompt_tokens=one.prompt_tokens, output_tokens=one.tokens_out)
    for _ in range(2):
        metered.serves(1)
    metered.passes(SAMPLE_EVERY_S)
    served = 2 * WORK / metered.measured_s  # the last two, at once
    assert metered.rate == pytest.approx(2 * 2.0 * 5 / SAMPLE_EVERY_S + served, rel=0.05)


def test_slow_is_slow_and_hung_is_not(metered: Metered) -> None:
    metered.arrives(6)
    metered.works(11.5)
    assert metered.measured_s == pytest.approx(10.0)
    metered.passes(HUNG_S - 2.0)
    metered.works(1.0)
    assert metered.measured_s == pytest.approx(10.0 + HUNG_S - 1.0)
    metered.passes(HUNG_S + 2.0)
    metered.works(1.0)
    assert metered.measured_s == pytest.approx(10.0 + HUNG_S)


def test_a_gap_between_samples_proves_nothing(metered: Metered) -> None:
    metered.arrives(6)
    metered.works(11.5)
    metered.gate.clock.now += 2 * MAX_GAP_S
    metered.works(SAMPLE_EVERY_S)
    assert metered.measured_s == pytest.approx(10.0)


def test_it_remembers_a_minute_of_pressed_time_however_long_ago(metered: Metered) -> None:
    metered.arrives(6)
    metered.works(100.0)
    assert metered.measured_s == pytest.approx(MEMORY_S)
    fast = metered.rate
    metered.gate.clock.now += 1e6
    assert metered.rate == fast
    assert metered.meter.capacity(metered.gate.clock.now).age_s == pytest.approx(1e6)
    metered.works(MEMORY_S, a_sample=2)
    assert fast is not None
    assert metered.rate is not None
    assert 1.5 * fast < metered.rate < 2.0 * fast
