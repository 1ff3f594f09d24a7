"""The policy of the demo: written from what was measured, or read from a file with every problem told."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluicegate_lab.calibrate import Capacity
from sluicegate_lab.demo_policy import PolicyFileError, default_policy, read_policy
from sluicegate_lab.traffic import BATCH, INTERACTIVE, WorkCost


def capacity(*, idle_ttft_s: float = 0.1, full_gap_s: float = 0.03) -> Capacity:
    return Capacity(
        cost=WorkCost(0.002, 0.005),
        idle_ttft_s=idle_ttft_s,
        full_gap_s=full_gap_s,
        requests_per_s=2.0,
        output_tokens_per_s=100.0,
        mean_output_tokens=50.0,
    )


def test_a_quick_engine_is_held_to_a_second() -> None:
    goals = default_policy(capacity(), "llama.cpp").goals
    assert goals[INTERACTIVE].ttft_s == 1.0
    assert goals[INTERACTIVE].itl_s == pytest.approx(0.09)
    assert goals[INTERACTIVE].weight == 10
    assert goals[BATCH].ttft_s == 20.0
    assert goals[BATCH].itl_s is None


def test_a_slow_engine_is_held_to_four_times_its_idle_time() -> None:
    goals = default_policy(capacity(idle_ttft_s=0.512, full_gap_s=0.2), "llama.cpp").goals
    assert goals[INTERACTIVE].ttft_s == pytest.approx(2.1)
    assert goals[INTERACTIVE].itl_s == pytest.approx(0.6)


def test_the_default_policy_tells_classes_and_clients_as_the_client_does() -> None:
    policy = default_policy(capacity(), "Auto").policy
    assert policy.classify.default == INTERACTIVE
    assert policy.classify.client_header == "x-client-id"
    assert [(rule.header, rule.values, rule.class_name) for rule in policy.classify.rules] == [
        ("x-admission-class", (BATCH,), BATCH)
    ]


def test_a_file_may_hold_the_spec_or_the_whole_object(tmp_path: Path) -> None:
    spec = default_policy(capacity(), "llama.cpp").text
    bare, whole = tmp_path / "spec.yaml", tmp_path / "object.yaml"
    bare.write_text(spec)
    indented = "".join(f"  {line}\n" for line in spec.splitlines())
    whole.write_text(
        f"apiVersion: sluicegate.dev/v1alpha1\nkind: AdmissionPolicy\nmetadata: {{name: x}}\nspec:\n{indented}"
    )
    assert read_policy(bare).policy == read_policy(whole).policy


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("classes: [", "not YAML"),
        ("classes:\n- {name: interactive}\n- {name: batch, wieght: 3}\n", "weight"),
        ("classes:\n- {name: interactive}\n", "no class batch"),
        ("- 1\n", "yaml"),
    ],
)
def test_a_policy_that_cannot_be_used_says_why(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(PolicyFileError, match=told):
        read_policy(path)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(PolicyFileError, match="No such file"):
        read_policy(tmp_path / "none.yaml")
