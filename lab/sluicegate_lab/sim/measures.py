"""What came out of a simulation: the yardstick, the same for every policy.

- *within SLO*: served whole, the first token within the class's TTFT, the mean time between tokens within its ITL. A
  demand that needed several tries counts once, and its last try is what its client saw.
- *goodput*: work (`work`) of the demands within SLO, weighted by class. Requests alone would reward picking the cheap.
- *admitted*: tries that were neither refused nor evicted; *attainment*: the part of them within SLO.
- *wasted*: work done for answers that nobody got, over all work done. *recomputed*: prompt tokens computed once more
  after their KV was lost.
- *fairness*: Jain's index, (sum x)^2 / (n sum x^2), over the clients of a class, x being what a client was served over
  what max-min fairness would have given it of the same total: 1 is fair, 1/n is one client with everything.
- *share*: in windows of `SHARE_WINDOW_S`, what a class was given over what it could claim: the lesser of what it
  offered in the window and its part by weight of all that was given. 1 where it had at least that in every window.
- *prediction*: |predicted - true TTFT| / true, over the served, after the first `LEARNING` predictions.
- *idle refusals*: refused while the engine had nothing to do, although it would have met its TTFT.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from sluicegate_core.policy import Policy
from sluicegate_lab.sim.work import work_s
from sluicegate_lab.sim.world import Fate, Run

LEARNING: Final = 200
SHARE_WINDOW_S: Final = 10.0

Floats = np.ndarray[Any, np.dtype[np.float64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Of a time, s; None where there is none."""

    p50: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Floats) -> Quantiles:
        if not values.size:
            return cls(p50=None, p95=None, p99=None)
        p50, p95, p99 = np.quantile(values, (0.5, 0.95, 0.99))
        return cls(p50=float(p50), p95=float(p95), p99=float(p99))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassMeasures:
    """One class. Work in seconds of the engine."""

    name: str
    offered: int
    offered_work_s: float
    served: int
    within_slo: int
    goodput_s: float
    admitted: int
    attainment: float | None
    ttft_s: Quantiles
    queue_delay_s: Quantiles
    itl_p95_s: float | None
    refused: dict[str, int]
    left: int
    failed: int
    tries: int
    fairness: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """One simulation."""

    classes: tuple[ClassMeasures, ...]
    span_s: float
    weighted_goodput_s: float
    wasted: float
    recomputed_tokens: int
    saved_tokens: int
    preempted: int
    utilisation: float
    prediction_p50: float | None
    prediction_p95: float | None
    idle_refusals: int

    @property
    def goodput(self) -> float:
        """Weighted goodput a second of offered traffic."""
        return self.weighted_goodput_s / self.span_s

    @property
    def fairness(self) -> float:
        return min(one.fairness for one in self.classes)

    @property
    def share(self) -> float:
        return min(one.share for one in self.classes)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"goodput": self.goodput}


def measure(run: Run, policy: Policy) -> Measures:
    """Measure a run under the classes of a policy."""
    records, workload = run.records, run.workload
    demand = np.asarray(records.demand, dtype=np.int64)
    fate = np.asarray(records.fate, dtype=np.int64)
    arrived = np.asarray(records.arrived_at)
    first = np.asarray(records.first_at)
    classes = np.asarray(workload.class_index, dtype=np.int64)
    work = np.asarray(workload.work_s)
    tokens = np.asarray(records.tokens_out, dtype=np.float64)
    served = fate == Fate.SERVED
    with np.errstate(invalid="ignore"):
        ttft = first - arrived
        gap = (np.asarray(records.ended_at) - first) / np.maximum(tokens - 1.0, 1.0)
        good = served.copy()
        for index, one in enumerate(policy.classes):
            of_class = classes[demand] == index
            if one.slo.ttft_s is not None:
                good &= ~of_class | (ttft <= one.slo.ttft_s)
            if one.slo.itl_s is not None:
                good &= ~of_class | (gap <= one.slo.itl_s)
    shares = _shares(run, policy, demand, classes, work)
    measured = tuple(
        _class(
            run, policy, index, _Columns(demand, fate, classes, work, ttft, gap, served, good), shares[index]
        )
        for index in range(len(policy.classes))
    )
    predicted = np.asarray(records.predicted_ttft_s)
    known = served & ~np.isnan(predicted)
    order = np.argsort(arrived[known], kind="stable")
    error = (np.abs(predicted[known] - ttft[known]) / np.maximum(ttft[known], 1e-9))[order][LEARNING:]
    slos = [one.slo.ttft_s for one in policy.classes]
    return Measures(
        classes=measured,
        span_s=workload.span_s,
        weighted_goodput_s=sum(
            one.goodput_s * policy.classes[index].weight for index, one in enumerate(measured)
        ),
        wasted=_wasted(run, demand, served),
        recomputed_tokens=int(sum(records.recomputed)),
        saved_tokens=int(sum(records.saved)),
        preempted=run.preempted,
        utilisation=run.busy_s / run.end_s if run.end_s else 0.0,
        prediction_p50=float(np.quantile(error, 0.5)) if error.size else None,
        prediction_p95=float(np.quantile(error, 0.95)) if error.size else None,
        idle_refusals=sum(
            1
            for one, alone_s in run.idle_refusals
            if (slo := slos[workload.class_index[one]]) is None or alone_s <= slo
        ),
    )


