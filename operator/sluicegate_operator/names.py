"""The names that hold the operator's parts together: of the resource, and of what is put on pods and beside them.

What else a pod gets lives in `injection`; this module imports nothing of the operator.
"""

from __future__ import annotations

import hashlib
from typing import Final

GROUP: Final = "sluicegate.dev"
VERSION: Final = "v1alpha1"
PLURAL: Final = "admissionpolicies"
KIND: Final = "AdmissionPolicy"

#: A pod with this label at "false" is left alone.
INJECT_LABEL: Final = f"{GROUP}/inject"
#: Put on every pod that was given a gate.
GATED_LABEL: Final = f"{GROUP}/gated"
#: The name of the policy that gates the pod.
POLICY_ANNOTATION: Final = f"{GROUP}/policy"
#: What the injection did, as compact JSON.
STATUS_ANNOTATION: Final = f"{GROUP}/injection"
#: Touched by the reconciler, so that the kubelet refreshes the mounted policy at once.
REVISION_ANNOTATION: Final = f"{GROUP}/revision"

GATE_CONTAINER: Final = "sluicegate-gate"
POLICY_VOLUME: Final = "sluicegate-policy"
POLICY_MOUNT: Final = "/etc/sluicegate/policy"
POLICY_KEY: Final = "policy.yaml"
ADMIN_PORT: Final = 9901
#: At most 15 characters, as every port's name.
ADMIN_PORT_NAME: Final = "gate-admin"

#: The Secret of the webhook's certificates, in the operator's namespace.
CERTIFICATE_SECRET: Final = "sluicegate-webhook-cert"  # noqa: S105  # the name of a Secret

FIELD_MANAGER: Final = "sluicegate"

#: Longest name of a ConfigMap: a DNS subdomain.
MAX_NAME: Final = 253


def policy_configmap(policy: str) -> str:
    """The name of the ConfigMap that holds a policy for its gates; hashed where it would be too long."""
    name = f"sluicegate-policy-{policy}"
    if len(name) > MAX_NAME:
        digest = hashlib.sha256(policy.encode()).hexdigest()[:16]
        name = f"{name[: MAX_NAME - 17].rstrip('.-')}-{digest}"
    return name
