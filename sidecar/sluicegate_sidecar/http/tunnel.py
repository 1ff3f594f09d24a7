"""A connection after an upgrade: bytes both ways, as they come, with backpressure both ways.

Either side may close its sending half; the other half stays open until it closes too, or until nothing has
passed for `Limits.tunnel_idle_s`. Losing either connection closes the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluicegate_sidecar.http.client import ClientConnection
    from sluicegate_sidecar.http.engine import EngineConnection
    from sluicegate_sidecar.http.exchange import Exchange


class Tunnel:
    """See the module. Owned by the client connection; the exchange ends when the tunnel is closed."""

    __slots__ = (
        "_client",
        "_client_eof",
        "_engine",
        "_engine_eof",
        "_exchange",
        "_open",
        "active",
        "since_s",
    )

    def __init__(self, client: ClientConnection, engine: EngineConnection, exchange: Exchange) -> None:
        self._client = client
        self._engine = engine
        self._exchange = exchange
        self._client_eof = False
        self._engine_eof = False
        self._open = True
        self.active = True
        self.since_s = 0.0

    def from_client(self, data: bytes) -> None:
        """Bytes for the engine."""
        self.active = True
        if self._engine.transport is not None and self._open:
            self._engine.transport.write(data)

    def from_engine(self, data: bytes) -> None:
        """Bytes for the client."""
        self.active = True
        if self._open:
            self._client.send(data)

    def client_eof(self) -> bool:
        """The client sends no more; True to keep its connection for the other direction."""
        self._client_eof = True
        if self._engine_eof:
            self.close()
            return False
        if self._engine.transport is not None:
            self._engine.transport.write_eof()
        return True

    def engine_eof(self) -> bool:
        """The engine sends no more; True to keep its connection for the other direction."""
        self._engine_eof = True
        if self._client_eof:
            self.close()
            return False
        self._client.write_eof()
        return True

    def engine_paused(self) -> None:
        """The engine takes no more for now."""
        self._client.pause_reading()

    def engine_resumed(self) -> None:
        """The engine takes data again."""
        self._client.resume_reading()

    def client_lost(self) -> None:
        """The client's connection is closed."""
        self.close()

    def engine_lost(self) -> None:
        """The engine's connection is closed."""
        self.close()

    def sweep(self, now_s: float, idle_s: float) -> None:
        """Close what has been silent for too long."""
        if self.active:
            self.active = False
            self.since_s = now_s
        elif now_s - self.since_s >= idle_s:
            self.close()

    def close(self) -> None:
        """Close both sides; what was taken for the client is still sent. Once."""
        if self._open:
            self._open = False
            self._engine.discard()
            self._client.close()
            self._exchange.tunnel_closed()
