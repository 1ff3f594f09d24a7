"""Injected pods on a real cluster: they start, they serve through the gate, and nobody gets past it."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml
from tests.cluster.engines import MODEL, RESTRICTED_CONTAINER, RESTRICTED_POD, Json, Site, site, until

from sluicegate_core.policy import parse_policy
from sluicegate_operator.injection import InjectionContext, inject

PODS = [
    case
    for path in sorted((Path(__file__).parents[1] / "manifests" / "pods").glob("*.yaml"))
    for case in yaml.safe_load(path.read_text(encoding="utf-8"))
]
QUESTION = {"model": "m", "messages": [{"role": "user", "content": "hello 5"}], "max_tokens": 5}


@pytest.fixture
async def here(kubeconfig: Path, gate_image: str, engine_image: str) -> AsyncIterator[Site]:
    async with site(kubeconfig, gate_image, engine_image) as there:
        yield there


async def ask(url: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as http:
        return await http.post(f"{url}/v1/chat/completions", json=QUESTION)


async def ends(here: Site, name: str, command: list[str]) -> str:
    """How a pod ends that runs the command: Succeeded or Failed."""
    container = {
        "name": "client", "image": here.engine_image, "imagePullPolicy": "Never", "command": command,
        "securityContext": RESTRICTED_CONTAINER,
    }  # fmt: skip
    spec = {"restartPolicy": "Never", "securityContext": RESTRICTED_POD, "containers": [container]}
    await here.create("pods", {"metadata": {"name": name}, "spec": spec})

    async def phase() -> str | None:
        found: str = (await here.get("pods", name))["status"].get("phase", "")
        return found if found in ("Succeeded", "Failed") else None

    return await until(phase, f"pod {name} has ended")


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_gated_pod_serves_and_nobody_gets_past_the_gate(here: Site) -> None:
    """In a namespace that enforces `restricted`, with probes by name, by number and by exec."""
    url = await here.deploy(here.inject(here.pod()).pod, 1)
    answer = await ask(url)
    assert (answer.status_code, answer.headers["x-sluicegate-reason"]) == (200, "admitted")

    (pod,) = await here.pods()
    ip = pod["status"]["podIP"]
    assert await ends(here, "through", ["curl", "-sf", "-m", "9", f"http://{ip}:8080/health"]) == "Succeeded"
    assert await ends(here, "past", ["curl", "-sf", "-m", "9", f"http://{ip}:27080/health"]) == "Failed"
    async with httpx.AsyncClient() as http:
        drain = await http.get(f"http://{ip}:9901/drain")
        assert drain.status_code == 403
        assert (await http.get(f"http://{ip}:9901/enginez")).json() == {"accepts": True}

    statuses = [*pod["status"]["initContainerStatuses"], *pod["status"]["containerStatuses"]]
    assert {one["name"]: one["restartCount"] for one in statuses} == {"sluicegate-gate": 0, "engine": 0}


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_gate_has_no_credentials(here: Site) -> None:
    made = await here.create("pods", here.inject(here.pod(metadata={"name": "llama"})).pod)
    (gate,) = made["spec"]["initContainers"]
    (engine,) = made["spec"]["containers"]
    where = "/var/run/secrets/kubernetes.io/serviceaccount"
    assert [one["name"] for one in gate["volumeMounts"] if one["mountPath"] == where] == ["sluicegate-policy"]
    assert [one["name"][:15] for one in engine["volumeMounts"]] == ["kube-api-access"]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_port_that_needs_a_privilege(here: Site) -> None:
    """The gate listens on port 80 without one."""
    url = await here.deploy(here.inject(here.pod(port=80)).pod, 1)
    assert (await ask(url)).headers["x-sluicegate-reason"] == "admitted"


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_ports_name_leads_to_the_gate(here: Site) -> None:
    """The engine's start is in a file, as in an image of one's own: NamedPort."""
    text = f"exec llama-server -m {MODEL} --host 0.0.0.0 --port 8080 --metrics\n"
    await here.create("configmaps", {"metadata": {"name": "start"}, "data": {"start.sh": text}})
    pod = here.pod(
        command=["sh", "/start/start.sh"], args=[], volumeMounts=[{"name": "start", "mountPath": "/start"}]
    )
    pod["spec"]["volumes"] = [{"name": "start", "configMap": {"name": "start"}}]
    result = here.inject(pod)
    assert result.status["takeover"] == "NamedPort"
    url = await here.deploy(result.pod, 1)
    assert (await ask(url)).headers["x-sluicegate-reason"] == "admitted"


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_an_engine_that_starts_slowly_is_no_error(here: Site) -> None:
    """The gate waits, not ready and without a restart, for as long as the engine's own probes allow."""
    script = f"sleep 20; exec llama-server -m {MODEL} --host 0.0.0.0 --port 8080 --metrics"
    await here.deploy(here.inject(here.pod(command=["sh", "-c", script], args=[])).pod, 1)
    (pod,) = await here.pods()
    statuses = [*pod["status"]["initContainerStatuses"], *pod["status"]["containerStatuses"]]
    assert {one["name"]: one["restartCount"] for one in statuses} == {"sluicegate-gate": 0, "engine": 0}


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_job_ends_and_its_script_goes_through_the_gate(here: Site) -> None:
    """A native sidecar keeps no Job from ending. What else the engine's own script does is a client's doing."""
    question = json.dumps(QUESTION)
    script = f"""
llama-server -m {MODEL} --host 0.0.0.0 --port 8080 &
until curl -sf localhost:8080/health; do sleep 1; done
curl -sf -D /dev/stderr localhost:8080/v1/chat/completions -H 'content-type: application/json' -d '{question}' 2>&1 |
  grep -i 'x-sluicegate-reason: admitted'
"""
    pod = here.inject(
        here.pod(
            metadata={"name": "job"},
            command=["sh", "-c", script],
            args=[],
            livenessProbe=None,
            startupProbe=None,
        )
    ).pod
    pod["spec"]["restartPolicy"] = "Never"
    await here.create("pods", pod)

    async def phase() -> str | None:
        found: str = (await here.get("pods", "job"))["status"].get("phase", "")
        return found if found in ("Succeeded", "Failed") else None

    assert await until(phase, "the pod has ended") == "Succeeded"


@pytest.fixture
async def anywhere(kubeconfig: Path) -> AsyncIterator[Site]:
    async with site(kubeconfig, "example/gate:1", "example/engine:1", labels={}) as there:
        yield there


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_api_server_takes_every_pod_that_it_took_before(anywhere: Site) -> None:
    """The pods of tests/manifests, before and after: what is valid stays valid, and draws no new warning."""
    context = InjectionContext(
        namespace=anywhere.name, policy_name="llama", image="example/gate:1", drain_token="token"
    )
    for case in PODS:
        policy = parse_policy({"classes": [{"name": "default"}], **case.get("policy", {})})
        pod = {"metadata": {"name": case["name"]}, "spec": copy.deepcopy(case["spec"])}
        before = await created(anywhere, pod)
        after = await created(anywhere, inject(pod, policy, context).pod)
        assert after.status_code == before.status_code == 201, (case["name"], after.text)
        assert set(after.headers.get_list("warning")) <= set(before.headers.get_list("warning")), case["name"]


async def created(here: Site, pod: Json) -> Any:
    """What the API server says to the pod, without creating it."""
    path = f"api/v1/namespaces/{here.name}/pods"
    return await here.http.post(path, json=pod, params={"dryRun": "All"})
