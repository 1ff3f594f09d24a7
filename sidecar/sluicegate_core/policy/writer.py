"""From a `Policy` back to a spec, and to what is worth a second look.

`write_spec` states every default that has a value, so that it is also the answer to "what is in force?"; parsed
again, it gives the same policy. `policy_warnings` names what is accepted but does less than it may seem to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sluicegate_core.durations import format_duration
from sluicegate_core.policy.model import (
    Autoscaling,
    Classify,
    ClassPolicy,
    Mode,
    Policy,
    Provider,
    Rule,
    Selector,
)
from sluicegate_core.problems import show


def write_spec(policy: Policy) -> dict[str, Any]:
    """The spec of the policy as plain data, as it would be written in YAML or JSON."""
    return _stated(
        selector=None if policy.selector is None else _selector(policy.selector),
        mode=policy.mode.value,
        engine=_stated(
            type=policy.engine.type.value,
            port=policy.engine.port,
            slots=policy.engine.slots,
            healthPath=policy.engine.health_path,
            metricsPath=policy.engine.metrics_path,
        ),
        classes=[_class(one) for one in policy.classes],
        classify=_classify(policy.classify),
        autoscaling=None if policy.autoscaling is None else _autoscaling(policy.autoscaling),
    )


def _stated(**fields: Any) -> dict[str, Any]:
    """The fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def _written(duration_s: float | None) -> str | None:
    return None if duration_s is None else format_duration(duration_s)


def _class(one: ClassPolicy) -> dict[str, Any]:
    return _stated(
        name=one.name,
        slo=_stated(ttft=_written(one.slo.ttft_s), itl=_written(one.slo.itl_s)) or None,
        weight=one.weight,
        maxQueueTime=_written(one.max_queue_time_s),
        maxConcurrency=one.max_concurrency,
        reservedSlots=one.reserved_slots,
        preemptible=one.preemptible,
    )


def _classify(classify: Classify) -> dict[str, Any]:
    return _stated(
        default=classify.default,
        client=None if classify.client_header is None else {"header": classify.client_header},
        rules=[_rule(rule) for rule in classify.rules] or None,
    )


def _rule(rule: Rule) -> dict[str, Any]:
    written = _stated(header=rule.header, values=list(rule.values) or None, model=rule.model, path=rule.path)
    return {**written, "class": rule.class_name}


def _selector(selector: Selector) -> dict[str, Any]:
    return _stated(
        matchLabels=dict(selector.match_labels) or None,
        matchExpressions=[
            _stated(key=one.key, operator=one.operator.value, values=list(one.values) or None)
            for one in selector.match_expressions
        ]
        or None,
    )


def _autoscaling(autoscaling: Autoscaling) -> dict[str, Any]:
    return _stated(
        provider=autoscaling.provider.value,
        minReplicas=autoscaling.min_replicas,
        maxReplicas=autoscaling.max_replicas,
        coldStart=_written(autoscaling.cold_start_s),
    )


def policy_warnings(policy: Policy) -> tuple[str, ...]:
    """What is accepted but does less than it may seem to, each as `path: what and why`."""
    return (*_not_in_force(policy), *_without_effect(policy))


def _not_in_force(policy: Policy) -> Iterator[str]:
    """Fields that this version accepts and does not act on."""
    if policy.mode is Mode.SHADOW:
        yield (
            "spec.mode: Shadow lets everything pass and measures it; what Enforce would have refused is not "
            "forecast yet"
        )
    for place, one in enumerate(policy.classes):
        if one.preemptible:
            yield (
                f"spec.classes[{place}].preemptible: nothing is taken back from the engine yet; the class is treated "
                "like any other of its weight"
            )
    if policy.engine.port is not None:
        yield "spec.engine.port: read by the operator only; a gate goes where its --upstream points"
    if policy.selector is not None:
        yield "spec.selector: read by the operator only; a gate gates the engine that it stands in front of"
    if policy.autoscaling is not None and policy.autoscaling.provider is not Provider.NONE:
        yield "spec.autoscaling: read by the operator only; a gate does not scale anything"


def _without_effect(policy: Policy) -> Iterator[str]:
    """Settings that hold, and change nothing."""
    if all(one.slo.ttft_s is None for one in policy.classes):
        yield (
            "spec.classes: no class has an slo.ttft, so requests are refused only for their time in the queue, "
            "not for their time to the first token"
        )
    lightest = min(one.weight for one in policy.classes)
    reachable = {policy.classify.default, *(rule.class_name for rule in policy.classify.rules)}
    for place, one in enumerate(policy.classes):
        if one.reserved_slots and one.weight == lightest:
            yield (
                f"spec.classes[{place}].reservedSlots: slots are kept from classes of a lesser weight, and "
                "there is none"
            )
        if one.name not in reachable:
            yield f"spec.classes[{place}]: no rule leads to class {one.name}, and it is not the default"
    yield from _shadowed(policy.classify.rules)


def _shadowed(rules: tuple[Rule, ...]) -> Iterator[str]:
    """Rules on a model or a path that an earlier, shorter prefix takes everything from."""
    for subject in ("model", "path"):
        prefixes: list[tuple[int, str]] = []
        for place, rule in enumerate(rules):
            pattern: str | None = getattr(rule, subject)
            if pattern is None:
                continue
            for before, prefix in prefixes:
                if pattern.startswith(prefix):
                    yield (
                        f"spec.classify.rules[{place}].{subject}: {show(pattern)} never matches, as rule {before} "
                        f"takes everything that begins with {show(prefix)}; write it before that one"
                    )
                    break
            if pattern.endswith("*"):
                prefixes.append((place, pattern[:-1]))
