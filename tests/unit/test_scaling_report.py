"""A gate's report as the operator reads it: the gate's own are taken whole, and nothing else is believed."""

import asyncio
import json
from typing import Any

import pytest
from tests.unit.observed import Observed

from sluicegate_operator.scaling.report import MAX_REPORT_BYTES, GateReport, ReportError, parse_report
from sluicegate_sidecar.gate_report import GateReport as Writer


def written(observed: Observed) -> dict[str, Any]:
    """What a gate answers."""
    loop = asyncio.new_event_loop()
    writer = Writer(observed, loop)
    try:
        document: dict[str, Any] = json.loads(json.dumps(writer.build()))
        return document
    finally:
        writer.close()
        loop.close()


@pytest.fixture
def document() -> dict[str, Any]:
    observed = Observed()
    observed.lives()
    return written(observed)


def read(document: object) -> GateReport:
    return parse_report(json.dumps(document).encode())


def test_what_a_gate_writes_is_read(document: dict[str, Any]) -> None:
    report = read(document)
    assert report.instance == document["instance"]
    assert report.engine_status == "up"
    assert report.engine_slots == 2
    assert report.classes.keys() == {"interactive", "batch"}
    interactive = document["classes"]["interactive"]
    assert report.classes["interactive"].rejected == interactive["rejected"] == {"engine_down": 1}
    assert report.classes["interactive"].work_served == interactive["work_served"] > 0
    assert report.capacity.work_per_s is None


def test_a_gate_that_has_seen_nothing_is_read() -> None:
    report = read(written(Observed()))
    assert report.engine_reported_age_s is None
    assert report.capacity.age_s is None


def test_what_is_not_known_here_is_passed_over(document: dict[str, Any]) -> None:
    document["tomorrow"] = document["work"]["tomorrow"] = {"a": [1]}
    document["classes"]["batch"]["tomorrow"] = None
    assert read(document) == read({k: v for k, v in document.items() if k != "tomorrow"})


def set_at(document: dict[str, Any], path: str, value: object) -> None:
    *steps, last = path.split(".")
    for step in steps:
        document = document[step]
    if value is ...:
        del document[last]
    else:
        document[last] = value


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("version", 2, "version 2, and 1 is understood"),
        ("version", True, "report.version"),
        ("instance", ..., "report.instance is missing"),
        ("instance", None, "report.instance is null"),
        ("uptime_s", -1.0, "report.uptime_s"),
        ("uptime_s", "1", "report.uptime_s"),
        ("uptime_s", 10**400, "report.uptime_s"),
        ("draining", 1, "report.draining"),
        ("policy", [], "report.policy is no object"),
        ("policy.problems", ["a", 1], "report.policy.problems"),
        ("engine", ..., "report.engine is no object"),
        ("engine.running", 1.5, "report.engine.running"),
        ("classes.batch", None, "report.classes.batch is no object"),
        ("classes.batch.offered", -1, "report.classes.batch.offered"),
        ("classes.batch.rejected", {"ttft": "1"}, "report.classes.batch.rejected"),
        ("classes.batch.rejected", {str(n): 1 for n in range(100)}, "report.classes.batch.rejected"),
        ("classes", {str(n): {} for n in range(100)}, "100 entries"),
        ("work.capacity.work_per_s", ..., "report.work.capacity.work_per_s is missing"),
    ],
)
def test_what_is_no_report_is_said_by_its_place(
    document: dict[str, Any], path: str, value: object, says: str
) -> None:
    set_at(document, path, value)
    with pytest.raises(ReportError, match=says):
        read(document)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_are_finite(document: dict[str, Any], number: str) -> None:
    document["uptime_s"] = 12345.25
    text = json.dumps(document).replace("12345.25", number)
    with pytest.raises(ReportError, match=r"report\.uptime_s"):
        parse_report(text.encode())


@pytest.mark.parametrize("data", [b"", b"[", b"\xff\xfe", b"[]", b"null", b"[" * 200_000])
def test_what_is_not_json_is_no_report(data: bytes) -> None:
    with pytest.raises(ReportError):
        parse_report(data)


def test_a_report_has_a_largest_size() -> None:
    with pytest.raises(ReportError, match="bytes"):
        parse_report(b" " * (MAX_REPORT_BYTES + 1))
