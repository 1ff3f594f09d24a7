"""The parser against documents that nobody wrote by hand.

Whatever is decoded from JSON or YAML, the parser gives a policy or a PolicyError; what is valid survives being
written and read; and one wrong value in a valid policy is told at its own place, and nowhere else.
"""

import contextlib
import copy
import datetime
from typing import Any

import yaml
from hypothesis import given, note
from hypothesis import strategies as st

from sluicegate_core.durations import format_duration
from sluicegate_core.policy import (
    EngineType,
    Policy,
    PolicyError,
    Problem,
    parse_policy,
    policy_warnings,
    write_spec,
)
from sluicegate_core.policy.nodes import ListOf, Node, Record
from sluicegate_core.policy.schema import ITL_MAX_S, MAX_WEIGHT, SPEC, TTFT_MAX_S, every_field
from sluicegate_core.problems import MAX_PROBLEMS
from sluicegate_sidecar.policy_file import PolicyFileError, read_policy

FIELD_NAMES = sorted({field.name for _, field in every_field()} | {"apiVersion", "kind", "metadata", "spec"})

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**4000)
    | st.floats()
    | st.text()
    | st.sampled_from(["2s", "0s", "-1s", "a", "Off", "KEDA", "interactive", "x-a", "/v1*", "*"])
    | st.dates()
    | st.binary()
)
KEYS = st.sampled_from(FIELD_NAMES) | st.text() | st.none() | st.booleans() | st.integers() | st.floats()
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=6),
    max_leaves=30,
)


def near_schema(node: Node) -> st.SearchStrategy[Any]:
    """Documents that follow the schema for a while, and then do not: they get past its first lines."""
    match node:
        case Record():
            known = {field.name: near_schema(field.node) | ANYTHING for field in node.fields}
            return st.fixed_dictionaries({}, optional=known)
        case ListOf():
            return st.lists(near_schema(node.item) | ANYTHING, max_size=4)
    return SCALARS


def milliseconds(least: int, most_s: float) -> st.SearchStrategy[int]:
    return st.integers(least, int(most_s * 1000))


def written(duration_ms: int) -> str:
    return format_duration(duration_ms / 1000)


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    """Valid specs, with any field left out that may be."""
    names = draw(st.lists(st.text("abc0", min_size=1, max_size=4), min_size=1, max_size=4, unique=True))
    slots = draw(st.none() | st.integers(len(names), 64))
    spec: dict[str, Any] = {"classes": [draw(classes(name)) for name in names]}
    engine: dict[str, Any] = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "type": st.sampled_from([one.value for one in EngineType]),
                "port": st.integers(1, 65535),
                "healthPath": st.just("/health"),
            },
        )
    )
    if slots is not None:
        engine["slots"] = slots
    rules = draw(st.lists(rules_of(names), max_size=4))
    for place, rule in enumerate(rules):  # no two rules look for the same
        for subject in ("model", "path"):
            if subject in rule:
                rule[subject] = f"{rule[subject]}{place}"
        if "header" in rule:
            rule["header"] = f"{rule['header']}-{place}"
    optional = {
        "mode": draw(st.sampled_from(["Enforce", "Shadow", "Off"])),
        "engine": engine,
        "classify": {
            "default": draw(st.sampled_from(names)),
            "rules": rules,
            "client": {"header": "X-Tenant"},
        },
        "selector": {"matchLabels": {"app": draw(st.sampled_from(["a", "", "A.b_c-1"]))}},
        "autoscaling": {"maxReplicas": draw(st.integers(1, 9)), "coldStart": "3m"},
    }
    for name in draw(st.sets(st.sampled_from(sorted(optional)))):
        spec[name] = optional[name]
    return spec


@st.composite
def classes(draw: st.DrawFn, name: str) -> dict[str, Any]:
    ttft_ms = draw(milliseconds(1, TTFT_MAX_S))
    slo = {"ttft": written(ttft_ms), "itl": written(draw(milliseconds(1, ITL_MAX_S)))}
    optional = {
        "slo": slo,
        "weight": draw(st.integers(1, MAX_WEIGHT)),
        "maxQueueTime": written(draw(st.integers(0, ttft_ms))),
        "maxConcurrency": draw(st.integers(1, 100)),
        "reservedSlots": draw(st.integers(0, 1)),
        "preemptible": draw(st.booleans()),
    }
    return {"name": name} | {key: optional[key] for key in draw(st.sets(st.sampled_from(sorted(optional))))}


