"""The report of a demo: one HTML file that needs nothing else, and one picture for a page that links to it.

Four kinds of plots, each of both replays with the same axes: the time to the first token of every request,
what was served within the SLO so far, how the times to the first token are distributed over all that was
offered, and when requests were refused or given up. Then the table, the policy and the set-up.

Invariants: no script, no font, nothing fetched; legible in light and dark; all text is escaped. The drawing
itself is `plots.py`, the numbers are `outcome.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from sluicegate_lab.load import Outcome, Record
from sluicegate_lab.outcome import (
    TOTAL,
    Goals,
    Row,
    RunResult,
    ratio,
    show_seconds,
    show_share,
    waited_s,
)
from sluicegate_lab.plots import COLOURS_DARK, COLOURS_LIGHT, STYLE, Axis, Plot, Point

LEAST_TTFT_S = 0.02
MOST_TTFT_S = 40.0
TTFT_TICKS = (0.02, 0.1, 0.5, 1.0, 5.0, 20.0)
"""The time axis of every TTFT plot, by powers of ten; what is faster or slower lies on the edge."""

MAX_MARKS = 1_500
"""Marks in one plot: beyond it every n-th request is drawn, so that a page stays a page."""

BINS = 40
"""Bars over the length of a replay."""

CAPTION = ("engine", "measured", "overload", "arrivals")
"""What of the set-up stands below the picture."""

SIDES = ("engine alone", "through the gate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything that a report shows. Pairs are (engine alone, through the gate)."""

    alone: Sequence[Record]
    gated: Sequence[Record]
    results: tuple[RunResult, RunResult]
    rows: Sequence[Row]
    verdict: Sequence[str]
    goals: Goals
    seconds: float
    policy_text: str
    setup: Sequence[tuple[str, str]]

    @property
    def sides(self) -> tuple[tuple[str, Sequence[Record]], ...]:
        return tuple(zip(SIDES, (self.alone, self.gated), strict=True))


def ttft_over_time(comparison: Comparison) -> list[Plot]:
    """A plot for each side: one mark a request, at the time it was offered and the time it waited."""
    plots: list[Plot] = []
    for side, records in comparison.sides:
        plot = Plot(
            title=f"Time to first token, {side}",
            alt=f"Each request's time to its first token over the time it was offered, {side}.",
            x=Axis("seconds into the replay", 0.0, comparison.seconds),
            y=Axis("TTFT", LEAST_TTFT_S, MOST_TTFT_S, log=True, ticks=TTFT_TICKS, unit=" s"),
        )
        drawn = records[:: math.ceil(len(records) / MAX_MARKS)] if records else records
        for name, shape in zip(comparison.goals, ("dot", "mark"), strict=False):
            of_class = [one for one in drawn if one.request.class_name == name]
            answered = [(one.offered_s, one.ttft_s) for one in of_class if one.ttft_s is not None]
            plot.dots(answered, name, name, shape=shape)
            left = [(one.offered_s, waited_s(one) or MOST_TTFT_S) for one in of_class if _left(one)]
            plot.dots(left, name, shape="cross")
        plot.dots((), "refused", "gave up", shape="cross")
        refused = [(one.offered_s, LEAST_TTFT_S) for one in drawn if one.outcome is Outcome.REFUSED]
        plot.dots(refused, "refused", "refused", shape="tick")
        for index, (name, goal) in enumerate(comparison.goals.items()):
            if goal.ttft_s is not None:
                # Names between the two lines, where fewer marks lie than above and below.
                plot.level(goal.ttft_s, f"SLO {name} {goal.ttft_s:g} s", name, below=index > 0)
        plots.append(plot)
    return plots


def _left(record: Record) -> bool:
    return record.ttft_s is None and record.outcome in (Outcome.GAVE_UP, Outcome.CUT_OFF)


