"""What the records of a replay amount to: counts, percentiles, goodput, and a verdict in words.

Definitions, the same for both sides of a comparison:
- *within SLO*: served to the end, first token within the class's TTFT, mean inter-token time within its ITL;
- *goodput*: what was within SLO, counted in requests, in output tokens, and in seconds of engine work times
  the weight of the class (requests alone would reward picking the cheap ones);
- *admitted*: all that were not refused; *attainment of the admitted*: the part of them within SLO;
- *TTFT of the admitted*: whoever left before the first token counts with the time waited, a lower bound:
  leaving them out would make the side look best that lost most;
- *wasted tokens*: output tokens of answers that missed their SLO or were not served to the end.

Pure: no clock, no I/O. Records come from `load.py`, drawings of them from `report.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sluicegate_lab.calibrate import tokens_of
from sluicegate_lab.load import Outcome, Record
from sluicegate_lab.traffic import WorkCost

TOTAL = "total"


@dataclass(frozen=True, slots=True)
class ClassGoal:
    """What a class was promised: seconds, None where the policy says nothing; and its weight."""

    ttft_s: float | None
    itl_s: float | None
    weight: int

    def met_by(self, record: Record) -> bool:
        """Whether a request was served within the SLO."""
        ttft_s, mean_gap_s = record.ttft_s, record.mean_gap_s
        if record.outcome is not Outcome.SERVED or ttft_s is None:
            return False
        if self.ttft_s is not None and ttft_s > self.ttft_s:
            return False
        return self.itl_s is None or mean_gap_s is None or mean_gap_s <= self.itl_s


Goals = Mapping[str, ClassGoal]


@dataclass(frozen=True, slots=True)
class ClassResult:
    """One class, or all of them, in one replay. Times in seconds; None where there is nothing to measure."""

    offered: int
    served: int
    within_slo: int
    tokens_within_slo: int
    weighted_goodput_s: float
    attainment: float | None
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    ttft_p99_s: float | None
    itl_p95_s: float | None
    refused: int
    refusal_p50_s: float | None
    gave_up: int
    cut_off: int
    failed: int
    wasted_tokens: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


RunResult = dict[str, ClassResult]
"""By class, in the policy's order, and `TOTAL` last."""


