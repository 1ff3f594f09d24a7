"""What is on the board, in Prometheus' words: the second clock's half of the operator's metrics.

`FAMILIES` is the list of them; docs/metrics.md says the same to people, dashboards and alerts are made of them. As
everywhere: unknown is absent, never 0. Labels are the policies that there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sluicegate_operator.scaling.board import Board
from sluicegate_operator.scaling.demand import Demand

POLICY_LABELS: Final = ("namespace", "policy")

#: Name -> what it means. All are gauges with `POLICY_LABELS`; `STATE_LABEL` is the one that has another.
FAMILIES: Final[dict[str, str]] = {
    "sluicegate_operator_demand_replicas": "Replicas that what is offered needs; not cut to the policy's bounds.",
    "sluicegate_operator_demand_known": "1 while the demand can be told, 0 while it cannot: replicas are held then.",
    "sluicegate_operator_wanted_replicas": "Whole replicas that an autoscaler would run on it, within the bounds.",
    "sluicegate_operator_replicas": "Pods that the policy selects, by what they are doing.",
    "sluicegate_operator_silent_gates": "Ready pods whose gate has not answered lately.",
    "sluicegate_operator_ungated_pods": "Ready pods without a gate.",
    "sluicegate_operator_offered_work_per_second": "Offered work, in prompt tokens; each demand once.",
    "sluicegate_operator_capacity_work_per_second": "Work that one replica was measured to do.",
}
STATE_LABEL: Final = {"sluicegate_operator_replicas": "state"}


class BoardCollector(Collector):
    """Reads the board when it is scraped, on the loop that owns it."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def collect(self) -> Iterator[Metric]:
        metrics = {
            name: GaugeMetricFamily(name, text, labels=(*POLICY_LABELS, *_more(name)))
            for name, text in FAMILIES.items()
        }
        for labels, name, value in self._read():
            metrics[f"sluicegate_operator_{name}"].add_metric(labels, value)
        yield from (metric for metric in metrics.values() if metric.samples)

    def _read(self) -> Iterator[tuple[tuple[str, ...], str, float]]:
        for key in self._board.policies:
            found = self._board.read(key)
            if found is None:
                continue
            answer, _ = found
            labels = key.namespace, key.name
            yield labels, "demand_known", float(isinstance(answer, Demand))
            fleet = answer.fleet
            yield (*labels, "ready"), "replicas", fleet.ready
            yield (*labels, "starting"), "replicas", fleet.starting
            yield (*labels, "leaving"), "replicas", fleet.leaving
            yield labels, "silent_gates", fleet.silent
            yield labels, "ungated_pods", fleet.ungated
            if isinstance(answer, Demand):
                yield labels, "demand_replicas", answer.replicas
                yield labels, "wanted_replicas", answer.wanted
                yield labels, "offered_work_per_second", answer.work_per_s
                if answer.capacity_per_s is not None:
                    yield labels, "capacity_work_per_second", answer.capacity_per_s


def _more(name: str) -> tuple[str, ...]:
    return (STATE_LABEL[name],) if name in STATE_LABEL else ()
