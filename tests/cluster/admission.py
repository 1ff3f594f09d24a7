"""What tests of the webhook have on a real API server: a namespace of their own, policies, pods, and webhook processes
that the API server reaches by address.

The webhook runs beside the test, as a process or several, and the API server is told where by `url`: so these tests
need an API server and nothing else, no node and no image. That it works as a Deployment behind its Service is the
chart's tests'.
"""

import asyncio
import base64
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import httpx2 as httpx
from lightkube.config.client_adapter import AsyncClient, ConnectionParams

from sluicegate_operator.certificates.authority import Pair, issue_authority, issue_serving
from sluicegate_operator.kube.client import Api, load_config
from sluicegate_operator.kube.resources import POLICIES, WEBHOOKS
from sluicegate_operator.webhook_configuration import Target, Wanted, build_configuration

T = TypeVar("T")

#: Where the API server reaches this process.
HOST = "127.0.0.1"
PATIENCE_S = 60.0
POLL_S = 0.05

PROGRAM = "import sys; from sluicegate_operator.webhook.run import main; sys.exit(main())"

GATE = "sluicegate-gate"


async def until(ask: Callable[[], Awaitable[T | None]], what: str) -> T:
    """The first answer that is not None; AssertionError when there is none for `PATIENCE_S`.

    Asks again and again, since an API server tells nobody when it has taken up a configuration.
    """
    never = asyncio.Event()
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + PATIENCE_S
    while (answer := await ask()) is None:
        assert loop.time() < give_up_s, f"it never held: {what}"
        try:
            await asyncio.wait_for(never.wait(), POLL_S)
        except TimeoutError:
            continue
    return answer


@dataclass(frozen=True)
class Created:
    """What the API server said to the creation of a pod."""

    status: int
    body: dict[str, Any]
    warnings: list[str]

    @property
    def gates(self) -> list[dict[str, Any]]:
        """The gates that the pod was given."""
        inits = (self.body.get("spec") or {}).get("initContainers") or []
        return [one for one in inits if one["name"] == GATE]

    @property
    def owner(self) -> str | None:
        """The policy that gates the pod."""
        name: str | None = (self.body["metadata"].get("annotations") or {}).get("sluicegate.dev/policy")
        return name


class Namespace:
    """A namespace of the test's own, and the calls that are made in it."""

    def __init__(self, name: str, api: Api, http: httpx.AsyncClient) -> None:
        self.name = name
        self.api = api
        self.http = http
        self.configurations: set[str] = set()

    def policy(self, name: str, **spec: Any) -> dict[str, Any]:
        """The object of a policy for pods labelled `app: llama`."""
        return {
            "apiVersion": "sluicegate.dev/v1alpha1",
            "kind": "AdmissionPolicy",
            "metadata": {"name": name, "namespace": self.name},
            "spec": {"selector": {"matchLabels": {"app": "llama"}}, "classes": [{"name": "all"}]} | spec,
        }

    async def create_policy(self, name: str, **spec: Any) -> dict[str, Any]:
        """Create a policy."""
        return await self.api.create(POLICIES, self.policy(name, **spec))

    async def create_pod(self, pod: Mapping[str, Any], *, dry_run: bool = False) -> Created:
        """Create a pod, as any client does."""
        answer = await self.http.post(
            f"api/v1/namespaces/{self.name}/pods", json=dict(pod), params={"dryRun": "All"} if dry_run else {}
        )
        warnings = [
            one.split('"', 1)[1].rsplit('"', 1)[0].replace('\\"', '"')
            for one in answer.headers.get_list("warning")
        ]
        return Created(answer.status_code, answer.json(), warnings)

    async def configure(
        self, policies: Sequence[Wanted], target: Target, *, name: str = ""
    ) -> dict[str, Any]:
        """Write a webhook configuration of the test's own, with the entries that ours would have."""
        configuration = build_configuration(policies, target)
        configuration["metadata"]["name"] = name or f"{self.name}-webhook"
        return await self.write_configuration(configuration)

    async def write_configuration(self, configuration: dict[str, Any]) -> dict[str, Any]:
        """Create or replace a webhook configuration; it goes with the namespace."""
        name = configuration["metadata"]["name"]
        self.configurations.add(name)
        there = await self.api.get(WEBHOOKS, None, name)
        if there is None:
            return await self.api.create(WEBHOOKS, configuration)
        metadata = configuration["metadata"] | {"resourceVersion": there["metadata"]["resourceVersion"]}
        return await self.api.replace(WEBHOOKS, configuration | {"metadata": metadata})


@asynccontextmanager
async def namespace(kubeconfig: Path) -> AsyncIterator[Namespace]:
    """A new namespace, which goes with all that is in it."""
    config = load_config(kubeconfig)
    name = f"webhook-{secrets.token_hex(4)}"
    async with AsyncClient(config, ConnectionParams(timeout=httpx.Timeout(PATIENCE_S))) as http:
        api = Api(config)
        answer = await http.post("api/v1/namespaces", json={"metadata": {"name": name}})
        answer.raise_for_status()
        there = Namespace(name, api, http)
        try:
            yield there
        finally:
            for configuration in there.configurations:
                await http.delete(f"{WEBHOOKS.path()}/{configuration}")
            await http.delete(f"api/v1/namespaces/{name}")
            await api.close()


