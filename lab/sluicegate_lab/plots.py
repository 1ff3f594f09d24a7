"""Plots as inline SVG, drawn by a hundred lines of plain Python: no script, no font, no fetch.

A `Plot` is a frame with two axes; what is drawn into it is clipped to it. Colours are CSS classes, so that the
page which holds the plot decides on light and dark (`STYLE` has both). All text is escaped.

What is plotted is decided in `report.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

Point = tuple[float, float]

STYLE = """\
.plot text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--soft)}
.plot .name{font-weight:600;font-size:13px;fill:var(--ink)}
.plot .grid{stroke:var(--grid);stroke-width:1}
.plot .axis{stroke:var(--edge);stroke-width:1}
.plot .line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.plot .engine{--c:var(--engine)}.plot .gate{--c:var(--gate)}
.plot .interactive{--c:var(--interactive)}.plot .batch{--c:var(--batch)}.plot .refused{--c:var(--refused)}
.plot .left{--c:var(--bad)}
.plot .line,.plot .mark,.plot .cross{stroke:var(--c)}
.plot .dot,.plot .bar{fill:var(--c)}.plot .dot{fill-opacity:.75}
.plot .mark{fill:none;stroke-width:1.4}
.plot .cross{stroke-width:1.4;fill:none;stroke-opacity:.8}
.plot .slo{stroke:var(--c,var(--soft));stroke-width:1.3;stroke-dasharray:5 4}
.plot .slo-name{font-size:11px;fill:var(--c,var(--soft));paint-order:stroke;stroke:var(--card);stroke-width:3px}
"""

COLOURS_LIGHT = (
    "--page:#f6f7f9;--card:#fff;--ink:#1a2130;--soft:#5b6577;--edge:#b9c1cd;--grid:#e6e9ee;"
    "--engine:#c2620c;--gate:#1f66d0;--interactive:#0c8577;--batch:#8a4fc4;--refused:#98a1b0;"
    "--good:#14804a;--bad:#b42318"
)
COLOURS_DARK = (
    "--page:#0f131a;--card:#171c25;--ink:#e8ecf3;--soft:#9aa5b8;--edge:#49536a;--grid:#262d3a;"
    "--engine:#f0994a;--gate:#6aa5ff;--interactive:#3ec6b4;--batch:#c09af8;--refused:#6b7588;"
    "--good:#4cc38a;--bad:#ff7b72"
)
"""Blue and orange tell the sides apart for all common kinds of colour blindness."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: what it shows, from where to where, and whether by powers of ten.

    `ticks` are the values that get a label; empty: chosen to be round.
    """

    name: str
    low: float
    high: float
    log: bool = False
    ticks: tuple[float, ...] = ()
    unit: str = ""

    def share(self, value: float) -> float:
        """Where the value lies between the ends, 0 to 1; values beyond an end lie on it."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def labelled(self) -> tuple[float, ...]:
        return self.ticks or round_ticks(self.low, self.high)


def round_ticks(low: float, high: float, count: int = 5) -> tuple[float, ...]:
    """About `count` round values from `low` to `high`: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return tuple(index * step for index in range(first, math.floor(high / step + 1e-9) + 1))


def number(value: float) -> str:
    """A tick's label: no digits that say nothing."""
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:g}"


