"""What the live view shows of a replay at a moment, and that it can be drawn."""

from __future__ import annotations

import io

from rich.console import Console

from sluicegate_lab.live import SPARK_SECONDS, View, snapshot, spark_line
from sluicegate_lab.load import Outcome, Record
from sluicegate_lab.outcome import TOTAL, Cell, ClassGoal, Row
from sluicegate_lab.traffic import BATCH, INTERACTIVE, Request

GOALS = {INTERACTIVE: ClassGoal(1.0, None, 10), BATCH: ClassGoal(20.0, None, 1)}


def record(
    outcome: Outcome | None,
    tokens: tuple[float, ...] = (),
    ended_s: float | None = None,
    name: str = INTERACTIVE,
) -> Record:
    return Record(
        Request(0, 0.0, name, "chat-web", 8, 4), 10.0, outcome, ended_s=ended_s, token_at_s=list(tokens)
    )


def test_each_request_is_shown_in_one_place() -> None:
    moments = snapshot(
        [
            record(None),
            record(None, tokens=(10.5,)),
            record(Outcome.SERVED, tokens=(10.5, 11.0), ended_s=11.0),
            record(Outcome.REFUSED, ended_s=10.01),
            record(Outcome.GAVE_UP, ended_s=18.0),
            record(Outcome.SERVED, tokens=(15.0,), ended_s=16.0, name=BATCH),
        ],
        GOALS,
        now_s=20.0,
    )
    one = moments[INTERACTIVE]
    assert (one.offered, one.in_slo, one.waiting, one.streaming, one.refused, one.gave_up) == (
        5,
        1,
        1,
        1,
        1,
        1,
    )
    assert moments[BATCH].in_slo == 1
    assert moments[TOTAL].offered == 6


def test_the_times_shown_are_recent_ones() -> None:
    old, new = record(None, tokens=(10.5,)), record(None, tokens=(39.0,))
    assert snapshot([old, new], GOALS, now_s=40.0)[INTERACTIVE].ttft_p50_s == 29.0
    assert snapshot([old], GOALS, now_s=40.0)[INTERACTIVE].ttft_p50_s is None


def test_the_spark_line_counts_full_seconds_and_is_as_long_as_the_replay_so_far() -> None:
    assert spark_line([], 3.2) == "   "
    assert spark_line([0.1, 1.2, 1.4, 3.1], 3.9) == "▅█ "
    assert len(spark_line([5.0], 500.0)) == SPARK_SECONDS


def test_the_comparison_fits_eighty_columns() -> None:
    out = io.StringIO()
    cells = {name: Cell("1,234", "99.9 s", "gate") for name in (INTERACTIVE, BATCH, TOTAL)}
    View(Console(file=out, width=80)).comparison([Row("SLO kept, of admitted", cells)])
    assert "interactive" in out.getvalue()
    assert "…" not in out.getvalue()
