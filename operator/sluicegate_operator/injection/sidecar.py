"""The gate's container, and what the pod needs for it: volume, drain hook, grace period.

Invariants:
- The container passes Pod Security `restricted` and needs nothing that a restricted pod may not have.
- It has no Kubernetes credentials: the ServiceAccount admission plugin, which runs again after a webhook has changed
  the pod, mounts a token into every container that has nothing mounted at the token's path. So something is.
- It is a native sidecar at the end of the init containers: it starts after everything that prepares the pod, and
  after a mesh's proxy; it stops before that proxy, and after the engine. It neither delays the engine's start (no
  startup probe) nor keeps a Job from ending.
- Its readiness is never a matter of load; a loading engine makes it not ready, however long that takes.

Pure builders.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from sluicegate_core.policy import Policy
from sluicegate_operator.injection.context import InjectionContext
from sluicegate_operator.injection.pods import Json, all_limit, has_istio, is_guaranteed
from sluicegate_operator.injection.takeover import Plan
from sluicegate_operator.names import (
    ADMIN_PORT,
    ADMIN_PORT_NAME,
    GATE_CONTAINER,
    POLICY_MOUNT,
    POLICY_VOLUME,
    policy_configmap,
)

#: Where service account tokens are mounted.
TOKEN_PATH: Final = "/var/run/secrets/kubernetes.io/serviceaccount"  # noqa: S105
TOKEN_HEADER: Final = "x-sluicegate-token"  # noqa: S105
TOKEN_VARIABLE: Final = "SLUICEGATE_DRAIN_TOKEN"  # noqa: S105
#: How long a gate that drains still takes what comes, s. The pod is taken out of its Services in the moment its
#: deletion begins, but proxies, routers and clients' connection pools learn of it later; seldom more than this.
SETTLE_S: Final = 5
#: What the engine itself gets to stop after the drain, s: the default of Kubernetes for a whole pod.
STOP_S: Final = 30
#: The longest drain that leaves a grace period of a day.
MAX_GRACE_S: Final = 86_400
#: Of a gate in a pod that is Guaranteed, where nobody states a limit. Half a core carries thousands of requests a
#: second; less would be throttled in bursts, and delay tokens.
GUARANTEED_CPU: Final = "500m"
GUARANTEED_MEMORY: Final = "768Mi"
#: Of a gate whose neighbours all limit theirs: a gate is one process, and cannot use more than a core.
LIMITED_CPU: Final = "1"
#: Below this a process without privileges may not listen, where the runtime does not say otherwise.
FIRST_UNPRIVILEGED_PORT: Final = 1024
UNPRIVILEGED_SYSCTL: Final = "net.ipv4.ip_unprivileged_port_start"
ISTIO_EXCLUDE: Final = "traffic.sidecar.istio.io/excludeInboundPorts"

_SLEEP: Final = re.compile(r"\s*(?:exec\s+)?(?:/(?:usr/)?bin/)?sleep\s+(\d{1,5})s?\s*;?\s*\Z")


def gate_container(pod: Json, policy: Policy, plan: Plan, context: InjectionContext) -> dict[str, Any]:
    """The gate's container."""
    host = "127.0.0.1" if plan.on_loopback else ""
    pull_policy = policy.gate.image_pull_policy or context.image_pull_policy
    ports: list[Mapping[str, Any]] = [
        {"name": ADMIN_PORT_NAME, "containerPort": ADMIN_PORT, "protocol": "TCP"}
    ]
    if plan.gate_port is not None:
        ports.insert(0, {"protocol": "TCP", **plan.gate_port})
    container: dict[str, Any] = {
        "name": GATE_CONTAINER,
        "image": policy.gate.image or context.image,
        **({"imagePullPolicy": pull_policy} if pull_policy else {}),
        "restartPolicy": "Always",
        "args": [
            f"--policy={POLICY_MOUNT}",
            f"--upstream=http://127.0.0.1:{plan.engine_port}",
            f"--listen={host}:{plan.port}",
            f"--admin=:{ADMIN_PORT}",
            f"--drain-timeout={policy.drain_timeout_s:g}",
            *context.extra_args,
            *policy.gate.extra_args,
        ],
        "env": [{"name": TOKEN_VARIABLE, "value": context.drain_token}],
        "ports": ports,
        "resources": _resources(pod, policy, context),
        "securityContext": _security_context(context),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": POLICY_VOLUME, "mountPath": POLICY_MOUNT, "readOnly": True},
            # In the place of a token: the policy is no secret, and a volume of its own could keep the cluster's
            # autoscaler from ever removing the node.
            {"name": POLICY_VOLUME, "mountPath": TOKEN_PATH, "readOnly": True},
        ],
    }
    if not _admin_port_is_hidden(pod):
        container |= _probes()
    return container


def policy_volume(context: InjectionContext) -> dict[str, Any]:
    """The policy's ConfigMap as a whole: one key alone would never be refreshed. A gate without it lets all pass."""
    name = policy_configmap(context.policy_name)
    return {"name": POLICY_VOLUME, "configMap": {"name": name, "optional": True}}


