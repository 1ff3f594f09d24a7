"""The board's metrics: documented, true, and absent where a thing is not known."""

import re
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.test_scaling_endpoint import BOUNDS, KEY, World

from sluicegate_operator.scaling import BoardCollector
from sluicegate_operator.scaling.metrics import FAMILIES, POLICY_LABELS, STATE_LABEL

DOCUMENT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")


def scraped(world: World) -> dict[str, dict[tuple[str, ...], float]]:
    """Name -> labels' values -> value, read by Prometheus' own parser."""
    registry = CollectorRegistry()
    registry.register(BoardCollector(world.board))
    return {
        family.name: {tuple(sample.labels.values()): sample.value for sample in family.samples}
        for family in text_string_to_metric_families(generate_latest(registry).decode())
    }


def test_every_one_is_documented_with_its_labels() -> None:
    part = DOCUMENT.partition("### Demand")[2]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]+) \|", part, re.MULTILINE)
    found = {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    ours = {
        name: ("gauge", POLICY_LABELS + ((STATE_LABEL[name],) if name in STATE_LABEL else ()))
        for name in FAMILIES
    }
    assert {name: found.get(name) for name in ours} == ours


def test_a_known_demand_has_all_of_them() -> None:
    world = World()
    world.polls()
    metrics = scraped(world)
    assert metrics.keys() == FAMILIES.keys()
    assert metrics["sluicegate_operator_demand_replicas"] == {KEY: 2.0}
    assert metrics["sluicegate_operator_wanted_replicas"] == {KEY: 2.0}
    assert metrics["sluicegate_operator_replicas"][*KEY, "ready"] == 1.0
    assert metrics["sluicegate_operator_capacity_work_per_second"] == {KEY: 100.0}


def test_an_unknown_one_is_absent_and_says_so() -> None:
    world = World()
    world.gate.answers = False
    world.polls()
    metrics = scraped(world)
    assert metrics["sluicegate_operator_demand_known"] == {KEY: 0.0}
    assert metrics["sluicegate_operator_silent_gates"] == {KEY: 1.0}
    assert "sluicegate_operator_demand_replicas" not in metrics
    assert "sluicegate_operator_wanted_replicas" not in metrics


def test_a_number_that_is_too_old_is_unknown_here_as_well() -> None:
    world = World()
    world.polls()
    world.now += 60.0
    metrics = scraped(world)
    assert metrics["sluicegate_operator_demand_known"] == {KEY: 0.0}
    assert "sluicegate_operator_demand_replicas" not in metrics


def test_a_policy_that_has_gone_leaves_nothing() -> None:
    world = World()
    world.board.post(KEY, [], BOUNDS)
    world.board.forget(KEY)
    assert scraped(world) == {}