def pod(labels: Mapping[str, str] | None = None, **metadata: Any) -> dict[str, Any]:
    """A pod with an engine in it, which nobody starts."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "llama-", "labels": {"app": "llama"} if labels is None else dict(labels)}
        | metadata,
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "nodeSelector": {"nobody": "has-this"},
            "containers": [
                {
                    "name": "engine",
                    "image": "example.com/llama.cpp:server",
                    "command": ["llama-server"],
                    "args": ["--port", "8000", "-m", "/models/m.gguf"],
                    "ports": [{"name": "http", "containerPort": 8000}],
                }
            ],
        },
    }


@dataclass
class Hook:
    """A webhook process and its certificate's directory.

    Attributes:
        port: where it serves, once it is ready.
    """

    directory: Path
    process: asyncio.subprocess.Process
    port: int
    admin_port: int
    log: list[dict[str, Any]] = field(default_factory=list)

    async def stop(self) -> None:
        """End it, in good order."""
        if self.process.returncode is None:
            self.process.terminate()
        await self.process.wait()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()


def place(directory: Path, certificate: bytes, key: bytes) -> None:
    """Put a certificate into place as the kubelet does: a directory of its own, and a link that is swapped."""
    version = directory / f"..{secrets.token_hex(8)}"
    version.mkdir(parents=True)
    (version / "tls.crt").write_bytes(certificate)
    (version / "tls.key").write_bytes(key)
    (directory / "..new").symlink_to(version.name)
    os.replace(directory / "..new", directory / "..data")
    for name in ("tls.crt", "tls.key"):
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(f"..data/{name}")


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as one:
        one.bind((HOST, 0))
        port: int = one.getsockname()[1]
        return port


async def start_hook(kubeconfig: Path, directory: Path, namespace_name: str, *arguments: str) -> Hook:
    """Start a webhook process that serves with what lies in `directory`; returns once it is ready."""
    port, admin_port = free_port(), free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM,
        f"--listen={HOST}:{port}", f"--admin={HOST}:{admin_port}", f"--certificates={directory}",
        f"--kubeconfig={kubeconfig}", f"--namespace={namespace_name}", "--gate-image=example.com/sluicegate:1",
        "--shutdown-delay=0", "--log-format=json", *arguments,
    )  # fmt: skip
    hook = Hook(directory, process, port, admin_port)
    async with httpx.AsyncClient() as http:

        async def ready() -> bool | None:
            assert process.returncode is None, "the webhook has ended"
            try:
                return (await http.get(f"http://{HOST}:{admin_port}/readyz")).is_success or None
            except httpx.HTTPError:
                return None

        await until(ready, "the webhook is ready")
    return hook


@asynccontextmanager
async def splitter(hooks: Sequence[Hook]) -> AsyncIterator[int]:
    """A port that leads to each of the replicas in turn, as a Service does: connections, not requests.

    Replicas may leave the list and join it meanwhile.
    """
    turns = count()
    pumps: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # one side has gone: so has the other
        finally:
            writer.transport.abort()

    async def split(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hook = hooks[next(turns) % len(hooks)]
        try:
            there_reader, there_writer = await asyncio.open_connection(HOST, hook.port)
        except OSError:
            writer.transport.abort()
            return
        for one in (pump(reader, there_writer), pump(there_reader, writer)):
            task = asyncio.create_task(one)
            pumps.add(task)
            task.add_done_callback(pumps.discard)

    server = await asyncio.start_server(split, HOST, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tuple(pumps):
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


@dataclass
class Rig:
    """A namespace, one webhook, and the target that leads to it."""

    there: Namespace
    kubeconfig: Path
    hook: Hook
    authority: Pair
    target: Target


def target_of(port: int, authority_pem: bytes) -> Target:
    """How the API server finds a webhook on this port, and whom it trusts there."""

    bundle = base64.b64encode(authority_pem).decode()
    return Target(
        namespace="sluicegate-system", service="unused", url=f"https://{HOST}:{port}", ca_bundle=bundle
    )


@asynccontextmanager
async def rig(kubeconfig: Path, directory: Path) -> AsyncIterator[Rig]:
    """All of it, running."""
    now = datetime.now(UTC)
    authority = issue_authority(now, timedelta(days=1))
    serving = issue_serving(authority, [HOST], now, timedelta(hours=1))
    place(directory / "certificates", serving.certificate_pem, serving.key_pem)
    async with AsyncExitStack() as stack:
        there = await stack.enter_async_context(namespace(kubeconfig))
        hook = await start_hook(kubeconfig, directory / "certificates", there.name)
        stack.push_async_callback(hook.stop)
        yield Rig(there, kubeconfig, hook, authority, target_of(hook.port, authority.certificate_pem))


async def metrics(hook: Hook) -> dict[str, float]:
    """Every sample of a webhook's metrics."""
    async with httpx.AsyncClient() as http:
        page = (await http.get(f"http://{HOST}:{hook.admin_port}/metrics")).text
    samples = (line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in samples}
