"""The dashboard as Grafana's JSON, made with Grafana's foundation SDK from `panels`.

Deterministic: the same panels give the same bytes, so that the file in the chart can be compared. Whoever imports it
chooses the data source; namespace and policy are chosen from what the gates report.
"""

from __future__ import annotations

import json
from typing import Final

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

from sluicegate_operator.observability.panels import GRAFANA_POLICY, GRAFANA_WINDOW, ROWS, Panel

TITLE: Final = "Sluicegate"
#: Stays the same across versions, so that links to it live on.
UID: Final = "sluicegate"
SOURCE: Final = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
PANEL_HEIGHT: Final = 8
STAT_HEIGHT: Final = 4


def dashboard_json() -> str:
    """The whole dashboard, sorted and indented, with a line's end."""
    board = (
        dashboard.Dashboard(TITLE)
        .uid(UID)
        .description(
            "What is offered, what is refused and why, whether the SLO holds, and how many replicas it takes."
        )
        .tags(["sluicegate", "llm", "inference"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_choice("namespace", "Namespace", "sluicegate_requests_offered_total"))
        .with_variable(
            _choice("policy", "Policy", 'sluicegate_requests_offered_total{namespace="$namespace"}')
        )
    )
    for row in ROWS:
        board = board.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            board = board.with_panel(_panel(panel))
    built = json.loads(JSONEncoder().encode(board.build()))
    for number, one in enumerate(built["panels"], start=1):
        one["id"] = number
    return json.dumps(built, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _choice(name: str, label: str, series: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(f"label_values({series}, {name})")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )


def _panel(panel: Panel) -> timeseries.Panel | stat.Panel:
    made = _stat(panel) if panel.kind == "stat" else _lines(panel)
    made.title(panel.title).description(panel.question).unit(panel.unit).datasource(SOURCE).span(panel.width)
    for number, query in enumerate(panel.queries):
        target = (
            prometheus.Dataquery()
            .ref_id(chr(ord("A") + number))
            .datasource(SOURCE)
            .expr(query.rendered(GRAFANA_POLICY, GRAFANA_WINDOW))
        )
        made.with_target(target.legend_format(query.legend) if query.legend else target)
    return made


def _stat(panel: Panel) -> stat.Panel:
    return stat.Panel().height(STAT_HEIGHT).reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))


def _lines(panel: Panel) -> timeseries.Panel:
    legend = (
        common.VizLegendOptions()
        .display_mode(common_models.LegendDisplayMode.LIST)
        .placement(common_models.LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    tooltip = common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI)
    made = timeseries.Panel().height(PANEL_HEIGHT).min(0.0).legend(legend).tooltip(tooltip)
    made.show_points(common_models.VisibilityMode.NEVER)
    if panel.top is not None:
        made.max(panel.top)
    if panel.stacked:
        stacking = common.StackingConfig().mode(common_models.StackingMode.NORMAL)
        made.stacking(stacking).fill_opacity(20.0)
    return made
