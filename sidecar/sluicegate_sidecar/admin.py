"""The admin port: what Kubernetes, Prometheus and people ask of a gate. It serves no inference.

    /healthz       200 while the process's event loop runs
    /readyz        200 while this replica should get traffic; 503 says in one word why not; never because of load
    /metrics       Prometheus text or OpenMetrics
    /debug/state   what the gate is doing right now, as JSON
    /drain         refuse what comes, and answer when nothing is in flight any more or the time is over

`/drain` takes GET as well as POST, since a preStop hook of Kubernetes can only GET, and there is no way back from
it: so the port belongs to the pod and its node, not to clients. Everything else only reads.

The only module that imports aiohttp, which costs more memory and time than all the rest of the gate: the process
imports it beside the traffic, once the data port listens. Limits on what comes in: `MAX_CONNECTIONS`,
`MAX_LINE_BYTES`, `MAX_HEADERS`; no body is read.
"""

import asyncio
import contextlib
import math
import os
from collections.abc import Awaitable, Callable
from typing import Final, cast

import msgspec
from aiohttp import web

from sluicegate_core.stats import Histogram
from sluicegate_core.vocabulary import NOT_READY
from sluicegate_sidecar.metrics import Exposition
from sluicegate_sidecar.settings import Address
from sluicegate_sidecar.state import GateProcess, snapshot

#: A kubelet, some Prometheuses and a few people; above, connections are closed unanswered.
MAX_CONNECTIONS: Final = 64
#: Of a request line, and of a header line: no path or header of use here is near it.
MAX_LINE_BYTES: Final = 4096
MAX_HEADERS: Final = 64
#: A connection without a request, s: longer than between two scrapes.
IDLE_S: Final = 75.0
#: What handlers get to end when the port closes, s: a waiting drain is told by its process's end.
CLOSE_S: Final = 0.5
#: The longest drain that may be asked for, s: a day.
MAX_DRAIN_S: Final = 86_400.0
#: Between two looks at the loop's lag, s.
LAG_EVERY_S: Final = 0.25
LAG_BOUNDS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AdminError(OSError):
    """The port cannot be opened; one line says which and why."""


class LoopLag:
    """Samples how late the event loop's timers fire: the time that any event may have to wait for its turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.seconds = Histogram(LAG_BOUNDS_S)
        self._loop = loop
        self._due = loop.time() + LAG_EVERY_S
        self._timer = loop.call_at(self._due, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        self.seconds.add(max(0.0, now - self._due))
        self._due = now + LAG_EVERY_S
        self._timer = self._loop.call_at(self._due, self._look)

    def close(self) -> None:
        """Sample no more."""
        self._timer.cancel()


class Admin:
    """The handlers, over one gate's process."""

    def __init__(self, process: GateProcess, lag: LoopLag) -> None:
        self._process = process
        self._exposition = Exposition(process, lag.seconds)

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[_errors_as_json], client_max_size=MAX_LINE_BYTES)
        app.router.add_get("/healthz", self.healthz)
        app.router.add_get("/readyz", self.readyz)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/debug/state", self.state)
        app.router.add_get("/drain", self.drain, allow_head=False)
        app.router.add_post("/drain", self.drain)
        return app

    async def healthz(self, _: web.Request) -> web.Response:
        """The loop runs, or nobody would answer."""
        return _json({"status": "ok"})

    async def readyz(self, _: web.Request) -> web.Response:
        """Whether a Service should send requests here. A gate that refuses for load is ready: it answers."""
        reason = not_ready(self._process)
        if reason is not None:
            return _json({"ready": False, "reason": reason}, status=503)
        return _json({"ready": True})

    async def metrics(self, request: web.Request) -> web.Response:
        """One scrape."""
        page, content_type = await self._exposition.render(request.headers.get("accept", ""))
        return web.Response(body=page, headers={"content-type": content_type})

    async def state(self, _: web.Request) -> web.Response:
        """One snapshot, laid out for reading."""
        return _json(snapshot(self._process), pretty=True)

    async def drain(self, request: web.Request) -> web.Response:
        """Begin a drain, or join one; `?timeout=SECONDS` bounds the wait, by default as the process's own.

        200 in both cases: a hook that fails would not make the pod wait any longer.
        """
        timeout_s = _timeout_s(request.query.get("timeout"), self._process.settings.drain_timeout_s)
        loop = asyncio.get_running_loop()
        since = loop.time()
        drained = await self._process.drain(timeout_s)
        waited_s = round(loop.time() - since, 3)
        return _json({"drained": drained, "in_flight": self._process.gate.in_flight, "waited_s": waited_s})


