"""The gate's report: documented field by field, true, monotonic, and null where a thing is not known."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.observed import BATCH, INTERACTIVE, Observed

from sluicegate_core.capacity import SAMPLE_EVERY_S
from sluicegate_core.effects import Truth
from sluicegate_core.policy import Classify, ClassPolicy, Policy
from sluicegate_core.vocabulary import EngineStatus, Reason
from sluicegate_sidecar.gate_report import MAX_PROBLEM_CHARS, MAX_PROBLEMS, GateReport

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


class Reported:
    """A gate on its standing clock, and its report. Samples are taken by hand, each half second of that clock."""

    def __init__(self, **given: object) -> None:
        self.gate = Observed(**given)  # type: ignore[arg-type]
        self.loop = asyncio.new_event_loop()
        self.report = GateReport(self.gate, self.loop)

    def close(self) -> None:
        self.report.close()
        self.loop.close()

    def read(self) -> dict[str, object]:
        """As it goes over the wire."""
        plain: dict[str, object] = json.loads(json.dumps(self.report.build(), allow_nan=False))
        return plain

    def passes(self, seconds: float) -> None:
        for _ in range(round(seconds / SAMPLE_EVERY_S)):
            self.gate.clock.now += SAMPLE_EVERY_S
            self.report.capacity.sample(self.gate.clock.now, self.gate.controller)


@pytest.fixture
def reported() -> Iterator[Reported]:
    one = Reported()
    yield one
    one.close()


def at(report: object, path: str) -> object:
    for step in path.split("."):
        assert isinstance(report, dict)
        report = report[step]
    return report


def leaves(report: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Every field, classes as NAME, and a count by reason as one field."""
    if isinstance(report, dict) and path.rpartition(".")[2] not in ("rejected", "evicted", "failed"):
        for key, value in report.items():
            name = "NAME" if path == "classes" else key
            yield from leaves(value, f"{path}.{name}" if path else name)
    else:
        yield path, report


def documented() -> dict[str, str]:
    """Field -> type, from the table of the report."""
    part = DOCUMENT.partition("### The gate's report")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `([\w.]+)` \| ([^|]+) \| [^|]+ \|$", part, re.MULTILINE))


def fits(value: object, kind: str) -> bool:
    if value is None:
        return kind.endswith("or null")
    match kind.removesuffix(" or null"):
        case "integer":
            return type(value) is int
        case "number":
            return type(value) in (int, float)
        case "string":
            return isinstance(value, str)
        case "strings":
            return isinstance(value, list) and all(isinstance(one, str) for one in value)
        case "boolean":
            return isinstance(value, bool)
        case "integers by reason":
            return isinstance(value, dict) and all(
                key in set(Reason) and type(one) is int for key, one in value.items()
            )
    raise AssertionError(f"no such type: {kind}")


@pytest.mark.parametrize("lived", [False, True])
def test_every_field_is_documented_with_its_type_and_no_other(reported: Reported, lived: bool) -> None:
    if lived:
        reported.gate.lives()
    kinds = documented()
    fields = dict(leaves(reported.read()))
    assert fields.keys() == kinds.keys()
    assert [name for name, value in fields.items() if not fits(value, kinds[name])] == []


def test_a_gate_that_has_seen_nothing_says_null_and_not_zero(reported: Reported) -> None:
    report = reported.read()
    for path in (
        "policy.error",
        "engine.reported_running",
        "engine.reported_age_s",
        "work.capacity.work_per_s",
    ):
        assert at(report, path) is None
    assert at(report, "work.capacity.age_s") is None
    assert at(report, "classes.batch.offered") == 0


def test_a_retry_is_offered_and_no_new_work(reported: Reported) -> None:
    first = reported.gate.arrives(BATCH)
    work = at(reported.read(), "classes.batch.work_offered")
    assert work == first.cost > 0
    again = reported.gate.arrives(BATCH, is_retry=True)
    report = reported.read()
    assert again.cost > 0
    assert at(report, "classes.batch.work_offered") == work
    assert (at(report, "classes.batch.offered"), at(report, "classes.batch.retries")) == (2, 1)


