"""The admin port: what Kubernetes, Prometheus and people ask of a gate. It serves no inference.

    /healthz       200 while the process's event loop runs
    /readyz        200 while this replica should get traffic; 503 says in one word why not; never because of load
    /metrics       Prometheus text or OpenMetrics
    /debug/state   what the gate is doing right now, as JSON
    /report        what the operator adds up over all gates of a policy, as JSON
    /enginez       200 while the engine accepts connections: what a TCP probe of its port would tell
    /drain         stop admitting, and answer when nothing is in flight any more or the time is over

`/drain` takes GET as well as POST, since a preStop hook of Kubernetes can only GET, and there is no way back from
it: where the process has a drain token, whoever asks has to show it. Everything else only reads.

It is an application of the gate's own data path that answers everything itself: one HTTP implementation, hardened
and bounded once, where a second one would cost the idle gate a quarter of its memory. Limits on what comes in:
`LIMITS`.
"""

import asyncio
import contextlib
import hmac
import logging
import math
import os
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple
from urllib.parse import parse_qs

import msgspec

from sluicegate_core.stats import Histogram
from sluicegate_core.vocabulary import NOT_READY
from sluicegate_sidecar.gate_report import GateReport
from sluicegate_sidecar.http import Exchange, Limits, Server, serve
from sluicegate_sidecar.metrics import Exposition
from sluicegate_sidecar.settings import Address
from sluicegate_sidecar.state import GateProcess, snapshot

log = logging.getLogger(__name__)

#: A kubelet, some Prometheuses and a few people, with heads of usual size and no bodies.
LIMITS: Final = Limits(
    connections=64,
    header_count=64,
    header_bytes=16_384,
    target_bytes=1024,
    body_bytes=4096,
    body_bytes_total=65_536,
)
#: The longest drain that may be asked for, s: a day.
MAX_DRAIN_S: Final = 86_400.0
TOKEN_HEADER: Final = b"x-sluicegate-token"
#: For the engine to accept a connection, s: a kubelet's own bound on a probe.
CONNECT_S: Final = 1.0
#: Between two looks at the loop's lag, s.
LAG_EVERY_S: Final = 0.25
LAG_BOUNDS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)

JSON: Final = "application/json"


class AdminError(OSError):
    """The port cannot be opened; one line says which and why."""


