"""Capacity and demand against truths that are known beforehand: an engine whose speed is written down.

The engine is the step model of `tests.simulation.world`, in virtual time, behind the real controller; the gate's
meter samples it as the gate does, and the operator's ledger and demand read the gate's real report. What the
engine can do follows from its parameters in closed form, or from an engine that runs the same jobs without any
gate. Everything is seeded: nothing here can flake.
"""

import asyncio
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.simulation.world import EngineModel, Happening, Job, World

from sluicegate_core.capacity import ENOUGH_ENDED, SAMPLE_EVERY_S, CapacityMeter
from sluicegate_core.policy import ClassPolicy, EngineSpec, Mode, Policy, Slo
from sluicegate_core.request import OUTPUT_TOKEN_COST
from sluicegate_operator.scaling.demand import TARGET_UTILISATION, Bounds, Demand, Why, demand, situation
from sluicegate_operator.scaling.ledger import Ledger, Replica, ReplicaState
from sluicegate_operator.scaling.report import parse_report
from sluicegate_sidecar.gate_report import GateReport

POLL_S = 5.0


class Watched(World):
    """A world whose controller is sampled each half second, and whose gate is polled each five."""

    def __init__(self, policy: Policy, engine: EngineModel, jobs: Iterable[Job], **more: object) -> None:
        super().__init__(policy, engine, jobs, **more)  # type: ignore[arg-type]
        self.meter = CapacityMeter()
        self.push(SAMPLE_EVERY_S, "sample", None)
        self.ledger_of_operator = Ledger(0.0)
        self.answers: list[tuple[float, Demand]] = []
        self.push(POLL_S, "report", None)

    @property
    def goes_on(self) -> bool:
        return bool(self.to_come or self.inside or self.controller.waiting)

    def on_sample(self, _: object) -> None:
        self.meter.sample(self.now, self.controller)
        if self.goes_on:
            self.push(self.now + SAMPLE_EVERY_S, "sample", None)

    def on_report(self, _: object) -> None:
        report = parse_report(json.dumps(self.document()).encode())
        replica = Replica(uid="a", state=ReplicaState.READY, report=report, reported_at=self.now)
        self.ledger_of_operator.book(self.now, [replica])
        answer = demand(situation(self.ledger_of_operator), Bounds())
        if isinstance(answer, Demand):
            self.answers.append((self.now, answer))
        if self.goes_on:
            self.push(self.now + POLL_S, "report", None)

    def document(self) -> dict[str, object]:
        """What this gate would answer. Samples are taken in virtual time, so its own loop never runs."""
        process = SimpleNamespace(
            gate=SimpleNamespace(controller=self.controller, clock=lambda: self.now),
            reload=SimpleNamespace(
                content_hash="", generation=1, mode=self.controller.policy.mode, last_error=None, problems=()
            ),
            leaving=False,
        )
        loop = asyncio.new_event_loop()
        report = GateReport(process, loop)  # type: ignore[arg-type]
        report.capacity, report.instance = self.meter, "one"
        document = report.build()
        report.close()
        loop.close()
        return {**document, "uptime_s": self.now}


def poisson(rate: float, seconds: float, seed: int, *, begins: float = 0.0, **job: object) -> Iterator[Job]:
    """Jobs of 60 to 140 prompt tokens and 10 to 50 output tokens: 160 units of work on the mean."""
    rng = random.Random(seed)
    at = begins
    while (at := at + rng.expovariate(rate)) < begins + seconds:
        yield Job(
            at=at, class_index=0, prompt_tokens=rng.randint(60, 140), output_tokens=rng.randint(10, 50), **job
        )  # type: ignore[arg-type]


MEAN_WORK = 100 + OUTPUT_TOKEN_COST * 30
ENGINE = EngineModel(base_s=0.02, per_stream_s=0.001, per_prompt_token_s=0.0005, slots=4)


def one_class(
    mode: Mode = Mode.ENFORCE, *, slots: int | None = None, ttft_s: float | None = 5.0, **more: object
) -> Policy:
    return Policy(
        mode=mode,
        engine=EngineSpec(slots=slots),
        classes=(ClassPolicy("all", Slo(ttft_s=ttft_s), **more),),  # type: ignore[arg-type]
    )


