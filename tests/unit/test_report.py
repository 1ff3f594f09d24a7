"""The report: one file, nothing fetched, everything escaped, every plot well-formed."""

from __future__ import annotations

import dataclasses
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluicegate_lab.load import Outcome, Record
from sluicegate_lab.outcome import ClassGoal, summarise, table, verdict
from sluicegate_lab.plots import Axis, Plot, round_ticks
from sluicegate_lab.report import (
    MAX_MARKS,
    Comparison,
    goodput_over_time,
    html,
    picture,
    ttft_distribution,
    ttft_over_time,
    turned_away,
    write_report,
)
from sluicegate_lab.traffic import BATCH, INTERACTIVE, Request, WorkCost

GOALS = {INTERACTIVE: ClassGoal(1.0, 0.1, 10), BATCH: ClassGoal(20.0, None, 1)}


def records(shift_s: float, count: int = 40) -> list[Record]:
    outcomes = (Outcome.SERVED, Outcome.SERVED, Outcome.REFUSED, Outcome.GAVE_UP)
    made: list[Record] = []
    for index in range(count):
        outcome = outcomes[index % 4]
        name = BATCH if index % 3 == 0 else INTERACTIVE
        tokens = [index + shift_s, index + shift_s + 0.05] if outcome is Outcome.SERVED else []
        request = Request(index, float(index), name, "chat-web", 20, 10)
        made.append(Record(request, float(index), outcome, 200, index + shift_s + 1, tokens))
    return made


def comparison(alone: list[Record] | None = None, gated: list[Record] | None = None) -> Comparison:
    alone = records(3.0) if alone is None else alone
    gated = records(0.3) if gated is None else gated
    cost = WorkCost(0.001, 0.01)
    results = summarise(alone, GOALS, cost), summarise(gated, GOALS, cost)
    return Comparison(
        alone=alone,
        gated=gated,
        results=results,
        rows=table(*results),
        verdict=verdict(*results),
        goals=GOALS,
        seconds=40.0,
        policy_text="classes: []",
        setup=[("engine", "llama.cpp"), ("model", "countdown")],
    )


def plots(of: Comparison) -> list[Plot]:
    return [*ttft_over_time(of), *goodput_over_time(of), *ttft_distribution(of), *turned_away(of)]


def test_the_report_fetches_nothing_and_runs_nothing() -> None:
    page = html(comparison())
    assert not re.search(
        r"<script|<link|<iframe|<img|@import|url\(|\bsrc=|\bhref=|javascript:|\bon\w+=", page
    )
    assert "http" not in page


def test_what_users_write_is_escaped() -> None:
    hostile = '<script>alert("x")</script>'
    of = dataclasses.replace(
        comparison(), policy_text=hostile, setup=[("model", hostile), ("engine", hostile)]
    )
    for document in (html(of), picture(of)):
        assert "<script" not in document
    assert "&lt;script&gt;" in html(of)


def test_every_plot_is_well_formed_and_inside_its_frame() -> None:
    for plot in plots(comparison()):
        root = ET.fromstring(plot.svg())
        assert root.get("aria-label")
        for circle in root.iter("circle"):
            assert 0 <= float(circle.get("cx") or -1) <= plot.width
            assert 0 <= float(circle.get("cy") or -1) <= plot.height


def test_the_picture_stands_alone() -> None:
    root = ET.fromstring(picture(comparison()))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme:dark" in picture(comparison())


def test_every_answered_request_has_its_mark() -> None:
    of = comparison()
    alone = ttft_over_time(of)[0].inner()
    answered = sum(1 for one in of.alone if one.token_at_s)
    legend_marks = 2
    assert len(re.findall(r"<circle", alone)) == answered + legend_marks


def test_a_long_replay_is_drawn_with_bounded_marks() -> None:
    many = records(0.5, count=4 * MAX_MARKS)
    assert ttft_over_time(comparison(many, many))[0].inner().count("<circle") <= MAX_MARKS + 2


def test_nothing_offered_is_still_a_report() -> None:
    assert "<table>" in html(comparison([], []))
    ET.fromstring(picture(comparison([], [])))


def test_the_report_is_written_where_asked_also_in_a_new_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    write_report(path, comparison())
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


@given(st.floats(-1e4, 1e4), st.floats(0.001, 1e4))
def test_ticks_are_round_few_and_inside(low: float, span: float) -> None:
    high = low + span
    ticks = round_ticks(low, high)
    assert 1 <= len(ticks) <= 11
    slack = span * 1e-6
    assert all(low - slack <= tick <= high + slack for tick in ticks)
    if len(ticks) > 1:
        step = ticks[1] - ticks[0]
        leading = step / 10 ** math.floor(math.log10(step) + 1e-6)
        assert min(abs(leading - round_one) for round_one in (1, 2, 5, 10)) < 1e-3


@pytest.mark.parametrize(("value", "share"), [(0.01, 0.0), (0.1, 0.5), (1.0, 1.0), (0.0, 0.0), (50.0, 1.0)])
def test_a_logarithmic_axis_puts_powers_at_equal_steps_and_the_rest_on_its_edges(
    value: float, share: float
) -> None:
    assert Axis("t", 0.01, 1.0, log=True).share(value) == pytest.approx(share)