def _probes() -> dict[str, Any]:
    def get(path: str) -> dict[str, Any]:
        return {"path": path, "port": ADMIN_PORT, "scheme": "HTTP"}

    return {
        "readinessProbe": {
            "httpGet": get("/readyz"),
            "periodSeconds": 5,
            "timeoutSeconds": 3,
            "failureThreshold": 2,
        },
        # A restart cuts every stream: only a gate that has stood still for a minute is worth it.
        "livenessProbe": {
            "httpGet": get("/healthz"),
            "initialDelaySeconds": 10,
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
    }


def _admin_port_is_hidden(pod: Json) -> bool:
    """Whether Istio's proxy may stand in front of the admin port.

    Istio rewrites the probes of the containers that it sees, and the gate comes after it. Where mutual TLS is
    strict, the kubelet's plain requests would then fail, and the pod would never be ready.
    """
    excluded = (pod.get("metadata", {}).get("annotations") or {}).get(ISTIO_EXCLUDE, "")
    return has_istio(pod) and not {"*", str(ADMIN_PORT)} & {one.strip() for one in excluded.split(",")}


def istio_warnings(pod: Json) -> tuple[str, ...]:
    """What to write where Istio hides the admin port."""
    if not _admin_port_is_hidden(pod):
        return ()
    return (
        f"Istio's proxy stands in front of the gate's admin port: the gate goes without probes, and where mutual TLS "
        f"is strict its drain and its report do not work; annotate the pod template with {ISTIO_EXCLUDE}: "
        f'"{ADMIN_PORT}"',
    )


def _security_context(context: InjectionContext) -> dict[str, Any]:
    user = (
        {}
        if context.run_as_user is None
        else {"runAsUser": context.run_as_user, "runAsGroup": context.run_as_user}
    )
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        **user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _resources(pod: Json, policy: Policy, context: InjectionContext) -> dict[str, Any]:
    """The policy's, over the installation's, as far as the pod has room for them.

    A pod that is Guaranteed stays so: the gate requests its limits. Where all others limit their CPU, a quota may
    demand it of everyone. A pod that states resources as a whole has no room for more: the gate shares in them.
    """
    if pod.get("spec", {}).get("resources"):
        return {}
    requests = dict(context.requests) | dict(policy.gate.requests)
    limits = dict(context.limits) | dict(policy.gate.limits)
    if is_guaranteed(pod):
        limits = {"cpu": GUARANTEED_CPU, "memory": requests.get("memory", GUARANTEED_MEMORY)} | limits
        requests = dict(limits)
    elif all_limit(pod, "cpu"):
        limits = {"cpu": LIMITED_CPU} | limits
    return {**({"requests": requests} if requests else {}), **({"limits": limits} if limits else {})}


# The end of the pod.


def drain_hook(policy: Policy, context: InjectionContext, settle_s: int) -> dict[str, Any]:
    """A hook that returns when nothing is in flight any more."""
    return {
        "httpGet": {
            "path": f"/drain?timeout={policy.drain_timeout_s:g}&settle={settle_s}",
            "port": ADMIN_PORT,
            "scheme": "HTTP",
            "httpHeaders": [{"name": TOKEN_HEADER, "value": context.drain_token}],
        }
    }


def slept_s(hook: Mapping[str, Any]) -> int | None:
    """How long a preStop hook sleeps, s, where it does nothing else; else None.

    Such a hook waits for Services to forget the pod, and the drain does that and more.
    """
    sleep = hook.get("sleep")
    if sleep:
        return int(sleep.get("seconds", 0))
    command = (hook.get("exec") or {}).get("command") or []
    if (
        len(command) == 3
        and command[0].rsplit("/", 1)[-1] in ("sh", "bash")
        and command[1] in ("-c", "-lc", "-ec")
    ):
        text = command[2]
    else:
        text = " ".join(command)
    found = _SLEEP.match(text)
    return int(found[1]) if found else None


def grace_period_s(pod: Json, policy: Policy, settle_s: int) -> int:
    """The pod's grace period, raised so that the longest drain and the engine's own end fit into it."""
    given = pod.get("spec", {}).get("terminationGracePeriodSeconds")
    needed = math.ceil(max(policy.drain_timeout_s, settle_s)) + STOP_S
    return max(STOP_S if given is None else int(given), min(needed, MAX_GRACE_S))


def sysctls(pod: Json, port: int) -> list[dict[str, str]] | None:
    """The pod's sysctls with which an unprivileged process may listen on the port; None where nothing is needed.

    This one is a safe sysctl: it belongs to the pod's own network namespace, and `restricted` allows it.
    """
    if port >= FIRST_UNPRIVILEGED_PORT:
        return None
    given = list((pod.get("spec", {}).get("securityContext") or {}).get("sysctls") or ())
    for one in given:
        if one.get("name") == UNPRIVILEGED_SYSCTL and str(one.get("value", "")).isdigit():
            if int(one["value"]) <= port:
                return None
            return [
                {**other, "value": str(port)} if other.get("name") == UNPRIVILEGED_SYSCTL else other
                for other in given
            ]
    return [*given, {"name": UNPRIVILEGED_SYSCTL, "value": str(port)}]