def goodput_over_time(comparison: Comparison) -> list[Plot]:
    """A plot for each class: requests within SLO so far, both sides."""
    plots: list[Plot] = []
    end_s = max((one.ended_s or 0.0 for one in (*comparison.alone, *comparison.gated)), default=1.0)
    for name, goal in comparison.goals.items():
        ends_s = [
            sorted(
                one.ended_s or 0.0 for one in records if one.request.class_name == name and goal.met_by(one)
            )
            for _, records in comparison.sides
        ]
        most = max(1, *map(len, ends_s))
        plot = Plot(
            title=f"{name}: served within SLO so far",
            alt=f"Requests of class {name} served within SLO over time, engine alone and through the gate.",
            x=Axis("seconds into the replay", 0.0, max(end_s, comparison.seconds)),
            y=Axis("requests", 0.0, most * 1.08),
        )
        plot.upright(comparison.seconds, "last arrival")
        for (side, _), kind, ends in zip(comparison.sides, ("engine", "gate"), ends_s, strict=True):
            steps = [(0.0, 0.0), *((end, float(count)) for count, end in enumerate(ends, start=1))]
            plot.line([*steps, (plot.x.high, steps[-1][1])], kind, side)
        plots.append(plot)
    return plots


def ttft_distribution(comparison: Comparison) -> list[Plot]:
    """A plot for each class: the share of all offered requests whose first token came within a time."""
    plots: list[Plot] = []
    for name, goal in comparison.goals.items():
        plot = Plot(
            title=f"{name}: first token within",
            alt=f"Share of the offered requests of class {name} that had their first token within a time.",
            x=Axis("time to first token", LEAST_TTFT_S, MOST_TTFT_S, log=True, ticks=TTFT_TICKS, unit=" s"),
            y=Axis("of the offered", 0.0, 100.0, unit="%"),
        )
        if goal.ttft_s is not None:
            plot.upright(goal.ttft_s, f"SLO {goal.ttft_s:g} s")
        for (side, records), kind in zip(comparison.sides, ("engine", "gate"), strict=True):
            of_class = [one for one in records if one.request.class_name == name]
            waits_s = sorted(one.ttft_s for one in of_class if one.ttft_s is not None)
            steps: list[Point] = [(LEAST_TTFT_S, 0.0)]
            for count, wait_s in enumerate(waits_s, start=1):
                steps += [(wait_s, steps[-1][1]), (wait_s, 100.0 * count / len(of_class))]
            plot.line([*steps, (MOST_TTFT_S, steps[-1][1])], kind, side)
        plots.append(plot)
    return plots


def turned_away(comparison: Comparison) -> list[Plot]:
    """A plot for each side: when requests were refused, and when their clients gave up, in equal bins."""
    end_s = max((one.ended_s or 0.0 for one in (*comparison.alone, *comparison.gated)), default=1.0)
    end_s = max(end_s, comparison.seconds)
    width_s = end_s / BINS
    counts: list[tuple[list[int], list[int]]] = []
    for _, records in comparison.sides:
        refused, left = [0] * BINS, [0] * BINS
        for one in records:
            bins = refused if one.outcome is Outcome.REFUSED else left if _left(one) else None
            if bins is not None:
                bins[min(int((one.ended_s or 0.0) / width_s), BINS - 1)] += 1
        counts.append((refused, left))
    most = max(1, *(a + b for refused, left in counts for a, b in zip(refused, left, strict=True)))
    plots: list[Plot] = []
    for (side, _), (refused, left) in zip(comparison.sides, counts, strict=True):
        plot = Plot(
            title=f"Turned away, {side}",
            alt=f"Requests refused and requests whose client gave up over time, {side}.",
            x=Axis("seconds into the replay", 0.0, end_s),
            y=Axis(f"requests in {width_s:.1f} s", 0.0, most * 1.08),
            height=250,
        )
        spans = [(index * width_s, (index + 1) * width_s) for index in range(BINS)]
        plot.bars(
            [(*span, 0.0, float(n)) for span, n in zip(spans, refused, strict=True)], "refused", "refused"
        )
        plot.bars(
            [(*span, float(n), float(n + m)) for span, n, m in zip(spans, refused, left, strict=True)],
            "left",
            "gave up",
        )
        plots.append(plot)
    return plots


