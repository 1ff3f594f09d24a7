"""The policy's parser: what it reads, what it makes of what is left out, and what it says is wrong.

Each table row of errors is a promise: the place, a part of what is said, and a part of the fix.
"""

import copy
from typing import Any

import pytest

from sluicegate_core.policy import (
    Autoscaling,
    Classify,
    ClassPolicy,
    EngineSpec,
    EngineType,
    LabelOperator,
    LabelRequirement,
    Mode,
    Policy,
    PolicyError,
    Provider,
    Rule,
    Selector,
    Slo,
    parse_policy,
    policy_warnings,
    write_spec,
)
from sluicegate_core.problems import MAX_PROBLEMS

FULL: dict[str, Any] = {
    "selector": {
        "matchLabels": {"b/name": "2", "app": "llama-70b"},
        "matchExpressions": [
            {"key": "tier", "operator": "NotIn", "values": ["x", "y"]},
            {"key": "gpu", "operator": "Exists"},
        ],
    },
    "mode": "Shadow",
    "engine": {
        "type": "llama.cpp",
        "port": 8000,
        "slots": 4,
        "healthPath": "/health",
        "metricsPath": "/m?x=1",
    },
    "classes": [
        {
            "name": "interactive",
            "slo": {"ttft": "1.5s", "itl": "80ms"},
            "weight": 10,
            "maxQueueTime": "500ms",
            "maxConcurrency": 3,
            "reservedSlots": 2,
            "preemptible": False,
        },
        {"name": "batch", "slo": {"ttft": "5m"}, "maxQueueTime": "0s", "preemptible": True},
    ],
    "classify": {
        "default": "batch",
        "client": {"header": "X-Tenant"},
        "rules": [
            {"header": "X-Admission-Class", "values": ["a", "b c"], "class": "interactive"},
            {"model": "llama*", "class": "interactive"},
            {"path": "/v1/embeddings", "class": "batch"},
        ],
    },
    "autoscaling": {"provider": "HPA", "minReplicas": 2, "maxReplicas": 8, "coldStart": "3m"},
}

FULL_POLICY = Policy(
    mode=Mode.SHADOW,
    engine=EngineSpec(EngineType.LLAMA_CPP, 8000, 4, "/health", "/m?x=1"),
    classes=(
        ClassPolicy("interactive", Slo(1.5, 0.08), 10, 0.5, 3, 2, False),
        ClassPolicy("batch", Slo(300.0), max_queue_time_s=0.0, preemptible=True),
    ),
    classify=Classify(
        "batch",
        "x-tenant",
        (
            Rule("interactive", header="x-admission-class", values=("a", "b c")),
            Rule("interactive", model="llama*"),
            Rule("batch", path="/v1/embeddings"),
        ),
    ),
    selector=Selector(
        (("app", "llama-70b"), ("b/name", "2")),
        (
            LabelRequirement("tier", LabelOperator.NOT_IN, ("x", "y")),
            LabelRequirement("gpu", LabelOperator.EXISTS),
        ),
    ),
    autoscaling=Autoscaling(Provider.HPA, 2, 8, 180.0),
)


def manifest(spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "sluicegate.dev/v1alpha1",
        "kind": "AdmissionPolicy",
        "metadata": {"name": "p"},
        "spec": spec,
    }


def changed(path: str, value: Any) -> dict[str, Any]:
    """FULL with one place set to another value; a path such as `classes/1/slo/ttft`."""
    spec = copy.deepcopy(FULL)
    at: Any = spec
    *parents, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    for part in parents:
        at = at[part]
    at[last] = value
    return spec


def problems_of(document: object) -> dict[str, str]:
    """Path to the whole line, for each problem."""
    with pytest.raises(PolicyError) as caught:
        parse_policy(document)
    return {problem.path: str(problem) for problem in caught.value.problems}


def test_every_field_is_read() -> None:
    assert parse_policy(FULL) == FULL_POLICY


def test_the_whole_object_and_the_bare_spec_are_the_same() -> None:
    assert parse_policy(manifest(FULL)) == FULL_POLICY
    assert parse_policy(manifest(FULL) | {"status": {"anything": [1]}}) == FULL_POLICY


