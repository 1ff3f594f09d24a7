"""What is shown while a demo runs: a live table in a terminal, plain lines elsewhere.

`View` is the one who writes to the terminal; two kinds of it differ in how a replay is watched and in nothing
else. `snapshot` is the pure part: what a replay amounts to at a moment.

Invariant: a view only reads the records of a replay, between two steps of the loop that owns them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sluicegate_lab.load import Outcome, Record, Replay
from sluicegate_lab.outcome import TOTAL, Goals, Row, percentile, show_seconds, waited_s

REFRESH_S = 0.25
PLAIN_EVERY_S = 5.0
WINDOW_S = 10.0
"""Over which the TTFTs of the live view are taken: long enough for a few requests, short enough to move."""

SPARK_SECONDS = 20
SPARK_FROM_COLUMNS = 110
"""Narrower terminals go without the spark line: every number fits in 80 columns."""

SPARK_LEVELS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Moment:
    """One class in the middle of a replay. TTFTs over the last `WINDOW_S`; `spark` in SLO each second."""

    offered: int
    in_slo: int
    waiting: int
    streaming: int
    refused: int
    gave_up: int
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    spark: str


def snapshot(records: Sequence[Record], goals: Goals, now_s: float) -> dict[str, Moment]:
    """Each class at the moment `now_s` of the replay, and `TOTAL` last."""
    by_class = {name: [one for one in records if one.request.class_name == name] for name in goals}
    moments = {name: _moment(of_class, goals, now_s) for name, of_class in by_class.items()}
    moments[TOTAL] = _moment(records, goals, now_s)
    return moments


def _moment(records: Sequence[Record], goals: Goals, now_s: float) -> Moment:
    in_slo_ends_s: list[float] = []
    recent_s: list[float] = []
    waiting = streaming = refused = gave_up = 0
    for record in records:
        if record.outcome is None:
            if record.token_at_s:
                streaming += 1
            else:
                waiting += 1
        elif record.outcome is Outcome.REFUSED:
            refused += 1
        elif record.outcome is Outcome.GAVE_UP:
            gave_up += 1
        elif goals[record.request.class_name].met_by(record):
            in_slo_ends_s.append(record.ended_s or 0.0)
        wait_s = waited_s(record)
        if wait_s is not None and record.offered_s + wait_s >= now_s - WINDOW_S:
            recent_s.append(wait_s)
    return Moment(
        offered=len(records),
        in_slo=len(in_slo_ends_s),
        waiting=waiting,
        streaming=streaming,
        refused=refused,
        gave_up=gave_up,
        ttft_p50_s=percentile(recent_s, 0.5),
        ttft_p95_s=percentile(recent_s, 0.95),
        spark=spark_line(in_slo_ends_s, now_s),
    )


def spark_line(ends_s: Sequence[float], now_s: float) -> str:
    """How many ended in each of the last `SPARK_SECONDS` full seconds, as a line of blocks."""
    last = int(now_s)
    first = max(0, last - SPARK_SECONDS)
    counts = [0] * (last - first)
    for end_s in ends_s:
        if first <= int(end_s) < last:
            counts[int(end_s) - first] += 1
    top = max(counts, default=0)
    if top == 0:
        return " " * len(counts)
    steps = len(SPARK_LEVELS) - 1
    return "".join(SPARK_LEVELS[round(count / top * steps)] if count else " " for count in counts)


class View:
    """Plain lines, for a pipe or a log; also what a live view does between the replays."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def note(self, text: str) -> None:
        """One line of progress."""
        self.console.print(f"· {text}", style="dim", highlight=False, markup=False, soft_wrap=True)

    def heading(self, text: str) -> None:
        self.console.print()
        self.console.print(text, style="bold", highlight=False, markup=False, soft_wrap=True)

    def text(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    async def watch(self, replay: Replay, title: str, goals: Goals, seconds: float) -> None:
        """Shows the replay until cancelled."""
        self.heading(f"{title}: {seconds:.0f} s")
        while True:
            await asyncio.sleep(PLAIN_EVERY_S)
            now_s = replay.now_s()
            parts = []
            for name, one in snapshot(replay.records, goals, now_s).items():
                if name != TOTAL:
                    parts.append(
                        f"{name}: offered {one.offered}, in SLO {one.in_slo}, waiting {one.waiting}, "
                        f"refused {one.refused}, gave up {one.gave_up}, TTFT p50 {show_seconds(one.ttft_p50_s)}"
                    )
            self.text(f"  {now_s:3.0f} s  {' | '.join(parts)}")

    def comparison(self, rows: Sequence[Row]) -> None:
        """The table side by side."""
        shown = Table(
            box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False, header_style="bold"
        )
        shown.add_column("", no_wrap=True)
        for name in rows[0].cells:
            shown.add_column(f"{name}\nalone", justify="right")
            shown.add_column("\ngate", justify="right")
        for row in rows:
            values: list[Text] = []
            for cell in row.cells.values():
                values.append(Text(cell.engine, style="green" if cell.better == "engine" else ""))
                values.append(Text(cell.gate, style="green" if cell.better == "gate" else ""))
            shown.add_row(row.measure, *values)
        self.console.print(shown)
        self.console.print("alone: straight to the engine; gate: through the gate", style="dim")


class LiveView(View):
    """A table that is drawn anew four times a second."""

    async def watch(self, replay: Replay, title: str, goals: Goals, seconds: float) -> None:
        self.console.print()
        with Live(
            self._frame(replay, title, goals, seconds),
            console=self.console,
            auto_refresh=False,
            vertical_overflow="visible",
        ) as live:
            try:
                while True:
                    live.update(self._frame(replay, title, goals, seconds), refresh=True)
                    await asyncio.sleep(REFRESH_S)
            finally:
                with contextlib.suppress(OSError):
                    live.update(self._frame(replay, title, goals, seconds), refresh=True)

    def _frame(self, replay: Replay, title: str, goals: Goals, seconds: float) -> Panel:
        now_s = replay.now_s()
        shown = Table(box=None, pad_edge=False, padding=(0, 1), collapse_padding=True, header_style="dim")
        spark = self.console.width >= SPARK_FROM_COLUMNS
        shown.add_column("class", no_wrap=True)
        for heading in ("offered", "in SLO", "waiting", "streams", "refused", "gave up", "TTFT p50", "p95"):
            shown.add_column(heading, justify="right", no_wrap=True)
        if spark:
            shown.add_column(f"in SLO, last {SPARK_SECONDS} s", min_width=SPARK_SECONDS, no_wrap=True)
        for name, one in snapshot(replay.records, goals, now_s).items():
            slo_s = goals[name].ttft_s if name in goals else None
            cells = [
                Text(name, style="bold" if name == TOTAL else ""),
                Text(str(one.offered)),
                Text(str(one.in_slo), style="green"),
                Text(str(one.waiting)),
                Text(str(one.streaming)),
                Text(str(one.refused)),
                Text(str(one.gave_up)),
                _against(one.ttft_p50_s, slo_s),
                _against(one.ttft_p95_s, slo_s),
            ]
            if spark:
                cells.append(Text(one.spark.rjust(SPARK_SECONDS), style="green"))
            shown.add_row(*cells)
        done = min(1.0, now_s / seconds)
        bar = Text("━" * round(done * 40), style="cyan") + Text("━" * (40 - round(done * 40)), style="dim")
        phase = f"  {now_s:5.1f} s of {seconds:.0f} s" if now_s < seconds else f"  {now_s:5.1f} s, draining"
        return Panel(Group(bar + Text(phase), Text(), shown), title=title, title_align="left", expand=False)


def _against(value_s: float | None, slo_s: float | None) -> Text:
    over = value_s is not None and slo_s is not None and value_s > slo_s
    return Text(show_seconds(value_s), style="red" if over else "")
