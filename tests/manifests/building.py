"""Pods and policies for the tests of injection, in few words."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from sluicegate_core.policy import Injection, Policy, Takeover, parse_policy
from sluicegate_operator.injection import InjectionContext, InjectionResult, inject

CONTEXT = InjectionContext(
    namespace="serving", policy_name="llama", image="registry.example/gate:1", drain_token="t0ken"
)
VLLM: dict[str, Any] = {
    "name": "engine",
    "image": "vllm/vllm-openai:v0.10.0",
    "args": ["--model=m", "--port=8000"],
    "ports": [{"name": "http", "containerPort": 8000}],
}


def container(**fields: Any) -> dict[str, Any]:
    """vLLM on port 8000, with other fields; None removes one."""
    made = copy.deepcopy(VLLM) | fields
    return {key: value for key, value in made.items() if value is not None}


def script(text: str, **fields: Any) -> dict[str, Any]:
    """A container that a shell starts."""
    return container(command=["/bin/bash", "-c", text], args=None, image="example/engine:1", **fields)


def pod(*containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    metadata = {"name": "p", "labels": {"app": "llama"}}
    return {"metadata": metadata, "spec": {"containers": list(containers) or [container()], **spec}}


def policy(injection: dict[str, Any] | None = None, **spec: Any) -> Policy:
    """A policy whose spec has these fields, as they are written in a manifest."""
    given = injection or {}
    return replace(
        parse_policy({"classes": [{"name": "default"}], **spec}),
        injection=Injection(
            container=given.get("container"),
            takeover=Takeover(given.get("takeover", "Auto")),
            upstream_port=given.get("upstreamPort"),
        ),
    )


def gated(given: dict[str, Any], **spec: Any) -> InjectionResult:
    """What becomes of a pod that must get a gate."""
    result = inject(given, policy(**spec), CONTEXT)
    assert result.refusal is None, result.refusal
    return result


def refusal(given: dict[str, Any], **spec: Any) -> str:
    """Why a pod is left alone that must be."""
    result = inject(given, policy(**spec), CONTEXT)
    assert result.refusal is not None, result.status
    return result.refusal


def engine_of(result: InjectionResult, name: str = "engine") -> dict[str, Any]:
    return next(one for one in result.pod["spec"]["containers"] if one["name"] == name)


def gate_of(result: InjectionResult) -> dict[str, Any]:
    """The gate's container: always the last of the init containers."""
    gate: dict[str, Any] = result.pod["spec"]["initContainers"][-1]
    assert gate["name"] == "sluicegate-gate"
    return gate
