"""What must fit together in a policy: names that are used exist, bounds do not contradict each other.

The checks run on what the schema has read, before the model is built, and look only at values that are valid by
themselves: a name that is wrong in one place is not complained about a second time where it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sluicegate_core.durations import format_duration
from sluicegate_core.policy.model import LabelOperator, Provider
from sluicegate_core.policy.nodes import INVALID
from sluicegate_core.problems import Problems, nearest, show

CONDITIONS = ("header", "model", "path")


def check(spec: dict[str, Any], problems: Problems) -> None:
    """Note what does not fit together in a spec as the schema reads it; INVALID may stand anywhere."""
    classes = _valid_records(spec["classes"])
    _class_names(classes, problems)
    slots = spec["engine"]["slots"] if isinstance(spec["engine"], dict) else None
    for place, one in classes:
        _class_bounds(f"spec.classes[{place}]", one, problems)
    if isinstance(slots, int):
        _reserved(classes, slots, problems)
    if isinstance(spec["classify"], dict):
        # Names are held against the classes only where all classes are known.
        whole = len(classes) == len(spec["classes"]) if isinstance(spec["classes"], tuple) else False
        names = list(dict.fromkeys(one["name"] for _, one in classes))
        _classify(spec["classify"], names if whole and INVALID not in names else None, problems)
    if isinstance(spec["selector"], dict):
        _selector(spec["selector"], problems)
    if isinstance(spec["autoscaling"], dict):
        _autoscaling(spec["autoscaling"], problems)


def _valid_records(items: Any) -> list[tuple[int, dict[str, Any]]]:
    """The items of a list that were read, with their places."""
    if not isinstance(items, tuple):
        return []
    return [(place, item) for place, item in enumerate(items) if isinstance(item, dict)]


def _class_names(classes: list[tuple[int, dict[str, Any]]], problems: Problems) -> None:
    first: dict[str, int] = {}
    for place, one in classes:
        name = one["name"]
        if name is INVALID:
            continue
        if name in first:
            message = f"is the name of spec.classes[{first[name]}] too; allowed is one class of a name"
            problems.add(f"spec.classes[{place}].name", name, message, "rename one of them, or remove it")
        first.setdefault(name, place)


def _class_bounds(path: str, one: dict[str, Any], problems: Problems) -> None:
    slo, queue_time_s = one["slo"], one["maxQueueTime"]
    ttft_s = slo["ttft"] if isinstance(slo, dict) else None
    if isinstance(ttft_s, float) and isinstance(queue_time_s, float) and queue_time_s > ttft_s:
        ttft = format_duration(ttft_s)
        problems.add(
            f"{path}.maxQueueTime",
            format_duration(queue_time_s),
            f"is longer than {path}.slo.ttft, which is over by then; allowed is at most {ttft}",
            f"write at most {ttft}, or remove the line: slo.ttft is the default",
        )
    reserved, cap = one["reservedSlots"], one["maxConcurrency"]
    if isinstance(reserved, int) and isinstance(cap, int) and reserved > cap:
        problems.add(
            f"{path}.reservedSlots",
            reserved,
            f"is more than {path}.maxConcurrency lets the class use; allowed is at most {cap}",
            f"write at most {cap}, or raise maxConcurrency",
        )


def _reserved(classes: list[tuple[int, dict[str, Any]]], slots: int, problems: Problems) -> None:
    """No class keeps more slots than there are, nor all classes together."""
    kept = 0
    for place, one in classes:
        reserved = one["reservedSlots"]
        if not isinstance(reserved, int):
            continue
        left, kept = slots - kept, kept + reserved
        if reserved > left:
            others = "" if left == slots else ", less what the classes before it keep"
            problems.add(
                f"spec.classes[{place}].reservedSlots",
                reserved,
                f"is more than the engine has: spec.engine.slots is {slots}{others}; "
                f"allowed is at most {max(left, 0)}",
                f"write at most {max(left, 0)}, or correct spec.engine.slots",
            )


def _classify(classify: dict[str, Any], names: list[str] | None, problems: Problems) -> None:
    """`names` are those of the classes; None where they are not all known."""
    if classify["default"] is not None:
        _existing("spec.classify.default", classify["default"], names, problems)
    taken: dict[tuple[str, str], str] = {}
    for place, rule in _valid_records(classify["rules"]):
        path = f"spec.classify.rules[{place}]"
        _existing(f"{path}.class", rule["class"], names, problems)
        _conditions(path, rule, problems)
        for subject, pattern, where in _patterns(path, rule):
            before = taken.setdefault((subject, pattern), where)
            if before != where:
                message = f"never matches: {before} has it already, and the first match wins"
                problems.add(
                    where, pattern, f"{message}; allowed is each value once", "remove it here or there"
                )


def _existing(path: str, name: Any, names: list[str] | None, problems: Problems) -> None:
    """Note a class that there is not."""
    if names is None or name is INVALID or name in names:
        return
    near = nearest(name, names)
    fix = f"did you mean {near}?" if near else f"write one of them, or add a class named {show(name)}"
    problems.add(path, name, f"is not the name of a class; allowed is one of {', '.join(names)}", fix)


def _conditions(path: str, rule: dict[str, Any], problems: Problems) -> None:
    """A rule has exactly one condition, and a header has values."""
    present = [name for name in CONDITIONS if rule[name] is not None]
    allowed = "allowed is exactly one of header (with values), model and path"
    if len(present) > 1:
        message = f"has {len(present)} conditions; {allowed}"
        problems.note(path, ", ".join(present), message, "write a rule for each; the first that matches wins")
    elif not present and rule["values"] is None:
        fix = "add header and values, or model, or path; what no rule takes goes to spec.classify.default"
        problems.note(path, "", f"has no condition; {allowed}", fix)
    if rule["header"] is not None and rule["values"] is None:
        message = "is missing; allowed is a list of the header's values that the rule takes"
        problems.note(f"{path}.values", "", message, "add values: [...]")
    if rule["header"] is None and rule["values"] not in (None, INVALID):
        message = f"stands without a header; {allowed}"
        problems.add(f"{path}.values", rule["values"], message, "add the header whose values these are")


def _patterns(path: str, rule: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What the rule looks for: the subject, the value or pattern, and where it stands."""
    if isinstance(rule["header"], str) and isinstance(rule["values"], tuple):
        for place, value in enumerate(rule["values"]):
            if value is not INVALID:
                yield f"header {rule['header']}", value, f"{path}.values[{place}]"
    for subject in ("model", "path"):
        if isinstance(rule[subject], str):
            yield subject, rule[subject], f"{path}.{subject}"


