"""The estimators against closed forms, computed in exact fractions or by hand."""

import math
import random
from fractions import Fraction

import pytest

from sluicegate_core.learn import DecayingRate, Drain, FittedLine, Mean, Quantiles


def weighted_least_squares(
    samples: list[tuple[float, float]], memory: int
) -> tuple[Fraction, Fraction] | None:
    """(intercept, slope) by the normal equations, in fractions.

    The latest sample weighs 1, each one before it `1 - 1/memory` of the next; one more at the origin weighs 1.
    Where the free fit has a negative coefficient, the other is fitted alone to the samples.
    """
    keep = Fraction(1.0 - 1.0 / memory)
    weights = [keep ** (len(samples) - 1 - i) for i in range(len(samples))]
    points = [(w, Fraction(x), Fraction(y)) for w, (x, y) in zip(weights, samples, strict=True)]
    with_origin = [*points, (Fraction(1), Fraction(0), Fraction(0))]
    n = sum(w for w, _, _ in with_origin)
    sx, sy = sum(w * x for w, x, _ in with_origin), sum(w * y for w, _, y in with_origin)
    sxx, sxy = sum(w * x * x for w, x, _ in with_origin), sum(w * x * y for w, x, y in with_origin)
    determinant = n * sxx - sx * sx
    if not determinant:
        return sy / (n - 1), Fraction(0)
    slope = (n * sxy - sx * sy) / determinant
    intercept = (sy - slope * sx) / n
    if slope < 0:
        return sy / (n - 1), Fraction(0)
    if intercept < 0:
        return Fraction(0), sxy / sxx
    return intercept, slope


def noisy_line(rng: random.Random, count: int, intercept: float, slope: float) -> list[tuple[float, float]]:
    """Within a factor of two of the line, so that no sample counts as an outlier."""
    xs = [rng.uniform(1.0, 4_000.0) for _ in range(count)]
    return [(x, (intercept + slope * x) * rng.uniform(0.75, 1.3)) for x in xs]


@pytest.mark.parametrize("count", [4, 9, 15, 16, 17, 61, 241])
@pytest.mark.parametrize(
    ("intercept", "slope"), [(0.05, 0.0004), (0.0, 0.0004), (0.3, 0.0), (12.0, 0.27), (0.0, 1e-7)]
)
def test_the_line_is_the_weighted_least_squares_fit(count: int, intercept: float, slope: float) -> None:
    rng = random.Random(count)
    samples = noisy_line(rng, count, intercept, slope)
    line = FittedLine(64)
    for x, y in samples:
        line.add(x, y)
    wanted = weighted_least_squares(
        samples if count <= 16 or count % 4 == 1 else samples[: count // 4 * 4 + 1], 64
    )
    assert wanted is not None
    assert line.known
    assert line.intercept == pytest.approx(float(wanted[0]), rel=1e-6, abs=1e-9)
    assert line.slope == pytest.approx(float(wanted[1]), rel=1e-6, abs=1e-12)
    assert line.at(700.0) == pytest.approx(float(wanted[0] + wanted[1] * 700), rel=1e-6)


@pytest.mark.parametrize("seed", range(30))
def test_neither_coefficient_is_ever_negative(seed: int) -> None:
    rng = random.Random(seed)
    line = FittedLine(rng.choice((8, 64, 256)))
    for _ in range(200):
        line.add(rng.choice((0.0, rng.uniform(0, 10), rng.uniform(0, 1e6))), rng.expovariate(1.0))
        assert line.slope >= 0.0
        assert line.intercept >= 0.0
        assert math.isfinite(line.slope)
        assert math.isfinite(line.intercept)
        assert line.relative_deviation >= 0.0


def test_a_negative_slope_is_zero_and_the_level_refitted() -> None:
    samples = [(x, 10.0 - 0.02 * x) for x in (100.0, 200.0, 300.0)] * 20
    line = FittedLine(10**9)
    for x, y in samples:
        line.add(x, y)
    assert (line.intercept, line.slope) == (pytest.approx(6.0), 0.0)


def test_a_negative_intercept_is_zero_and_the_slope_refitted() -> None:
    samples = [(x, 0.02 * x - 1.0) for x in (100.0, 200.0, 300.0)] * 5
    line = FittedLine(10**9)
    for x, y in samples:
        line.add(x, y)
    assert line.intercept == 0.0
    assert line.slope == pytest.approx(sum(x * y for x, y in samples) / sum(x * x for x, _ in samples))


def test_samples_that_all_have_one_x_make_a_line_through_the_origin() -> None:
    line = FittedLine(64)
    for _ in range(50):
        line.add(500.0, 0.2)
    assert line.at(500.0) == pytest.approx(0.2)
    assert line.at(1_000.0) == pytest.approx(0.4, rel=0.01)


@pytest.mark.parametrize("count", [4, 10, 13, 61])
def test_a_line_with_a_level_of_its_own_is_the_fit_with_its_slope_drawn_to_zero(count: int) -> None:
    """Ridge regression on the slope alone: the normal equation of the slope with `FLATNESS` added, in fractions."""
    rng = random.Random(count)
    samples = [(float(rng.randint(1, 40)), rng.uniform(0.02, 0.05)) for _ in range(count)]
    line = FittedLine(64, from_origin=False)
    for x, y in samples:
        line.add(x, y)
    keep = Fraction(1.0 - 1.0 / 64)
    points = [(keep ** (count - 1 - i), Fraction(x), Fraction(y)) for i, (x, y) in enumerate(samples)]
    n = sum(w for w, _, _ in points)
    mean_x = sum(w * x for w, x, _ in points) / n
    mean_y = sum(w * y for w, _, y in points) / n
    spread = sum(w * (x - mean_x) ** 2 for w, x, _ in points) + Fraction(FittedLine.FLATNESS)
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in points) / spread
    if slope < 0:
        slope = Fraction(0)
    assert line.slope == pytest.approx(float(slope), rel=1e-6, abs=1e-12)
    assert line.intercept == pytest.approx(float(mean_y - slope * mean_x), rel=1e-6)


