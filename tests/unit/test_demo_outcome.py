"""What the records of a replay amount to, against figures counted by hand."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluicegate_lab.load import Outcome, Record
from sluicegate_lab.outcome import (
    TOTAL,
    ClassGoal,
    percentile,
    ratio,
    show_seconds,
    summarise,
    table,
    verdict,
)
from sluicegate_lab.traffic import BATCH, INTERACTIVE, Request, WorkCost

GOALS = {INTERACTIVE: ClassGoal(1.0, 0.1, 10), BATCH: ClassGoal(20.0, None, 1)}
COST = WorkCost(prompt_token_s=0.001, output_token_s=0.01)


def record(
    outcome: Outcome,
    *,
    class_name: str = INTERACTIVE,
    tokens: tuple[float, ...] = (),
    ended_s: float = 5.0,
    served_tokens: int | None = None,
) -> Record:
    request = Request(0, 0.0, class_name, "chat-web", 98, 10)
    return Record(
        request,
        offered_s=1.0,
        outcome=outcome,
        ended_s=ended_s,
        token_at_s=list(tokens),
        prompt_tokens=100,
        served_tokens=served_tokens,
    )


GOOD = record(Outcome.SERVED, tokens=(1.5, 1.55, 1.6), served_tokens=4)
LATE = record(Outcome.SERVED, tokens=(3.5, 3.6, 3.7), served_tokens=4)
SLOW = record(Outcome.SERVED, tokens=(1.5, 1.9, 2.3), served_tokens=4)
REFUSED = record(Outcome.REFUSED, ended_s=1.002)
LEFT = record(Outcome.GAVE_UP, ended_s=9.0)
JOB = record(Outcome.SERVED, class_name=BATCH, tokens=(15.0, 16.0), served_tokens=3)
BROKEN = record(Outcome.FAILED, class_name=BATCH, tokens=(2.0,))


def test_within_slo_asks_for_the_end_the_first_token_and_the_pace() -> None:
    goal = GOALS[INTERACTIVE]
    assert goal.met_by(GOOD)
    assert not goal.met_by(LATE)
    assert not goal.met_by(SLOW)
    assert not goal.met_by(REFUSED)
    assert not goal.met_by(record(Outcome.CUT_OFF, tokens=(1.5, 1.55)))
    assert GOALS[BATCH].met_by(JOB)


def test_a_class_without_promises_is_within_slo_when_it_is_served() -> None:
    assert ClassGoal(None, None, 1).met_by(LATE)
    assert not ClassGoal(None, None, 1).met_by(LEFT)


def test_every_request_is_counted_once_in_its_class_and_in_the_total() -> None:
    everything = [GOOD, LATE, SLOW, REFUSED, LEFT, JOB, BROKEN]
    result = summarise(everything, GOALS, COST)
    for one in result.values():
        assert one.served + one.refused + one.gave_up + one.cut_off + one.failed == one.offered
    assert result[TOTAL].offered == len(everything)
    for field in ("offered", "served", "within_slo", "refused", "gave_up", "failed", "wasted_tokens"):
        assert getattr(result[TOTAL], field) == sum(getattr(result[name], field) for name in GOALS)


def test_the_figures_of_a_class_by_hand() -> None:
    one = summarise([GOOD, LATE, SLOW, REFUSED, LEFT], GOALS, COST)[INTERACTIVE]
    assert one.within_slo == 1
    assert one.tokens_within_slo == 4
    assert one.weighted_goodput_s == pytest.approx(10 * (100 * 0.001 + 4 * 0.01))
    assert one.attainment == pytest.approx(1 / 4)
    assert one.refusal_p50_s == pytest.approx(0.002)
    assert one.wasted_tokens == 8
    # 0.5, 0.5, 2.5, and 8 s waited in vain: who left is not left out.
    assert one.ttft_p50_s == pytest.approx(1.5)
    assert one.ttft_p99_s == pytest.approx(8.0, abs=0.2)


def test_nothing_offered_has_no_percentiles_and_no_attainment() -> None:
    one = summarise([], GOALS, COST)[TOTAL]
    assert one.offered == 0
    assert one.attainment is None
    assert one.ttft_p50_s is None
    assert one.refusal_p50_s is None


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50))
def test_percentiles_agree_with_the_standard_library(values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    for step, cut in enumerate(cuts, start=1):
        assert percentile(values, step / 20) == pytest.approx(cut, rel=1e-9, abs=1e-9)


def test_the_table_says_who_is_ahead_and_leaves_out_what_never_happened() -> None:
    engine = summarise([LATE, LEFT, JOB], GOALS, COST)
    gate = summarise([GOOD, REFUSED, REFUSED], GOALS, COST)
    rows = {row.measure: row for row in table(engine, gate)}
    assert rows["within SLO"].cells[INTERACTIVE].better == "gate"
    assert rows["within SLO"].cells[BATCH].better == "engine"
    assert rows["offered"].cells[TOTAL].better == ""
    assert rows["TTFT p95"].cells[INTERACTIVE].better == "gate"
    assert "failed" not in rows
    assert "failed" in {row.measure for row in table(engine, summarise([BROKEN], GOALS, COST))}


def test_the_verdict_says_where_the_gate_loses() -> None:
    engine = summarise([LATE, LEFT, JOB, JOB], GOALS, COST)
    gate = summarise([GOOD, GOOD, REFUSED, JOB], GOALS, COST)
    said = " ".join(verdict(engine, gate))
    assert "3 of 4 requests through the gate, 2 with the engine alone" in said
    assert "batch within SLO 1 against 2" in said
    assert "did not win" not in said


def test_the_verdict_says_that_the_gate_did_not_win() -> None:
    said = " ".join(verdict(summarise([GOOD, JOB], GOALS, COST), summarise([LATE, JOB], GOALS, COST)))
    assert "The gate did not win here." in said


def test_the_verdict_claims_no_loss_where_there_is_none() -> None:
    said = " ".join(verdict(summarise([LATE], GOALS, COST), summarise([GOOD], GOALS, COST)))
    assert "loses" not in said


@pytest.mark.parametrize(
    ("value_s", "shown"),
    [
        (None, "-"),
        (0.0004, "0.4 ms"),
        (0.085, "85 ms"),
        (0.9996, "1.00 s"),
        (9.994, "9.99 s"),
        (12.34, "12.3 s"),
    ],
)
def test_times_are_shown_in_the_unit_that_fits(value_s: float | None, shown: str) -> None:
    assert show_seconds(value_s) == shown


def test_a_ratio_to_nothing_is_said_in_words() -> None:
    assert ratio(5, 2) == "2.5x"
    assert ratio(50, 2) == "25x"
    assert ratio(5, 0) == "from nothing"
    assert ratio(0, 0) == "as many as none"
