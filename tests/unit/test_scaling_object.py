"""The ScaledObject: what KEDA is told, and what it is never told."""

import re
from typing import Any

import pytest

from sluicegate_core.policy import Autoscaling
from sluicegate_operator.scaling import ScaledObjectSpec, ScaleTarget, scaled_object
from sluicegate_operator.scaling.scaled_object import (
    MAX_NAME,
    other_autoscaler,
    scale_target,
    scaled_object_name,
)

DEPLOYMENT = ScaleTarget("apps/v1", "Deployment", "llama-70b")


def built(
    *, min_replicas: int = 1, max_replicas: int | None = 8, authentication: str | None = None
) -> dict[str, Any]:
    spec = ScaledObjectSpec(
        name="sluicegate-llama-70b",
        namespace="serving",
        policy="llama-70b",
        policy_uid="0000-1111",
        policy_api_version="sluicegate.dev/v1alpha1",
        policy_kind="AdmissionPolicy",
        autoscaling=Autoscaling(min_replicas=min_replicas, max_replicas=max_replicas),
        target=DEPLOYMENT,
        endpoint="http://sluicegate.sluicegate-system.svc:8082",
        authentication=authentication,
        labels=(("app.kubernetes.io/managed-by", "sluicegate"),),
    )
    return scaled_object(spec)


def test_the_policy_owns_it() -> None:
    made = built()
    assert (made["apiVersion"], made["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("AdmissionPolicy", "llama-70b", "0000-1111")
    assert owner["controller"] is True
    assert made["metadata"]["labels"] == {"app.kubernetes.io/managed-by": "sluicegate"}


def test_it_scales_the_workload_within_the_policys_bounds() -> None:
    spec = built(min_replicas=2, max_replicas=5)["spec"]
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "llama-70b"}
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 5)


def test_a_gate_cannot_wake_a_pod_that_is_not_there() -> None:
    assert built(min_replicas=0)["spec"]["minReplicaCount"] == 1


def test_it_asks_the_operator_for_this_policys_demand_in_replicas() -> None:
    (trigger,) = built()["spec"]["triggers"]
    assert trigger == {
        "type": "metrics-api",
        "metricType": "AverageValue",
        "metadata": {
            "url": "http://sluicegate.sluicegate-system.svc:8082/scaling/serving/llama-70b",
            "valueLocation": "demand",
            "targetValue": "1",
            "format": "json",
        },
    }


def test_without_a_number_the_replicas_stay() -> None:
    fallback = built(min_replicas=2)["spec"]["fallback"]
    assert fallback == {"failureThreshold": 3, "replicas": 2, "behavior": "currentReplicasIfHigher"}


def test_it_takes_away_slowly_and_adds_at_once() -> None:
    behavior = built()["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleUp"]["stabilizationWindowSeconds"] == 0
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] >= 300
    assert {"type": "Pods", "value": 1, "periodSeconds": 60} in behavior["scaleDown"]["policies"]


def test_the_endpoints_token_comes_from_a_cluster_wide_authentication() -> None:
    (trigger,) = built(authentication="sluicegate")["spec"]["triggers"]
    assert trigger["metadata"]["authMode"] == "bearer"
    assert trigger["authenticationRef"] == {"kind": "ClusterTriggerAuthentication", "name": "sluicegate"}


def test_a_policy_that_scales_has_an_upper_bound() -> None:
    with pytest.raises(ValueError, match="maxReplicas"):
        built(max_replicas=None)


@pytest.mark.parametrize(
    ("owners", "expected"),
    [
        ([DEPLOYMENT, DEPLOYMENT], DEPLOYMENT),
        ([ScaleTarget("apps/v1", "StatefulSet", "s")], ScaleTarget("apps/v1", "StatefulSet", "s")),
        ([], "no pod of the policy belongs to a workload that can be scaled"),
        ([ScaleTarget("batch/v1", "Job", "j")], "Job j has no replicas that can be scaled"),
        (
            [DEPLOYMENT, ScaleTarget("apps/v1", "Deployment", "a")],
            "the policy selects pods of 2 workloads (Deployment a, Deployment llama-70b): make one policy for each",
        ),
    ],
)
def test_the_workload_is_the_one_that_all_pods_belong_to(
    owners: list[ScaleTarget], expected: ScaleTarget | str
) -> None:
    assert scale_target(owners) == expected


def test_its_name_fits_into_a_label_of_kedas() -> None:
    assert scaled_object_name("llama-70b") == "sluicegate-llama-70b"
    long = [f"{'a' * 60}.{n}" for n in range(2)]
    names = {scaled_object_name(one) for one in long}
    assert len(names) == 2
    for name in names:
        assert len(name) <= MAX_NAME
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", name)


def hpa(name: str, kind: str, scaled: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"scaleTargetRef": {"kind": kind, "name": scaled}}}


@pytest.mark.parametrize(
    ("autoscalers", "found"),
    [
        ([], None),
        ([hpa("keda-hpa-mine", "Deployment", "llama-70b")], None),
        ([hpa("theirs", "Deployment", "other"), hpa("theirs", "StatefulSet", "llama-70b")], None),
        ([hpa("keda-hpa-mine", "Deployment", "llama-70b"), hpa("old", "Deployment", "llama-70b")], "old"),
        ([hpa("keda-hpa-theirs", "Deployment", "llama-70b")], "keda-hpa-theirs"),
    ],
)
def test_another_autoscaler_of_the_same_workload_is_found(
    autoscalers: list[dict[str, Any]], found: str | None
) -> None:
    assert other_autoscaler(autoscalers, DEPLOYMENT, "mine") == found
