"""The one entry: a pod and a policy in, the gated pod out, or the reason why it is left alone.

Idempotent by the gate's container name: a pod that has a gate is returned as it is, whoever calls again and whatever
other webhooks have added since. Nothing is read but the arguments, and they are not changed.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from sluicegate_core.policy import Policy, Takeover
from sluicegate_operator.injection import sidecar
from sluicegate_operator.injection.choice import RefusedError
from sluicegate_operator.injection.context import InjectionContext, InjectionResult
from sluicegate_operator.injection.pods import (
    Json,
    containers,
    init_containers,
    numbers_in,
    running_containers,
    uses_windows,
)
from sluicegate_operator.injection.probes import rewrite_probes
from sluicegate_operator.injection.takeover import Plan, plan_takeover
from sluicegate_operator.names import (
    ADMIN_PORT,
    GATE_CONTAINER,
    GATED_LABEL,
    INJECT_LABEL,
    POLICY_ANNOTATION,
    POLICY_VOLUME,
    STATUS_ANNOTATION,
)


def inject(pod: dict[str, Any], policy: Policy, context: InjectionContext) -> InjectionResult:
    """Put a gate in front of the pod's engine."""
    metadata = pod.get("metadata") or {}
    if any(one.get("name") == GATE_CONTAINER for one in containers(pod) + init_containers(pod)):
        return InjectionResult(pod=pod, warnings=(), refusal=None, status=_told(metadata))
    if (metadata.get("labels") or {}).get(INJECT_LABEL) == "false":
        refusal = f"it opts out by its label {INJECT_LABEL}: false"
        return InjectionResult(pod=pod, warnings=(), refusal=refusal, status={"refusal": refusal})
    try:
        _check_pod(pod)
        return _gated(pod, policy, context, plan_takeover(pod, policy))
    except RefusedError as error:
        refusal = str(error)
        status = {"refusal": refusal}
        left = copy.deepcopy(pod)
        _annotate(left, context, status)
        warning = f"sluicegate: not gated by policy {context.policy_name!r}: {refusal}"
        return InjectionResult(pod=left, warnings=(warning,), refusal=refusal, status=status)


def _check_pod(pod: Json) -> None:
    """Refuse pods in front of which no gate can stand."""
    spec = pod.get("spec", {})
    if spec.get("hostNetwork"):
        raise RefusedError(
            "it uses the node's network (hostNetwork): there the engine's port would be open to everything on the "
            "node, and two pods could not have gates on one node; remove hostNetwork, or use a hostPort"
        )
    if uses_windows(pod):
        raise RefusedError("it runs on Windows, and the gate does not")
    for container in running_containers(pod):
        if any(port.get("containerPort") == ADMIN_PORT for port in container.get("ports") or ()):
            raise RefusedError(
                f"container {container.get('name')!r} has port {ADMIN_PORT}, which is the gate's admin port; move it"
            )
    if any(volume.get("name") == POLICY_VOLUME for volume in spec.get("volumes") or ()):
        raise RefusedError(f"it has a volume named {POLICY_VOLUME!r}, which is the gate's; rename it")


def _gated(pod: Json, policy: Policy, context: InjectionContext, plan: Plan) -> InjectionResult:
    gated = copy.deepcopy(dict(pod))
    spec = gated["spec"]
    warnings = list(plan.warnings)
    for index, container in enumerate(spec["containers"]):
        is_engine = index == plan.engine.index
        changed, more = rewrite_probes(plan.container if is_engine else container, plan, is_engine=is_engine)
        spec["containers"][index] = changed
        warnings += more
    for index, container in enumerate(spec.get("initContainers") or ()):
        if container.get("restartPolicy") == "Always":
            spec["initContainers"][index], more = rewrite_probes(container, plan, is_engine=False)
            warnings += more
    if ADMIN_PORT in numbers_in(pod):
        warnings.append(f"the pod names port {ADMIN_PORT}, which is the gate's admin port now")
    warnings += sidecar.istio_warnings(pod)

    gate = sidecar.gate_container(pod, policy, plan, context)
    settle_s = _add_drain(spec["containers"][plan.engine.index], gate, policy, context, warnings)
    spec.setdefault("initContainers", [])
    spec["initContainers"] = [*(spec["initContainers"] or ()), gate]
    spec["volumes"] = [*(spec.get("volumes") or ()), sidecar.policy_volume(context)]
    spec["terminationGracePeriodSeconds"] = sidecar.grace_period_s(pod, policy, settle_s)
    listened = sidecar.sysctls(pod, plan.port)
    if listened is not None:
        spec["securityContext"] = {**(spec.get("securityContext") or {}), "sysctls": listened}

    told = tuple(f"sluicegate: {warning}" for warning in dict.fromkeys(warnings))
    status = _status(plan, tuple(dict.fromkeys(warnings)))
    _annotate(gated, context, status)
    labels = gated["metadata"].get("labels") or {}
    gated["metadata"]["labels"] = {**labels, GATED_LABEL: "true"}
    return InjectionResult(pod=gated, warnings=told, refusal=None, status=status)


def _add_drain(
    engine: dict[str, Any],
    gate: dict[str, Any],
    policy: Policy,
    context: InjectionContext,
    warnings: list[str],
) -> int:
    """Let the end of the pod wait for what is in flight; returns how long the gate goes on admitting, s.

    The hook stands on the engine, which is then not told to stop before it returns. A hook that the engine has
    already is kept, unless it only sleeps: there is room for one. The gate then drains by a hook of its own, which
    runs at the same time.
    """
    lifecycle = dict(engine.get("lifecycle") or {})
    own = lifecycle.get("preStop")
    slept_s = sidecar.slept_s(own) if own else 0
    settle_s = max(sidecar.SETTLE_S, slept_s or 0)
    hook = sidecar.drain_hook(policy, context, settle_s)
    if slept_s is not None:
        engine["lifecycle"] = {**lifecycle, "preStop": hook}
        return settle_s
    gate["lifecycle"] = {"preStop": hook}
    warnings.append(
        f"container {engine.get('name')!r} has a preStop hook of its own, which is kept: streams are sure to end only "
        "if it waits for them; remove it, and the gate's drain takes its place"
    )
    return settle_s


def _status(plan: Plan, warnings: tuple[str, ...]) -> dict[str, Any]:
    status: dict[str, Any] = {
        "takeover": plan.takeover.value,
        "container": plan.engine.name,
        "port": plan.port,
        "enginePort": plan.engine_port,
        "engine": plan.engine_type.value,
    }
    if plan.takeover is Takeover.NAMED_PORT and plan.gate_port is not None:
        status["portName"] = plan.gate_port["name"]
    if warnings:
        status["warnings"] = list(warnings)
    return status


def _annotate(pod: dict[str, Any], context: InjectionContext, status: dict[str, Any]) -> None:
    metadata = pod.setdefault("metadata", {})
    metadata["annotations"] = {
        **(metadata.get("annotations") or {}),
        POLICY_ANNOTATION: context.policy_name,
        STATUS_ANNOTATION: json.dumps(status, separators=(",", ":"), sort_keys=True, ensure_ascii=False),
    }


def _told(metadata: Json) -> dict[str, Any]:
    """What an earlier injection said; empty where the annotation is not ours to read."""
    try:
        status = json.loads((metadata.get("annotations") or {}).get(STATUS_ANNOTATION, ""))
    except (ValueError, RecursionError):  # whoever may write pods may write anything here
        return {}
    return status if isinstance(status, dict) else {}
