"""The dashboard and the alerts: as generated, made of documented metrics, and each alert tried by promtool."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from sluicegate_operator.observability.__main__ import files
from sluicegate_operator.observability.panels import ROWS
from sluicegate_operator.observability.rules import GROUPS, groups

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "sluicegate"
DOCUMENT = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
ALERTS = {alert.name: alert for alerts in GROUPS.values() for alert in alerts}


def metrics_in(text: str) -> set[str]:
    """Names of metrics in queries, without what histograms append."""
    names = re.findall(r"\b(?:sluicegate|process)_\w+\b(?!\.)", text)
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in names}


def promtool(*arguments: str | Path) -> str:
    program = shutil.which("promtool")
    assert program, "promtool is needed: scripts/system-packages prometheus"
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", sorted(files()))
def test_the_chart_has_what_is_generated(name: str) -> None:
    """Run `python -m sluicegate_operator.observability` where this fails."""
    assert (CHART / name).read_text(encoding="utf-8") == files()[name]


@pytest.mark.parametrize("name", sorted(files()))
def test_every_metric_is_documented(name: str) -> None:
    documented = set(re.findall(r"^\| `(\w+)` \|", DOCUMENT, re.MULTILINE))
    used = metrics_in(files()[name])
    assert used
    assert used <= documented


def test_every_panel_asks_something_and_fits_its_line() -> None:
    for row in ROWS:
        width = sum(panel.width for panel in row.panels)
        assert width % 24 == 0, row.title
        for panel in row.panels:
            assert panel.queries
            assert panel.question.endswith(".")


def test_the_dashboard_can_be_imported_anywhere() -> None:
    """No identity of a data source, none of an instance, unique ids, and variables for all that queries use."""
    board: dict[str, Any] = json.loads(files()["dashboards/sluicegate.json"])
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {one["name"] for one in board["templating"]["list"]}
    assert variables == {"datasource", "namespace", "policy"}
    for panel in panels:
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert [one["refId"] for one in panel["targets"]] == list("ABCDEF")[: len(panel["targets"])]
        for target in panel["targets"]:
            assert 'namespace="$namespace", policy="$policy"' in target["expr"]
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= {"namespace", "policy", "__rate_interval"}


def test_every_query_is_promql(tmp_path: Path) -> None:
    """As recording rules, which promtool parses."""
    queries = [
        query.rendered('namespace="a", policy="b"', "1m")
        for row in ROWS
        for panel in row.panels
        for query in panel.queries
    ]
    rules = [{"record": f"query:{number}", "expr": expr} for number, expr in enumerate(queries)]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    assert f"{len(queries)} rules found" in promtool("check", "rules", path)


def test_the_rules_are_rules() -> None:
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", CHART / "rules" / "sluicegate.yaml")


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_every_alert_says_for_whom_and_what_to_do(name: str) -> None:
    alert = ALERTS[name]
    assert alert.severity in ("warning", "critical")
    assert "{{ $labels.namespace }}/{{ $labels.policy }}" in alert.summary
    assert len(alert.description) > 60


def test_the_document_lists_the_alerts_with_their_severity_and_time() -> None:
    rows = re.findall(r"^\| `(Sluicegate\w+)` \| (\w+) \| ([^|]+) \|$", DOCUMENT, re.MULTILINE)
    assert {name: severity for name, severity, _ in rows} == {n: a.severity for n, a in ALERTS.items()}
    for name, _, text in rows:
        if "Slo" not in name:
            assert f"{in_minutes(ALERTS[name].lasts)} min" in text, name


# Each alert against series that fire it, and against series that do not.

OF = 'namespace="serving", policy="llama"'
POD = f'{OF}, pod="a"'


def counter(name: str, labels: str, a_minute: float) -> dict[str, str]:
    return {"series": f"sluicegate_{name}{{{labels}}}", "values": f"0+{a_minute}x400"}


def gauge(name: str, labels: str, value: float) -> dict[str, str]:
    return {"series": f"sluicegate_{name}{{{labels}}}", "values": f"{value}x400"}


def refused(a_minute: float, reason: str = "ttft") -> list[dict[str, str]]:
    labels = f'{POD}, class="chat"'
    return [
        counter("requests_offered_total", labels, 100.0),
        counter("requests_rejected_total", f'{labels}, reason="{reason}"', a_minute),
    ]


def missed(a_minute: float) -> list[dict[str, str]]:
    labels = f'{POD}, class="chat"'
    return [
        counter("requests_served_total", labels, 1000.0),
        counter("requests_served_in_slo_total", labels, 1000.0 - a_minute),
    ]


def policies(*hashes: str) -> list[dict[str, str]]:
    return [
        gauge("policy_info", f'{OF}, pod="{number}", hash="{one}", mode="Enforce"', 1.0)
        for number, one in enumerate(hashes)
    ]


def lag(seconds: float) -> list[dict[str, str]]:
    """All samples in the bucket below that."""
    bounds = [0.01, 0.025, 0.1, 0.25]
    return [
        counter("event_loop_lag_seconds_bucket", f'{POD}, le="{bound}"', 240.0 if bound >= seconds else 0.0)
        for bound in bounds
    ] + [counter("event_loop_lag_seconds_bucket", f'{POD}, le="+Inf"', 240.0)]


#: Alert -> series that fire it, series that do not, and the labels it fires with.
CASES: dict[str, tuple[list[list[dict[str, str]]], list[list[dict[str, str]]], dict[str, str]]] = {
    "SluicegateSustainedRefusal": (
        [refused(6.0), refused(100.0, "queue_time")],
        [refused(4.0), refused(100.0, "engine_down"), refused(100.0, "draining"), refused(0.0)],
        {"class": "chat"},
    ),
    "SluicegateSloBurnFast": ([missed(150.0)], [missed(140.0), missed(0.0)], {"class": "chat"}),
    "SluicegateSloBurnSlow": ([missed(65.0)], [missed(55.0), missed(0.0)], {"class": "chat"}),
    "SluicegateDemandAboveBounds": (
        [[gauge("operator_demand_replicas", OF, 9.0), gauge("operator_wanted_replicas", OF, 8.0)]],
        [[gauge("operator_demand_replicas", OF, 7.3), gauge("operator_wanted_replicas", OF, 8.0)]],
        {},
    ),
    "SluicegateDemandUnknown": (
        [[gauge("operator_demand_known", OF, 0.0)]],
        [[gauge("operator_demand_known", OF, 1.0)]],
        {},
    ),
    "SluicegateGatesSilent": (
        [[gauge("operator_silent_gates", OF, 2.0)]],
        [[gauge("operator_silent_gates", OF, 0.0)]],
        {},
    ),
    "SluicegatePodsNotGated": (
        [[gauge("operator_ungated_pods", OF, 1.0)]],
        [[gauge("operator_ungated_pods", OF, 0.0)]],
        {},
    ),
    "SluicegatePolicyRefused": (
        [[gauge("policy_last_reload_success", POD, 0.0)]],
        [[gauge("policy_last_reload_success", POD, 1.0)]],
        {},
    ),
    "SluicegatePoliciesDiffer": ([policies("0a", "0b")], [policies("0a", "0a")], {}),
    "SluicegateEngineDown": (
        [[gauge("engine_status", f'{POD}, status="down"', 1.0)]],
        [[gauge("engine_status", f'{POD}, status="down"', 0.0), gauge("engine_status", f'{POD}, status="up"', 1.0)]],
        {"pod": "a", "status": "down"},
    ),
    "SluicegateGateSlow": ([lag(0.1)], [lag(0.025)], {"pod": "a"}),
}  # fmt: skip


def in_minutes(lasts: str) -> int:
    assert lasts.endswith("m")
    return int(lasts[:-1])


def tried(name: str, series: list[dict[str, str]], labels: dict[str, str] | None) -> dict[str, Any]:
    """A test for promtool: after hours of these series the alert fires with those labels, or not at all."""
    checks: list[dict[str, Any]] = []
    for minutes in (380, 400):
        expected = [] if labels is None else [{"exp_labels": {"severity": ALERTS[name].severity, **labels}}]
        checks.append({"eval_time": f"{minutes}m", "alertname": name, "exp_alerts": expected})
    return {"interval": "1m", "input_series": series, "alert_rule_test": checks}


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_each_alert_fires_when_it_should_and_only_then(name: str, tmp_path: Path) -> None:
    fires, stays_quiet, more = CASES[name]
    labels = {"namespace": "serving", "policy": "llama", **more}
    # promtool compares annotations as well; what they say is looked at elsewhere.
    bare = [
        {**group, "rules": [{k: v for k, v in rule.items() if k != "annotations"} for rule in group["rules"]]}  # type: ignore[attr-defined]
        for group in groups()
    ]
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump({"groups": bare}))
    tests = [tried(name, series, labels) for series in fires] + [
        tried(name, series, None) for series in stays_quiet
    ]
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(rules)], "tests": tests}))
    promtool("test", "rules", path)


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_an_alert_does_not_fire_at_once(name: str, tmp_path: Path) -> None:
    """Half of `for` after its series begin it is quiet; with the shortest of them, too."""
    fires, _, _ = CASES[name]
    quiet_until = in_minutes(ALERTS[name].lasts) // 2
    rules = tmp_path / "rules.yaml"
    rules.write_text(files()["rules/sluicegate.yaml"])
    checks = [{"eval_time": f"{quiet_until}m", "alertname": name, "exp_alerts": []}]
    tests = [{"interval": "1m", "input_series": series, "alert_rule_test": checks} for series in fires]
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(rules)], "tests": tests}))
    promtool("test", "rules", path)


def test_what_an_alert_says_is_filled_in(tmp_path: Path) -> None:
    """Through promtool, which renders annotations as Prometheus does."""
    alert = ALERTS["SluicegateSustainedRefusal"]
    expected = {
        "exp_labels": {"severity": "warning", "namespace": "serving", "policy": "llama", "class": "chat"},
        "exp_annotations": {
            "summary": "chat of serving/llama is refused for want of room.",
            "description": alert.description.replace("{{ $value | humanizePercentage }}", "25%"),
        },
    }
    rules = tmp_path / "rules.yaml"
    rules.write_text(files()["rules/sluicegate.yaml"])
    checks = [{"eval_time": "60m", "alertname": alert.name, "exp_alerts": [expected]}]
    tests = [{"interval": "1m", "input_series": refused(25.0), "alert_rule_test": checks}]
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(rules)], "tests": tests}))
    promtool("test", "rules", path)