def _figures(comparison: Comparison) -> list[tuple[str, str, str]]:
    """The four numbers at the top: what, engine alone, through the gate."""
    alone, gated = comparison.results
    first = next(iter(comparison.goals))
    return [
        (
            "goodput, weighted by class",
            f"{alone[TOTAL].weighted_goodput_s:,.0f} s",
            f"{gated[TOTAL].weighted_goodput_s:,.0f} s",
        ),
        *(
            (f"{name} within SLO", str(alone[name].within_slo), str(gated[name].within_slo))
            for name in comparison.goals
        ),
        (
            f"{first} first token, p95",
            show_seconds(alone[first].ttft_p95_s),
            show_seconds(gated[first].ttft_p95_s),
        ),
        (
            "of the admitted within SLO",
            show_share(alone[TOTAL].attainment),
            show_share(gated[TOTAL].attainment),
        ),
    ]


PAGE_STYLE = f"""\
:root{{color-scheme:light dark;{COLOURS_LIGHT}}}
@media(prefers-color-scheme:dark){{:root{{{COLOURS_DARK}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--page);color:var(--ink);
  font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}}
main{{max-width:1160px;margin:0 auto;padding:32px 20px 60px}}
h1{{font-size:25px;line-height:1.25;margin:0 0 6px;letter-spacing:-.01em}}
h2{{font-size:16px;margin:38px 0 12px}}
.sub{{color:var(--soft);margin:0 0 22px}}
.card{{background:var(--card);border:1px solid var(--grid);border-radius:10px;padding:14px 16px}}
.figures{{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:12px;margin-bottom:16px}}
.figures .what{{color:var(--soft);font-size:13px}}
.figures b{{font-size:22px;font-weight:650;color:var(--gate);font-variant-numeric:tabular-nums}}
.figures i{{font-style:normal;color:var(--engine);font-variant-numeric:tabular-nums}}
.plots{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(480px,100%),1fr));gap:14px}}
.plots svg{{width:100%;height:auto;display:block}}
p{{margin:0 0 8px;max-width:120ch}}
.wide{{overflow-x:auto}}
table{{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}}
th,td{{padding:5px 12px;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}}
th{{color:var(--soft);font-weight:600;font-size:13px}}
td:first-child,th:first-child{{text-align:left}}
th[colspan]{{text-align:center;color:var(--ink)}}
.group{{border-left:1px solid var(--grid)}}
td.better{{color:var(--good);font-weight:600}}
pre{{margin:0;overflow-x:auto;font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}}
dl{{display:grid;grid-template-columns:max-content 1fr;gap:4px 18px;margin:0}}
dt{{color:var(--soft)}}dd{{margin:0;overflow-wrap:anywhere}}
.two{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr));gap:14px}}
.note{{color:var(--soft);font-size:13px}}
{STYLE}"""

DEFINITIONS = (
    "Within SLO: served to the end, the first token within the TTFT of the class and the mean time between "
    "tokens within its ITL. Weighted goodput: seconds of engine work served within SLO, times the weight of "
    "the class. TTFT percentiles are of all that were not refused; whoever gave up counts with the time "
    "waited, a lower bound. Wasted tokens: output of answers that missed their SLO or were not read to the "
    "end. Both replays used the same arrivals, lengths, engine and client; clients take a refusal for an "
    "answer and send nothing again."
)


