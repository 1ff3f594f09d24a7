"""Pods found in public repositories (tests/manifests), through injection, against a simulation of what they do.

The table says what is expected of each; the checks below hold for every one that is gated: the engine is where the
gate looks for it and nowhere else, whoever came by number or by name still arrives, every probe asks what it asked,
and nothing else has changed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.manifests.patching import apply_patch
from tests.manifests.simulation import GATE, Simulated, named_ports, probe_target, simulate

from sluicegate_core.policy import Policy, parse_policy
from sluicegate_operator.injection import InjectionContext, InjectionResult, inject, json_patch

FOLDER = Path(__file__).parents[1] / "manifests"
CONTEXT = InjectionContext(
    namespace="serving", policy_name="llama", image="registry.example/gate:1", drain_token="t0ken"
)
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")

Case = dict[str, Any]


def cases() -> Iterator[Case]:
    for path in sorted((FOLDER / "pods").glob("*.yaml")):
        yield from yaml.safe_load(path.read_text(encoding="utf-8"))


CASES = list(cases())
GATED = [case for case in CASES if "refusal" not in case["expect"]]
REFUSED = [case for case in CASES if "refusal" in case["expect"]]


def name_of(case: Case) -> str:
    return str(case["name"])


def pod_of(case: Case) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": f"{case['name']}-", "labels": {"app": case["name"]}},
        "spec": copy.deepcopy(case["spec"]),
    }


def policy_of(case: Case) -> Policy:
    return parse_policy({"classes": [{"name": "default"}], **case.get("policy", {})})


def injected(case: Case) -> InjectionResult:
    return inject(pod_of(case), policy_of(case), CONTEXT)


def simulated(case: Case, pod: dict[str, Any]) -> Simulated:
    return simulate(pod, case.get("environment"))


def engine_of(pod: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in pod["spec"]["containers"] if one["name"] == name)


def gate_of(pod: dict[str, Any]) -> dict[str, Any]:
    return next(one for one in pod["spec"]["initContainers"] if one["name"] == GATE)


@pytest.mark.parametrize("case", GATED, ids=name_of)
def test_what_is_done(case: Case) -> None:
    expect, result = case["expect"], injected(case)
    assert result.refusal is None
    told = {key: result.status[key] for key in ("takeover", "container", "engine", "port")}
    assert told == {key: expect[key] for key in told}
    if "enginePort" in expect:
        assert result.status["enginePort"] == expect["enginePort"]
    if "warning" in expect:
        assert any(expect["warning"] in warning for warning in result.warnings), result.warnings
    else:
        assert result.warnings == ()
    annotations = result.pod["metadata"]["annotations"]
    assert annotations["sluicegate.dev/policy"] == "llama"
    assert json.loads(annotations["sluicegate.dev/injection"]) == result.status
    assert result.pod["metadata"]["labels"]["sluicegate.dev/gated"] == "true"


@pytest.mark.parametrize("case", REFUSED, ids=name_of)
def test_what_is_left_alone(case: Case) -> None:
    pod = pod_of(case)
    result = inject(pod, policy_of(case), CONTEXT)
    assert result.refusal is not None
    assert case["expect"]["refusal"] in result.refusal
    assert result.pod["spec"] == pod["spec"]
    assert "sluicegate.dev/gated" not in result.pod["metadata"]["labels"]
    assert json.loads(result.pod["metadata"]["annotations"]["sluicegate.dev/injection"]) == result.status
    assert [result.refusal in warning for warning in result.warnings] == [True]


@pytest.mark.parametrize("case", GATED, ids=name_of)
def test_who_listens_where(case: Case) -> None:
    """Started for real, before and after."""
    expect, result = case["expect"], injected(case)
    before, after = simulated(case, pod_of(case)), simulated(case, result.pod)
    name, port, engine_port = expect["container"], result.status["port"], result.status["enginePort"]
    assert after.upstream == engine_port
    assert after.reaches(engine_port, inside=True) == (
        name if name in {one for one, _ in before.listeners.values()} else "nobody"
    )
    assert after.reaches(port, inside=True) == GATE
    if expect["takeover"] == "Auto":
        assert before.reaches(port, inside=True) == name, before.listeners
        assert (after.reaches(port) == GATE) is (before.reaches(port) == name)
        if "can still be reached" not in expect.get("warning", ""):
            assert after.reaches(engine_port) == "nobody"
        assert expect.get("loopback", False) is (before.reaches(port) == "nobody")
    for other in before.listeners:
        if other != port:
            assert after.listeners[other] == before.listeners[other]
    assert set(after.listeners) - set(before.listeners) <= {port, engine_port, 9901}


@pytest.mark.parametrize("case", GATED, ids=name_of)
def test_services_arrive_at_the_gate(case: Case) -> None:
    """By number and by name, whichever a Service uses."""
    pod, result = pod_of(case), injected(case)
    before, after = dict(named_ports(pod)), dict(named_ports(result.pod))
    assert after.pop("gate-admin") == 9901
    port = result.status["port"]
    if case["expect"]["takeover"] == "Auto":
        assert after == before
    else:
        moved = result.status["portName"]
        assert after == {**before, moved: port}
        numbers = [
            one["containerPort"] for one in engine_of(result.pod, case["expect"]["container"])["ports"]
        ]
        assert before[moved] in numbers
    names = [name for name, _ in named_ports(result.pod)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("case", GATED, ids=name_of)
def test_probes_ask_what_they_asked(case: Case) -> None:
    pod, result = pod_of(case), injected(case)
    port, engine_port = result.status["port"], result.status["enginePort"]
    auto = case["expect"]["takeover"] == "Auto"
    every = [*zip(pod["spec"]["containers"], result.pod["spec"]["containers"], strict=True)]
    every += zip(pod["spec"].get("initContainers", []), result.pod["spec"]["initContainers"], strict=False)
    for old, new in every:
        for kind in PROBES:
            if kind not in old:
                assert kind not in new
                continue
            times = {
                key: value for key, value in old[kind].items() if key not in ("httpGet", "tcpSocket", "exec")
            }
            assert times.items() <= new[kind].items()
            how, where = probe_target(old, old[kind])
            if how == "tcp" and where == port:
                assert new[kind]["httpGet"] == {"path": "/enginez", "port": 9901, "scheme": "HTTP"}
                continue
            now = probe_target(new, new[kind])
            if how == "exec":
                asked = json.dumps(where).replace(f"localhost:{port}", f"127.0.0.1:{engine_port}")
                assert json.dumps(now[1]) == (asked if auto else json.dumps(where))
                assert where, "the command calls something"
            else:
                assert now == (how, where)
                assert new[kind][{"http": "httpGet", "tcp": "tcpSocket"}[how]].get("path") == old[kind][
                    {"http": "httpGet", "tcp": "tcpSocket"}[how]
                ].get("path")


@pytest.mark.parametrize("case", GATED, ids=name_of)
def test_the_end_of_the_pod(case: Case) -> None:
    expect, result = case["expect"], injected(case)
    engine, gate = engine_of(result.pod, expect["container"]), gate_of(result.pod)
    holder = gate if expect.get("drain") == "gate" else engine
    hook = holder["lifecycle"]["preStop"]["httpGet"]
    assert hook["path"] == f"/drain?timeout=300&settle={expect.get('settle', 5)}"
    assert hook["port"] == 9901
    assert hook["httpHeaders"] == [{"name": "x-sluicegate-token", "value": "t0ken"}]
    assert {"name": "SLUICEGATE_DRAIN_TOKEN", "value": "t0ken"} in gate["env"]
    assert result.pod["spec"]["terminationGracePeriodSeconds"] == expect.get("grace", 330)
    other = engine if holder is gate else gate
    assert "httpGet" not in other.get("lifecycle", {}).get("preStop", {})


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_patch_says_the_same(case: Case) -> None:
    pod = pod_of(case)
    before = copy.deepcopy(pod)
    result = inject(pod, policy_of(case), CONTEXT)
    assert pod == before, "what is given is not changed"
    patch = json_patch(pod, result.pod)
    assert apply_patch(pod, patch) == result.pod
    assert json_patch(result.pod, result.pod) == []


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_again_is_the_same(case: Case) -> None:
    once = injected(case)
    twice = inject(once.pod, policy_of(case), CONTEXT)
    assert twice.pod == once.pod
    assert twice.refusal == once.refusal
    assert twice.status == once.status


@pytest.mark.parametrize("case", GATED, ids=name_of)
def test_nothing_else_changes(case: Case) -> None:
    pod, result = pod_of(case), injected(case)
    left = copy.deepcopy(result.pod)
    spec, name = left["spec"], case["expect"]["container"]
    assert spec["initContainers"].pop()["name"] == GATE
    assert spec["volumes"].pop()["name"] == "sluicegate-policy"
    for field in ("initContainers", "volumes"):
        if not spec[field] and field not in pod["spec"]:
            del spec[field]
    for old, new in zip(pod["spec"]["containers"], spec["containers"], strict=True):
        changed = {"command", "args", "env", "ports", "lifecycle"} if old["name"] == name else set()
        for field in changed | set(PROBES):
            if field in old:
                new[field] = old[field]
            else:
                new.pop(field, None)
    if "terminationGracePeriodSeconds" in pod["spec"]:
        spec["terminationGracePeriodSeconds"] = pod["spec"]["terminationGracePeriodSeconds"]
    else:
        del spec["terminationGracePeriodSeconds"]
    assert spec == pod["spec"]


def test_there_are_many_and_each_says_where_it_is_from() -> None:
    assert len(CASES) >= 40
    assert len({case["name"] for case in CASES}) == len(CASES)
    sources = (FOLDER / "SOURCES.md").read_text(encoding="utf-8")
    for case in CASES:
        row = f"| `{case['name']}` | {case['repository']} | `{case['path']}` |"
        assert row in sources, row
