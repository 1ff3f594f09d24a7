"""From a decoded document to a `Policy`, or to everything that is wrong with it.

The document is what a YAML or JSON decoder gives: either the whole object (apiVersion, kind, metadata, spec) or
the bare spec. Paths in problems always begin at `spec`, where a field stands in the whole object. Whatever the
document, nothing but PolicyError is raised, and the work is bounded by the schema, not by the document's depth.

Reading text into a document is the gate's (`policy_file`): this package does no I/O and knows no format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluicegate_core.policy.consistency import check
from sluicegate_core.policy.model import (
    DERIVED_S,
    Autoscaling,
    Classify,
    ClassPolicy,
    EngineSpec,
    LabelRequirement,
    Policy,
    Rule,
    Selector,
    Slo,
)
from sluicegate_core.policy.nodes import INVALID
from sluicegate_core.policy.schema import API_VERSION, KIND, SPEC
from sluicegate_core.problems import Problems, child, nearest

MANIFEST_FIELDS = ("apiVersion", "kind", "metadata", "spec", "status")
"""Of the whole object. Any of the first four tells it from a bare spec; status is written by the operator."""


def parse_policy(document: object) -> Policy:
    """The policy that the document states, with every default filled in.

    Raises PolicyError with all its problems.
    """
    problems = Problems()
    read = (
        SPEC.read(spec, "spec", problems) if (spec := _spec(document, problems)) is not INVALID else INVALID
    )
    if read is not INVALID:
        check(read, problems)
    problems.raise_any()
    assert isinstance(read, dict), "what could not be read has a problem"
    return _policy(read)


def _spec(document: object, problems: Problems) -> object:
    """The spec within the document: all of it, where it is a bare one."""
    if not isinstance(document, Mapping):
        why = "is empty" if document is None else "is not a mapping"
        message = f"the document {why}; allowed is an {KIND}, whole or just its spec"
        problems.add("spec", document, message, "start from examples/minimal.yaml")
        return INVALID
    if not any(name in document for name in MANIFEST_FIELDS[:4]):
        return document
    for name, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
        value = document.get(name)
        if value != expected:
            problems.add(name, value, f"is not {expected}, the only one allowed", f"write {name}: {expected}")
    if "metadata" in document and not isinstance(document["metadata"], Mapping):
        problems.add(
            "metadata",
            document["metadata"],
            "is not a mapping; allowed is a mapping",
            "write metadata: {name: ...}",
        )
    for name in document:
        if name not in MANIFEST_FIELDS:
            _unknown(name, document[name], problems)
    if "spec" not in document:
        problems.note("spec", "", f"is missing; allowed is {SPEC.allowed}", "add spec: with at least classes")
        return INVALID
    spec: object = document["spec"]
    return spec


def _unknown(name: object, value: object, problems: Problems) -> None:
    """Note a field beside the spec that does not belong there."""
    fix = "remove it"
    if isinstance(name, str):
        if name in {field.name for field in SPEC.fields}:
            fix = f"write it inside: spec.{name}"
        elif near := nearest(name, MANIFEST_FIELDS):
            fix = f"did you mean {near}?"
    message = f"is not a field of an {KIND}; allowed are {', '.join(MANIFEST_FIELDS)}"
    problems.add(child("", name).removeprefix("."), value, message, fix)


def _policy(spec: dict[str, Any]) -> Policy:
    return Policy(
        mode=spec["mode"],
        engine=_engine(spec["engine"]),
        classes=tuple(_class(one) for one in spec["classes"]),
        classify=_classify(spec["classify"]),
        selector=_selector(spec["selector"]),
        autoscaling=_autoscaling(spec["autoscaling"]),
    )


def _engine(read: dict[str, Any] | None) -> EngineSpec:
    if read is None:
        return EngineSpec()
    return EngineSpec(
        type=read["type"],
        port=read["port"],
        slots=read["slots"],
        health_path=read["healthPath"],
        metrics_path=read["metricsPath"],
    )


def _class(read: dict[str, Any]) -> ClassPolicy:
    slo, queue_time_s = read["slo"], read["maxQueueTime"]
    return ClassPolicy(
        name=read["name"],
        slo=Slo() if slo is None else Slo(ttft_s=slo["ttft"], itl_s=slo["itl"]),
        weight=read["weight"],
        max_queue_time_s=DERIVED_S if queue_time_s is None else queue_time_s,
        max_concurrency=read["maxConcurrency"],
        reserved_slots=read["reservedSlots"],
        preemptible=read["preemptible"],
    )


def _classify(read: dict[str, Any] | None) -> Classify:
    if read is None:
        return Classify()
    client = read["client"]
    return Classify(
        default=read["default"] or "",
        client_header=None if client is None else client["header"],
        rules=tuple(
            Rule(
                class_name=rule["class"],
                header=rule["header"],
                values=rule["values"] or (),
                model=rule["model"],
                path=rule["path"],
            )
            for rule in read["rules"]
        ),
    )


def _selector(read: dict[str, Any] | None) -> Selector | None:
    if read is None:
        return None
    return Selector(
        match_labels=read["matchLabels"],
        match_expressions=tuple(
            LabelRequirement(key=one["key"], operator=one["operator"], values=one["values"])
            for one in read["matchExpressions"]
        ),
    )


def _autoscaling(read: dict[str, Any] | None) -> Autoscaling | None:
    if read is None:
        return None
    return Autoscaling(
        provider=read["provider"],
        min_replicas=read["minReplicas"],
        max_replicas=read["maxReplicas"],
        cold_start_s=read["coldStart"],
    )
