"""Engines on a real cluster: namespaces, Deployments, Services, and what a client makes of them.

`engine_image` has a program `llama-server` with llama.cpp's own flags, a model at MODEL, a shell and curl; `gate_image`
is built from the project's Dockerfile. The cluster's Services and pods are reached from where the test runs.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx2 as httpx
import openai
from lightkube.config.client_adapter import AsyncClient, ConnectionParams

from sluicegate_core.policy import parse_policy
from sluicegate_operator.injection import InjectionContext, InjectionResult, inject
from sluicegate_operator.kube.client import load_config

Json = dict[str, Any]
T = TypeVar("T")

MODEL = "/opt/model.gguf"
TOKEN = "a-token-of-the-test"
PATIENCE_S = 180.0
POLL_S = 0.2

RESTRICTED_NAMESPACE = {"pod-security.kubernetes.io/enforce": "restricted"}
RESTRICTED_POD = {
    "runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip
RESTRICTED_CONTAINER = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


async def until(ask: Callable[[], Awaitable[T | None]], what: str) -> T:
    """The first answer that is not None. A cluster tells nobody when it is done: so it is asked again and again."""
    loop, never = asyncio.get_running_loop(), asyncio.Event()
    give_up_s = loop.time() + PATIENCE_S
    while (answer := await ask()) is None:
        assert loop.time() < give_up_s, f"it never held: {what}"
        try:
            await asyncio.wait_for(never.wait(), POLL_S)
        except TimeoutError:
            continue
    return answer


@dataclass
class Site:
    """A namespace of the test's own, and the calls that are made in it."""

    name: str
    http: httpx.AsyncClient
    gate_image: str
    engine_image: str

    # Objects.

    def _path(self, kind: str, name: str = "") -> str:
        group = "apis/apps/v1" if kind == "deployments" else "api/v1"
        return f"{group}/namespaces/{self.name}/{kind}" + (f"/{name}" if name else "")

    async def create(self, kind: str, document: Json) -> Json:
        answer = await self.http.post(self._path(kind), json=document)
        assert answer.is_success, answer.text
        made: Json = answer.json()
        return made

    async def get(self, kind: str, name: str = "", **params: str) -> Json:
        answer = await self.http.get(self._path(kind, name), params=params)
        assert answer.is_success, answer.text
        found: Json = answer.json()
        return found

    async def patch(self, kind: str, name: str, patch: Json) -> None:
        headers = {"content-type": "application/strategic-merge-patch+json"}
        answer = await self.http.patch(self._path(kind, name), content=json.dumps(patch), headers=headers)
        assert answer.is_success, answer.text

    async def pods(self, selector: str = "app=llama") -> list[Json]:
        found: list[Json] = (await self.get("pods", labelSelector=selector))["items"]
        return found

    async def account(self) -> bool | None:
        """Whether pods can be created yet."""
        return (await self.http.get(self._path("serviceaccounts", "default"))).is_success or None

    # What is built of them.

    def pod(self, *, port: int = 8080, metadata: Json | None = None, **fields: Any) -> Json:
        """A pod with llama.cpp, and a probe of each kind; `fields` of its container."""
        engine: Json = {
            "name": "engine",
            "image": self.engine_image,
            "imagePullPolicy": "Never",
            "command": ["llama-server"],
            "args": ["-m", MODEL, "--host", "0.0.0.0", "--port", str(port), "--metrics"],
            "ports": [{"name": "http", "containerPort": port}],
            "startupProbe": {
                "exec": {"command": ["curl", "-sf", f"http://localhost:{port}/health"]},
                "periodSeconds": 1,
                "failureThreshold": 120,
            },
            "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 1},
            "livenessProbe": {"tcpSocket": {"port": port}, "periodSeconds": 2, "failureThreshold": 5},
            "securityContext": RESTRICTED_CONTAINER,
        }
        metadata = {"labels": {"app": "llama"}} | (metadata or {})
        spec = {"securityContext": RESTRICTED_POD, "containers": [engine | fields]}
        return {"metadata": metadata, "spec": spec}

    def inject(self, pod: Json, **spec: Any) -> InjectionResult:
        """The pod with its gate, as the webhook would make it."""
        context = InjectionContext(
            namespace=self.name,
            policy_name="llama",
            image=self.gate_image,
            drain_token=TOKEN,
            image_pull_policy="Never",
            requests=(("cpu", "10m"), ("memory", "64Mi")),
        )
        result = inject(pod, parse_policy({"classes": [{"name": "default"}], **spec}), context)
        assert result.refusal is None, result.refusal
        return result

    async def deploy(self, template: Json, replicas: int) -> str:
        """A Deployment and its Service, by the name of the port; returns the Service's URL once all are ready."""
        await self.create(
            "deployments",
            {
                "metadata": {"name": "llama"},
                "spec": {
                    "replicas": replicas,
                    "selector": {"matchLabels": {"app": "llama"}},
                    "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
                    "template": template,
                },
            },
        )
        service = await self.create(
            "services",
            {
                "metadata": {"name": "llama"},
                "spec": {"selector": {"app": "llama"}, "ports": [{"port": 80, "targetPort": "http"}]},
            },
        )
        url = f"http://{service['spec']['clusterIP']}"
        await self.rolled_out(replicas)
        await until(lambda: self._answers(url), "the Service answers")
        return url

    async def _answers(self, url: str) -> bool | None:
        async with httpx.AsyncClient() as http:
            try:
                return (await http.get(f"{url}/health")).is_success or None
            except httpx.HTTPError:
                return None

    async def rolled_out(self, replicas: int) -> None:
        """Until the Deployment's template is what runs, and nothing else does."""

        async def done() -> bool | None:
            found = await self.get("deployments", "llama")
            status = found.get("status", {})
            settled = (
                status.get("observedGeneration") == found["metadata"]["generation"]
                and status.get("updatedReplicas") == status.get("availableReplicas") == replicas
            )
            return (settled and len(await self.pods()) == replicas) or None

        await until(done, "the Deployment is rolled out")