def _selector(selector: dict[str, Any], problems: Problems) -> None:
    if selector["matchLabels"] == () and selector["matchExpressions"] == ():
        problems.note(
            "spec.selector",
            "",
            "selects every pod of the namespace; allowed is at least one label or expression",
            "name a label of the engine's pods, such as matchLabels: {app: llama-70b}",
        )
    for place, one in _valid_records(selector["matchExpressions"]):
        path, operator, values = (
            f"spec.selector.matchExpressions[{place}].values",
            one["operator"],
            one["values"],
        )
        if operator is INVALID or values is INVALID:
            continue
        takes_values = operator in (LabelOperator.IN, LabelOperator.NOT_IN)
        if takes_values and not values:
            message = f"is empty; allowed is a list of at least 1, as operator is {operator}"
            problems.note(path, "", message, "add the label's values")
        elif values and not takes_values:
            message = f"does not go with operator {operator}; allowed is no values"
            problems.add(path, values, message, "remove it, or use the operator In or NotIn")


def _autoscaling(autoscaling: dict[str, Any], problems: Problems) -> None:
    provider, least, most = (autoscaling[name] for name in ("provider", "minReplicas", "maxReplicas"))
    if most is None and provider is not Provider.NONE and provider is not INVALID:
        problems.note(
            "spec.autoscaling.maxReplicas",
            "",
            "is missing; allowed is a whole number, as it bounds what may be spent",
            "add maxReplicas, or provider: None",
        )
    if isinstance(least, int) and isinstance(most, int) and least > most:
        problems.add(
            "spec.autoscaling.minReplicas",
            least,
            f"is more than spec.autoscaling.maxReplicas; allowed is at most {most}",
            f"write at most {most}, or raise maxReplicas",
        )
