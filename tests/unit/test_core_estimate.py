"""Estimates, retries and the numbers that bound them."""

import random
from typing import Any

import pytest

from sluicegate_core.estimate import (
    MAX_MODELS,
    MAX_OUTPUT_RECORDS,
    MAX_TOKENS,
    UNLEARNED_OUTPUT_TOKENS,
    UNLEARNED_TOKENS_A_BYTE,
    Estimator,
)
from sluicegate_core.request import OUTPUT_TOKEN_COST, Request
from sluicegate_core.retry import MAX_REMEMBERED, UNKNOWN_RETRY_AFTER_S, RetryMemory, retry_after_s


def estimated(estimator: Estimator, class_name: str = "c", **facts: Any) -> Request:
    request = Request(**facts)
    estimator.estimate(request, class_name)
    return request


def teach(estimator: Estimator, count: int, *, slope: float, overhead: int, model: str = "m") -> None:
    rng = random.Random(1)
    for _ in range(count):
        size = rng.randint(100, 20_000)
        request = Request(model=model, prompt_bytes=size)
        estimator.learn(request, "c", prompt_tokens=int(overhead + slope * size), output_tokens=None)


# Prompt tokens.


def test_unlearned_prompts_are_rather_thought_too_long() -> None:
    assert estimated(Estimator(), prompt_bytes=1_000).prompt_tokens == int(1_000 * UNLEARNED_TOKENS_A_BYTE)


@pytest.mark.parametrize(("slope", "overhead"), [(0.22, 12), (0.45, 30), (0.05, 0)])
def test_bytes_to_tokens_are_learned_with_the_overhead_of_the_template(slope: float, overhead: int) -> None:
    estimator = Estimator()
    teach(estimator, 200, slope=slope, overhead=overhead)
    for size in (200, 5_000, 100_000):
        learned = estimated(estimator, model="m", prompt_bytes=size).prompt_tokens
        assert learned == pytest.approx(overhead + slope * size, rel=0.03, abs=3)


def test_each_model_learns_its_own() -> None:
    estimator = Estimator()
    teach(estimator, 100, slope=0.2, overhead=0, model="english")
    teach(estimator, 100, slope=0.5, overhead=0, model="other")
    assert estimated(estimator, model="english", prompt_bytes=10_000).prompt_tokens == pytest.approx(
        2_000, rel=0.03
    )
    assert estimated(estimator, model="other", prompt_bytes=10_000).prompt_tokens == pytest.approx(
        5_000, rel=0.03
    )
    assert estimated(estimator, model="new", prompt_bytes=10_000).prompt_tokens == 3_000


def test_what_is_known_is_not_estimated_and_teaches_nothing() -> None:
    estimator = Estimator()
    request = estimated(estimator, model="m", prompt_bytes=10_000, known_prompt_tokens=7)
    assert request.prompt_tokens == 7
    for _ in range(20):
        estimator.learn(request, "c", prompt_tokens=9_999, output_tokens=None)
    assert estimated(estimator, model="m", prompt_bytes=10_000).prompt_tokens == 3_000


@pytest.mark.parametrize(
    ("facts", "tokens"),
    [
        ({"prompt_bytes": 0}, 1),
        ({"known_prompt_tokens": 0}, 1),
        ({"known_prompt_tokens": -5}, 1),
        ({"known_prompt_tokens": 10**15}, MAX_TOKENS),
        ({"prompt_bytes": 10**12}, MAX_TOKENS),
    ],
)
def test_prompt_tokens_stay_within_bounds(facts: dict[str, int], tokens: int) -> None:
    assert estimated(Estimator(), **facts).prompt_tokens == tokens


# Output tokens.


def test_output_is_a_high_quantile_of_its_class_and_model() -> None:
    estimator = Estimator()
    rng = random.Random(2)
    lengths = [rng.randint(10, 1_000) for _ in range(256)]
    for length in lengths:
        estimator.learn(Request(model="m"), "long", prompt_tokens=None, output_tokens=length)
        estimator.learn(Request(model="m"), "short", prompt_tokens=None, output_tokens=5)
    eighty = sorted(lengths[-200:])[160]
    assert estimated(estimator, "long", model="m").output_tokens == pytest.approx(eighty, rel=0.25)
    assert estimated(estimator, "short", model="m").output_tokens in (5, 6)
    assert estimated(estimator, "long", model="other").output_tokens == UNLEARNED_OUTPUT_TOKENS


