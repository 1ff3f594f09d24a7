"""The listening side, and what all connections share.

One `Server` owns the client connections, the pool of engine connections, the counters, and the one timer: a
sweep over all connections that acts on every bound in `Limits`. A timer per request or per piece would cost
more than the piece; a sweep costs a fraction of a microsecond for each connection and second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from email.utils import formatdate
from typing import TYPE_CHECKING, Final

from sluicegate_sidecar.http.client import ClientConnection
from sluicegate_sidecar.http.interface import Application
from sluicegate_sidecar.http.limits import Limits
from sluicegate_sidecar.http.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

#: Connections that wait to be accepted: a burst of clients that all reconnect at once must not be refused by
#: the kernel. It cuts this down to its own bound (`net.core.somaxconn`).
_BACKLOG: Final = 1024

#: How long connections that were cut may take to be gone; the loop needs a turn or two for it.
_CUT_S: Final = 1.0


class Server:
    """A gate's data port. Made by `serve`.

    Attributes:
        app: the application.
        limits: the limits in force.
        pool: the connections to the engine, with counters of its own.
        host, port: where it listens; the port that was given by the system where 0 was asked for.
        exchanges: requests with the application or the engine right now.
        body_bytes: bytes of requests held right now.
        accepted: connections accepted since the start.
        draining: no connection is kept alive any more.
    """

    def __init__(self, app: Application, pool: Pool, limits: Limits) -> None:
        self.app = app
        self.pool = pool
        self.limits = limits
        self.loop = pool.loop
        self.host = ""
        self.port = 0
        self.exchanges = 0
        self.body_bytes = 0
        self.accepted = 0
        self.draining = False
        self.date_line = b""
        self._clients: set[ClientConnection] = set()
        self._all_gone = asyncio.Event()
        self._all_gone.set()
        self._listener: asyncio.AbstractServer | None = None
        self.keepalive_requests = limits.keepalive_requests or sys.maxsize
        self._sweep_s = limits.sweep_s
        self._timer: asyncio.TimerHandle | None = None

    @property
    def open_connections(self) -> int:
        """Client connections, busy and idle."""
        return len(self._clients)

    async def listen(self, host: str, port: int) -> None:
        """Start to accept.

        Raises:
            OSError: the address cannot be had.
        """
        self._sweep()
        make: Callable[[], asyncio.BaseProtocol] = lambda: ClientConnection(self)  # noqa: E731
        self._listener = await self.loop.create_server(make, host, port, backlog=_BACKLOG)
        name = self._listener.sockets[0].getsockname()
        self.host, self.port = name[0], name[1]

    def leave(self) -> None:
        """Keep no connection alive beyond its next response; go on accepting others."""
        self.draining = True

    def drain(self) -> None:
        """Keep no connection alive from now on: idle ones close at once, others with their next response."""
        self.draining = True
        for client in tuple(self._clients):
            client.drain()

    async def close(self, grace_s: float = 0.0) -> None:
        """Stop listening, let what is in flight finish for at most `grace_s`, then cut it."""
        if self._listener is not None:
            self._listener.close()
        self.drain()
        await self._gone(grace_s)
        for client in tuple(self._clients):
            client.cut_off()
        await self.pool.close()
        await self._gone(_CUT_S)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---- for connections ------------------------------------------------------------------------------

    def opened(self, client: ClientConnection) -> bool:
        """A client connected; False where it is one too many."""
        self.accepted += 1
        self._clients.add(client)
        self._all_gone.clear()
        return len(self._clients) <= self.limits.connections

    def closed(self, client: ClientConnection) -> None:
        """A client's connection is closed."""
        self._clients.discard(client)
        if not self._clients:
            self._all_gone.set()

    def protocol_error(self, kind: str) -> None:
        """Tell the application of a client that broke the protocol or hit a limit."""
        try:
            self.app.on_protocol_error(kind)
        except Exception:
            log.exception("on_protocol_error of the application failed")

    # ---- inside ---------------------------------------------------------------------------------------

    async def _gone(self, most_s: float) -> None:
        if self._clients and most_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(most_s):
                    await self._all_gone.wait()

    def _sweep(self) -> None:
        self.date_line = b"date: %b\r\n" % formatdate(usegmt=True).encode("ascii")
        now_s = self.loop.time()
        for client in tuple(self._clients):
            client.sweep(now_s)
        self.pool.sweep(now_s)
        self._timer = self.loop.call_later(self._sweep_s, self._sweep)


async def serve(
    app: Application,
    *,
    upstream_host: str,
    upstream_port: int,
    host: str = "127.0.0.1",
    port: int = 0,
    limits: Limits | None = None,
) -> Server:
    """Listen on `host`:`port` and pass what the application forwards to the engine.

    Args:
        app: decides about requests.
        upstream_host, upstream_port: the engine; a name is resolved at each connect.
        host, port: where clients connect; port 0 is any free one, told by `Server.port`.
        limits: None for the defaults.

    Raises:
        OSError: the address cannot be had.
    """
    limits = limits or Limits()
    pool = Pool(asyncio.get_running_loop(), upstream_host, upstream_port, limits)
    server = Server(app, pool, limits)
    await server.listen(host, port)
    return server
