"""The alerts, as groups of Prometheus rules. The chart wraps them into a PrometheusRule.

Pure data. Each alert tells what is wrong for whom, and its description what to do about it. `warning` is for working
hours, `critical` for now. Thresholds have their reasons beside them; tests run each alert against series that fire it
and series that do not (promtool).

The SLO alerts burn an error budget over two windows each, a long one that it matters in and a short one that it goes
on in (Google SRE workbook, chapter 5): the objective is that of what is served, `OBJECTIVE` is within the SLO of its
class. Refusals are told apart: that they happen is the gate's work, that they go on is `SluicegateSustainedRefusal`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Share of served requests that is to be within the SLO of their class.
OBJECTIVE: Final = 0.99
#: Budget burnt so many times too fast: 2 % of a month's in an hour, and 5 % in six hours.
FAST_BURN: Final = 14.4
SLOW_BURN: Final = 6.0
#: Refused for want of room, of what is offered: above what the bursts of a well sized deployment cost.
REFUSED_SHARE: Final = 0.05
#: Refusals that more replicas would cure.
WANT_OF_ROOM: Final = "ttft|queue_time|queue_full"
#: An HPA's tolerance: above it the bounds of the policy cut the demand off.
TOLERANCE: Final = 1.1
#: Event loop lag at the 99th percentile, s: a tenth of a usual gap between tokens' SLO.
MAX_LAG_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert. `lasts` is how long it must hold before it fires."""

    name: str
    expr: str
    lasts: str
    severity: str
    summary: str
    description: str

    def rule(self) -> dict[str, object]:
        """As Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.lasts,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "description": self.description},
        }


_OF = "{{ $labels.namespace }}/{{ $labels.policy }}"


def _missed(window: str) -> str:
    """Share of what is served that misses its SLO."""
    by = "sum by (namespace, policy, class)"
    good = f"{by} (rate(sluicegate_requests_served_in_slo_total[{window}]))"
    return f"(1 - {good} / {by} (rate(sluicegate_requests_served_total[{window}])))"


def _burn(factor: float, long: str, short: str) -> str:
    budget = f"{factor:g} * {1 - OBJECTIVE:g}"
    return f"{_missed(long)} > {budget} and {_missed(short)} > {budget}"


TRAFFIC_ALERTS: Final = (
    Alert(
        name="SluicegateSustainedRefusal",
        expr=(
            "sum by (namespace, policy, class)"
            f' (rate(sluicegate_requests_rejected_total{{reason=~"{WANT_OF_ROOM}"}}[5m]))'
            f" / sum by (namespace, policy, class) (rate(sluicegate_requests_offered_total[5m])) > {REFUSED_SHARE:g}"
        ),
        lasts="10m",
        severity="warning",
        summary="{{ $labels.class }} of " + _OF + " is refused for want of room.",
        description=(
            "{{ $value | humanizePercentage }} of what is offered has been refused for ten minutes: there are too few "
            "replicas for it. See whether more are coming (Demand and replicas on the dashboard), whether maxReplicas "
            "cuts them off, and whether the SLO of the class is one that this engine can keep."
        ),
    ),
    Alert(
        name="SluicegateSloBurnFast",
        expr=_burn(FAST_BURN, "1h", "5m"),
        lasts="2m",
        severity="critical",
        summary="{{ $labels.class }} of " + _OF + " misses its SLO badly.",
        description=(
            "{{ $value | humanizePercentage }} of what was served in the last hour missed the SLO of its class. The "
            "gate lets too much through: see its predictions on the dashboard, and whether the engine has slowed down."
        ),
    ),
    Alert(
        name="SluicegateSloBurnSlow",
        expr=_burn(SLOW_BURN, "6h", "30m"),
        lasts="15m",
        severity="warning",
        summary="{{ $labels.class }} of " + _OF + " misses its SLO too often.",
        description=(
            "{{ $value | humanizePercentage }} of what was served in the last six hours missed the SLO of its class."
        ),
    ),
)

REPLICA_ALERTS: Final = (
    Alert(
        name="SluicegateDemandAboveBounds",
        expr=f"sluicegate_operator_demand_replicas > {TOLERANCE:g} * sluicegate_operator_wanted_replicas",
        lasts="15m",
        severity="warning",
        summary=_OF + " needs more replicas than maxReplicas allows.",
        description="It needs {{ $value | humanize }}. Raise spec.autoscaling.maxReplicas, or accept refusals.",
    ),
    Alert(
        name="SluicegateDemandUnknown",
        expr="sluicegate_operator_demand_known == 0",
        lasts="15m",
        severity="warning",
        summary="The demand of " + _OF + " is not known: its replicas are held.",
        description=(
            "Nothing scales it in the meantime. GET /scaling/NAMESPACE/POLICY on the reconciler says why, as does the "
            "policy's condition CapacityNeeded."
        ),
    ),
    Alert(
        name="SluicegateGatesSilent",
        expr="sluicegate_operator_silent_gates > 0",
        lasts="5m",
        severity="warning",
        summary="{{ $value }} gates of " + _OF + " do not answer.",
        description=(
            "What their pods are offered is not seen. See the policy's status for which they are, and whether a "
            "NetworkPolicy keeps the operator from port 9901 of these pods."
        ),
    ),
    Alert(
        name="SluicegatePodsNotGated",
        expr="sluicegate_operator_ungated_pods > 0",
        lasts="10m",
        severity="warning",
        summary="{{ $value }} pods of " + _OF + " have no gate.",
        description=(
            "They take whatever comes. They were created while no webhook answered, or before the policy: restart them "
            "(the policy's status has the command), or let spec.rollout: Restart do it."
        ),
    ),
)

GATE_ALERTS: Final = (
    Alert(
        name="SluicegatePolicyRefused",
        expr="min by (namespace, policy) (sluicegate_policy_last_reload_success) == 0",
        lasts="5m",
        severity="warning",
        summary="Gates of " + _OF + " refuse their policy.",
        description=(
            "The last good one stays in force. The gates' /debug/state and logs say which field is wrong; a gate older "
            "than the operator may not know a new one."
        ),
    ),
    Alert(
        name="SluicegatePoliciesDiffer",
        expr="count by (namespace, policy) (count by (namespace, policy, hash) (sluicegate_policy_info)) > 1",
        lasts="10m",
        severity="warning",
        summary="The gates of " + _OF + " do not all enforce the same policy.",
        description="A change arrives within seconds. See on the dashboard which pods are behind, and their nodes.",
    ),
    Alert(
        name="SluicegateEngineDown",
        expr='sluicegate_engine_status{status="down"} == 1',
        lasts="5m",
        severity="critical",
        summary="The engine of {{ $labels.pod }} (" + _OF + ") is down.",
        description="Its gate answers 503 until it is back. See the logs of the engine's container.",
    ),
    Alert(
        name="SluicegateGateSlow",
        expr=(
            "histogram_quantile(0.99, sum by (namespace, policy, pod, le)"
            f" (rate(sluicegate_event_loop_lag_seconds_bucket[5m]))) > {MAX_LAG_S:g}"
        ),
        lasts="10m",
        severity="warning",
        summary="The gate of {{ $labels.pod }} (" + _OF + ") is short of CPU.",
        description=(
            "Events wait {{ $value | humanizeDuration }} for their turn, tokens of every stream among them. Raise the "
            "CPU of the gate (spec.gate.resources), or take its limit away."
        ),
    ),
)

GROUPS: Final = {
    "sluicegate.traffic": TRAFFIC_ALERTS,
    "sluicegate.replicas": REPLICA_ALERTS,
    "sluicegate.gates": GATE_ALERTS,
}


def groups() -> list[dict[str, object]]:
    """As in `spec.groups` of a PrometheusRule, and in a file of rules."""
    return [{"name": name, "rules": [alert.rule() for alert in alerts]} for name, alerts in GROUPS.items()]
