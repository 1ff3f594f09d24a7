"""Pods of the cluster as replicas of the ledger, and the workload that they belong to.

Pure functions over objects as the API server gives them, which are trusted to have the shape of their kind and
nothing more: every field may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sluicegate_operator.names import GATED_LABEL
from sluicegate_operator.scaling.ledger import Replica, ReplicaState
from sluicegate_operator.scaling.report import GateReport
from sluicegate_operator.scaling.scaled_object import ScaleTarget

Object = Mapping[str, Any]

#: Pods in these phases have ended: they are no replica any more, whatever their conditions say.
ENDED: Final = ("Succeeded", "Failed")


def replica(pod: Object, report: GateReport | None, reported_at: float) -> Replica | None:
    """The pod as a replica, with the last report of its gate; None where the pod has ended."""
    metadata, status = pod.get("metadata") or {}, pod.get("status") or {}
    if status.get("phase") in ENDED:
        return None
    if metadata.get("deletionTimestamp"):
        state = ReplicaState.LEAVING
    elif _is_ready(status):
        state = ReplicaState.READY
    else:
        state = ReplicaState.STARTING
    return Replica(
        uid=metadata.get("uid", ""),
        state=state,
        gated=(metadata.get("labels") or {}).get(GATED_LABEL) == "true",
        report=report,
        reported_at=reported_at,
    )


def controller(one: Object) -> ScaleTarget | None:
    """The owner that manages an object: of a pod its ReplicaSet, of that its Deployment; None where there is none."""
    for owner in (one.get("metadata") or {}).get("ownerReferences") or ():
        if owner.get("controller"):
            return ScaleTarget(owner["apiVersion"], owner["kind"], owner["name"])
    return None


def _is_ready(status: Object) -> bool:
    return any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in status.get("conditions") or ()
    )
