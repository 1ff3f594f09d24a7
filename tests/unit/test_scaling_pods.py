"""Pods as replicas, and whose they are."""

from typing import Any

import pytest

from sluicegate_operator.names import GATED_LABEL
from sluicegate_operator.scaling.ledger import ReplicaState
from sluicegate_operator.scaling.pods import controller, replica
from sluicegate_operator.scaling.scaled_object import ScaleTarget


def pod(*, ready: str | None = None, phase: str = "Running", **metadata: object) -> dict[str, Any]:
    conditions = [{"type": "PodScheduled", "status": "True"}]
    if ready is not None:
        conditions.append({"type": "Ready", "status": ready})
    return {
        "metadata": {"uid": "u", "labels": {GATED_LABEL: "true"}, **metadata},
        "status": {"phase": phase, "conditions": conditions},
    }


@pytest.mark.parametrize(
    ("given", "state"),
    [
        (pod(ready="True"), ReplicaState.READY),
        (pod(ready="False"), ReplicaState.STARTING),
        (pod(ready="Unknown"), ReplicaState.STARTING),
        (pod(phase="Pending"), ReplicaState.STARTING),
        (pod(ready="True", deletionTimestamp="2026-01-01T00:00:00Z"), ReplicaState.LEAVING),
        ({"metadata": {"uid": "u"}}, ReplicaState.STARTING),
        ({"metadata": {"uid": "u"}, "status": {"conditions": None}}, ReplicaState.STARTING),
    ],
)
def test_its_state_is_by_its_conditions(given: dict[str, Any], state: ReplicaState) -> None:
    made = replica(given, None, 0.0)
    assert made is not None
    assert (made.uid, made.state) == ("u", state)


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_one_that_has_ended_is_none(phase: str) -> None:
    assert replica(pod(ready="True", phase=phase), None, 0.0) is None


@pytest.mark.parametrize(
    ("labels", "gated"),
    [({GATED_LABEL: "true"}, True), ({GATED_LABEL: "false"}, False), ({}, False), (None, False)],
)
def test_it_is_gated_by_its_label(labels: dict[str, str] | None, gated: bool) -> None:
    made = replica(pod(ready="True", labels=labels), None, 0.0)
    assert made is not None
    assert made.gated is gated


def test_its_controller_is_one_of_its_owners() -> None:
    owners = [
        {"apiVersion": "v1", "kind": "Node", "name": "n"},
        {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "llama-5d9", "controller": True},
    ]
    assert controller(pod(ownerReferences=owners)) == ScaleTarget("apps/v1", "ReplicaSet", "llama-5d9")
    assert controller(pod(ownerReferences=owners[:1])) is None
    assert controller({"metadata": {"ownerReferences": None}}) is None
    assert controller({}) is None
