"""The second clock, from end to end, with the real KEDA: load rises, requests are refused, replicas come, refusals end.

One pod of llama.cpp with its gate, a quarter of a core each: what it can do is measured first, by clients that ask
without a pause. Then requests come at twice that rate, whatever becomes of them: that needs 2 / 0.8 replicas, which
is three. Meanwhile a real Prometheus scrapes the gates, and no panel of the dashboard is empty. Afterwards one ready
pod without a gate makes the demand unknown, and the replicas stay.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import aiohttp
import httpx2 as httpx
import openai
import pytest
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from tests.cluster.engines import RESTRICTED_CONTAINER, RESTRICTED_POD, Json, Site, site, until
from tests.prometheus_server import Panels, Prometheus

from sluicegate_core.policy import Autoscaling
from sluicegate_operator.kube.client import load_config
from sluicegate_operator.names import ADMIN_PORT, GATED_LABEL, POLICY_ANNOTATION
from sluicegate_operator.scaling import GateReport, ScaledObjectSpec, ScaleTarget, parse_report, scaled_object
from sluicegate_operator.scaling.ledger import FOR_WANT_OF_ROOM
from sluicegate_operator.scaling.scaled_object import FAILURES_BEFORE_FALLBACK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

T = TypeVar("T")
HERE = Path(__file__).parent
POLICY = "llama"
SELECTOR = "app=llama"
#: Of one answer.
TOKENS = 150
OVERLOAD = 2.0
NEEDED = 3
MOST = 5
QUARTER = {"requests": {"cpu": "10m"}, "limits": {"cpu": "250m"}}
CLASSES = [{"name": "default", "slo": {"ttft": "2s"}}]
SCALED_OBJECTS = "apis/keda.sh/v1alpha1/namespaces/{}/scaledobjects"


@pytest.fixture
async def keda(kubeconfig: Path) -> None:
    """KEDA serves: its kinds are known, and its adapter answers for the external metrics."""
    async with AsyncClient(load_config(kubeconfig), ConnectionParams()) as http:
        for path in ("apis/keda.sh/v1alpha1", "apis/external.metrics.k8s.io/v1beta1"):
            answer = await http.get(path)
            assert answer.is_success, f"no KEDA in this cluster: {path} says {answer.status_code}"


@pytest.fixture
async def here(kubeconfig: Path, gate_image: str, engine_image: str, keda: None) -> AsyncIterator[Site]:
    async with site(kubeconfig, gate_image, engine_image) as there:
        yield there
        # Before its namespace: KEDA has a finalizer on it.
        await there.http.delete(f"{SCALED_OBJECTS.format(there.name)}/{POLICY}")
        await until(lambda: gone(there), "the ScaledObject is gone")


async def gone(here: Site) -> bool | None:
    answer = await here.http.get(f"{SCALED_OBJECTS.format(here.name)}/{POLICY}")
    return True if answer.status_code == 404 else None


# What runs.


async def start_signal(here: Site, image: str) -> None:
    """The process that polls the gates and serves the demand, with leave to list the namespace's pods."""
    name = "signal"
    rbac = f"apis/rbac.authorization.k8s.io/v1/namespaces/{here.name}"
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    subjects = [{"kind": "ServiceAccount", "name": name, "namespace": here.name}]
    metadata = {"name": name}
    await here.create("serviceaccounts", {"metadata": metadata})
    for kind, document in (
        ("roles", {"rules": rules}),
        ("rolebindings", {"roleRef": role, "subjects": subjects}),
    ):
        answer = await here.http.post(f"{rbac}/{kind}", json={"metadata": metadata, **document})
        assert answer.is_success, answer.text
    script = (HERE / "keda_signal.py").read_text(encoding="utf-8")
    await here.create("configmaps", {"metadata": metadata, "data": {"keda_signal.py": script}})
    container = {
        "name": name,
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["python3", "/signal/keda_signal.py", here.name, SELECTOR, POLICY],
        "ports": [{"containerPort": 8082}],
        "readinessProbe": {"tcpSocket": {"port": 8082}, "periodSeconds": 1},
        "volumeMounts": [{"name": "script", "mountPath": "/signal"}],
        "securityContext": RESTRICTED_CONTAINER,
    }
    spec = {
        "serviceAccountName": name,
        "securityContext": RESTRICTED_POD,
        "containers": [container],
        "volumes": [{"name": "script", "configMap": {"name": name}}],
    }
    await here.create("pods", {"metadata": {"name": name, "labels": {"app": name}}, "spec": spec})
    ports = {"selector": {"app": name}, "ports": [{"port": 8082}]}
    await here.create("services", {"metadata": metadata, "spec": ports})