def true_rate(engine: EngineModel, **job: object) -> float:
    """Work a second of the engine alone: as many jobs as it takes, one after the other, and no gate in front."""
    jobs = [replace(one, at=0.0) for one in poisson(10.0, 60.0, 5, **job)]
    world = World(Policy(mode=Mode.OFF), engine, jobs)
    world.run()
    return sum(one.prompt_tokens + OUTPUT_TOKEN_COST * one.output_tokens for one in jobs) / world.now


def measured(world: Watched) -> float:
    world.run()
    capacity = world.meter.capacity(world.now).work_per_s
    assert capacity is not None
    return capacity


# Capacity.


def test_one_slot_in_closed_form() -> None:
    """A prompt of p tokens and n tokens take `base + p c` and `n - 1` steps of `base + stream`."""
    engine = EngineModel(base_s=0.02, per_stream_s=0.005, per_prompt_token_s=0.001, slots=1)
    prompt, output = 100, 31
    exact_s = 0.02 + prompt * 0.001 + (output - 1) * 0.025
    jobs = [Job(at=0.1 * n, class_index=0, prompt_tokens=prompt, output_tokens=output) for n in range(400)]
    world = Watched(one_class(slots=1, ttft_s=None), engine, jobs)
    assert measured(world) == pytest.approx((prompt + OUTPUT_TOKEN_COST * output) / exact_s, rel=0.03)


@pytest.mark.parametrize(
    "job", [{}, {"streams": False}, {"tells": False}], ids=["streams", "silent", "no usage"]
)
@pytest.mark.parametrize("overload", [1.3, 4.0])
def test_it_is_what_the_engine_does_without_a_gate(job: dict[str, object], overload: float) -> None:
    truth = true_rate(ENGINE, **job)
    world = Watched(one_class(slots=4), ENGINE, poisson(overload * truth / MEAN_WORK, 90.0, 11, **job))
    assert measured(world) == pytest.approx(truth, rel=0.12)


@pytest.mark.parametrize(
    ("policy", "engine"),
    [
        (one_class(), ENGINE),
        (one_class(), replace(ENGINE, reports_every_s=1.0)),
        (one_class(Mode.SHADOW, slots=4), ENGINE),
        (one_class(slots=4, max_queue_time_s=0.0), ENGINE),
    ],
    ids=["slots found out", "slots by its queue", "shadow", "no queue"],
)  # fmt: skip
def test_however_it_is_known_that_the_engine_is_full(policy: Policy, engine: EngineModel) -> None:
    truth = true_rate(ENGINE)
    world = Watched(policy, engine, poisson(2.0 * truth / MEAN_WORK, 90.0, 13))
    assert measured(world) == pytest.approx(truth, rel=0.15)


def test_under_an_inter_token_slo_it_is_the_rate_at_the_batch_that_the_slo_allows() -> None:
    """A step of 10 ms and 2 ms a stream: with at most 30 ms a token, no more than ten streams run."""
    engine = EngineModel(base_s=0.01, per_stream_s=0.002, per_prompt_token_s=0.0, slots=64)
    policy = Policy(classes=(ClassPolicy("all", Slo(ttft_s=20.0, itl_s=0.030)),))
    world = Watched(policy, engine, poisson(40.0, 90.0, 3))
    at_ten = MEAN_WORK / 30 * 10 / 0.030
    assert 0.7 * at_ten < measured(world) < 1.1 * at_ten


def test_an_engine_that_is_never_full_is_not_measured() -> None:
    world = Watched(one_class(slots=4), ENGINE, poisson(0.3, 200.0, 7))
    world.run()
    assert world.meter.capacity(world.now).work_per_s is None


def test_a_class_that_waits_for_its_own_cap_says_nothing_of_the_engine() -> None:
    """One at a time of four slots, and more than enough of it; refusals and evictions included."""
    engine = replace(ENGINE, slots=4)
    policy = Policy(
        engine=EngineSpec(slots=4),
        classes=(ClassPolicy("all", max_concurrency=1, max_queue_time_s=2.0),),
    )
    world = Watched(policy, engine, poisson(6.0, 120.0, 43))
    report = world.run()
    assert report.refused[0] > 100
    assert world.meter.capacity(world.now).work_per_s is None


