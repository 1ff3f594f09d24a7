"""The ScaledObject through which KEDA scales an engine's workload on the demand that the operator tells.

Pure: given what is wanted, the object as it is applied. Who applies it, and when it goes again, is the reconciler's.
Each setting has its reason here, since a wrong one shows only at the peak:

- `AverageValue` of 1: desired replicas are the demand rounded up, whatever number of pods is ready. (`Value` would
  multiply by the ready ones, and be stuck when none is.)
- at least one replica: a gate cannot wake a pod that does not exist.
- `currentReplicasIfHigher`: KEDA's default fallback would fall to a fixed number while nothing is known.
- up at once, down slowly: what is asked for has been needed for half a minute already; what is taken away takes its
  model with it.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sluicegate_core.policy import Autoscaling

API_VERSION: Final = "keda.sh/v1alpha1"
KIND: Final = "ScaledObject"
#: The path to the number in the endpoint's answer (gjson).
VALUE_LOCATION: Final = "demand"
#: How often KEDA asks by itself. Above one replica the HPA's own sync (15 s) leads, whatever stands here.
POLLING_INTERVAL_S: Final = 15
#: Errors in a row before the fallback holds: about as long as a restart of the operator needs.
FAILURES_BEFORE_FALLBACK: Final = 3
#: An HPA takes the greatest recommendation of so long; on top of the long window of the demand itself.
SCALE_DOWN_WINDOW_S: Final = 300
#: Pods, or percent of them, taken away in a minute at most: the greater.
SCALE_DOWN_PODS: Final = 1
SCALE_DOWN_PERCENT: Final = 10
SCALE_DOWN_PERIOD_S: Final = 60
#: Pods, or percent of them, added in a quarter of a minute at most: the greater. An HPA's own defaults.
SCALE_UP_PODS: Final = 4
SCALE_UP_PERCENT: Final = 100
SCALE_UP_PERIOD_S: Final = 15

#: Kinds with a scale subresource that KEDA and an HPA take.
SCALABLE: Final = {
    ("apps/v1", "Deployment"),
    ("apps/v1", "StatefulSet"),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"),
}


#: Longest name: KEDA calls its HPA `keda-hpa-NAME` and puts that into a label, whose values end at 63 characters.
MAX_NAME: Final = 63 - len("keda-hpa-")
HASH_CHARS: Final = 8


@dataclass(frozen=True, slots=True)
class ScaleTarget:
    """The workload whose replicas are scaled, in the policy's namespace."""

    api_version: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledObjectSpec:
    """What a ScaledObject is made of.

    Attributes:
        name: of the ScaledObject.
        namespace: of the policy and of everything else here.
        policy: name of the AdmissionPolicy, which owns the object.
        policy_uid: of the same.
        policy_api_version: of the same, such as `sluicegate.dev/v1alpha1`.
        policy_kind: of the same.
        autoscaling: of the policy; `max_replicas` is set.
        target: what is scaled.
        endpoint: base URL of the scaling endpoint, such as `http://sluicegate.sluicegate-system.svc:8082`.
        authentication: name of a ClusterTriggerAuthentication that holds the endpoint's token; None: it has none.
        labels: put on the object.
    """

    name: str
    namespace: str
    policy: str
    policy_uid: str
    policy_api_version: str
    policy_kind: str
    autoscaling: Autoscaling
    target: ScaleTarget
    endpoint: str
    authentication: str | None = None
    labels: tuple[tuple[str, str], ...] = ()


def scaled_object_name(policy: str) -> str:
    """The name of a policy's ScaledObject; hashed where it would be too long."""
    name = f"sluicegate-{policy}"
    if len(name) <= MAX_NAME:
        return name
    digest = hashlib.sha256(policy.encode()).hexdigest()[:HASH_CHARS]
    return f"{name[: MAX_NAME - HASH_CHARS - 1].rstrip('.-')}-{digest}"