def percentile(values: Sequence[float], share: float) -> float | None:
    """The `share` quantile by linear interpolation between order statistics; None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def waited_s(record: Record) -> float | None:
    """The time to the first token, or the time waited for one in vain; None for a refusal or a failure."""
    if record.ttft_s is not None:
        return record.ttft_s
    return record.total_s if record.outcome in (Outcome.GAVE_UP, Outcome.CUT_OFF) else None


def summarise(records: Iterable[Record], goals: Goals, cost: WorkCost) -> RunResult:
    """The result of one replay. Records of a class without a goal are an error (`KeyError`)."""
    by_class: dict[str, list[Record]] = {name: [] for name in goals}
    for record in records:
        by_class[record.request.class_name].append(record)
    result = {name: _result(of_class, goals, cost) for name, of_class in by_class.items()}
    result[TOTAL] = _result([record for each in by_class.values() for record in each], goals, cost)
    return result


def _result(records: Sequence[Record], goals: Goals, cost: WorkCost) -> ClassResult:
    met = [record for record in records if goals[record.request.class_name].met_by(record)]
    met_ids = {id(record) for record in met}

    def count(outcome: Outcome) -> int:
        return sum(record.outcome is outcome for record in records)

    refused = [record for record in records if record.outcome is Outcome.REFUSED]
    waits_s = [wait for wait in map(waited_s, records) if wait is not None]
    gaps_s = [gap for gap in (record.mean_gap_s for record in records) if gap is not None]
    admitted = len(records) - len(refused)
    return ClassResult(
        offered=len(records),
        served=count(Outcome.SERVED),
        within_slo=len(met),
        tokens_within_slo=sum(map(tokens_of, met)),
        weighted_goodput_s=sum(
            cost.of(record.prompt_tokens or record.request.prompt_words, tokens_of(record))
            * goals[record.request.class_name].weight
            for record in met
        ),
        attainment=len(met) / admitted if admitted else None,
        ttft_p50_s=percentile(waits_s, 0.5),
        ttft_p95_s=percentile(waits_s, 0.95),
        ttft_p99_s=percentile(waits_s, 0.99),
        itl_p95_s=percentile(gaps_s, 0.95),
        refused=len(refused),
        refusal_p50_s=percentile([record.total_s or 0.0 for record in refused], 0.5),
        gave_up=count(Outcome.GAVE_UP),
        cut_off=count(Outcome.CUT_OFF),
        failed=count(Outcome.FAILED),
        wasted_tokens=sum(tokens_of(record) for record in records if id(record) not in met_ids),
    )


@dataclass(frozen=True, slots=True)
class Cell:
    """Both values of a measure, as text, and who is ahead.

    `better` is "gate", "engine" or "": none, a tie, or a measure that is neither good nor bad by itself.
    """

    engine: str
    gate: str
    better: str


@dataclass(frozen=True, slots=True)
class Row:
    """One measure, for every class and in total."""

    measure: str
    cells: dict[str, Cell]


@dataclass(frozen=True, slots=True)
class _Measure:
    """A line of the table: which field, how it is written, and whether more of it is better, worse, or neither.

    `if_any`: the line is left out when it is zero everywhere.
    """

    name: str
    of: str
    show: Callable[[float | None], str]
    more_is_better: bool | None = None
    if_any: bool = False


def table(engine: RunResult, gate: RunResult) -> list[Row]:
    """The comparison as text, the same for the terminal and the report."""
    rows: list[Row] = []
    for measure in MEASURES:
        pairs = {
            name: (getattr(engine[name], measure.of), getattr(gate[name], measure.of)) for name in engine
        }
        if not measure.if_any or any(left or right for left, right in pairs.values()):
            rows.append(Row(measure.name, {name: _cell(measure, *pair) for name, pair in pairs.items()}))
    return rows


def _cell(measure: _Measure, engine: float | None, gate: float | None) -> Cell:
    better = ""
    if measure.more_is_better is not None and engine is not None and gate is not None and engine != gate:
        better = "gate" if (gate > engine) == measure.more_is_better else "engine"
    return Cell(measure.show(engine), measure.show(gate), better)


def show_count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def show_work(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f} s"


def show_share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def show_seconds(value: float | None) -> str:
    """Three digits in the unit that fits: `640 us`, `85 ms`, `12.3 s`."""
    if value is None:
        return "-"
    if value >= 0.9995:
        return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s"
    return f"{value * 1e3:.0f} ms" if value >= 0.00995 else f"{value * 1e3:.1f} ms"


MEASURES = (
    _Measure("offered", "offered", show_count),
    _Measure("served", "served", show_count, more_is_better=True),
    _Measure("within SLO", "within_slo", show_count, more_is_better=True),
    _Measure("tokens within SLO", "tokens_within_slo", show_count, more_is_better=True),
    _Measure("weighted goodput", "weighted_goodput_s", show_work, more_is_better=True),
    _Measure("SLO kept, of admitted", "attainment", show_share, more_is_better=True),
    _Measure("TTFT p50", "ttft_p50_s", show_seconds, more_is_better=False),
    _Measure("TTFT p95", "ttft_p95_s", show_seconds, more_is_better=False),
    _Measure("TTFT p99", "ttft_p99_s", show_seconds, more_is_better=False),
    _Measure("inter-token p95", "itl_p95_s", show_seconds, more_is_better=False),
    _Measure("refused", "refused", show_count),
    _Measure("refused after (p50)", "refusal_p50_s", show_seconds),
    _Measure("gave up waiting", "gave_up", show_count, more_is_better=False),
    _Measure("wasted tokens", "wasted_tokens", show_count, more_is_better=False),
    _Measure("failed", "failed", show_count, more_is_better=False, if_any=True),
    _Measure("cut off at the end", "cut_off", show_count, more_is_better=False, if_any=True),
)


def ratio(gate: float, engine: float) -> str:
    """`2.5x`, or words where the engine alone had none."""
    if engine == 0:
        return "as many as none" if gate == 0 else "from nothing"
    return f"{gate / engine:.2g}x" if gate / engine < 10 else f"{gate / engine:.0f}x"


def verdict(engine: RunResult, gate: RunResult) -> list[str]:
    """What the numbers say, in sentences computed from them; also where the gate loses."""
    alone, gated = engine[TOTAL], gate[TOTAL]
    classes = [name for name in engine if name != TOTAL]
    said = [
        f"Within SLO: {gated.within_slo} of {gated.offered} requests through the gate, "
        f"{alone.within_slo} with the engine alone ({ratio(gated.within_slo, alone.within_slo)}); "
        f"goodput weighted by class {show_work(gated.weighted_goodput_s)} against "
        f"{show_work(alone.weighted_goodput_s)} ({ratio(gated.weighted_goodput_s, alone.weighted_goodput_s)})."
    ]
    if gated.weighted_goodput_s <= alone.weighted_goodput_s:
        said.append("The gate did not win here.")
    if gated.refused:
        said.append(
            f"The gate refused {gated.refused} requests, half of them within "
            f"{show_seconds(gated.refusal_p50_s)}, and kept {show_share(gated.attainment)} of the rest within "
            f"SLO; the engine alone took all, kept {show_share(alone.attainment)}, and let "
            f"{alone.gave_up} clients wait until they gave up ({gated.gave_up} did through the gate)."
        )
    losses = [
        f"{name} within SLO {gate[name].within_slo} against {engine[name].within_slo}"
        for name in classes
        if gate[name].within_slo < engine[name].within_slo
    ]
    losses += [
        f"{name} TTFT p95 {show_seconds(gate[name].ttft_p95_s)} against {show_seconds(engine[name].ttft_p95_s)}"
        for name in classes
        if (gate[name].ttft_p95_s or 0.0) > (engine[name].ttft_p95_s or 0.0)
    ]
    if gated.served < alone.served:
        losses.append(f"requests served in all {gated.served} against {alone.served}")
    if gated.failed > alone.failed:
        losses.append(f"failures {gated.failed} against {alone.failed}")
    if losses:
        said.append(f"Where the gate loses: {'; '.join(losses)}.")
    return said