async def apply_scaled_object(here: Site) -> None:
    """As the operator builds it, but that nothing delays a low number: it would show at once."""
    owner = await here.get("configmaps", "signal")
    spec = ScaledObjectSpec(
        name=POLICY,
        namespace=here.name,
        policy=POLICY,
        policy_uid=owner["metadata"]["uid"],
        policy_api_version="v1",
        policy_kind="ConfigMap",
        autoscaling=Autoscaling(min_replicas=1, max_replicas=MOST),
        target=ScaleTarget("apps/v1", "Deployment", "llama"),
        endpoint=f"http://signal.{here.name}.svc:8082",
    )
    document: Any = scaled_object(spec)
    document["metadata"]["ownerReferences"][0]["name"] = "signal"
    behavior = document["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    behavior["scaleDown"] = {"stabilizationWindowSeconds": 0}
    answer = await here.http.post(SCALED_OBJECTS.format(here.name), json=document)
    assert answer.is_success, answer.text


# What is seen of it.


async def demand(here: Site) -> tuple[int, Json]:
    """What the endpoint says, as KEDA sees it."""
    service = await here.get("services", "signal")
    url = f"http://{service['spec']['clusterIP']}:8082/scaling/{here.name}/{POLICY}"
    async with httpx.AsyncClient() as http:
        try:
            answer = await http.get(url)
        except httpx.HTTPError as error:
            return 0, {"error": repr(error)}
    return answer.status_code, answer.json()


async def reports(here: Site) -> list[GateReport]:
    found = []
    async with httpx.AsyncClient() as http:
        for pod in await here.pods():
            try:
                answer = await http.get(f"http://{pod['status']['podIP']}:{ADMIN_PORT}/report")
            except (KeyError, httpx.HTTPError):
                continue
            found.append(parse_report(answer.content))
    return found


async def turned_away(here: Site) -> int:
    """Refused or evicted for want of room, by all gates that there are."""
    return sum(
        one.rejected.get(reason, 0) + one.evicted.get(reason, 0)
        for report in await reports(here)
        for one in report.classes.values()
        for reason in FOR_WANT_OF_ROOM
    )


async def replicas(here: Site) -> tuple[int, int]:
    """Wanted and ready ones of the Deployment."""
    found = await here.get("deployments", "llama")
    return found["spec"]["replicas"], found.get("status", {}).get("readyReplicas", 0)


async def scaled(here: Site) -> Json:
    answer = await here.http.get(f"{SCALED_OBJECTS.format(here.name)}/{POLICY}")
    assert answer.is_success, answer.text
    found: Json = answer.json()
    return found


async def hpa_active(here: Site) -> bool | None:
    path = f"apis/autoscaling/v2/namespaces/{here.name}/horizontalpodautoscalers/keda-hpa-{POLICY}"
    answer = await here.http.get(path)
    conditions = answer.json().get("status", {}).get("conditions", []) if answer.is_success else []
    active = any(one["type"] == "ScalingActive" and one["status"] == "True" for one in conditions)
    return True if active else None


def scrapes(here: Site, pods: list[Json], signal: str) -> list[Json]:
    """The gates, labelled as the chart's PodMonitor does, and who serves the demand.

    By address: Debian's Prometheus has no service discovery of Kubernetes.
    """
    gates = [
        {
            "targets": [f"{pod['status']['podIP']}:{ADMIN_PORT}"],
            "labels": {
                "namespace": here.name,
                "pod": pod["metadata"]["name"],
                "policy": pod["metadata"]["annotations"][POLICY_ANNOTATION],
            },
        }
        for pod in pods
        if pod["metadata"]["labels"][GATED_LABEL] == "true"
    ]
    operator = [{"targets": [f"{signal}:8082"]}]
    return [
        {"job_name": "gates", "static_configs": gates},
        {"job_name": "operator", "honor_labels": True, "static_configs": operator},
    ]


# Load.


@dataclass
class Requests:
    """Requests, each on a connection of its own, so that new replicas get their share; with the SDK's own retries."""

    url: str
    ends: Counter[str] = field(default_factory=Counter)

    async def one(self, client: openai.AsyncOpenAI) -> None:
        try:
            stream = await client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": f"hello {TOKENS}"}],
                stream=True,
                max_tokens=TOKENS,
            )
            async for _ in stream:
                pass
            self.ends["served"] += 1
        except openai.APIStatusError as error:
            self.ends[str(error.status_code)] += 1
        except openai.APIError as error:
            self.ends[type(error).__name__] += 1

    def client(self) -> openai.AsyncOpenAI:
        http = httpx.AsyncClient(limits=httpx.Limits(max_keepalive_connections=0), timeout=120)
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", http_client=http)

    async def without_a_pause(self, clients: int, stop: asyncio.Event) -> None:
        async def again(client: openai.AsyncOpenAI) -> None:
            while not stop.is_set():
                await self.one(client)

        async with self.client() as client:
            await asyncio.gather(*(again(client) for _ in range(clients)))

    async def at_rate(self, a_second: float, stop: asyncio.Event) -> None:
        """So many a second, whatever becomes of them."""
        began, sent = monotonic(), 0
        async with self.client() as client, asyncio.TaskGroup() as group:
            while not stop.is_set():
                due = int((monotonic() - began) * a_second)
                for _ in range(due - sent):
                    group.create_task(self.one(client))
                sent = due
                try:
                    await asyncio.wait_for(stop.wait(), 0.5 / a_second)
                except TimeoutError:
                    continue