@dataclass(frozen=True, slots=True)
class _Columns:
    """By try, but for `classes` and `work`, which are by demand."""

    demand: np.ndarray[Any, np.dtype[np.int64]]
    fate: np.ndarray[Any, np.dtype[np.int64]]
    classes: np.ndarray[Any, np.dtype[np.int64]]
    work: Floats
    ttft: Floats
    gap: Floats
    served: Bools
    good: Bools


def _class(run: Run, policy: Policy, index: int, columns: _Columns, share: float) -> ClassMeasures:
    records = run.records
    of_class = columns.classes[columns.demand] == index
    good = columns.good & of_class
    served = columns.served & of_class
    refused = of_class & ((columns.fate == Fate.REFUSED) | (columns.fate == Fate.EVICTED))
    admitted = int(np.count_nonzero(of_class & ~refused))
    started = np.asarray(records.started_at)
    delay = (started - np.asarray(records.arrived_at))[of_class & ~np.isnan(started)]
    mine = columns.classes == index
    reasons = Counter(records.reason[row] for row in np.flatnonzero(refused))
    gaps = columns.gap[served & (np.asarray(records.tokens_out) > 1)]
    return ClassMeasures(
        name=policy.classes[index].name,
        offered=int(np.count_nonzero(mine)),
        offered_work_s=float(columns.work[mine].sum()),
        served=int(np.count_nonzero(served)),
        within_slo=int(np.count_nonzero(good)),
        goodput_s=float(columns.work[columns.demand[good]].sum()),
        admitted=admitted,
        attainment=int(np.count_nonzero(good)) / admitted if admitted else None,
        ttft_s=Quantiles.of(columns.ttft[served]),
        queue_delay_s=Quantiles.of(delay),
        itl_p95_s=float(np.quantile(gaps, 0.95)) if gaps.size else None,
        refused=dict(sorted(reasons.items())),
        left=int(np.count_nonzero(of_class & (columns.fate == Fate.LEFT))),
        failed=int(np.count_nonzero(of_class & (columns.fate == Fate.FAILED))),
        tries=int(np.count_nonzero(of_class)),
        fairness=_fairness(run, index, columns, served),
        share=share,
    )


def max_min(claims: Sequence[float], total: float) -> list[float]:
    """What max-min fairness gives each claim of a total: nobody more than it claims, the rest in equal parts."""
    given = [0.0] * len(claims)
    left = total
    for done, index in enumerate(sorted(range(len(claims)), key=lambda i: claims[i])):
        given[index] = min(claims[index], left / (len(claims) - done))
        left -= given[index]
    return given


def jain(values: Sequence[float]) -> float:
    """Jain's index; 1 where there is nothing to share."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares > 0.0 else 1.0


def _fairness(run: Run, index: int, columns: _Columns, served: Bools) -> float:
    claims: dict[str, float] = {}
    given: dict[str, float] = {}
    for demand in np.flatnonzero(columns.classes == index):
        client = run.workload.clients[demand]
        claims[client] = claims.get(client, 0.0) + run.workload.work_s[demand]
    for demand in columns.demand[served]:
        client = run.workload.clients[demand]
        given[client] = given.get(client, 0.0) + run.workload.work_s[demand]
    names = sorted(claims)
    fair = max_min([claims[name] for name in names], sum(given.values()))
    return jain([given.get(name, 0.0) / part for name, part in zip(names, fair, strict=True) if part > 0.0])


def _shares(
    run: Run,
    policy: Policy,
    demand: np.ndarray[Any, np.dtype[np.int64]],
    classes: np.ndarray[Any, np.dtype[np.int64]],
    work: Floats,
) -> list[float]:
    started = np.asarray(run.records.started_at)
    begun = ~np.isnan(started)
    windows = 1 + int(max(run.end_s, run.workload.span_s) / SHARE_WINDOW_S)
    count = len(policy.classes)
    offered = np.zeros((count, windows))
    given = np.zeros((count, windows))
    at = np.minimum((np.asarray(run.records.arrived_at) / SHARE_WINDOW_S).astype(int), windows - 1)
    np.add.at(offered, (classes[demand], at), work[demand])
    start = np.minimum((started[begun] / SHARE_WINDOW_S).astype(int), windows - 1)
    np.add.at(given, (classes[demand[begun]], start), work[demand[begun]])
    weights = np.asarray([float(one.weight) for one in policy.classes])
    part = (weights / weights.sum())[:, None] * given.sum(axis=0)[None, :]
    claim = np.minimum(offered, part)
    had = np.minimum(given, claim)
    return [
        float(had[index].sum() / claim[index].sum()) if claim[index].sum() > 0.0 else 1.0
        for index in range(count)
    ]


def _wasted(run: Run, demand: np.ndarray[Any, np.dtype[np.int64]], served: Bools) -> float:
    workload, records, model = run.workload, run.records, run.model
    computed = np.asarray(records.computed, dtype=np.float64) * model.prefill_token_s
    prompts = np.asarray(workload.prompt_tokens, dtype=np.float64)[demand]
    tokens = np.asarray(records.tokens_out, dtype=np.float64)
    answers = np.where(tokens > 1.0, work_s(model, prompts, tokens) - prompts * model.prefill_token_s, 0.0)
    total = float((computed + answers).sum())
    return float((computed + answers)[~served].sum()) / total if total > 0.0 else 0.0