@asynccontextmanager
async def site(
    kubeconfig: Path, gate_image: str, engine_image: str, labels: Mapping[str, str] | None = None
) -> AsyncIterator[Site]:
    """A new namespace with the policy of `llama`, which goes with all that is in it."""
    name = f"injection-{secrets.token_hex(4)}"
    async with AsyncClient(load_config(kubeconfig), ConnectionParams(timeout=httpx.Timeout(30))) as http:
        document = {
            "metadata": {"name": name, "labels": dict(RESTRICTED_NAMESPACE if labels is None else labels)}
        }
        answer = await http.post("api/v1/namespaces", json=document)
        answer.raise_for_status()
        here = Site(name, http, gate_image, engine_image)
        try:
            policy = {"classes": [{"name": "default", "maxQueueTime": "5m"}]}
            data = {"policy.yaml": json.dumps(policy)}
            await here.create("configmaps", {"metadata": {"name": "sluicegate-policy-llama"}, "data": data})
            await until(here.account, "the namespace has its service account")
            yield here
        finally:
            await http.delete(f"api/v1/namespaces/{name}")


@dataclass
class Load:
    """Clients that stream without a pause, with the SDK's own retries, until they are told to stop.

    Attributes:
        texts: what each whole stream said.
        errors: what the SDK raised, and streams that ended without saying so.
    """

    url: str
    tokens: int
    texts: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, clients: int) -> None:
        """Returns when every client has ended its last stream."""
        async with openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=300) as client:
            await asyncio.gather(*(self._stream(client) for _ in range(clients)))

    def stop(self) -> None:
        self._stop.set()

    async def _stream(self, client: openai.AsyncOpenAI) -> None:
        while not self._stop.is_set():
            text, reason = "", None
            try:
                stream = await client.chat.completions.create(
                    model="m",
                    messages=[{"role": "user", "content": f"hello {self.tokens}"}],
                    stream=True,
                    max_tokens=self.tokens,
                    temperature=0,
                )
                async for chunk in stream:
                    if chunk.choices:
                        text += chunk.choices[0].delta.content or ""
                        reason = chunk.choices[0].finish_reason or reason
            except openai.APIError as error:
                self.errors.append(repr(error))
                continue
            if reason is None:
                self.errors.append(f"cut after {len(text)} characters")
            else:
                self.texts.append(text)
