"""Thousands of small worlds with faults, each held against the naive model after every event.

A world is made from its seed alone: policy, engine, clients, faults, a change of policy, a drain. A failure names
the seed; `pytest -k "[SEED]"` replays it.
"""

import random

import pytest
from tests.simulation.world import EngineModel, Happening, Job, World

from sluicegate_core.policy import Classify, ClassPolicy, EngineSpec, Mode, Policy, Slo

FATES = ("error", "cut", "hang", "busy")
ALL_NAMES = ("interactive", "standard", "batch", "other")


def some_policy(rng: random.Random) -> Policy:
    names = rng.sample(ALL_NAMES, rng.randint(1, 4))
    classes = tuple(
        ClassPolicy(
            name,
            slo=Slo(ttft_s=rng.choice((None, 0.5, 2.0, 10.0)), itl_s=rng.choice((None, 0.03, 0.1, 0.6))),
            weight=rng.choice((1, 1, 3, 10)),
            max_queue_time_s=rng.choice((0.0, 0.3, 2.0, 10.0)),
            max_concurrency=rng.choice((None, None, 1, 3)),
            reserved_slots=rng.choice((None, None, 0, 1, 3)),
        )
        for name in names
    )
    return Policy(
        mode=rng.choice((Mode.ENFORCE,) * 8 + (Mode.SHADOW, Mode.OFF)),
        engine=EngineSpec(slots=rng.choice((None, None, 1, 3, 8))),
        classes=classes,
        classify=Classify(default=rng.choice(names)),
    )


def some_job(rng: random.Random, at: float, classes: int, number: int, trouble: float) -> Job:
    generates = rng.random() < 0.9
    return Job(
        at=at,
        class_index=rng.randrange(classes),
        prompt_tokens=rng.choice((1, rng.randint(1, 300), rng.randint(1, 6_000))),
        output_tokens=rng.randint(1, 12) if generates else 1,
        client=rng.choice("abcdef"),
        leaves_after_s=rng.expovariate(0.5) if rng.random() < trouble else None,
        streams=generates and rng.random() < 0.7,
        generates=generates,
        fate=rng.choice(FATES) if rng.random() < trouble else "served",
        retries=rng.choice((0, 0, 2)),
        request_id=b"%d" % number if rng.random() < 0.5 else b"",
        tells=rng.random() < 0.8,
    )


def some_world(seed: int) -> World:
    rng = random.Random(seed)
    policy = some_policy(rng)
    slots = rng.choice((1, 2, 4, 16))
    engine = EngineModel(
        base_s=rng.choice((0.002, 0.02)),
        per_stream_s=rng.choice((0.0001, 0.004)),
        per_prompt_token_s=rng.choice((0.00005, 0.001)),
        chunk=rng.choice((64, 512, 2048)),
        slots=slots,
        reports_every_s=rng.choice((None, None, 1.0)),
        reports_slots=rng.random() < 0.5,
    )
    trouble = rng.choice((0.0, 0.1, 0.5))
    at, jobs = 0.0, []
    gap_s = rng.choice((0.003, 0.03, 0.3))
    for number in range(rng.randint(30, 90)):
        at += rng.choice((0.0, rng.expovariate(1 / gap_s)))  # many arrive at the very same time
        jobs.append(some_job(rng, at, len(policy.classes), number, trouble))
    happenings: list[Happening] = []
    if rng.random() < 0.4:
        happenings.append(Happening(rng.uniform(0, at), "reconfigure", some_policy(rng)))
        happenings.append(Happening(rng.uniform(0, at), "reconfigure", some_policy(rng)))
    if rng.random() < 0.3:
        dies_at = rng.uniform(0, at)
        happenings.append(Happening(dies_at, "down"))
        happenings.append(Happening(dies_at + rng.expovariate(1.0), "up"))
    if rng.random() < 0.4:
        happenings.append(Happening(rng.uniform(0, at), "stall", rng.uniform(0.1, 5.0)))
    if rng.random() < 0.3:
        happenings.append(Happening(rng.uniform(0, at), "slots", rng.choice((1, 2, 8, 16))))
    if rng.random() < 0.3:
        drained_at = rng.uniform(0, 1.2 * at)
        happenings.append(Happening(drained_at, "drain"))
        happenings.append(Happening(drained_at + rng.expovariate(1.0), "give_up"))
    return World(policy, engine, jobs, seed=seed, happenings=happenings, checked=True)


def run(seed: int) -> World:
    world = some_world(seed)
    try:
        world.run()
    except Exception as error:
        error.add_note(f"seed {seed}, at {world.now:.6f} s, policy {world.controller.policy}")
        raise
    assert world.ledger is not None
    world.ledger.check(world.controller, world.now, settled=True)
    assert not world.ledger.living
    return world


@pytest.mark.parametrize("seed", range(200))
def test_every_rule_holds_after_every_event(seed: int) -> None:
    run(seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("hundred", range(20))
def test_every_rule_holds_in_two_thousand_more(hundred: int) -> None:
    for seed in range(1_000 + 100 * hundred, 1_100 + 100 * hundred):
        run(seed)


def test_the_same_seed_is_the_same_world() -> None:
    """What a failure prints replays it."""
    first, second = run(7), run(7)
    assert first.now == second.now
    assert first.report == second.report
    assert [r[:4] for r in first.controller.refusals.recent] == [
        r[:4] for r in second.controller.refusals.recent
    ]


def test_the_worlds_see_every_fate() -> None:
    """The worlds are worth running: between them every outcome, and every reason that the core gives, occurs."""
    seen: set[object] = set()
    for seed in range(30):
        ledger = run(seed).ledger
        assert ledger is not None
        seen |= {reason for _, _, reason in ledger.ends} | {outcome for _, outcome, _ in ledger.ends}
    assert {str(one) for one in seen if one is not None} >= {
        "served", "rejected", "evicted", "failed",
        "draining", "engine_down", "ttft", "queue_time", "deadline", "client_gone", "drained",
        "engine_reset_early", "engine_reset_midstream", "engine_hung", "engine_busy", "engine_error",
    }  # fmt: skip
