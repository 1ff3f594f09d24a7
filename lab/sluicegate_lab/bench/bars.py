"""The promises: each a number, a bar that it must not exceed, and what was measured beside it.

A ratio's value is the median over rounds of (subject / peer in the same round). Its spread says how far rounds
differ; the A/A pair's, what the machine alone does to a ratio whose truth is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from sluicegate_lab.bench.loads import Sample

#: The names that the loads' targets have in every part.
SUBJECT: Final = "subject"
ENVOY: Final = "envoy"
ENVOY_AGAIN: Final = "envoy again"
NGINX: Final = "nginx"
DIRECT: Final = "direct"


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, smallest and largest of a few numbers."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One promise.

    Attributes:
        name: for `--only` and the JSON object.
        title: for people.
        value, bar, unit: `value` holds when it is at most `bar`.
        spread: of the value over the rounds.
        noise: of the same ratio for two equal Envoys.
        to_nginx: the subject's ratio to nginx.
        absolute: what was measured, by target, in `absolute_unit`.
    """

    name: str
    title: str
    value: float
    bar: float
    unit: str
    spread: Spread | None = None
    noise: Spread | None = None
    to_nginx: float | None = None
    absolute: Mapping[str, float] = field(default_factory=dict)
    absolute_unit: str = ""

    @property
    def holds(self) -> bool:
        return self.value <= self.bar

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "value": round(self.value, 4),
            "bar": self.bar,
            "unit": self.unit,
            "holds": self.holds,
        }


Samples = Mapping[str, Sequence[Sample]]
Reading = Callable[[Sample, Sample | None], float]


def reading(key: str) -> Reading:
    """A value as it was measured."""
    return lambda sample, _direct: sample.values[key]


def added(key: str) -> Reading:
    """A value less what the same load measured straight to the engine stub in the same round.

    Never below a microsecond, the resolution of what is subtracted: a ratio needs a denominator.
    """

    def read(sample: Sample, direct: Sample | None) -> float:
        if direct is None:
            raise ValueError("nothing to subtract: the load did not run straight to the engine stub")
        return max(1.0, sample.values[key] - direct.values[key])

    return read


def ratio_bar(
    samples: Samples, read: Reading, *, name: str, title: str, bar: float, absolute_unit: str = "us"
) -> Bar:
    """The subject's ratio to Envoy, with A/A pair, nginx and the absolute medians beside it."""
    columns = _columns(samples, read)
    envoy = columns[ENVOY]

    def ratios(of: str, to: Sequence[float]) -> Spread:
        return Spread.of([a / b for a, b in zip(columns[of], to, strict=True)])

    spread = ratios(SUBJECT, envoy)
    return Bar(
        name=name,
        title=title,
        value=spread.median,
        bar=bar,
        unit="E",
        spread=spread,
        noise=ratios(ENVOY_AGAIN, envoy) if ENVOY_AGAIN in columns else None,
        to_nginx=ratios(SUBJECT, columns[NGINX]).median if NGINX in columns else None,
        absolute={target: median(values) for target, values in columns.items()},
        absolute_unit=absolute_unit,
    )


def _columns(samples: Samples, read: Reading) -> dict[str, list[float]]:
    """The value of each round, by target."""
    direct: Sequence[Sample | None] = samples.get(DIRECT) or [None] * len(samples[ENVOY])
    return {
        target: [read(sample, floor) for sample, floor in zip(column, direct, strict=True)]
        for target, column in samples.items()
        if target != DIRECT
    }