@pytest.mark.parametrize(
    ("facts", "tokens"),
    [
        ({}, UNLEARNED_OUTPUT_TOKENS),
        ({"max_output_tokens": 10}, 10),
        ({"max_output_tokens": 10_000}, UNLEARNED_OUTPUT_TOKENS),
        ({"max_output_tokens": 10, "choices": 4}, 40),
        ({"choices": 4}, 4 * UNLEARNED_OUTPUT_TOKENS),
        ({"max_output_tokens": 0}, 0),
        ({"generates": False}, 0),
        ({"generates": False, "max_output_tokens": 50}, 0),
        ({"choices": 10**9}, MAX_TOKENS),
    ],
)
def test_output_never_exceeds_what_the_request_allows(facts: dict[str, Any], tokens: int) -> None:
    request = estimated(Estimator(), prompt_bytes=1_000, **facts)
    assert request.output_tokens == tokens
    assert request.cost == request.prompt_tokens + OUTPUT_TOKEN_COST * tokens


def test_a_bound_caps_what_was_learned_too() -> None:
    estimator = Estimator()
    for _ in range(50):
        estimator.learn(Request(model="m", choices=2), "c", prompt_tokens=None, output_tokens=900)
    assert estimated(estimator, model="m", max_output_tokens=100, choices=2).output_tokens == 200
    assert estimated(estimator, model="m", choices=2).output_tokens == pytest.approx(900, rel=0.2)


def test_what_generates_nothing_teaches_no_output_length() -> None:
    estimator = Estimator()
    for _ in range(50):
        estimator.learn(Request(model="m", generates=False), "c", prompt_tokens=None, output_tokens=1)
    assert estimated(estimator, model="m").output_tokens == UNLEARNED_OUTPUT_TOKENS


def test_memory_is_bounded_whatever_names_come() -> None:
    estimator = Estimator()
    for i in range(5_000):
        request = Request(model=f"model-{i}", prompt_bytes=1_000)
        estimator.estimate(request, f"class-{i}")
        estimator.learn(request, f"class-{i}", prompt_tokens=250, output_tokens=10)
    assert len(estimator._tokens_of_bytes) <= MAX_MODELS + 1
    assert len(estimator._outputs) <= MAX_OUTPUT_RECORDS + 1


# Retries.


@pytest.mark.parametrize("fits_in_s", [None, -3.0, 0.0, 0.5, 1.0, 7.0, 80.0, 119.0, 120.0, 1e9, float("inf")])
def test_retry_after_is_within_what_clients_honour_and_spread(fits_in_s: float | None) -> None:
    rng = random.Random(5)
    drawn = [retry_after_s(fits_in_s, rng) for _ in range(2_000)]
    assert all(1.0 <= s <= 120.0 for s in drawn)
    spread = max(drawn) - min(drawn)
    assert spread >= 0.9
    assert len(set(drawn)) > 1_900  # no two come back together
    base_s = UNKNOWN_RETRY_AFTER_S if fits_in_s is None else fits_in_s
    if base_s <= 80.0:  # never sooner than it fits
        assert min(drawn) >= base_s
        assert max(drawn) <= max(base_s, 1.0) + max(1.0, 0.5 * base_s)


def test_a_seed_gives_the_same_retry_after() -> None:
    assert [retry_after_s(5.0, random.Random(3)) for _ in range(3)] == [
        retry_after_s(5.0, random.Random(3))
    ] * 3


def test_refused_ids_are_remembered_up_to_a_bound() -> None:
    memory = RetryMemory()
    memory.refused(b"")
    assert b"" not in memory.ids
    for i in range(3 * MAX_REMEMBERED):
        memory.refused(b"%d" % i)
        memory.refused(b"kept")
    assert len(memory.ids) == MAX_REMEMBERED
    assert b"kept" in memory.ids
    assert b"0" not in memory.ids
