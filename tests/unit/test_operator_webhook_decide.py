"""What is decided, apart from connections: errors of ours, warnings that kubectl can show, logs of one line."""

import io
import json
import logging
from typing import Any

import pytest

from sluicegate_core.policy import FailurePolicy, Injection, Policy, Selector
from sluicegate_operator.logs import ConsoleFormatter, JsonFormatter
from sluicegate_operator.webhook.decide import FailedError, Outcome, decide
from sluicegate_operator.webhook.policies import KnownPolicy
from sluicegate_operator.webhook.review import (
    MAX_WARNING_CHARS,
    MAX_WARNINGS,
    Review,
    allow,
    bounded_warnings,
)
from sluicegate_operator.webhook.settings import GateDefaults

CONTEXT = GateDefaults(image="example.com/sluicegate:1").context("serving", "llama", "a-token")
BROKEN = {"metadata": {"labels": {"app": "llama"}}, "spec": {"containers": 7}}


def known(failure_policy: FailurePolicy, **fields: Any) -> KnownPolicy:
    spec = Policy(selector=Selector(), injection=Injection(failure_policy=failure_policy))
    given = {"name": "llama", "created_at": "2026-01-01T00:00:00Z", "spec": spec} | fields
    return KnownPolicy(namespace="serving", uid="u", generation=1, **given)


def review(pod: dict[str, Any]) -> Review:
    return Review(
        uid="u", namespace="serving", operation="CREATE", resource=("", "v1", "pods"), subresource="", pod=pod,
        dry_run=False,
    )  # fmt: skip


def test_an_error_of_ours_lets_the_pod_pass_under_ignore() -> None:
    policy = known(FailurePolicy.IGNORE)
    decision = decide(review(BROKEN), policy, [policy], CONTEXT)
    assert decision.outcome is Outcome.FAILED
    assert decision.patch == []
    assert "the injection failed" in decision.warnings[0]


def test_an_error_of_ours_is_no_answer_under_fail() -> None:
    policy = known(FailurePolicy.FAIL)
    with pytest.raises(FailedError, match="AdmissionPolicy llama"):
        decide(review(BROKEN), policy, [policy], CONTEXT)


def test_a_policy_that_was_asked_for_counts_beside_its_neighbours() -> None:
    """It may not be in the table yet, while an older one is, or a younger one."""
    policy = known(FailurePolicy.IGNORE)
    older = known(FailurePolicy.IGNORE, name="older", created_at="2025-01-01T00:00:00Z")
    younger = known(FailurePolicy.IGNORE, name="younger", created_at="2027-01-01T00:00:00Z")
    pod = {"metadata": {"labels": {}}, "spec": {"hostNetwork": True, "containers": []}}
    assert decide(review(pod), policy, [], CONTEXT).outcome is Outcome.REFUSED
    assert decide(review(pod), policy, [younger], CONTEXT).outcome is Outcome.REFUSED
    assert decide(review(pod), policy, [older, younger], CONTEXT).outcome is Outcome.OTHER_OWNER


def test_a_policy_that_never_was_valid_owns_no_pod_of_anybody() -> None:
    invalid = known(FailurePolicy.IGNORE, name="a", created_at="2020-01-01T00:00:00Z", spec=None, problem="x")
    policy = known(FailurePolicy.IGNORE)
    pod = {"metadata": {"labels": {}}, "spec": {"hostNetwork": True, "containers": []}}
    assert decide(review(pod), policy, [invalid, policy], CONTEXT).outcome is Outcome.REFUSED


def test_a_pod_is_named_by_what_is_known_of_its_name() -> None:
    assert review({"metadata": {"name": "p"}}).pod_name == "p"
    assert review({"metadata": {"generateName": "p-"}}).pod_name == "p-*"
    assert review({}).pod_name == ""


# Warnings.


def test_long_warnings_are_broken_between_words_and_lose_nothing() -> None:
    words = [f"word{number}" for number in range(60)]
    lines = bounded_warnings([" ".join(words)])
    assert all(len(line) <= MAX_WARNING_CHARS for line in lines)
    assert " ".join(" ".join(lines).split()) == "sluicegate: " + " ".join(words)


def test_each_warning_says_who_warns_and_says_it_once() -> None:
    assert bounded_warnings(["one", "sluicegate: two"]) == ["sluicegate: one", "sluicegate: two"]


@pytest.mark.parametrize("warning", ["x" * 5000, "a\nb\x1b[31m\u2028c", "\x00" * 300])
def test_whatever_a_warning_holds_it_is_lines_that_can_be_shown(warning: str) -> None:
    lines = bounded_warnings([warning])
    assert lines
    assert all(line.isprintable() and len(line) <= MAX_WARNING_CHARS for line in lines)


def test_warnings_are_bounded_in_number() -> None:
    lines = bounded_warnings(f"warning {number}" for number in range(100))
    assert len(lines) == MAX_WARNINGS
    assert "log" in lines[-1]


def test_an_answer_without_a_patch_has_no_patch_type() -> None:
    """The API server refuses a type without a patch."""
    assert allow("u", patch=[]) == {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "response": {"uid": "u", "allowed": True},
    }


# Logs.


@pytest.mark.parametrize("formatter", [JsonFormatter(), ConsoleFormatter()])
def test_a_record_is_one_line_whatever_it_holds(formatter: logging.Formatter) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.warning("a\nforged line %s", "\x1b[2J", extra={"pod": "p\r\nq", "long": "y" * 100_000})
    assert stream.getvalue().count("\n") == 1
    assert "\x1b" not in stream.getvalue()
    assert len(stream.getvalue()) < 20_000


def test_a_record_as_json_has_its_fields_and_its_traceback() -> None:
    try:
        raise ValueError("a reason")
    except ValueError:
        record = logging.makeLogRecord(
            {"msg": "hello %s", "args": ("you",), "levelname": "ERROR", "name": "n", "policy": "llama"}
        )
        import sys

        record.exc_info = sys.exc_info()
    line = json.loads(JsonFormatter().format(record))
    assert (line["message"], line["level"], line["logger"], line["policy"]) == (
        "hello you",
        "error",
        "n",
        "llama",
    )
    assert line["exception"].endswith("ValueError: a reason")
