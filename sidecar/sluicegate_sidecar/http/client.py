"""One client connection: its exchanges one after another, in order; its responses; its end.

How requests are read is in `reader.py`.

When the client closes its sending side while its request is pending (`Limits.half_close`): a FIN alone does
not tell "I have said all" from "I am gone", and only writing would. By default it counts as gone, as with the
usual proxies and inference servers: an LLM client that gave up closes its socket, and each token for it takes
a slot from someone who waits; clients that half-close and wait exist (`nc -N`), but none speaks these APIs.
RFC 9112 (9.5, 9.6) leaves the choice. The rule is the same whether the FIN came with the request or later,
since the two cannot be told apart. An answer already written is delivered in both cases.

While reading is paused (too much was pipelined) the loop cannot see a FIN: `has_left` asks the kernel, at the
hand-over and in each sweep.

Invariants:
- `send` is the transport's `write`. It is called for an exchange that has not ended, and those end when the
  connection is lost, so it never meets a closed handle.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import struct
from typing import TYPE_CHECKING, Final, cast

from sluicegate_sidecar.http import heads
from sluicegate_sidecar.http.errors import Problem, problem
from sluicegate_sidecar.http.reader import BUSY, CLOSED, HEAD, LINGER, TUNNEL, RequestReader
from sluicegate_sidecar.http.tunnel import Tunnel

if TYPE_CHECKING:
    from collections.abc import Callable

    from sluicegate_sidecar.http.engine import EngineConnection
    from sluicegate_sidecar.http.exchange import Exchange
    from sluicegate_sidecar.http.server import Server

log = logging.getLogger(__name__)

#: Linux tells a peer's FIN apart from data that waits before it; elsewhere it is seen once reading goes on.
_RDHUP: Final = getattr(select, "POLLRDHUP", 0)

#: SO_LINGER on, with no time: closing resets.
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)

#: A read this large means that a large body is coming in: others get a turn before the next read.
_LARGE_READ: Final = 64 * 1024


class ClientConnection(RequestReader):
    """See the module. Owned by the server's set of connections until it is lost."""

    __slots__ = (
        "_eof",
        "_exchange",
        "_tunnel",
        "active",
        "peer_host",
        "read_paused",
        "send",
        "since_s",
    )

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.peer_host = ""
        self.send: Callable[[bytes], None]
        self.active = True  # for the sweep: bytes moved since the last one
        self.since_s = 0.0  # for the sweep: when bytes last moved
        self._exchange: Exchange | None = None
        self._tunnel: Tunnel | None = None
        self._eof = False
        self.read_paused = False

    # ---- asyncio.Protocol -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        self.transport = cast(asyncio.Transport, transport)
        self.send = self.transport.write
        self.transport.set_write_buffer_limits(self.server.limits.client_buffer_bytes)
        peer = transport.get_extra_info("peername")
        self.peer_host = peer[0] if isinstance(peer, tuple) else ""
        if not self.server.opened(self):
            # No lingering: what is over the limit must not stay.
            self._write_problem(problem("connections"))
            self.close()

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        self.active = True
        state = self.state
        if state < BUSY and not self._ahead and not (self.write_paused and state == HEAD):
            self._read(data)
            if self._ahead:
                self._next()
            elif len(data) >= _LARGE_READ:
                self._yield_turn()
        elif state <= BUSY:
            self._keep_ahead(data, len(self._ahead))
        elif state == TUNNEL and self._tunnel is not None:
            self._tunnel.from_client(data)

    def eof_received(self) -> bool:
        """The client sends no more. See the module."""
        if self._tunnel is not None:
            return self._tunnel.client_eof()
        exchange = self._exchange
        if exchange is None:
            return False
        if self.server.limits.half_close:
            self._eof = True
            return True
        exchange.client_gone()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self.state = CLOSED
        self.transport = None
        self._drop_ahead()
        if self._tunnel is not None:
            self._tunnel.client_lost()
        elif self._exchange is not None:
            self._exchange.client_gone()
        self._drop_unfinished()
        self.server.closed(self)

    def pause_writing(self) -> None:
        """The client takes no more for now: hold the engine back."""
        self.write_paused = True
        self.active = True
        if self._exchange is not None:
            self._exchange.client_paused()

    def resume_writing(self) -> None:
        """The client took what there was."""
        self.write_paused = False
        self.active = True
        if self._exchange is not None:
            self._exchange.client_resumed()
        elif self._ahead:
            self._next()

    # ---- for the exchange -----------------------------------------------------------------------------

    def connection_line(self, exchange: Exchange) -> bytes:
        """What the response says about the connection; decides whether it lives on."""
        server = self.server
        if (
            not exchange.keepalive
            or server.draining
            or self._requests >= server.keepalive_requests
            or (self._eof and not self._ahead)
        ):
            exchange.keepalive = False
            return heads.CLOSE
        return heads.KEEP_ALIVE if exchange.http10 else b""

    def reply(self, exchange: Exchange, status: int, lines: bytes, body: bytes) -> None:
        """Send a response that the gate makes itself; `lines` are its header lines."""
        connection = self.connection_line(exchange)
        self.send(heads.local(status, lines, self.server.date_line + connection, body, exchange.method))

    def exchange_ended(self, exchange: Exchange) -> None:
        """The exchange is over and its response written: go on with the next, or close."""
        self._exchange = None
        server = self.server
        server.exchanges -= 1
        if self.state != BUSY:
            return
        done = self._eof and not self._ahead
        if exchange.keepalive and not done and not server.draining:
            self.state = HEAD
            if self._ahead and not self._reading:
                self._next()
        elif done or (exchange.asked_close and not self._ahead):
            self.close()
        else:
            self._linger()

    def cut(self, reset: bool) -> None:
        """End the connection in the middle of a response, after what is already written.

        Args:
            reset: the end of the connection would read as the end of the message: reset it instead.
        """
        transport = self.transport
        if transport is not None and reset:
            sock = transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self.abort()
        else:
            self.close()

    def close(self) -> None:
        """Close, after what is already written."""
        self.state = CLOSED
        self._drop_ahead()
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Close at once."""
        self.state = CLOSED
        self._drop_ahead()
        if self.transport is not None:
            self.transport.abort()

    def has_left(self) -> bool:
        """Whether the client closed while the loop could not see it, because reading is paused."""
        if not self.read_paused or self.transport is None:
            return False
        # In a tunnel, and where half-closing is allowed, the end of one direction is no leaving.
        half = self.state == TUNNEL or self.server.limits.half_close
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), 0 if half else _RDHUP)
        return bool(poll.poll(0))

    # ---- for the tunnel -------------------------------------------------------------------------------

    def open_tunnel(self, engine: EngineConnection) -> None:
        """From now on bytes go both ways as they are."""
        self._tunnel = tunnel = Tunnel(self, engine, cast("Exchange", self._exchange))
        self.state = TUNNEL
        engine.tunnel(tunnel)
        ahead = b"".join(self._ahead)
        self._drop_ahead()
        if ahead:
            tunnel.from_client(ahead)
        self.resume_reading()

    def write_eof(self) -> None:
        """Close the sending half, after what is already written."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write_eof()

    def pause_reading(self) -> None:
        """Read no more until `resume_reading`."""
        if self.transport is not None and not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        if self.read_paused and self.transport is not None:
            self.read_paused = False
            self.transport.resume_reading()

    # ---- for the server -------------------------------------------------------------------------------

    def sweep(self, now_s: float) -> None:
        """Act on a bound that has passed."""
        limits = self.server.limits
        if self.active:
            self.active = False
            self.since_s = now_s
        if self._phase_s is None:
            self._phase_s = now_s
        quiet_s = now_s - self.since_s
        phase_s = now_s - self._phase_s
        state = self.state
        if state == BUSY:
            stalled = self.write_paused and quiet_s >= limits.stall_s
            if self._exchange is not None and (stalled or self.has_left()):
                self._exchange.client_gone()
        elif state == TUNNEL:
            if self.has_left():
                self.abort()
            elif self._tunnel is not None:
                self._tunnel.sweep(now_s, limits.tunnel_idle_s)
        elif state == LINGER:
            if phase_s >= limits.linger_s:
                self.abort()
        elif state == CLOSED or (state == HEAD and self.write_paused):
            if quiet_s >= limits.stall_s:
                self.abort()
        elif state != HEAD:
            if quiet_s >= limits.body_idle_s or phase_s >= limits.body_s:
                self._refuse(problem("body_s"))
        elif self._head:
            if phase_s >= limits.header_s:
                self._refuse(problem("header_s"))
        elif quiet_s >= limits.idle_s:
            self.close()

    def drain(self) -> None:
        """Close if there is nothing in flight; a request under way is still answered, and then it closes."""
        if self.state == HEAD and not self._head and not self._ahead:
            self.close()

    def cut_off(self) -> None:
        """Close now, whatever is under way."""
        if self._exchange is not None:
            self._exchange.abort("the server is closed")
        self.abort()

    # ---- inside ---------------------------------------------------------------------------------------

    def _request_read(self, exchange: Exchange) -> None:
        """A request is whole: over to the application."""
        server = self.server
        self._exchange = exchange
        self.state = BUSY
        server.exchanges += 1
        try:
            server.app.on_request(exchange)
        except Exception:
            log.exception("on_request of the application failed")
            exchange.fail_application()

    def _yield_turn(self) -> None:
        """Let other connections have a turn before the next read of a large body."""
        if self.state < BUSY and not self.read_paused:
            self.pause_reading()
            self.server.loop.call_soon(self.resume_reading)

    def _refuse(self, found: Problem) -> None:
        """Answer a request that is not one, and close: what follows it on the connection has no meaning."""
        self._drop_unfinished()
        self._drop_ahead()
        self._write_problem(found)
        self._linger()

    def _write_problem(self, found: Problem) -> None:
        reply = heads.error_reply(found.status, found.message, found.kind)
        more = self.server.date_line + heads.CLOSE
        self.send(heads.local(reply.status, heads.lines(reply.headers), more, reply.body, b""))
        self.server.protocol_error(found.kind)

    def _linger(self) -> None:
        """Stop sending, and read on for a while without listening.

        Closing at once while the client still sends would reset the connection, and the answer could be lost
        before it is read.
        """
        self.state = LINGER
        self._phase_s = None
        self._drop_ahead()
        self.resume_reading()
        self.write_eof()