def test_a_line_with_a_level_of_its_own_is_flat_where_all_x_are_one() -> None:
    line = FittedLine(64, from_origin=False)
    for _ in range(50):
        line.add(1.0, 0.03)
    assert (line.intercept, line.slope) == (pytest.approx(0.03), pytest.approx(0.0, abs=1e-12))
    for _ in range(3):
        line.add(2.0, 0.04)
    line.add(2.0, 0.04)
    assert line.slope == pytest.approx(0.008, rel=0.3)


def test_samples_at_zero_alone_make_a_flat_line() -> None:
    line = FittedLine(64)
    for _ in range(50):
        line.add(0.0, 0.2)
    assert (line.intercept, line.slope) == (pytest.approx(0.2), 0.0)


def test_unknown_before_enough_samples() -> None:
    line = FittedLine(64)
    for i in range(FittedLine.ENOUGH):
        assert line.at(100.0) is None
        assert not line.known
        line.add(100.0 + i, 1.0)
    assert line.known
    assert line.at(100.0) is not None


@pytest.mark.parametrize("factor", [0.2, 0.5, 3.0, 10.0])
def test_a_new_regime_is_learned_within_a_few_memories(factor: float) -> None:
    rng = random.Random(1)
    line = FittedLine(64)
    for x, y in noisy_line(rng, 500, 0.05, 0.0004):
        line.add(x, y)
    for x, y in noisy_line(rng, 4 * 64, 0.05 * factor, 0.0004 * factor):
        line.add(x, y)
    assert line.at(1_000.0) == pytest.approx(0.45 * factor, rel=0.2)


def test_one_outlier_hardly_bends_a_steady_line() -> None:
    rng = random.Random(1)
    line = FittedLine(64)
    for x, y in noisy_line(rng, 200, 0.05, 0.0004):
        line.add(x, y)
    before = line.at(1_000.0)
    assert before is not None
    line.add(1_000.0, 3_600.0)
    for _ in range(4):
        line.add(1_000.0, before)
    assert line.at(1_000.0) == pytest.approx(before, rel=0.15)


def test_the_deviation_is_that_of_the_forecasts() -> None:
    rng = random.Random(2)
    line = FittedLine(256)
    for _ in range(2_000):
        x = rng.uniform(100, 2_000)
        line.add(x, 0.001 * x * rng.choice((0.8, 1.2)))
    assert line.relative_deviation == pytest.approx(0.2, abs=0.03)


# Mean.


def test_the_mean_is_exact_within_its_memory_and_exponential_beyond() -> None:
    mean = Mean(10)
    assert mean.value is None
    for i in range(1, 11):
        mean.add(float(i))
        assert mean.value == pytest.approx((i + 1) / 2)
    wanted = Fraction(11, 2)
    for value in (100, 7, 0, 3):
        mean.add(float(value))
        wanted += (value - wanted) / 10
    assert mean.value == pytest.approx(float(wanted))


# Quantiles.


def exact_quantile(samples: list[float], quantile: float, memory: int) -> float:
    """The least value below or at which more than `quantile` of the weight lies."""
    keep = 1.0 - 1.0 / memory
    weighted = sorted((value, keep ** (len(samples) - 1 - i)) for i, value in enumerate(samples))
    total, cumulated = sum(w for _, w in weighted), 0.0
    for value, weight in weighted:
        cumulated += weight
        if cumulated > quantile * total:
            return value
    return weighted[-1][0]


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("count", [16, 64, 800, 16_000])
def test_quantiles_are_exact_within_a_bin(quantile: float, count: int) -> None:
    rng = random.Random(count)
    samples = [min(1.0 + rng.lognormvariate(4.5, 1.2), 900_000.0) for _ in range(count)]
    record = Quantiles(256)
    for value in samples:
        record.add(value)
    known, exact = record.at(quantile), exact_quantile(samples, quantile, 256)
    assert known is not None
    assert exact * (1 - 1e-9) <= known <= exact * Quantiles.RATIO * (1 + 1e-9)


