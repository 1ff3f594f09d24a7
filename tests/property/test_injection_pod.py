"""Whatever the pod: it is gated or left alone, never broken, and nothing but what has to changes."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.manifests.building import CONTEXT, policy
from tests.manifests.patching import apply_patch
from tests.manifests.pod_security import violations

from sluicegate_operator.injection import inject, json_patch

Json = dict[str, Any]

ports = st.sampled_from([80, 8000, 8001, 8080, 9901, 27000])
texts = st.sampled_from(
    [
        "vllm", "serve", "--port", "--port=8000", "--port=$(PORT)", "$(PORT)", "8000", "--host", "0.0.0.0", "m",
        "python3", "-m", "vllm.entrypoints.openai.api_server", "llama-server", "/app/llama-server", "ollama", "exec",
        "tini", "--", "sh", "-c", "bash", "-lc", "vllm serve m --port 8000", 'exec vllm serve "$@"',
        "while true; do vllm serve m; done", "'", "$$", "$(", "${", "text-generation-launcher", "-p", "--config", "",
        "OLLAMA_HOST=0.0.0.0:1 ollama serve", 'set -- vllm serve; "$@"', "trtllm-serve", "tritonserver", "--uds",
        "--http-port=1", 'eval "vllm serve"',
    ]
)  # fmt: skip
#: How engines are started that can be moved.
starts: st.SearchStrategy[Json] = st.sampled_from(
    [
        {"command": ["vllm", "serve", "m"], "args": ["--port=8000"]},
        {"command": ["vllm", "serve", "m"], "args": None},
        {"command": ["bash", "-c", 'exec vllm serve "$@"', "--"], "args": ["m", "--port", "8000"]},
        {"command": ["sh", "-c", 'eval "vllm serve m --port 80 ${MORE}"'], "args": None},
        {"command": ["/app/llama-server"], "args": ["--host", "0.0.0.0", "--port", "8080"]},
        {
            "command": ["ollama", "serve"],
            "args": None,
            "env": [{"name": "OLLAMA_HOST", "value": "0.0.0.0:80"}],
        },
        {"command": ["text-generation-launcher", "--port", "80"], "args": None},
        {"command": ["/start.sh"], "args": None},
    ]
)
images = st.sampled_from(
    [
        "vllm/vllm-openai:v1", "ghcr.io/ggml-org/llama.cpp:server", "ollama/ollama", "example/x:1",
        "ghcr.io/huggingface/text-generation-inference:3", "nvcr.io/nvidia/tritonserver:25", "a@sha256:b", "",
    ]
)  # fmt: skip
handlers = st.one_of(
    st.builds(lambda p: {"httpGet": {"path": "/health", "port": p}}, ports | st.just("http")),
    st.builds(lambda p: {"tcpSocket": {"port": p}}, ports | st.just("http")),
    st.builds(lambda p: {"grpc": {"port": p}}, ports),
    st.builds(lambda p: {"exec": {"command": ["curl", f"http://localhost:{p}/v1/completions"]}}, ports),
    st.builds(lambda n: {"exec": {"command": ["sleep", str(n)]}}, st.integers(0, 90)),
)
probes = st.builds(lambda handler, period: {**handler, "periodSeconds": period}, handlers, st.integers(1, 60))
variables = st.one_of(
    st.builds(lambda n, v: {"name": n, "value": v}, st.sampled_from(["PORT", "OLLAMA_HOST", "A"]), texts),
    st.builds(
        lambda n: {"name": n, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}, st.just("PORT")
    ),
)
security = st.sampled_from(
    [
        {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        {"privileged": True},
        {"runAsUser": 0},
    ]
)

RESTRICTED: Json = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


@st.composite
def containers(draw: st.DrawFn, name: str) -> Json:
    made: Json = {"name": name, "image": draw(images)}
    for field, values in (
        ("command", st.lists(texts, max_size=4)),
        ("args", st.lists(texts, max_size=6)),
        ("env", st.lists(variables, max_size=3)),
        ("envFrom", st.just([{"configMapRef": {"name": "x"}}])),
        ("startupProbe", probes),
        ("readinessProbe", probes),
        ("livenessProbe", probes),
        ("securityContext", security),
        ("resources", st.just({"limits": {"cpu": "1", "memory": "1Gi"}})),
    ):
        if draw(st.booleans()):
            made[field] = draw(values)
    if draw(st.booleans()):
        made = {key: value for key, value in (made | draw(starts)).items() if value is not None}
    if draw(st.booleans()):
        numbers = draw(st.lists(ports, max_size=3, unique=True))
        made["ports"] = [
            {"containerPort": number, **({"name": "http"} if at == 0 else {})}
            for at, number in enumerate(numbers)
        ]
    if draw(st.booleans()):
        made["lifecycle"] = {draw(st.sampled_from(["preStop", "postStart"])): draw(handlers)}
    return made


@st.composite
def pods(draw: st.DrawFn) -> Json:
    spec: Json = {"containers": [draw(containers(f"c{at}")) for at in range(draw(st.integers(1, 3)))]}
    for field, values in (
        ("hostNetwork", st.booleans()),
        ("terminationGracePeriodSeconds", st.integers(0, 900)),
        ("volumes", st.just([{"name": "v", "emptyDir": {}}])),
        (
            "securityContext",
            st.sampled_from(
                [{"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}, {"runAsUser": 0}]
            ),
        ),
        (
            "initContainers",
            st.just([{"name": "i", "image": "x"}, {"name": "s", "image": "x", "restartPolicy": "Always"}]),
        ),
    ):
        if draw(st.integers(0, 3)) == 0:
            spec[field] = draw(values)
    labels = draw(st.sampled_from([{}, {"app": "x"}, {"sluicegate.dev/inject": "false"}]))
    return {"metadata": {"name": "p", **({"labels": labels} if labels else {})}, "spec": spec}


specs: st.SearchStrategy[Json] = st.sampled_from(
    [
        {},
        {"engine": {"port": 8000}},
        {"engine": {"type": "vLLM"}},
        {"injection": {"container": "c0"}},
        {"injection": {"takeover": "NamedPort"}},
        {"engine": {"port": 8000}, "injection": {"takeover": "Explicit", "upstreamPort": 8001}},
        {"injection": {"takeover": "Explicit"}},
    ]
)

ENGINE_FIELDS = ("command", "args", "env", "ports", "lifecycle")
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


@settings(max_examples=600, deadline=None)
@given(pod=pods(), spec=specs)
def test_gated_or_left_alone(pod: Json, spec: Json) -> None:
    pod = json.loads(json.dumps(pod))  # as it comes over the wire: no two parts are one object
    before = copy.deepcopy(pod)
    result = inject(pod, policy(**spec), CONTEXT)
    assert pod == before
    assert apply_patch(pod, json_patch(pod, result.pod)) == result.pod
    json.dumps(result.pod)
    again = inject(result.pod, policy(**spec), CONTEXT)
    assert (again.pod, again.status, again.refusal) == (result.pod, result.status, result.refusal)
    if result.refusal is not None:
        assert result.pod["spec"] == pod["spec"]
        return
    assert pod["metadata"].get("labels", {}).get("sluicegate.dev/inject") != "false"
    assert not pod["spec"].get("hostNetwork")
    assert violations(result.pod) == violations(pod)

    left = result.pod["spec"]
    assert left["initContainers"][:-1] == [
        {**one, **{kind: new[kind] for kind in PROBES if kind in new}}
        for one, new in zip(pod["spec"].get("initContainers", []), left["initContainers"], strict=False)
    ]
    for old, new in zip(pod["spec"]["containers"], left["containers"], strict=True):
        may_change = PROBES + (ENGINE_FIELDS if old["name"] == result.status["container"] else ())
        assert {key: value for key, value in old.items() if key not in may_change} == {
            key: value for key, value in new.items() if key not in may_change
        }
    for field, value in pod["spec"].items():
        if field not in (
            "containers",
            "initContainers",
            "volumes",
            "terminationGracePeriodSeconds",
            "securityContext",
        ):
            assert left[field] == value
    assert left["volumes"][:-1] == pod["spec"].get("volumes", [])
    assert left["terminationGracePeriodSeconds"] >= pod["spec"].get("terminationGracePeriodSeconds", 30)


documents = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["", "a", "~", "/"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["a", "b", "~1", "c/d", ""]), inner)
    ),
    max_leaves=20,
)


@settings(max_examples=500, deadline=None)
@given(before=documents, after=documents)
def test_a_patch_leads_from_one_document_to_any_other(before: object, after: object) -> None:
    """Within an object, as the patch of a pod is."""
    patch = json_patch({"x": before}, {"x": after})
    made = apply_patch({"x": before}, patch)
    assert json.dumps(made, sort_keys=True) == json.dumps({"x": after}, sort_keys=True)
    assert (patch == []) is (json.dumps(before, sort_keys=True) == json.dumps(after, sort_keys=True))