def test_what_is_written_is_read_back() -> None:
    assert parse_policy(write_spec(FULL_POLICY)) == FULL_POLICY
    assert parse_policy(write_spec(Policy())) == Policy()


def test_one_class_is_enough_and_every_default_is_filled_in() -> None:
    policy = parse_policy({"classes": [{"name": "chat", "slo": {"ttft": "2s"}}]})
    assert policy == Policy(
        mode=Mode.ENFORCE,
        engine=EngineSpec(EngineType.AUTO, None, None, None, None),
        classes=(ClassPolicy("chat", Slo(2.0, None), 1, 2.0, None, None, False),),
        classify=Classify("chat", None, ()),
        selector=None,
        autoscaling=None,
    )


def test_defaults_that_are_derived() -> None:
    policy = parse_policy(
        {"classes": [{"name": "a"}, {"name": "b", "slo": {"itl": "1s"}}], "autoscaling": {"maxReplicas": 3}}
    )
    assert [one.max_queue_time_s for one in policy.classes] == [30.0, 30.0]
    assert policy.classify.default == "a"
    assert policy.autoscaling == Autoscaling(Provider.KEDA, 1, 3, None)


@pytest.mark.parametrize(
    ("path", "value", "where", "said", "fix"),
    [
        # The kinds of value, and what YAML makes of text without quotes.
        ("mode", False, "spec.mode", "boolean, as YAML reads on, off", 'write "Off" in quotes'),
        ("mode", "enforce", "spec.mode", "one of Enforce, Shadow, Off", "did you mean Enforce?"),
        ("mode", "zzz", "spec.mode", '(got "zzz")', "use one of them"),
        ("mode", None, "spec.mode", "has no value", "remove the line"),
        ("mode", ["Off"], "spec.mode", "is a list", "use one of them"),
        ("engine/type", "vllm", "spec.engine.type", "one of Auto, vLLM", "did you mean vLLM?"),
        ("engine/type", "llamacpp", "spec.engine.type", "llama.cpp", "did you mean llama.cpp?"),
        ("engine/port", "8000", "spec.engine.port", "is text", "remove the quotes"),
        ("engine/port", 0, "spec.engine.port", "from 1 to 65535 (got 0)", "at least 1"),
        ("engine/port", 65536, "spec.engine.port", "too large", "at most 65535"),
        ("engine/slots", 4.0, "spec.engine.slots", "is a number; allowed is a whole number", "whole number"),
        ("engine/slots", True, "spec.engine.slots", "is a boolean", "whole number"),
        ("engine/slots", float("nan"), "spec.engine.slots", "(got nan)", "whole number"),
        pytest.param("engine/slots", 10**5000, "spec.engine.slots", "of 16610 bits", "at most", id="slots-huge"),
        ("engine/healthPath", "health", "spec.engine.healthPath", "begins with `/`", "/health"),
        ("engine/healthPath", "/a b", "spec.engine.healthPath", "not of this shape", "/health"),
        ("engine", None, "spec.engine", "has no value", "remove the line"),
        ("engine", "vLLM", "spec.engine", "is text; allowed is an engine (type, port", "mapping"),
        ("classes", {}, "spec.classes", "is a mapping", "begin each class with a dash"),
        ("classes", [], "spec.classes", "a list of 1 to 16", "at least 1"),
        ("classes", [{"name": f"c{n}"} for n in range(17)], "spec.classes", "has 17 items", "at most 16"),
        ("classes/1/name", "Batch", "spec.classes[1].name", "small letters", "interactive"),
        ("classes/1/name", "-batch", "spec.classes[1].name", "not of this shape", "interactive"),
        ("classes/1/name", "", "spec.classes[1].name", "is empty", "interactive"),
        ("classes/1/name", "a" * 64, "spec.classes[1].name", "has 64 characters", "shorten it to 63"),
        ("classes/1/name", "a\n", "spec.classes[1].name", '(got "a\\n")', "interactive"),
        ("classes/1/name", False, "spec.classes[1].name", "is a boolean", "in quotes"),
        ("classes/1", "batch", "spec.classes[1]", "is text; allowed is a class (name, slo", "mapping"),
        ("classes/1", None, "spec.classes[1]", "has no value", "remove the line"),
        ("classes/1/weight", 0, "spec.classes[1].weight", "too small", "at least 1"),
        ("classes/1/weight", 1001, "spec.classes[1].weight", "from 1 to 1000", "at most 1000"),
        ("classes/1/preemptible", "yes", "spec.classes[1].preemptible", "true or false", "without quotes"),
        ("classes/1/slo/ttft", 2, "spec.classes[1].slo.ttft", "without a unit", 'write "2s" for seconds'),
        ("classes/1/slo/ttft", -2, "spec.classes[1].slo.ttft", "without a unit", "with a unit"),
        ("classes/1/slo/ttft", "2 s", "spec.classes[1].slo.ttft", "has a space", "no spaces"),
        ("classes/1/slo/ttft", "0s", "spec.classes[1].slo.ttft", "too short; allowed is a duration from 1ms", "1ms"),
        ("classes/1/slo/ttft", "2d", "spec.classes[1].slo.ttft", "count in hours", "units out of h, m, s"),
        ("classes/1/slo/ttft", True, "spec.classes[1].slo.ttft", "is a boolean", "with a unit"),
        ("classes/1/slo/itl", "61s", "spec.classes[1].slo.itl", "too long", "at most 1m"),
        ("classes/1/maxQueueTime", "-1s", "spec.classes[1].maxQueueTime", "is negative", "at least 0s"),
        ("classify/rules/0/values/1", 1, "spec.classify.rules[0].values[1]", "is a number", 'in quotes: "1"'),
        ("classify/rules/0/values/1", True, "spec.classify.rules[0].values[1]", "is a boolean", '"on"'),
        ("classify/rules/0/values/1", " a", "spec.classify.rules[0].values[1]", "blanks around", "batch"),
        ("classify/rules/0/values", "a", "spec.classify.rules[0].values", "is text", "begin each value"),
        ("classify/rules/0/values", [], "spec.classify.rules[0].values", "1 to 64", "at least 1"),
        ("classify/rules/0/values", ["a"] * 65, "spec.classify.rules[0].values", "has 65", "at most 64"),
        ("classify/rules/0/header", "x admission", "spec.classify.rules[0].header", "HTTP header", "x-admission"),
        ("classify/rules/1/model", "*", "spec.classify.rules[1].model", "beginning", "llama-3*"),
        ("classify/rules/1/model", "a*b", "spec.classify.rules[1].model", "followed by `*`", "llama-3*"),
        ("classify/rules/2/path", "v1", "spec.classify.rules[2].path", "begins with `/`", "/v1"),
        ("classify/rules/2/path", "/v1?a=1", "spec.classify.rules[2].path", "without a query", "/v1"),
        ("classify/rules", [FULL["classify"]["rules"][1]] * 65, "spec.classify.rules", "has 65", "at most 64"),
        ("selector/matchLabels", [], "spec.selector.matchLabels", "is a list", "mapping"),
        ("selector/matchLabels/app", 1, "spec.selector.matchLabels.app", "is a number", '"1"'),
        ("selector/matchLabels/-x", "1", "spec.selector.matchLabels[\"-x\"]", "label key", "app.kubernetes.io"),
        # Unknown fields.
        ("clases", [], "spec.clases", "allowed are selector, mode", "did you mean classes?"),
        ("classes/0/max_queue_time", 1, "spec.classes[0].max_queue_time", "not a field of a class", "maxQueueTime?"),
        ("classes/0/ttft", "1s", "spec.classes[0].ttft", "not a field", "write it inside: slo.ttft"),
        ("classes/0/zzz", 1, "spec.classes[0].zzz", "not a field", "remove it"),
        ("engine/a b", 1, 'spec.engine["a b"]', "not a field", "remove it"),
        # What must fit together.
        ("classes/0/maxQueueTime", "2s", "spec.classes[0].maxQueueTime", "at most 1.5s", "slo.ttft is the default"),
        ("classes/0/reservedSlots", 5, "spec.classes[0].reservedSlots", "at most", "at most"),
        ("classes/1/reservedSlots", 3, "spec.classes[1].reservedSlots", "at most 2 (got 3)", "spec.engine.slots"),
        ("classify/default", "bach", "spec.classify.default", "one of interactive, batch", "did you mean batch?"),
        ("classify/rules/1/class", "zzz", "spec.classify.rules[1].class", "one of interactive", "add a class"),
        ("classify/rules/0/values", ["a", "a"], "spec.classify.rules[0].values[1]", "never matches", "remove it"),
        ("classify/rules/2", {"model": "llama*", "class": "batch"}, "spec.classify.rules[2].model", "rules[1]", "here"),
        ("classify/rules/0", {"class": "batch"}, "spec.classify.rules[0]", "has no condition", "add header"),
        (
            "classify/rules/1/path",
            "/v1",
            "spec.classify.rules[1]",
            "has 2 conditions; allowed is exactly one of header (with values), model and path (got model, path)",
            "a rule for each",
        ),
        ("classify/rules/1/values", ["a"], "spec.classify.rules[1].values", "without a header", "add the header"),
        (
            "classify/rules/1",
            {"header": "x-a", "class": "batch"},
            "spec.classify.rules[1].values",
            "is missing",
            "add values",
        ),
        ("selector", {}, "spec.selector", "every pod of the namespace", "matchLabels"),
        (
            "selector/matchExpressions/0/operator",
            "Exists",
            "spec.selector.matchExpressions[0].values",
            "does not go with",
            "remove it",
        ),
        (
            "selector/matchExpressions/1/operator",
            "In",
            "spec.selector.matchExpressions[1].values",
            "at least 1",
            "add the label's values",
        ),
        ("autoscaling/minReplicas", 9, "spec.autoscaling.minReplicas", "at most 8", "raise maxReplicas"),
        ("autoscaling/minReplicas", 0, "spec.autoscaling.minReplicas", "too small", "at least 1"),
        ("autoscaling", {}, "spec.autoscaling.maxReplicas", "is missing", "add maxReplicas"),
        ("autoscaling/provider", "none", "spec.autoscaling.provider", "KEDA, HPA, None", "did you mean None?"),
    ],
)  # fmt: skip
def test_an_error_names_place_value_what_is_allowed_and_the_fix(
    path: str, value: Any, where: str, said: str, fix: str
) -> None:
    lines = problems_of(changed(path, value))
    assert list(lines) == [where]
    before, _, after = lines[where].partition(" Fix: ")
    assert said in before
    assert fix in after