def test_quantiles_forget() -> None:
    record = Quantiles(64)
    for _ in range(1_000):
        record.add(1_000.0)
    for _ in range(400):
        record.add(10.0)
    assert record.at(0.95) == pytest.approx(10.0, rel=0.2)


def test_quantiles_are_unknown_at_first_and_fresh_within_eight() -> None:
    record = Quantiles(64)
    for _ in range(Quantiles.ENOUGH):
        assert record.at(0.5) is None
        record.add(100.0)
    assert record.at(0.5) == pytest.approx(100.0, rel=0.2)
    for _ in range(200):
        record.add(5.0)
        record.at(0.5)
    assert record.at(0.5) == pytest.approx(5.0, rel=0.2)


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0, 5e5, 1e7, 1e300])
def test_quantiles_of_what_lies_outside_the_bins(value: float) -> None:
    record = Quantiles(64)
    for _ in range(100):
        record.add(value)
    known = record.at(0.8)
    assert known is not None
    assert Quantiles.EDGES[0] <= known <= Quantiles.EDGES[-1]


def test_quantiles_survive_a_million_samples() -> None:
    """The weight of a new sample grows without end; it is scaled back in time."""
    record = Quantiles(16)
    for i in range(60_000):
        record.add(50.0 if i % 2 else 60.0)
    assert math.isfinite(record._weight)
    assert record.at(0.8) == pytest.approx(60.0, rel=0.2)


# Drain.


def test_the_drain_by_hand() -> None:
    drain = Drain()
    drain.handed_over(1.0, 50.0)  # nobody waited: not counted
    drain.backlogged(10.0, yes=True)
    for i in range(4):
        assert drain.rates(10.0 + i) is None
        drain.handed_over(10.5 + 0.5 * i, 100.0 + i)
    # Four in two seconds, with 406 of cost.
    assert drain.rates(12.0) == pytest.approx((203.0, 2.0))
    # A stalled engine lowers it by itself.
    assert drain.rates(16.0) == pytest.approx((406.0 / 6.0, 4.0 / 6.0))
    # Idle time does not count, however long.
    drain.backlogged(13.0, yes=False)
    assert drain.rates(5_000.0) == pytest.approx((406.0 / 3.0, 4.0 / 3.0))
    drain.handed_over(6_000.0, 1e9)
    assert drain.rates(6_000.0) == pytest.approx((406.0 / 3.0, 4.0 / 3.0))
    # Nor does saying it twice.
    drain.backlogged(7_000.0, yes=True)
    drain.backlogged(7_001.0, yes=True)
    assert drain.rates(7_001.0) == pytest.approx((406.0 / 4.0, 1.0))


@pytest.mark.parametrize(("every_s", "label"), [(10.0, "small"), (0.001, "large")])
def test_the_drain_remembers_seconds_or_requests_whichever_is_longer(every_s: float, label: str) -> None:
    """A steady engine is known exactly; one that changes its speed, after the memory has passed."""
    drain = Drain()
    now = 0.0
    drain.backlogged(now, yes=True)
    for _ in range(20_000 if label == "large" else 60):
        now += every_s
        drain.handed_over(now, 7.0)
    assert drain.rates(now) == pytest.approx((7.0 / every_s, 1.0 / every_s))
    memory_s = max(Drain.MIN_TIME_S, Drain.MIN_REQUESTS * every_s)
    changed_at = now
    while now < changed_at + 10 * memory_s:
        now += 2 * every_s
        drain.handed_over(now, 7.0)
    rates = drain.rates(now)
    assert rates is not None
    assert rates[1] == pytest.approx(0.5 / every_s, rel=0.03)


def test_the_drain_bears_a_clock_that_stands_still_or_steps_back() -> None:
    drain = Drain()
    drain.backlogged(10.0, yes=True)
    for now in (10.0, 10.0, 9.999, 10.0, 10.0):
        drain.handed_over(now, 10.0)
    rates = drain.rates(9.9)
    assert rates is None or (rates[0] > 0.0 and rates[1] > 0.0)


# DecayingRate.


def test_the_decaying_rate_is_the_sum_of_exponentials() -> None:
    rng = random.Random(3)
    rate = DecayingRate(30.0)
    at: list[float] = []
    now = 1_000.0
    for _ in range(500):
        now += rng.expovariate(2.0)
        at.append(now)
        rate.add(now)
    now += 3.0
    exact = sum(math.exp(-(now - t) / 30.0) for t in at) / 30.0
    assert rate.at(now) == pytest.approx(exact, rel=1.0 / DecayingRate.GRAINS)
    assert rate.at(now) == pytest.approx(2.0, rel=0.25)
    assert rate.at(now + 30.0) == pytest.approx(exact / math.e, rel=1.0 / DecayingRate.GRAINS)


def test_the_decaying_rate_bears_a_clock_that_steps_back() -> None:
    rate = DecayingRate(30.0)
    rate.add(100.0)
    rate.add(99.0)
    assert rate.at(99.0) == rate.at(100.0) > 0.0