def rules_of(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    into = {"class": st.sampled_from(names)}
    value = st.text("aB1é*:, ", min_size=1, max_size=5).map(lambda text: f"v{text}v")
    return (
        st.fixed_dictionaries(
            {
                "header": st.just("X-Class"),
                "values": st.lists(value, min_size=1, max_size=4, unique=True),
                **into,
            }
        )
        | st.fixed_dictionaries({"model": st.just("llama-"), **into})
        | st.fixed_dictionaries({"path": st.just("/v1/"), **into})
    )


def problems_of(document: object) -> tuple[Problem, ...]:
    """What the parser says is wrong; nothing where it gives a policy."""
    try:
        assert isinstance(parse_policy(document), Policy)
    except PolicyError as error:
        return error.problems
    return ()


@given(ANYTHING | near_schema(SPEC) | st.fixed_dictionaries({"spec": near_schema(SPEC)}))
def test_any_document_is_a_policy_or_a_policy_error(document: object) -> None:
    problems = problems_of(document)
    assert len(problems) <= MAX_PROBLEMS + 1
    for problem in problems:
        assert problem.path
        assert problem.message
        assert problem.fix
        assert len(str(problem)) < 1000
        assert str(problem).isprintable()
    if not problems:
        policy = parse_policy(document)
        policy_warnings(policy)
        assert parse_policy(write_spec(policy)) == policy


@given(st.binary() | st.text().map(str.encode) | ANYTHING.map(lambda one: yaml.dump(one).encode()))
def test_any_bytes_are_a_policy_or_a_policy_file_error(data: bytes) -> None:
    with contextlib.suppress(PolicyFileError):
        assert isinstance(read_policy(data, "p.yaml"), Policy)


@given(specs())
def test_a_valid_spec_survives_being_written_and_read(spec: dict[str, Any]) -> None:
    before = copy.deepcopy(spec)
    policy = parse_policy(spec)
    assert spec == before
    again = write_spec(policy)
    assert parse_policy(again) == policy
    assert write_spec(parse_policy(again)) == again
    assert read_policy(yaml.safe_dump(again).encode(), "p") == policy


@given(specs())
def test_what_is_stated_is_what_is_in_force(spec: dict[str, Any]) -> None:
    """Nothing that was written is dropped on the way: the spec is contained in what is written back."""
    again = write_spec(parse_policy(spec))
    for stated, effective in zip(spec["classes"], again["classes"], strict=True):
        assert stated.items() <= effective.items()
    assert spec.get("engine", {}).items() <= again["engine"].items()
    for name in ("mode", "selector"):
        if name in spec:
            assert again[name] == spec[name]
    if "classify" in spec:
        lowered = [
            {**rule, "header": rule["header"].lower()} if "header" in rule else rule
            for rule in spec["classify"]["rules"]
        ]
        assert again["classify"].get("rules", []) == lowered


def places(value: Any, path: str) -> list[tuple[str, Any, Any]]:
    """Each value below: its path, what holds it, and its key there."""
    found = []
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, inner in entries:
        where = f"{path}.{key}" if isinstance(value, dict) else f"{path}[{key}]"
        found.append((where, value, key))
        found += places(inner, where)
    return found


# Valid nowhere in a policy, each for another reason.
WRONG = st.sampled_from(
    [None, -1, 1.5, float("nan"), "\x00", "", datetime.date(2026, 1, 1), [[]], [None], {"zzz": 1}]
)


@given(specs(), st.data())
def test_one_wrong_value_is_told_at_its_own_place(spec: dict[str, Any], data: st.DataObject) -> None:
    where, holder, key = data.draw(st.sampled_from(places(spec, "spec")))
    wrong = data.draw(WRONG.filter(lambda one: not (one == "" and where == "spec.selector.matchLabels.app")))
    if isinstance(wrong, dict) and where == "spec.selector.matchLabels":
        wrong = {"zzz": 1.5}
    holder[key] = wrong
    note(f"{where} = {wrong!r}")
    paths = [problem.path for problem in problems_of(spec)]
    assert paths
    assert all(path.startswith(where) for path in paths), paths


@given(specs(), st.data())
def test_one_unknown_field_is_told_at_its_own_place(spec: dict[str, Any], data: st.DataObject) -> None:
    free = "spec.selector.matchLabels"
    records = [("spec", spec)] + [
        (where, holder[key])
        for where, holder, key in places(spec, "spec")
        if isinstance(holder[key], dict) and where != free
    ]
    where, record = data.draw(st.sampled_from(records))
    name = data.draw(
        st.from_regex(r"[a-z_]{1,30}", fullmatch=True).filter(lambda one: one not in FIELD_NAMES)
    )
    record[name] = data.draw(SCALARS)
    assert [problem.path for problem in problems_of(spec)] == [f"{where}.{name}"]
