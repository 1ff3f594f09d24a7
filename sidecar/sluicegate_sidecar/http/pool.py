"""The connections to the engine: idle ones kept for the next request, new ones made when there is none.

Owns every `EngineConnection`. Last in, first out: the connection used last is the least likely to have been
closed by the engine meanwhile. There is no bound on busy connections here: each serves one client connection,
and those are bounded.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from sluicegate_sidecar.http.engine import EngineConnection
from sluicegate_sidecar.http.interface import End
from sluicegate_sidecar.http.limits import Limits

if TYPE_CHECKING:
    from sluicegate_sidecar.http.exchange import Exchange


class Pool:
    """See the module.

    Attributes:
        retries: requests sent again because an idle connection had been closed by the engine.
        connects: connections made, or tried.
        authority: the engine's host and port, for requests that name none.
        stale: idle connections found closed before they were used.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, host: str, port: int, limits: Limits) -> None:
        self.loop = loop
        self.limits = limits
        self.buffer = bytearray(limits.engine_read_bytes)
        self.retries = 0
        self.connects = 0
        self.stale = 0
        named = f"[{host}]" if ":" in host else host
        self.authority = f"{named}:{port}".encode("ascii", "replace")
        self._host = host
        self._port = port
        self._idle: list[EngineConnection] = []
        self._open: set[EngineConnection] = set()
        self._connecting: set[asyncio.Task[None]] = set()

    @property
    def open_connections(self) -> int:
        """Connections to the engine, busy and idle."""
        return len(self._open)

    @property
    def idle_connections(self) -> int:
        """Connections to the engine that wait for a request."""
        return len(self._idle)

    def serve(self, exchange: Exchange) -> None:
        """Have the exchange's request sent, on an idle connection or a new one."""
        idle = self._idle
        while idle:
            engine = idle.pop()
            if engine.usable():
                engine.start(exchange)
                return
            self.stale += 1
            engine.discard()
        self._connect(exchange)

    def retry(self, exchange: Exchange) -> None:
        """Send once more, on a new connection: where one idle connection was stale, others are too."""
        self.retries += 1
        self._connect(exchange)

    def give_back(self, engine: EngineConnection) -> None:
        """A connection that may serve again."""
        if len(self._idle) < self.limits.engine_idle_connections:
            self._idle.append(engine)
        else:
            engine.discard()

    def forget(self, engine: EngineConnection) -> None:
        """Never use this connection again."""
        if engine in self._idle:
            self._idle.remove(engine)

    def opened(self, engine: EngineConnection) -> None:
        """A connection was made."""
        self._open.add(engine)

    def closed(self, engine: EngineConnection) -> None:
        """A connection was closed."""
        self._open.discard(engine)

    def sweep(self, now_s: float) -> None:
        """Act on bounds that have passed."""
        for engine in tuple(self._open):
            engine.sweep(now_s)

    async def close(self) -> None:
        """Close every connection, and give up those being made."""
        tasks = tuple(self._connecting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._idle.clear()
        for engine in tuple(self._open):
            engine.discard()

    def _connect(self, exchange: Exchange) -> None:
        self.connects += 1
        task = self.loop.create_task(self._connected(exchange))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connected(self, exchange: Exchange) -> None:
        """Connect, then serve the exchange; one that ended meanwhile leaves its connection to the pool."""
        try:
            async with asyncio.timeout(self.limits.connect_s):
                _, engine = await self.loop.create_connection(
                    lambda: EngineConnection(self), self._host, self._port
                )
        except (OSError, TimeoutError, ValueError):
            exchange.engine_failed(End.ENGINE_REFUSED)
            return
        if engine.transport is None or engine.transport.is_closing():
            exchange.engine_failed(End.ENGINE_RESET_EARLY)
        elif exchange.ended:
            self.give_back(engine)
        else:
            engine.start(exchange)