def test_a_missing_class_name_and_class_list() -> None:
    assert "is missing" in problems_of({"classes": [{}]})["spec.classes[0].name"]
    assert "is missing; allowed is a list of 1 to 16" in problems_of({})["spec.classes"]


def test_a_name_is_given_once() -> None:
    lines = problems_of({"classes": [{"name": "a"}, {"name": "b"}, {"name": "a"}]})
    assert list(lines) == ["spec.classes[2].name"]
    assert (
        "is the name of spec.classes[0] too; allowed is one class of a name" in lines["spec.classes[2].name"]
    )


def test_all_problems_at_once_across_all_parts() -> None:
    spec = changed("classes/1/name", "interactive")
    spec["mode"] = "x"
    spec["engine"]["port"] = 0
    spec["classes"][0]["weight"] = 0
    spec["classify"]["default"] = "nobody"
    spec["autoscaling"]["minReplicas"] = 9
    spec["unknown"] = 1
    assert set(problems_of(spec)) == {
        "spec.mode",
        "spec.engine.port",
        "spec.classes[0].weight",
        "spec.classes[1].name",
        "spec.classify.default",
        "spec.classify.rules[2].class",
        "spec.autoscaling.minReplicas",
        "spec.unknown",
    }


def test_a_wrong_class_name_is_not_complained_about_where_it_is_used() -> None:
    spec = changed("classes/1/name", "Batch")
    assert list(problems_of(spec)) == ["spec.classes[1].name"]