def test_a_hung_engine_is_not_a_slow_one() -> None:
    truth = true_rate(ENGINE)
    rate = 2.0 * truth / MEAN_WORK
    jobs = [*poisson(rate, 60.0, 17), *poisson(rate, 60.0, 18, begins=100.0)]
    stalls = [Happening(at=50.0, kind="stall", what=35.0)]
    world = Watched(one_class(slots=4), ENGINE, jobs, happenings=stalls)
    assert measured(world) == pytest.approx(truth, rel=0.15)


def test_after_a_change_of_speed_it_is_the_new_one() -> None:
    truth = true_rate(ENGINE)
    half = EngineModel(base_s=0.04, per_stream_s=0.002, per_prompt_token_s=0.001, slots=4)
    world = Watched(one_class(slots=4), ENGINE, poisson(2.0 * truth / MEAN_WORK, 400.0, 19))
    world.push(100.0, "slower", half)
    world.on_slower = lambda engine: setattr(world, "engine", engine)  # type: ignore[attr-defined]
    assert measured(world) == pytest.approx(truth / 2, rel=0.15)


def test_it_takes_evidence() -> None:
    meter_world = Watched(one_class(slots=4), ENGINE, poisson(100.0, 1.5, 23))
    meter_world.run()
    capacity = meter_world.meter.capacity(meter_world.now)
    assert capacity.ended >= ENOUGH_ENDED
    assert (capacity.work_per_s is None) == (capacity.pressed_s < 5.0)


# Demand.


@pytest.mark.parametrize("retries", [0, 2])
@pytest.mark.parametrize("overload", [1.5, 3.0])
def test_an_overload_is_its_factor_over_the_target_however_often_clients_come_back(
    overload: float, retries: int
) -> None:
    """Offered over capacity is the factor; what is refused and comes back is no new demand."""
    truth = true_rate(ENGINE)
    jobs = [
        replace(one, request_id=b"%d" % n)  # type: ignore[arg-type]
        for n, one in enumerate(poisson(overload * truth / MEAN_WORK, 240.0, 29, retries=retries))
    ]
    world = Watched(one_class(slots=4), ENGINE, jobs)
    world.run()
    told = [answer.replicas for at, answer in world.answers if 60.0 < at < 240.0]
    assert sum(told) / len(told) == pytest.approx(overload / TARGET_UTILISATION, rel=0.2)
    assert min(told) > overload  # never a low number


def test_a_replica_that_has_enough_to_do_is_not_joined_by_others() -> None:
    truth = true_rate(ENGINE)
    world = Watched(one_class(slots=4), ENGINE, poisson(0.4 * truth / MEAN_WORK, 300.0, 31))
    world.run()
    assert world.answers
    for at, answer in world.answers:
        assert answer.wanted == 1, (at, answer)


def test_the_surge_is_known_within_half_a_minute_and_held_for_minutes() -> None:
    truth = true_rate(ENGINE)
    quiet, surge = 0.3 * truth / MEAN_WORK, 2.5 * truth / MEAN_WORK
    jobs = [
        *poisson(quiet, 100.0, 37),
        *poisson(surge, 60.0, 38, begins=100.0),
        *poisson(quiet, 900.0, 39, begins=160.0),
    ]
    world = Watched(one_class(slots=4), ENGINE, jobs)
    world.run()
    wanted = {at: answer.wanted for at, answer in world.answers}
    assert wanted[100.0] == 1
    assert wanted[130.0] >= 3
    assert min(w for at, w in wanted.items() if 130.0 <= at <= 160.0) >= 3
    assert wanted[1000.0] == 1


def test_it_says_measured_when_it_has_measured() -> None:
    truth = true_rate(ENGINE)
    world = Watched(one_class(slots=4), ENGINE, poisson(2.0 * truth / MEAN_WORK, 120.0, 41))
    world.run()
    reasons = [answer.why for _, answer in world.answers]
    assert reasons[0] is Why.HOLDING or reasons[0] is Why.MEASURED
    assert Why.MEASURED in reasons
