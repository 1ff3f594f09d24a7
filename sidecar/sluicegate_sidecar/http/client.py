"""One client connection: reads requests, writes responses, one exchange at a time, in order.

States: HEAD (idle, or a head is coming in) -> LENGTH or CHUNKED (its body) -> BUSY (the exchange is with the
application or the engine) -> HEAD again, or LINGER (an answer that ends the connection is on its way; what
still comes in is thrown away), or TUNNEL (after an upgrade), or CLOSED.

Two readings of each request's framing must agree: llhttp's, and ours, which knows where a request ends before
llhttp sees what follows. So a pipelined request is never parsed before its turn, and bytes on whose meaning
two parsers could differ are refused.

When the client closes its sending side while its request is pending (`Limits.half_close`): a FIN alone does
not tell "I have said all" from "I am gone", and only writing would. By default it counts as gone, as with the
usual proxies and inference servers: an LLM client that gave up closes its socket, and each token for it takes
a slot from someone who waits; clients that half-close and wait exist (`nc -N`), but none speaks these APIs.
RFC 9112 (9.5, 9.6) leaves the choice. The rule is the same whether the FIN came with the request or later,
since the two cannot be told apart. An answer already written is delivered in both cases.

Ends of reading: while reading is paused (too much was pipelined) the loop cannot see a FIN; `has_left` asks
the kernel, at the hand-over and in each sweep.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import struct
from typing import TYPE_CHECKING, Final, cast

import httptools

from sluicegate_sidecar.http import heads
from sluicegate_sidecar.http.chunked import ChunkedBody
from sluicegate_sidecar.http.errors import Problem, problem
from sluicegate_sidecar.http.exchange import Exchange
from sluicegate_sidecar.http.interface import LocalReply
from sluicegate_sidecar.http.request import split_request_line, understand
from sluicegate_sidecar.http.tunnel import Tunnel

if TYPE_CHECKING:
    from sluicegate_sidecar.http.engine import EngineConnection
    from sluicegate_sidecar.http.server import Server

log = logging.getLogger(__name__)

HEAD, LENGTH, CHUNKED, BUSY, LINGER, TUNNEL, CLOSED = range(7)

_HEAD_END: Final = b"\r\n\r\n"

#: Linux tells a peer's FIN apart from data that waits before it; elsewhere it is seen once reading goes on.
_RDHUP: Final = getattr(select, "POLLRDHUP", 0)

#: SO_LINGER on, with no time: closing resets.
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)

#: A read this large means that a large body is coming in: others get a turn before the next read.
_LARGE_READ: Final = 64 * 1024


class ClientConnection(asyncio.Protocol):
    """See the module. Owned by the server's set of connections until it is lost."""

    __slots__ = (
        "_ahead",
        "_blank",
        "_chunks",
        "_eof",
        "_exchange",
        "_head",
        "_head_seen",
        "_headers",
        "_incoming",
        "_message_complete",
        "_need",
        "_parser",
        "_phase_s",
        "_read_paused",
        "_reading",
        "_requests",
        "_tunnel",
        "active",
        "peer_host",
        "server",
        "since_s",
        "state",
        "transport",
        "write_paused",
    )

    def __init__(self, server: Server) -> None:
        self.server = server
        self.transport: asyncio.Transport | None = None
        self.peer_host = ""
        self.state = HEAD
        self.write_paused = False
        self.active = True  # for the sweep: bytes moved since the last one
        self.since_s = 0.0  # for the sweep: when bytes last moved
        self._phase_s: float | None = None  # for the sweep: when this head or body began
        self._parser: httptools.HttpRequestParser | None = None
        self._exchange: Exchange | None = None
        self._tunnel: Tunnel | None = None
        self._blank = b""  # empty lines before a request
        self._head = b""  # a head that is not whole yet
        self._headers: list[tuple[bytes, bytes]] = []
        self._incoming: Exchange | None = None  # a request whose body is coming in
        self._head_seen = False
        self._message_complete = False
        self._need = 0
        self._chunks: ChunkedBody | None = None
        self._ahead = b""
        self._eof = False
        self._reading = False
        self._read_paused = False
        self._requests = 0

    # ---- asyncio.Protocol -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        self.transport = cast(asyncio.Transport, transport)
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
        if state == BUSY or (self.write_paused and state == HEAD):
            self._read_ahead(data)
        elif state < BUSY:
            self._read(data)
            if len(data) >= _LARGE_READ:
                self._yield_turn()
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
        elif self.state == HEAD and self._ahead:
            self._next()

    # ---- httptools ------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header line, or a trailer: those are dropped."""
        if not self._head_seen:
            headers = self._headers
            headers.append((name.lower(), value))
            if len(headers) > self.server.limits.header_count:
                raise problem("header_count")

    def on_headers_complete(self) -> None:
        """llhttp has read a head."""
        self._head_seen = True

    def on_message_complete(self) -> None:
        """llhttp has read a request."""
        self._message_complete = True

    # ---- for the exchange -----------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send bytes of the response."""
        if self.transport is not None:
            self.transport.write(data)

    def keeps_alive(self, exchange: Exchange) -> bool:
        """Whether the connection lives on after this exchange, as far as this end decides."""
        most = self.server.limits.keepalive_requests
        return (
            exchange.keepalive
            and not self.server.draining
            and not (self._eof and not self._ahead)
            and (most is None or self._requests < most)
        )

    def reply(self, exchange: Exchange, reply: LocalReply) -> None:
        """Send a response that the gate makes itself."""
        if not self.keeps_alive(exchange):
            exchange.keepalive = False
        self._write_reply(reply, heads.connection_line(exchange), exchange.method != b"HEAD")

    def exchange_ended(self, exchange: Exchange) -> None:
        """The exchange is over and its response written: go on with the next, or close."""
        self._exchange = None
        self.server.exchanges -= 1
        if self.state != BUSY:
            return
        self.active = True
        done = self._eof and not self._ahead
        if exchange.keepalive and not done and not self.server.draining:
            self.state = HEAD
            if not self._reading:
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
        if not self._read_paused or self.transport is None or self.server.limits.half_close or not _RDHUP:
            return False
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), _RDHUP)
        return bool(poll.poll(0))

    # ---- for the tunnel -------------------------------------------------------------------------------

    def open_tunnel(self, engine: EngineConnection) -> None:
        """From now on bytes go both ways as they are."""
        exchange = cast(Exchange, self._exchange)
        self._tunnel = tunnel = Tunnel(self, engine, exchange)
        self.state = TUNNEL
        engine.tunnel(tunnel)
        ahead = self._ahead
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
        if self.transport is not None and not self._read_paused:
            self._read_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        if self.transport is not None and self._read_paused:
            self._read_paused = False
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
        if self.state == BUSY:
            if self._exchange is not None and (
                (self.write_paused and quiet_s >= limits.stall_s) or self.has_left()
            ):
                self._exchange.client_gone()
        elif self.state == HEAD:
            if self.write_paused:
                if quiet_s >= limits.stall_s:
                    self.abort()
            elif self._head:
                if phase_s >= limits.header_s:
                    self._refuse(problem("header_s"))
            elif quiet_s >= limits.idle_s:
                self.close()
        elif self.state < BUSY:
            if quiet_s >= limits.body_idle_s or phase_s >= limits.body_s:
                self._refuse(problem("body_s"))
        elif self.state == TUNNEL:
            if self._tunnel is not None:
                self._tunnel.sweep(now_s, limits.tunnel_idle_s)
        elif (phase_s if self.state == LINGER else quiet_s) >= (
            limits.linger_s if self.state == LINGER else limits.stall_s
        ):
            self.abort()

    def drain(self) -> None:
        """Close if there is nothing in flight; a request under way is still answered, and then it closes."""
        if self.state == HEAD and not self._head and not self._ahead:
            self.close()

    def cut_off(self) -> None:
        """Close now, whatever is under way."""
        if self._exchange is not None:
            self._exchange.abort("the server is closed")
        self.abort()

    # ---- reading --------------------------------------------------------------------------------------

    def _read(self, data: bytes) -> None:
        """Take in requests until one is whole, or the data is used up."""
        self._reading = True
        try:
            while data and self.state < BUSY:
                if self.state == HEAD:
                    if self.write_paused:
                        break
                    data = self._read_head(data)
                elif self.state == LENGTH:
                    data = self._read_length(data)
                else:
                    data = self._read_chunked(data)
        except Problem as found:
            self._refuse(found)
            return
        finally:
            self._reading = False
        if data and self.state <= BUSY:
            self._read_ahead(data)

    def _read_head(self, data: bytes) -> bytes:
        """Take in a head, or a part of it; return what follows it."""
        before = len(self._head)
        if before:
            data = self._head + data
        elif self._blank or data[0] in b"\r\n":
            data = self._skip_blank(data)
        at = data.find(_HEAD_END, max(0, before - 3))
        end = at + 4 if at >= 0 else len(data)
        if end > self.server.limits.header_bytes:
            raise problem("header_bytes")
        if at < 0:
            if not before:
                self._phase_s = None
            self._head = data
            if data:
                self._feed(data[before:])
            return b""
        head = data[:end]
        self._head = b""
        self._feed(head[before:] if before else head)
        rest = data[end:]
        self._head_read(head, not rest)
        return rest

    def _skip_blank(self, data: bytes) -> bytes:
        """Drop empty lines before a request: whole ones, and not many."""
        data = self._blank + data
        rest = data.lstrip(b"\r\n")
        lead = data[: len(data) - len(rest)]
        most = b"\r\n" * self.server.limits.leading_crlf
        if not most.startswith(lead) or (rest and len(lead) % 2):
            raise problem("bad_request")
        self._blank = b"" if rest else lead
        return rest

    def _feed(self, data: bytes) -> None:
        """Have llhttp read too."""
        parser = self._parser
        if parser is None:
            parser = self._parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Raised where the body would begin; from here on only our own reading counts for this request.
            self._parser = None
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            raise (cause if isinstance(cause, Problem) else problem("bad_request")) from None
        except httptools.HttpParserError:
            kind = "bad_request" if self.state == HEAD else "bad_chunk"
            raise problem(kind) from None

    def _head_read(self, head: bytes, nothing_follows: bool) -> None:
        """A head is whole: understand it, and go on to the body."""
        if not self._head_seen:
            raise problem("bad_request")
        method, target, http10 = split_request_line(head[: head.index(b"\r\n")], self.server.limits)
        headers = self._headers
        if b" \r\n" in head or b"\t\r\n" in head:
            headers = [(name, value.rstrip(b" \t")) for name, value in headers]
        exchange = Exchange(self, method, target, headers, http10)
        framing = understand(exchange, self.server.limits)
        self._headers = []
        self._phase_s = None
        if framing.chunked:
            self._chunks = ChunkedBody(self.server.limits)
            self.state = CHUNKED
        elif framing.length:
            self._need = framing.length
            self.state = LENGTH
        else:
            self._request_read(exchange)
            return
        self._incoming = exchange
        if framing.expects_continue and nothing_follows:
            self.write(heads.CONTINUE)

    def _read_length(self, data: bytes) -> bytes:
        """Take in a body of known length, or a part of it; return what follows it."""
        need = self._need
        if len(data) > need:
            data, rest = data[:need], data[need:]
        else:
            rest = b""
        if self._parser is not None:
            self._feed(data)
        exchange = cast(Exchange, self._incoming)
        self._keep(exchange, data)
        self._need = need - len(data)
        if not self._need:
            self._request_read(exchange)
        return rest

    def _read_chunked(self, data: bytes) -> bytes:
        """Take in a chunked body, or a part of it; return what follows it."""
        chunks = cast(ChunkedBody, self._chunks)
        pieces: list[bytes] = []
        used = chunks.feed(data, pieces)
        if self._parser is not None:
            self._feed(data[:used])
        exchange = cast(Exchange, self._incoming)
        for piece in pieces:
            self._keep(exchange, piece)
        if chunks.done:
            self._chunks = None
            self._request_read(exchange)
        return data[used:]

    def _keep(self, exchange: Exchange, piece: bytes) -> None:
        server = self.server
        exchange.add_piece(piece)
        server.body_bytes += len(piece)
        if server.body_bytes > server.limits.body_bytes_total:
            raise problem("body_bytes_total")

    def _request_read(self, exchange: Exchange) -> None:
        """A request is whole: over to the application."""
        if self._parser is not None and not self._message_complete:
            raise problem("bad_framing")
        self._head_seen = self._message_complete = False
        self._incoming = None
        self._exchange = exchange
        self._requests += 1
        self.state = BUSY
        self.server.exchanges += 1
        try:
            self.server.app.on_request(exchange)
        except Exception:
            log.exception("on_request of the application failed")
            exchange.fail_application()

    def _read_ahead(self, data: bytes) -> None:
        """Keep what came before its turn, within bounds."""
        server = self.server
        self._ahead += data
        server.body_bytes += len(data)
        if (
            server.body_bytes > server.limits.body_bytes_total
            or len(self._ahead) >= server.limits.pipelined_bytes
        ):
            self.pause_reading()

    def _next(self) -> None:
        """Go on with what was read ahead."""
        ahead = self._ahead
        self._drop_ahead()
        self.resume_reading()
        if ahead:
            self._read(ahead)

    def _drop_ahead(self) -> None:
        self.server.body_bytes -= len(self._ahead)
        self._ahead = b""

    def _yield_turn(self) -> None:
        """Let other connections have a turn before the next read of a large body."""
        if self.transport is not None and not self._read_paused and self.state < BUSY:
            self._read_paused = True
            self.transport.pause_reading()
            self.server.loop.call_soon(self.resume_reading)

    # ---- refusing -------------------------------------------------------------------------------------

    def _refuse(self, found: Problem) -> None:
        """Answer a request that is not one, and close: what follows it on the connection has no meaning."""
        self._drop_unfinished()
        self._drop_ahead()
        self._write_problem(found)
        self._linger()

    def _write_problem(self, found: Problem) -> None:
        reply = heads.error_reply(found.status, found.message, found.kind)
        self._write_reply(reply, b"connection: close\r\n", True)
        self.server.protocol_error(found.kind)

    def _drop_unfinished(self) -> None:
        if self._incoming is not None:
            self._incoming.drop_body()
            self._incoming = None

    def _write_reply(self, reply: LocalReply, connection: bytes, content: bool) -> None:
        status = reply.status
        length = b"" if status in (204, 304) else b"content-length: %d\r\n" % len(reply.body)
        head = b"%b%b%b%b%b\r\n" % (
            heads.status_line(status),
            heads.lines(reply.headers),
            length,
            self.server.date_line,
            connection,
        )
        self.write(head + reply.body if content and length else head)

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