@pytest.mark.parametrize("document", [None, [], "classes", 1, True, 1.5, {1, 2}])
def test_what_is_no_mapping_is_no_policy(document: object) -> None:
    assert list(problems_of(document)) == ["spec"]


@pytest.mark.parametrize(
    ("change", "where", "fix"),
    [
        ({"apiVersion": "sluicegate.dev/v1"}, "apiVersion", "write apiVersion: sluicegate.dev/v1alpha1"),
        ({"kind": "Policy"}, "kind", "write kind: AdmissionPolicy"),
        ({"metadata": "p"}, "metadata", "write metadata"),
        ({"mode": "Off"}, "mode", "write it inside: spec.mode"),
        ({"Metadata": {}}, "Metadata", "did you mean metadata?"),
        ({"zzz": {}}, "zzz", "remove it"),
        ({True: {}}, "[true]", "remove it"),
        ({"spec": None}, "spec", "give it a value"),
    ],
)
def test_what_surrounds_the_spec(change: dict[Any, Any], where: str, fix: str) -> None:
    lines = problems_of(manifest(FULL) | change)
    assert list(lines) == [where]
    assert fix in lines[where].partition(" Fix: ")[2]


def test_a_whole_object_without_a_spec() -> None:
    document = manifest(FULL)
    del document["spec"]
    assert "is missing" in problems_of(document)["spec"]


