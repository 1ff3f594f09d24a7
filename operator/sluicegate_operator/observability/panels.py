"""The questions that the dashboard answers, row by row, and their queries.

Pure data. In a query `$policy` stands for the matchers of the policy that is looked at, and `$window` for the range
of a rate; `rendered` fills them in, for Grafana with its variables and for a test with what it made.

A query never shows nothing for "none": where a series may be missing because a thing has not happened, the gates
export 0 from the start; what is absent is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Matchers of the gates' and the operator's series of one policy.
POLICY: Final = "$policy"
WINDOW: Final = "$window"
#: The same for Grafana: its variables, and the range that fits the scrape interval and the resolution.
GRAFANA_POLICY: Final = 'namespace="$namespace", policy="$policy"'
GRAFANA_WINDOW: Final = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL, and the legend of its series in Grafana's words."""

    expr: str
    legend: str = ""

    def rendered(self, policy: str, window: str) -> str:
        """The query with its two placeholders filled in."""
        return self.expr.replace(POLICY, policy).replace(WINDOW, window)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One question. `unit` is Grafana's; `kind` is `timeseries` or `stat`; widths add up to 24 a line."""

    title: str
    question: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    width: int = 12
    top: float | None = None  # of the axis
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """Panels that belong together."""

    title: str
    panels: tuple[Panel, ...]


def _rate(metric: str, by: str) -> str:
    return f"sum by ({by}) (rate(sluicegate_{metric}{{{POLICY}}}[{WINDOW}]))"


def _quantile(quantile: float, metric: str) -> str:
    return f"histogram_quantile({quantile}, {_rate(metric + '_bucket', 'class, le')})"


def _quantiles(metric: str) -> tuple[Query, ...]:
    return (
        Query(_quantile(0.5, metric), "{{class}} p50"),
        Query(_quantile(0.95, metric), "{{class}} p95"),
    )


def _share(part: str, whole: str, by: str) -> str:
    return f"{_rate(part, by)} / {_rate(whole, by)}"


def _now(metric: str, by: str, more: str = "") -> str:
    return f"sum by ({by}) (sluicegate_{metric}{{{POLICY}{more}}})"


def _operator(metric: str, more: str = "") -> str:
    return f"sluicegate_operator_{metric}{{{POLICY}{more}}}"


def _up_to(ratio: str) -> str:
    """Predictions of at most so many times the actual."""
    series = f'sluicegate_ttft_prediction_ratio_bucket{{{POLICY}, le="{ratio}"}}'
    return f"sum by (class) (rate({series}[{WINDOW}]))"


AT_A_GLANCE: Final = Row(
    "At a glance",
    (
        Panel(
            title="Served within the SLO",
            question="Of what is served, the share within the SLO of its class.",
            unit="percentunit",
            kind="stat",
            width=6,
            queries=(Query(_share("requests_served_in_slo_total", "requests_served_total", "policy")),),
        ),
        Panel(
            title="Refused",
            question="Of what is offered, the share that is refused at arrival.",
            unit="percentunit",
            kind="stat",
            width=6,
            queries=(Query(_share("requests_rejected_total", "requests_offered_total", "policy")),),
        ),
        Panel(
            title="Replicas needed",
            question="The demand. Nothing is shown while it cannot be told.",
            unit="short",
            kind="stat",
            width=6,
            queries=(Query(_operator("demand_replicas")),),
        ),
        Panel(
            title="Ready replicas without a word",
            question="Ready pods whose gate does not answer, or that have none. What they are offered is not seen.",
            unit="short",
            kind="stat",
            width=6,
            queries=(Query(f"{_operator('silent_gates')} + {_operator('ungated_pods')}"),),
        ),
    ),
)

TRAFFIC: Final = Row(
    "Traffic",
    (
        Panel(
            title="Offered",
            question="Requests that arrive, by class; retries included.",
            unit="reqps",
            queries=(
                Query(_rate("requests_offered_total", "class"), "{{class}}"),
                Query(_rate("requests_retries_total", "policy"), "retries, all classes"),
            ),
        ),
        Panel(
            title="Refused, by reason",
            question="Requests that are refused at arrival, or leave the line unserved.",
            unit="reqps",
            stacked=True,
            queries=(
                Query(_rate("requests_rejected_total", "reason"), "{{reason}}"),
                Query(_rate("requests_evicted_total", "reason"), "{{reason}} (waited in vain)"),
            ),
        ),
        Panel(
            title="Queue delay",
            question="Arrival to hand-over, of what reaches the engine.",
            unit="s",
            queries=_quantiles("queue_delay_seconds"),
        ),
        Panel(
            title="Failed, by reason",
            question="Requests that were handed to the engine and not served.",
            unit="reqps",
            stacked=True,
            queries=(Query(_rate("requests_failed_total", "reason"), "{{reason}}"),),
        ),
    ),
)

