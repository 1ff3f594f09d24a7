"""An API server's side of the wire for AdmissionPolicies: list, watch with bookmarks, get, and trouble on demand.

It stands in for the real one where a test needs a fault at a certain moment; what the real one does is tested on a
cluster.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

API = "/apis/sluicegate.dev/v1alpha1"
END = object()


def policy(
    name: str, *, namespace: str = "serving", created: str = "2026-01-01T00:00:00Z", **spec: Any
) -> dict[str, Any]:
    """The object of a policy with one class."""
    return {
        "apiVersion": "sluicegate.dev/v1alpha1",
        "kind": "AdmissionPolicy",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{name}",
            "creationTimestamp": created,
            "generation": 1,
        },
        "spec": {"selector": {"matchLabels": {"app": "llama"}}, "classes": [{"name": "all"}]} | spec,
    }


class PolicyApiServer:
    """The objects, the open watches, and what was asked.

    Attributes:
        requests: "list", "watch VERSION", "get NAME", in order.
        fail: statuses to answer the next requests with, by kind; each once.
        hold: kinds whose requests wait until it is set.
    """

    def __init__(self) -> None:
        self.version = 100
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.requests: list[str] = []
        self.fail: dict[str, list[int]] = {"list": [], "watch": [], "get": []}
        self.hold: dict[str, asyncio.Event] = {}
        self._watches: list[asyncio.Queue[Any]] = []
        self._came = asyncio.Condition()
        self.port = 0

    # What happens in the cluster.

    def put(self, document: dict[str, Any], *, told: bool = True) -> None:
        """Add or change a policy; watchers hear of it unless it is not to be told."""
        metadata = document["metadata"]
        key = metadata["namespace"], metadata["name"]
        kind = "MODIFIED" if key in self.objects else "ADDED"
        self.version += 1
        metadata["resourceVersion"] = str(self.version)
        self.objects[key] = document
        if told:
            self.event(kind, document)

    def delete(self, name: str, namespace: str = "serving") -> None:
        """Delete a policy."""
        self.version += 1
        gone = self.objects.pop((namespace, name))
        self.event("DELETED", gone | {"metadata": gone["metadata"] | {"resourceVersion": str(self.version)}})

    def bookmark(self) -> None:
        """Tell watchers how far they are."""
        self.event(
            "BOOKMARK", {"kind": "AdmissionPolicy", "metadata": {"resourceVersion": str(self.version)}}
        )

    def expire(self) -> None:
        """End every watch as one whose version is too old."""
        self.event("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})

    def event(self, kind: str, document: dict[str, Any]) -> None:
        """Send an event as it is."""
        self.send(json.dumps({"type": kind, "object": document}).encode() + b"\n")

    def send(self, data: bytes) -> None:
        """Send bytes to every watch."""
        for queue in self._watches:
            queue.put_nowait(data)

    def cut(self) -> None:
        """End every watch in good order."""
        for queue in self._watches:
            queue.put_nowait(END)

    async def asked(self, request: str, times: int = 1) -> None:
        """Until a request has come so often."""
        async with self._came:
            await self._came.wait_for(lambda: self.requests.count(request) >= times)

    # The wire.

    async def _begin(self, kind: str, request: str) -> web.Response | None:
        async with self._came:
            self.requests.append(request)
            self._came.notify_all()
        if kind in self.hold:
            await self.hold[kind].wait()
        if self.fail[kind]:
            return web.json_response({"kind": "Status"}, status=self.fail[kind].pop(0))
        return None

    async def collection(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("watch") == "true":
            return await self.watch(request)
        failed = await self._begin("list", "list")
        if failed is not None:
            return failed
        within = request.match_info.get("namespace")
        items = [one for key, one in self.objects.items() if within in (None, key[0])]
        start, limit = int(request.query.get("continue", "0")), int(request.query["limit"])
        metadata: dict[str, str] = {"resourceVersion": str(self.version)}
        if start + limit < len(items):
            metadata["continue"] = str(start + limit)
        return web.json_response({"items": items[start : start + limit], "metadata": metadata})

    async def watch(self, request: web.Request) -> web.StreamResponse:
        assert request.query["allowWatchBookmarks"] == "true"
        assert int(request.query["timeoutSeconds"]) > 0
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self._watches.append(queue)
        try:
            failed = await self._begin("watch", f"watch {request.query['resourceVersion']}")
            if failed is not None:
                return failed
            response = web.StreamResponse(headers={"content-type": "application/json"})
            await response.prepare(request)
            while (data := await queue.get()) is not END:
                await response.write(data)
            return response
        finally:
            self._watches.remove(queue)

    async def one(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        failed = await self._begin("get", f"get {name}")
        if failed is not None:
            return failed
        found = self.objects.get((request.match_info["namespace"], name))
        return (
            web.json_response({"kind": "Status"}, status=404) if found is None else web.json_response(found)
        )

    def kubeconfig(self, directory: Path) -> Path:
        """A kubeconfig that leads here."""
        path = directory / "kubeconfig"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "test", "user": {"token": "a-token"}}],
        }
        path.write_text(json.dumps(config))
        return path


@asynccontextmanager
async def policy_api_server() -> AsyncIterator[PolicyApiServer]:
    """A running one."""
    server = PolicyApiServer()
    app = web.Application()
    app.router.add_get(f"{API}/admissionpolicies", server.collection)
    app.router.add_get(f"{API}/namespaces/{{namespace}}/admissionpolicies", server.collection)
    app.router.add_get(f"{API}/namespaces/{{namespace}}/admissionpolicies/{{name}}", server.one)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.port = runner.addresses[0][1]
    try:
        yield server
    finally:
        server.cut()
        for held in server.hold.values():
            held.set()
        await runner.cleanup()