def test_a_key_that_yaml_reads_as_a_boolean() -> None:
    assert "quotes" in problems_of({**FULL, True: 1})["spec[true]"]


def test_the_number_of_problems_is_bounded() -> None:
    document = {**FULL, **{f"field-{number}": 0 for number in range(1000)}}
    with pytest.raises(PolicyError) as caught:
        parse_policy(document)
    assert len(caught.value.problems) == MAX_PROBLEMS + 1
    assert f"{1000 - MAX_PROBLEMS} more problems" in str(caught.value.problems[-1])


def test_a_long_value_is_shown_in_part() -> None:
    line = problems_of(changed("mode", "\x1b[31m" + "x" * 100_000))["spec.mode"]
    assert len(line) < 300
    assert "\\x1b" in line
    assert "\x1b" not in line


def test_nobody_scales_and_no_bound_is_needed() -> None:
    assert parse_policy(changed("autoscaling", {"provider": "None"})).autoscaling == Autoscaling(
        Provider.NONE
    )


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("mode", "Enforce", "spec.classes[1].preemptible"),
        ("mode", "Shadow", "spec.mode: Shadow lets everything pass"),
        ("mode", "Enforce", "spec.selector: read by the operator only"),
        ("mode", "Enforce", "spec.autoscaling: read by the operator only"),
        ("mode", "Enforce", "spec.engine.port: read by the operator only"),
        (
            "classes/1/reservedSlots",
            1,
            "spec.classes[1].reservedSlots: slots are kept from classes of a lesser weight",
        ),
        ("classes/1/slo", {}, None),
        ("classify/rules/2", {"model": "llama-3", "class": "batch"}, "spec.classify.rules[2].model"),
        ("classify/rules", [], "spec.classes[0]: no rule leads to class interactive"),
    ],
)
def test_what_does_less_than_it_seems_to_is_named(path: str, value: Any, expected: str | None) -> None:
    warnings = policy_warnings(parse_policy(changed(path, value)))
    if expected is not None:
        assert [one for one in warnings if one.startswith(expected)]
    else:
        assert not [one for one in warnings if "slo" in one]


def test_classes_without_any_slo_are_named() -> None:
    assert any("no class has an slo.ttft" in one for one in policy_warnings(Policy()))


def test_a_plain_policy_has_no_warnings() -> None:
    assert policy_warnings(parse_policy({"classes": [{"name": "a", "slo": {"ttft": "1s"}}]})) == ()


@pytest.mark.parametrize(
    "build",
    [
        lambda: Policy(classes=()),
        lambda: Policy(classes=(ClassPolicy("a"), ClassPolicy("a"))),
        lambda: Policy(classify=Classify(default="nobody")),
        lambda: Policy(classify=Classify(rules=(Rule("nobody", model="m"),))),
        lambda: ClassPolicy(""),
        lambda: ClassPolicy("a", weight=0),
        lambda: ClassPolicy("a", max_queue_time_s=-2.0),
        lambda: ClassPolicy("a", max_queue_time_s=float("nan")),
        lambda: Rule("a"),
        lambda: Rule("a", model="m", path="/"),
        lambda: Rule("a", header="h"),
        lambda: Rule("a", model="m", values=("v",)),
    ],
)
def test_a_policy_built_wrong_in_code_is_a_bug(build: Any) -> None:
    with pytest.raises(ValueError):
        build()


def test_a_class_is_found_by_its_name() -> None:
    assert FULL_POLICY.class_index("batch") == 1
    with pytest.raises(ValueError):
        FULL_POLICY.class_index("nobody")