@dataclass(slots=True)
class Plot:
    """One plot. Every drawing method adds to it and returns nothing; `svg` closes it.

    `alt` says in words what is to be seen, for those who do not see it.
    """

    title: str
    alt: str
    x: Axis
    y: Axis
    width: int = 540
    height: int = 310
    left: int = 52
    right: int = 14
    top: int = 52
    bottom: int = 42
    _parts: list[str] = field(default_factory=list)
    _legend: list[tuple[str, str, str]] = field(default_factory=list)

    def at(self, point: Point) -> Point:
        """Pixels of a point."""
        across = self.width - self.left - self.right
        down = self.height - self.top - self.bottom
        return (
            self.left + self.x.share(point[0]) * across,
            self.top + (1 - self.y.share(point[1])) * down,
        )

    def line(self, points: Sequence[Point], kind: str, legend: str = "", *, dashed: bool = False) -> None:
        """A line through `points`; `kind` is its CSS class."""
        if len(points) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self.at, points))
            style = ' stroke-dasharray="6 4"' if dashed else ""
            self._parts.append(f'<polyline class="line {kind}"{style} points="{path}"/>')
        if legend:
            self._legend.append(("line", kind, legend))

    def dots(self, points: Iterable[Point], kind: str, legend: str = "", *, shape: str = "dot") -> None:
        """A mark at each point: a filled `dot`, a hollow `mark`, or a `cross`."""
        self._parts += [_mark(self.at(point), kind, shape) for point in points]
        if legend:
            self._legend.append((shape, kind, legend))

    def level(self, value: float, name: str, kind: str = "", *, below: bool = False) -> None:
        """A dashed line across at a value of y, with its name above it or below."""
        _, y = self.at((self.x.low, value))
        name_y = y + 13 if below else y - 4
        end = self.width - self.right
        self._parts.append(
            f'<line class="slo {kind}" x1="{self.left}" x2="{end}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        self._parts.append(
            f'<text class="slo-name {kind}" x="{end - 4}" y="{name_y:.1f}" text-anchor="end">{escape(name)}</text>'
        )

    def upright(self, value: float, name: str, kind: str = "") -> None:
        """A dashed line upwards at a value of x, with its name."""
        x, _ = self.at((value, self.y.low))
        end = self.height - self.bottom
        self._parts.append(f'<line class="slo {kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{self.top}" y2="{end}"/>')
        self._parts.append(
            f'<text class="slo-name {kind}" x="{x + 4:.1f}" y="{self.top + 11}">{escape(name)}</text>'
        )

    def bars(self, tops: Sequence[tuple[float, float, float, float]], kind: str, legend: str = "") -> None:
        """Bars, each from x0 to x1 and from y0 to y1."""
        for x0, x1, y0, y1 in tops:
            (left, low), (right, high) = self.at((x0, y0)), self.at((x1, y1))
            if low > high:
                self._parts.append(
                    f'<rect class="bar {kind}" x="{left + 0.5:.1f}" y="{high:.1f}" '
                    f'width="{max(right - left - 1, 1):.1f}" height="{low - high:.1f}"/>'
                )
        if legend:
            self._legend.append(("bar", kind, legend))

    def svg(self) -> str:
        """The plot as one `<svg>` element."""
        return (
            f'<svg class="plot" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-label="{escape(self.alt)}">{self.inner()}</svg>'
        )

    def inner(self) -> str:
        """What is inside the element, to be set into a larger picture."""
        return "".join(
            [
                f'<text class="name" x="{self.left}" y="16">{escape(self.title)}</text>',
                *self._axes(),
                *self._parts,
                *self._legend_marks(),
            ]
        )

    def _axes(self) -> list[str]:
        end, floor = self.width - self.right, self.height - self.bottom
        parts: list[str] = []
        for value in self.y.labelled():
            _, y = self.at((self.x.low, value))
            parts.append(f'<line class="grid" x1="{self.left}" x2="{end}" y1="{y:.1f}" y2="{y:.1f}"/>')
            label = f"{number(value)}{self.y.unit}"
            parts.append(f'<text x="{self.left - 7}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
        for value in self.x.labelled():
            x, _ = self.at((value, self.y.low))
            parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{floor}" y2="{floor + 4}"/>')
            label = f"{number(value)}{self.x.unit}"
            parts.append(f'<text x="{x:.1f}" y="{floor + 17}" text-anchor="middle">{label}</text>')
        parts.append(f'<line class="axis" x1="{self.left}" x2="{end}" y1="{floor}" y2="{floor}"/>')
        middle = (self.left + end) / 2
        name = escape(self.x.name)
        parts.append(f'<text x="{middle:.0f}" y="{self.height - 6}" text-anchor="middle">{name}</text>')
        return parts

    def _legend_marks(self) -> list[str]:
        """On the line below the title, from the left."""
        parts: list[str] = []
        x, y = float(self.left), 33
        for shape, kind, name in self._legend:
            if shape == "line":
                parts.append(f'<path class="line {kind}" d="M{x:.0f} {y - 4}h14"/>')
                x += 20
            elif shape == "bar":
                parts.append(f'<rect class="bar {kind}" x="{x:.0f}" y="{y - 9}" width="10" height="10"/>')
                x += 15
            else:
                parts.append(_mark((x + 3, y - 1 if shape == "tick" else y - 4), kind, shape))
                x += 12
            parts.append(f'<text x="{x:.0f}" y="{y}">{escape(name)}</text>')
            x += 6.6 * len(name) + 18
        return parts


def _mark(at: Point, kind: str, shape: str) -> str:
    x, y = at
    if shape == "cross":
        return f'<path class="cross {kind}" d="M{x - 2.6:.1f} {y - 2.6:.1f}l5.2 5.2m0 -5.2l-5.2 5.2"/>'
    if shape == "tick":
        return f'<path class="cross {kind}" d="M{x:.1f} {y:.1f}v-7"/>'
    return f'<circle class="{shape} {kind}" cx="{x:.1f}" cy="{y:.1f}" r="{2.9 if shape == "dot" else 3}"/>'