class Answer(NamedTuple):
    """What a handler says."""

    status: int
    content_type: str
    body: bytes


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
    """The application: handlers by path and method, over one gate's process."""

    def __init__(self, process: GateProcess, lag: LoopLag, report: GateReport) -> None:
        self._process = process
        self._report = report
        self._exposition = Exposition(process, lag.seconds, report.capacity)
        self._tasks: set[asyncio.Task[None]] = set()
        self._routes: dict[bytes, tuple[tuple[bytes, ...], Callable[[Exchange], Awaitable[Answer]]]] = {
            b"/healthz": ((b"GET", b"HEAD"), self.healthz),
            b"/readyz": ((b"GET", b"HEAD"), self.readyz),
            b"/metrics": ((b"GET", b"HEAD"), self.metrics),
            b"/debug/state": ((b"GET", b"HEAD"), self.state),
            b"/report": ((b"GET", b"HEAD"), self.report),
            b"/enginez": ((b"GET", b"HEAD"), self.engine),
            b"/drain": ((b"GET", b"POST"), self.drain),
        }

    # The data path's calls.

    def on_request(self, exchange: Exchange) -> None:
        """Answer, at once or when the handler has what it waits for."""
        route = self._routes.get(exchange.path)
        if route is None:
            _reply(exchange, _json({"error": "Not Found"}, status=404))
            return
        methods, handler = route
        if exchange.method not in methods:
            allow = (b"allow", b", ".join(methods))
            _reply(exchange, _json({"error": "Method Not Allowed"}, status=405), allow)
            return
        task = asyncio.get_running_loop().create_task(self._answer(exchange, handler))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def on_protocol_error(self, kind: str) -> None:
        """Whoever spoke no HTTP has been told."""

    async def _answer(self, exchange: Exchange, handler: Callable[[Exchange], Awaitable[Answer]]) -> None:
        try:
            answer = await handler(exchange)
        except Exception:
            log.exception("the admin port failed on %s", exchange.path.decode("latin-1"))
            answer = _json({"error": "Internal Server Error"}, status=500)
        if not exchange.ended:  # who asked may have left
            _reply(exchange, answer)

    async def close(self) -> None:
        """Give up what still waits."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # The handlers.

    async def healthz(self, _: Exchange) -> Answer:
        """The loop runs, or nobody would answer."""
        return _json({"status": "ok"})

    async def readyz(self, _: Exchange) -> Answer:
        """Whether a Service should send requests here. A gate that refuses for load is ready: it answers."""
        reason = not_ready(self._process)
        if reason is not None:
            return _json({"ready": False, "reason": reason}, status=503)
        return _json({"ready": True})

    async def metrics(self, exchange: Exchange) -> Answer:
        """One scrape."""
        accept = exchange.header(b"accept") or b""
        page, content_type = await self._exposition.render(accept.decode("latin-1"))
        return Answer(200, content_type, page)

    async def state(self, _: Exchange) -> Answer:
        """One snapshot, laid out for reading."""
        return _json(snapshot(self._process), pretty=True)

    async def report(self, _: Exchange) -> Answer:
        """One report, for the operator."""
        return _json(self._report.build())

    async def engine(self, _exchange: Exchange) -> Answer:
        """Whether the engine accepts a connection right now; nothing is sent on it."""
        upstream = self._process.settings.upstream
        try:
            async with asyncio.timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(upstream.host, upstream.port)
        except OSError as error:  # TimeoutError is one
            return _json({"accepts": False, "reason": _why(error)}, status=503)
        writer.transport.abort()  # whoever probes by TCP says no good-bye either
        return _json({"accepts": True})

    async def drain(self, exchange: Exchange) -> Answer:
        """Begin a drain, or join one.

        `?timeout=SECONDS` bounds it, by default as the process's own; `settle=SECONDS` of it are for those who have
        not heard yet. 200 in both cases: a hook that fails would not make the pod wait any longer.
        """
        settings = self._process.settings
        token = settings.drain_token
        if token is not None and not hmac.compare_digest(exchange.header(TOKEN_HEADER) or b"", token):
            return _json({"error": f"the header {TOKEN_HEADER.decode()} is missing or wrong"}, status=403)
        timeout_s = _seconds(exchange.target, "timeout", settings.drain_timeout_s)
        settle_s = _seconds(exchange.target, "settle", 0.0)
        if timeout_s is None or settle_s is None:
            name = "timeout" if timeout_s is None else "settle"
            return _json({"error": f"{name} is a number of seconds from 0 to {MAX_DRAIN_S:.0f}"}, status=400)
        loop = asyncio.get_running_loop()
        since = loop.time()
        drained = await self._process.drain(timeout_s, settle_s)
        waited_s = round(loop.time() - since, 3)
        return _json({"drained": drained, "in_flight": self._process.gate.in_flight, "waited_s": waited_s})


def not_ready(process: GateProcess) -> str | None:
    """Why no request should be sent here, or None. An engine of which nothing is known yet gets requests."""
    controller = process.gate.controller
    if process.server is None:
        return "starting"
    if process.leaving:
        return "draining"
    if controller.engine.status in NOT_READY:
        return f"engine_{controller.engine.status.value}"
    return None


def _seconds(target: bytes, name: str, otherwise: float) -> float | None:
    """A number of seconds that the query gives; None where it is no such number."""
    query = parse_qs(target.partition(b"?")[2].decode("latin-1"), keep_blank_values=True, max_num_fields=8)
    if name not in query:
        return otherwise
    with contextlib.suppress(ValueError):
        seconds = float(query[name][-1])
        if math.isfinite(seconds) and 0.0 <= seconds <= MAX_DRAIN_S:
            return seconds
    return None


def _json(value: object, *, status: int = 200, pretty: bool = False) -> Answer:
    body = msgspec.json.encode(value)
    if pretty:
        body = msgspec.json.format(body, indent=2)
    return Answer(status, JSON, body + b"\n")


def _reply(exchange: Exchange, answer: Answer, *headers: tuple[bytes, bytes]) -> None:
    content_type = (b"content-type", answer.content_type.encode("latin-1"))
    exchange.refuse(answer.status, (content_type, *headers), answer.body)


def _why(error: OSError) -> str:
    """The system's word for it; event loops say much more, and that twice."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)  # the resolver's errors are numbered below zero


class AdminServer:
    """A listening admin port. Made by `start_admin`.

    Attributes:
        port: where it listens; the one given by the system where 0 was asked for.
    """

    def __init__(self, admin: Admin, server: Server, lag: LoopLag, report: GateReport) -> None:
        self.port = server.port
        self._admin = admin
        self._server = server
        self._lag = lag
        self._report = report

    async def close(self) -> None:
        """Stop listening and close every connection."""
        self._lag.close()
        self._report.close()
        await self._server.close()
        await self._admin.close()


async def start_admin(process: GateProcess, address: Address) -> AdminServer:
    """Open the admin port of a gate's process, on its event loop.

    Raises:
        AdminError: the address cannot be had.
    """
    loop = asyncio.get_running_loop()
    lag, report = LoopLag(loop), GateReport(process, loop)
    admin = Admin(process, lag, report)
    try:
        server = await serve(
            admin,
            upstream_host="",  # nothing is ever forwarded
            upstream_port=0,
            host=address.host,
            port=address.port,
            limits=LIMITS,
        )
    except OSError as error:
        lag.close()
        report.close()
        raise AdminError(error.errno, f"cannot open the admin port on {address}: {_why(error)}") from error
    return AdminServer(admin, server, lag, report)