def html(comparison: Comparison) -> str:
    """The report as one HTML document."""
    alone, gated = comparison.results
    gain = ratio(gated[TOTAL].weighted_goodput_s, alone[TOTAL].weighted_goodput_s)
    figures = "".join(
        f'<div class="card"><div class="what">{escape(what)}</div><b>{escape(right)}</b> '
        f"<i>alone {escape(left)}</i></div>"
        for what, left, right in _figures(comparison)
    )
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in comparison.verdict)
    groups = (
        ("Time to the first token", ttft_over_time(comparison)),
        ("Goodput", goodput_over_time(comparison)),
        ("How long all that was offered waited", ttft_distribution(comparison)),
        ("Refusals, and clients who left", turned_away(comparison)),
    )
    plots = "".join(
        f'<h2>{escape(name)}</h2><div class="plots">'
        + "".join(f'<div class="card">{plot.svg()}</div>' for plot in drawn)
        + "</div>"
        for name, drawn in groups
    )
    setup = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in comparison.setup)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Sluicegate: an overloaded engine, with and without a gate</title><style>{PAGE_STYLE}</style>"
        "</head><body><main>"
        "<h1>An overloaded engine, with and without a gate</h1>"
        f'<p class="sub">The same arrivals twice, on the same engine. Weighted goodput through the gate: '
        f"{escape(gain)} of the engine alone.</p>"
        f'<div class="figures">{figures}</div><div class="card">{said}</div>{plots}'
        f'<h2>Side by side</h2><div class="card wide">{_html_table(comparison.rows)}</div>'
        f'<p class="note" style="margin-top:10px">{escape(DEFINITIONS)}</p>'
        '<div class="two"><div><h2>The policy</h2><div class="card"><pre>'
        f"{escape(comparison.policy_text.rstrip())}</pre></div></div>"
        f'<div><h2>The set-up</h2><div class="card"><dl>{setup}</dl></div></div></div>'
        "</main></body></html>\n"
    )


def _html_table(rows: Sequence[Row]) -> str:
    classes = list(rows[0].cells)
    groups = "".join(f'<th colspan="2" class="group">{escape(name)}</th>' for name in classes)
    sides = '<th class="group">alone</th><th>gate</th>' * len(classes)
    lines = [f"<tr><th></th>{groups}</tr><tr><th></th>{sides}</tr></thead><tbody>"]
    for row in rows:
        lines.append(f"<tr><td>{escape(row.measure)}</td>")
        for cell in row.cells.values():
            for text, side in ((cell.engine, "engine"), (cell.gate, "gate")):
                group = "group" if side == "engine" else ""
                better = "better" if cell.better == side else ""
                lines.append(f'<td class="{group} {better}">{escape(text)}</td>')
        lines.append("</tr>")
    return f"<table><thead>{''.join(lines)}</tbody></table>"


def write_report(path: Path, comparison: Comparison) -> None:
    """Writes the report. Raises `OSError` where it cannot."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html(comparison), encoding="utf-8")


def picture(comparison: Comparison) -> str:
    """The result as one SVG: both replays, request by request, under the figures that sum them up."""
    width, head, gap = 1120, 108, 16
    plots = ttft_over_time(comparison)
    height = head + plots[0].height + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" class="plot" role="img">'
        f"<style>svg{{{COLOURS_LIGHT}}}@media(prefers-color-scheme:dark){{svg{{{COLOURS_DARK}}}}}{STYLE}"
        ".big{font:650 21px system-ui,sans-serif !important;fill:var(--gate) !important}"
        ".than{fill:var(--engine) !important}</style>"
        f'<rect width="{width}" height="{height}" rx="12" fill="var(--card)" stroke="var(--grid)"/>'
    ]
    figures = _figures(comparison)
    step = (width - 2 * gap) / len(figures)
    for index, (what, left, right) in enumerate(figures):
        x = gap + 10 + index * step
        parts.append(
            f'<text x="{x:.0f}" y="30">{escape(what)}</text>'
            f'<text x="{x:.0f}" y="58" class="big">{escape(right)}</text>'
            f'<text x="{x:.0f}" y="78" class="than">engine alone {escape(left)}</text>'
        )
    for index, plot in enumerate(plots):
        plot.width = (width - 3 * gap) // 2
        parts.append(
            f'<g transform="translate({gap + index * (plot.width + gap)},{head})">{plot.inner()}</g>'
        )
    told = {name: value for name, value in comparison.setup if name in CAPTION}
    caption = " · ".join(told[name] for name in CAPTION if name in told)
    parts.append(f'<text x="{width / 2:.0f}" y="{height - 12}" text-anchor="middle">{escape(caption)}</text>')
    return "".join(parts) + "</svg>\n"