async def beside(work: Callable[[asyncio.Event], Awaitable[None]], ask: Awaitable[T]) -> T:
    """The answer, with the work going on until it is there."""
    stop = asyncio.Event()
    going_on = asyncio.ensure_future(work(stop))
    try:
        return await ask
    finally:
        stop.set()
        await going_on


async def capacity(here: Site) -> float | None:
    """Work a second of the one replica, once it has been pressed for long enough to be sure."""
    for report in await reports(here):
        if report.capacity.work_per_s is not None and report.capacity.pressed_s > 15.0:
            return report.capacity.work_per_s
    return None


async def prepared(here: Site, operator_image: str) -> tuple[str, float]:
    """One replica, the signal, and KEDA; the Service's URL, and how many requests a second one replica does."""
    template = here.inject(here.pod(resources=QUARTER), classes=CLASSES).pod
    policy = {"data": {"policy.yaml": json.dumps({"classes": CLASSES})}}
    await here.patch("configmaps", "sluicegate-policy-llama", policy)
    url = await here.deploy(template, 1)
    await start_signal(here, operator_image)
    # Before anything may scale it.
    load = Requests(url)
    work_per_s = await beside(
        lambda stop: load.without_a_pause(8, stop), until(lambda: capacity(here), "measured")
    )
    (report,) = await reports(here)
    (counted,) = report.classes.values()
    await apply_scaled_object(here)
    await until(lambda: hpa_active(here), "KEDA's HPA is active")
    return url, work_per_s / (counted.work_served / counted.served)


async def no_panel_is_empty(here: Site, folder: Path) -> None:
    """A Prometheus beside it, until every panel of the dashboard has something to say."""
    signal = (await here.get("services", "signal"))["spec"]["clusterIP"]
    panels = Panels(f'namespace="{here.name}", policy="{POLICY}"', "15s")
    prometheus = Prometheus(folder, scrapes(here, await here.pods(), signal))
    prometheus.start()
    try:
        async with aiohttp.ClientSession() as session:
            await panels.until_none_is_empty(prometheus, session)
    finally:
        await asyncio.to_thread(prometheus.end)


async def test_load_rises_replicas_come_and_refusals_end(
    here: Site, operator_image: str, tmp_path: Path
) -> None:
    url, of_one_replica = await prepared(here, operator_image)
    refused_before = await turned_away(here)
    surge, stop = Requests(url), asyncio.Event()
    began = monotonic()
    took: dict[str, float] = {}

    async def enough() -> bool | None:
        wanted, ready = await replicas(here)
        return True if wanted == ready >= NEEDED else None

    going_on = asyncio.ensure_future(surge.at_rate(OVERLOAD * of_one_replica, stop))
    try:
        await until(lambda: more_than(here, refused_before), "requests are refused")
        took["refused"] = monotonic() - began
        await until(enough, "three replicas are ready")
        took["ready"] = monotonic() - began
        await no_panel_is_empty(here, tmp_path)
        took["refusals ended"] = await refusals_end(here) - began
    finally:
        stop.set()
        await going_on
    wanted, _ = await replicas(here)
    status, said = await demand(here)
    print({key: f"{seconds:.1f} s" for key, seconds in took.items()}, dict(surge.ends), said)
    assert NEEDED <= wanted <= NEEDED + 1, said
    assert status == 200
    assert surge.ends["served"] > 0
    await the_replicas_stay_while_nothing_is_known(here, wanted)


async def more_than(here: Site, count: int) -> bool | None:
    return True if await turned_away(here) > count else None


async def refusals_end(here: Site) -> float:
    """Since when, on the monotonic clock, nobody was turned away, once that has been so for 20 s of load."""
    count, since = -1, 0.0

    async def steady() -> bool | None:
        nonlocal count, since
        now = await turned_away(here)
        if now != count:
            count, since = now, monotonic()
        return True if monotonic() - since > 20.0 else None

    await until(steady, "refusals end")
    return since


async def the_replicas_stay_while_nothing_is_known(here: Site, wanted: int) -> None:
    """A ready pod without a gate: what it is offered is not seen. KEDA fails for many syncs of the HPA in a row."""
    stranger = here.pod()
    metadata = {"name": "stranger", "labels": {"app": "llama"}}
    await here.create("pods", {"metadata": metadata, "spec": stranger["spec"]})

    async def broken() -> Json | None:
        status, said = await demand(here)
        return said if status == 503 else None

    assert (await until(broken, "the endpoint says 503"))["reason"] == "NotGated"
    seen = set()

    async def failed_for_long() -> bool | None:
        seen.add((await replicas(here))[0])
        health = (await scaled(here)).get("status", {}).get("health", {})
        failures = [one.get("numberOfFailures", 0) for one in health.values()]
        return True if failures and min(failures) >= FAILURES_BEFORE_FALLBACK + 5 else None

    await until(failed_for_long, "KEDA has fallen back for five syncs")
    assert seen == {wanted}
