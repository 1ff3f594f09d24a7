"""What the benchmark makes of its samples: ratios of the same round, their median, and whether a bar holds."""

import json
from collections.abc import Mapping, Sequence

import pytest

from sluicegate_lab.bench import BenchError
from sluicegate_lab.bench.bars import (
    DIRECT,
    ENVOY,
    ENVOY_AGAIN,
    NGINX,
    SUBJECT,
    Bar,
    added,
    ratio_bar,
    reading,
)
from sluicegate_lab.bench.loads import Conditions, Sample, quantile
from sluicegate_lab.bench.parts import Options
from sluicegate_lab.bench.report import Machine, as_json, as_markdown, as_text
from sluicegate_lab.bench.rounds import conditions, saturation


def column(*values: float, busy: float = 0.1) -> list[Sample]:
    return [Sample({"us": value}, Conditions(busy, 0.5, 0.02)) for value in values]


SAMPLES: Mapping[str, Sequence[Sample]] = {
    SUBJECT: column(50.0, 90.0, 60.0),
    ENVOY: column(100.0, 100.0, 100.0),
    ENVOY_AGAIN: column(110.0, 100.0, 95.0),
    NGINX: column(25.0, 30.0, 30.0),
}


def bar_of(samples: Mapping[str, Sequence[Sample]], bar: float) -> Bar:
    return ratio_bar(samples, reading("us"), name="cost", title="a cost", bar=bar)


def test_a_ratio_is_the_median_of_each_rounds_own_ratio() -> None:
    # Envoy is twice as slow in the second round, and so is everybody: the ratio stays.
    samples = {SUBJECT: column(50.0, 100.0, 60.0), ENVOY: column(100.0, 200.0, 100.0)}
    bar = bar_of(samples, 0.9)
    assert bar.value == pytest.approx(0.5)
    assert bar.spread is not None
    assert (bar.spread.low, bar.spread.high) == pytest.approx((0.5, 0.6))
    assert bar.noise is None
    assert bar.to_nginx is None


def test_the_pair_of_envoys_states_the_noise_and_nginx_stands_beside() -> None:
    bar = bar_of(SAMPLES, 0.9)
    assert bar.value == pytest.approx(0.6)
    assert bar.noise is not None
    assert (bar.noise.low, bar.noise.median, bar.noise.high) == pytest.approx((0.95, 1.0, 1.1))
    assert bar.to_nginx == pytest.approx(2.0)
    assert bar.absolute == {SUBJECT: 60.0, ENVOY: 100.0, ENVOY_AGAIN: 100.0, NGINX: 30.0}


@pytest.mark.parametrize(("bar", "holds"), [(0.61, True), (0.6, True), (0.59, False)])
def test_a_bar_holds_up_to_its_own_value(bar: float, holds: bool) -> None:
    assert bar_of(SAMPLES, bar).holds is holds


def test_an_added_delay_is_what_the_way_straight_to_the_engine_does_not_have() -> None:
    samples = {SUBJECT: column(40.0), ENVOY: column(70.0), NGINX: column(19.0), DIRECT: column(20.0)}
    bar = ratio_bar(samples, added("us"), name="delay", title="a delay", bar=0.6)
    assert bar.value == pytest.approx(20.0 / 50.0)
    assert bar.absolute == {SUBJECT: 20.0, ENVOY: 50.0, NGINX: 1.0}


def test_the_object_for_programs_has_what_a_bar_is_and_nothing_else() -> None:
    held, missed = bar_of(SAMPLES, 0.9), bar_of(SAMPLES, 0.5)
    assert json.loads(as_json([held, missed])) == {
        "bars": [
            {"name": "cost", "value": 0.6, "bar": 0.9, "unit": "E", "holds": True},
            {"name": "cost", "value": 0.6, "bar": 0.5, "unit": "E", "holds": False},
        ]
    }


def test_table_and_page_show_a_bar_that_is_missed_as_plainly_as_one_that_holds() -> None:
    bars = [bar_of(SAMPLES, 0.9), bar_of(SAMPLES, 0.5)]
    lines = as_text(bars).splitlines()
    assert "yes" in lines[1]
    assert "NO" in lines[2]
    machine = Machine(date="today", cpu="a cpu", cores=2, kernel="Linux 1", versions=("Python 3",))
    page = as_markdown(bars, machine, Options(), ["requests: the client was idle"])
    assert "1 of 2 bars hold" in page
    assert "| a cost | 0.6 E | <= 0.5 E | NO | 0.5..0.9 | 0.95..1.1 | 60 : 100 : 30 us | 2.00 |" in page
    assert "- requests: the client was idle." in page


def test_a_client_at_its_limit_is_told() -> None:
    samples = {SUBJECT: column(1.0, busy=0.95), ENVOY: column(1.0, busy=0.5)}
    assert saturation("load", samples) == [
        "load: the client was 95% busy against subject: it may limit what is measured"
    ]
    assert conditions("load", samples) == (
        "load: client and engine stub at most 95% busy, the subject 50%; proxies waited for their core 2% of the time"
    )


def test_quantiles_by_the_nearest_rank() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert quantile(values, 0.5) == 51.0
    assert quantile(values, 0.99) == 100.0
    with pytest.raises(BenchError, match="measured nothing"):
        quantile([], 0.5)