def test_who_is_refused_and_comes_back_is_one_demand(reported: Reported) -> None:
    reported.gate.controller.engine_status(reported.gate.clock.now, EngineStatus.DOWN)
    refused = reported.gate.arrives(INTERACTIVE, request_id=b"the same")
    reported.gate.controller.engine_status(reported.gate.clock.now, EngineStatus.UP)
    reported.gate.arrives(INTERACTIVE, request_id=b"the same")
    report = reported.read()
    assert at(report, "classes.interactive.work_offered") == refused.cost
    assert at(report, "classes.interactive.rejected") == {"engine_down": 1}


def test_estimates_and_what_they_proved_to_be_are_of_the_same_requests(reported: Reported) -> None:
    served, running = reported.gate.arrives(BATCH), reported.gate.arrives(BATCH)
    reported.gate.streams(served, tokens=8)
    reported.gate.finishes(served, prompt_tokens=100, output_tokens=8)
    report = reported.read()
    assert at(report, "classes.batch.work_predicted") == served.cost
    assert at(report, "classes.batch.work_served") == 100 + 2 * 8
    assert at(report, "classes.batch.work_offered") == served.cost + running.cost


def test_work_done_for_a_stream_that_was_cut_is_told_apart(reported: Reported) -> None:
    gate = reported.gate
    cut, unbegun = gate.arrives(BATCH), gate.arrives(BATCH)
    gate.streams(cut, tokens=5)
    gate.controller.cancel(gate.clock.now, cut)
    gate.controller.fail(gate.clock.now, unbegun, Reason.ENGINE_HUNG, Truth())
    report = reported.read()
    assert at(report, "classes.batch.work_failed") == cut.prompt_tokens + 2 * 5
    assert at(report, "classes.batch.work_served") == 0
    assert at(report, "classes.batch.failed") == {"client_gone": 1, "engine_hung": 1}


def test_what_was_counted_of_a_class_stays_when_it_is_gone(reported: Reported) -> None:
    gate = reported.gate
    gate.arrives(BATCH)
    only = Policy(classes=(ClassPolicy("interactive"),), classify=Classify(default="interactive"))
    gate.controller.reconfigure(gate.clock.now, only)
    report = reported.read()
    assert at(report, "classes.batch.offered") == 1
    assert (at(report, "classes.batch.running"), at(report, "classes.interactive.running")) == (0, 1)


def test_a_policy_that_was_refused_is_told_within_bounds(reported: Reported) -> None:
    reported.gate.reload.last_error = "x" * 10_000
    reported.gate.reload.problems = tuple("y" * 1000 for _ in range(100))
    policy = at(reported.read(), "policy")
    assert isinstance(policy, dict)
    assert len(policy["error"]) == MAX_PROBLEM_CHARS
    assert [len(one) for one in policy["problems"]] == [MAX_PROBLEM_CHARS] * MAX_PROBLEMS


def test_two_processes_have_two_names() -> None:
    first, second = Reported(), Reported()
    try:
        assert at(first.read(), "instance") != at(second.read(), "instance")
    finally:
        first.close()
        second.close()


def test_the_capacity_is_the_work_done_while_somebody_waited(reported: Reported) -> None:
    """Each half second one is served: 100 prompt tokens, as the engine says, and two output tokens that count twice."""
    reported.report.capacity = reported.gate.is_pressed()
    report = reported.read()
    assert at(report, "work.capacity.work_per_s") == pytest.approx((100 + 2 * 2) / 0.5, rel=0.05)
    assert at(report, "work.pressed") is True
    assert at(report, "work.pressed_s") == pytest.approx(9.5)
    assert at(report, "work.capacity.age_s") == pytest.approx(2.0)