SLO: Final = Row(
    "SLO",
    (
        Panel(
            title="Served within the SLO, of what is served",
            question="How well the promise is kept to those who get one.",
            unit="percentunit",
            top=1.0,
            queries=(
                Query(_share("requests_served_in_slo_total", "requests_served_total", "class"), "{{class}}"),
            ),
        ),
        Panel(
            title="Served within the SLO, of all that is offered",
            question="Goodput: refusals and retries count against it.",
            unit="percentunit",
            top=1.0,
            queries=(
                Query(_share("requests_served_in_slo_total", "requests_offered_total", "class"), "{{class}}"),
            ),
        ),
        Panel(
            title="Time to first token",
            question="Arrival at the gate to the first token, and what is promised.",
            unit="s",
            queries=(
                *_quantiles("ttft_seconds"),
                Query(f"max by (class) (sluicegate_class_slo_ttft_seconds{{{POLICY}}})", "{{class}} SLO"),
            ),
        ),
        Panel(
            title="Between tokens",
            question="Gaps between the tokens of a stream.",
            unit="s",
            queries=_quantiles("inter_token_seconds"),
        ),
    ),
)

DEMAND: Final = Row(
    "Demand and replicas",
    (
        Panel(
            title="Replicas, needed and there",
            question="The demand, and what runs. The demand is not shown while it cannot be told.",
            unit="short",
            queries=(
                Query(_operator("demand_replicas"), "needed"),
                Query(_operator("wanted_replicas"), "wanted, within the bounds"),
                Query(_operator("replicas", ', state=~"ready|starting"'), "{{state}}"),
            ),
        ),
        Panel(
            title="Offered work, and what one replica can do",
            question="In prompt tokens a second, an output token as two.",
            unit="short",
            queries=(
                Query(_operator("offered_work_per_second"), "offered"),
                Query(_operator("capacity_work_per_second"), "one replica, measured"),
            ),
        ),
        Panel(
            title="Pressed",
            question="Share of the time in which a replica has as much as it can take.",
            unit="percentunit",
            top=1.0,
            queries=(Query(_rate("pressed_seconds_total", "pod"), "{{pod}}"),),
        ),
        Panel(
            title="In the gates and with the engines",
            question="Requests that wait, and requests that run.",
            unit="short",
            queries=(
                Query(_now("requests_waiting", "class"), "{{class}} waiting"),
                Query(_now("requests_running", "class"), "{{class}} running"),
            ),
        ),
    ),
)

GATES: Final = Row(
    "Gates",
    (
        Panel(
            title="Engines, by state",
            question="As the gates find them.",
            unit="short",
            width=8,
            queries=(Query(_now("engine_status", "status"), "{{status}}"),),
        ),
        Panel(
            title="Policies in force",
            question="Gates by the policy that they enforce; for long more than one is a policy that does not arrive.",
            unit="short",
            width=8,
            queries=(
                Query(f"count by (hash, mode) (sluicegate_policy_info{{{POLICY}}})", "{{hash}} {{mode}}"),
            ),
        ),
        Panel(
            title="Event loop lag",
            question="What any event in a gate may have to wait for its turn, at the 99th percentile.",
            unit="s",
            width=8,
            queries=(
                Query(
                    f"histogram_quantile(0.99, {_rate('event_loop_lag_seconds_bucket', 'pod, le')})",
                    "{{pod}}",
                ),
            ),
        ),
        Panel(
            title="CPU",
            question="Cores that a gate uses.",
            unit="short",
            queries=(
                Query(f"sum by (pod) (rate(process_cpu_seconds_total{{{POLICY}}}[{WINDOW}]))", "{{pod}}"),
            ),
        ),
        Panel(
            title="Memory",
            question="Resident memory of a gate.",
            unit="bytes",
            queries=(Query(f"sum by (pod) (process_resident_memory_bytes{{{POLICY}}})", "{{pod}}"),),
        ),
    ),
)

PREDICTIONS: Final = Row(
    "Predictions",
    (
        Panel(
            title="Predicted over actual time to first token",
            question="1 is right; below it the gate was too hopeful.",
            unit="short",
            queries=_quantiles("ttft_prediction_ratio"),
        ),
        Panel(
            title="Predictions within 25 %",
            question="Share of the first tokens that came within a quarter of the predicted time.",
            unit="percentunit",
            top=1.0,
            queries=(
                Query(
                    f"({_up_to('1.25')} - {_up_to('0.8')}) / {_rate('ttft_prediction_ratio_count', 'class')}",
                    "{{class}}",
                ),
            ),
        ),
    ),
)

ROWS: Final = (AT_A_GLANCE, TRAFFIC, SLO, DEMAND, GATES, PREDICTIONS)