def other_autoscaler(
    autoscalers: Iterable[Mapping[str, Any]], target: ScaleTarget, scaled_object_name: str
) -> str | None:
    """The name of a HorizontalPodAutoscaler of somebody else that scales the target already: two would fight.

    Args:
        autoscalers: all HorizontalPodAutoscalers of the namespace.
        target: what is to be scaled.
        scaled_object_name: of the policy's own ScaledObject; the HPA that KEDA makes of it is not counted.
    """
    for one in autoscalers:
        name: str = one["metadata"]["name"]
        scaled = one["spec"]["scaleTargetRef"]
        same = (scaled["kind"], scaled["name"]) == (target.kind, target.name)
        if same and name != f"keda-hpa-{scaled_object_name}":
            return name
    return None


def scale_target(owners: Iterable[ScaleTarget]) -> ScaleTarget | str:
    """The one workload that the selected pods belong to, or why there is none.

    Args:
        owners: the topmost owner of each selected pod.
    """
    distinct = sorted(set(owners), key=str)
    if not distinct:
        return "no pod of the policy belongs to a workload that can be scaled"
    if len(distinct) > 1:
        names = ", ".join(str(one) for one in distinct[:5])
        return f"the policy selects pods of {len(distinct)} workloads ({names}): make one policy for each"
    (target,) = distinct
    if (target.api_version, target.kind) not in SCALABLE:
        return f"{target} has no replicas that can be scaled"
    return target


def scaled_object(spec: ScaledObjectSpec) -> dict[str, object]:
    """The object, as it is applied."""
    autoscaling = spec.autoscaling
    if autoscaling.max_replicas is None:
        raise ValueError("a policy that scales states maxReplicas")
    least = max(1, autoscaling.min_replicas)
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "name": spec.name,
            "namespace": spec.namespace,
            "labels": dict(spec.labels),
            "ownerReferences": [
                {
                    "apiVersion": spec.policy_api_version,
                    "kind": spec.policy_kind,
                    "name": spec.policy,
                    "uid": spec.policy_uid,
                    "controller": True,
                    "blockOwnerDeletion": False,
                }
            ],
        },
        "spec": {
            "scaleTargetRef": {
                "apiVersion": spec.target.api_version,
                "kind": spec.target.kind,
                "name": spec.target.name,
            },
            "minReplicaCount": least,
            "maxReplicaCount": max(least, autoscaling.max_replicas),
            "pollingInterval": POLLING_INTERVAL_S,
            "fallback": {
                "failureThreshold": FAILURES_BEFORE_FALLBACK,
                "replicas": least,
                "behavior": "currentReplicasIfHigher",
            },
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _behavior()}},
            "triggers": [_trigger(spec)],
        },
    }


def _trigger(spec: ScaledObjectSpec) -> dict[str, object]:
    metadata = {
        "url": f"{spec.endpoint}/scaling/{spec.namespace}/{spec.policy}",
        "valueLocation": VALUE_LOCATION,
        "targetValue": "1",
        "format": "json",
    }
    trigger: dict[str, object] = {"type": "metrics-api", "metricType": "AverageValue", "metadata": metadata}
    if spec.authentication is not None:
        metadata["authMode"] = "bearer"
        trigger["authenticationRef"] = {"kind": "ClusterTriggerAuthentication", "name": spec.authentication}
    return trigger


def _behavior() -> dict[str, object]:
    def policy(kind: str, value: int, period_s: int) -> dict[str, object]:
        return {"type": kind, "value": value, "periodSeconds": period_s}

    return {
        "scaleUp": {
            "stabilizationWindowSeconds": 0,
            "selectPolicy": "Max",
            "policies": [
                policy("Pods", SCALE_UP_PODS, SCALE_UP_PERIOD_S),
                policy("Percent", SCALE_UP_PERCENT, SCALE_UP_PERIOD_S),
            ],
        },
        "scaleDown": {
            "stabilizationWindowSeconds": SCALE_DOWN_WINDOW_S,
            "selectPolicy": "Max",
            "policies": [
                policy("Pods", SCALE_DOWN_PODS, SCALE_DOWN_PERIOD_S),
                policy("Percent", SCALE_DOWN_PERCENT, SCALE_DOWN_PERIOD_S),
            ],
        },
    }