def _why(error: OSError) -> str:
    """The system's word for it; event loops say much more, and that twice."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)  # the resolver's errors are numbered below zero


def not_ready(process: GateProcess) -> str | None:
    """Why no request should be sent here, or None. An engine of which nothing is known yet gets requests."""
    controller = process.gate.controller
    if process.server is None:
        return "starting"
    if controller.draining:
        return "draining"
    if controller.engine.status in NOT_READY:
        return f"engine_{controller.engine.status.value}"
    return None


def _timeout_s(text: str | None, otherwise: float) -> float:
    if text is None:
        return otherwise
    with contextlib.suppress(ValueError):
        timeout_s = float(text)
        if math.isfinite(timeout_s) and 0.0 <= timeout_s <= MAX_DRAIN_S:
            return timeout_s
    raise web.HTTPBadRequest(reason=f"timeout is a number of seconds from 0 to {MAX_DRAIN_S:.0f}")


def _json(value: object, *, status: int = 200, pretty: bool = False) -> web.Response:
    body = msgspec.json.encode(value)
    if pretty:
        body = msgspec.json.format(body, indent=2)
    return web.Response(body=body + b"\n", status=status, content_type="application/json")


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Unknown paths, wrong methods and bad parameters are answered in JSON."""
    try:
        return await handler(request)
    except web.HTTPError as error:
        response = _json({"error": error.reason}, status=error.status)
        if isinstance(error, web.HTTPMethodNotAllowed):
            response.headers["allow"] = ", ".join(sorted(error.allowed_methods))
        return response


class _OneTooMany(asyncio.Protocol):
    """Closes its connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()  # uvloop's transports do not inherit from it


class AdminServer:
    """A listening admin port. Made by `start_admin`.

    Attributes:
        port: where it listens; the one given by the system where 0 was asked for.
    """

    def __init__(self, process: GateProcess) -> None:
        self.port = 0
        self._lag = LoopLag(asyncio.get_running_loop())
        self._runner = web.AppRunner(
            Admin(process, self._lag).application(),
            access_log=None,
            keepalive_timeout=IDLE_S,
            lingering_time=CLOSE_S,
            shutdown_timeout=CLOSE_S,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
        )
        self._listener: asyncio.Server | None = None

    async def listen(self, address: Address) -> None:
        """Start to accept.

        Raises:
            AdminError: the address cannot be had.
        """
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(self._protocol, address.host, address.port)
        except OSError as error:
            await self.close()
            raise AdminError(
                error.errno, f"cannot open the admin port on {address}: {_why(error)}"
            ) from error
        self.port = self._listener.sockets[0].getsockname()[1]

    def _protocol(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        assert server is not None, "set up before it listens"
        return server() if len(server.connections) < MAX_CONNECTIONS else _OneTooMany()

    async def close(self) -> None:
        """Stop listening and close every connection."""
        if self._listener is not None:
            self._listener.close()
        self._lag.close()
        await self._runner.cleanup()


async def start_admin(process: GateProcess, address: Address) -> AdminServer:
    """Open the admin port of a gate's process, on its event loop.

    Raises:
        AdminError: the address cannot be had.
    """
    server = AdminServer(process)
    await server.listen(address)
    return server
