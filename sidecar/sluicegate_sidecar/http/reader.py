"""Reads requests from a client connection: heads, bodies, and what was sent before its turn.

Two readings of each request's framing must agree: llhttp's, and ours, which knows where a request ends before
llhttp sees what follows. So a pipelined request is never parsed before its turn, and bytes on whose meaning
two parsers could differ are refused. llhttp is fed exactly the bytes of one request, and must say that it is
whole when the last of them is in.

States: HEAD (idle, or a head is coming in) -> LENGTH or CHUNKED (its body) -> BUSY (the exchange is with the
application or the engine) -> HEAD again, or LINGER (an answer that ends the connection is on its way; what
still comes in is thrown away), or TUNNEL (after an upgrade), or CLOSED.

`ClientConnection` is the whole; this is its reading half, apart only to be read apart.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, cast

import httptools

from sluicegate_sidecar.http import heads
from sluicegate_sidecar.http.chunked import ChunkedBody
from sluicegate_sidecar.http.errors import Problem, problem
from sluicegate_sidecar.http.request import CHUNKED_BODY, read_head

if TYPE_CHECKING:
    from sluicegate_sidecar.http.client import ClientConnection
    from sluicegate_sidecar.http.exchange import Exchange
    from sluicegate_sidecar.http.server import Server

HEAD, LENGTH, CHUNKED, BUSY, LINGER, TUNNEL, CLOSED = range(7)

_HEAD_END: Final = b"\r\n\r\n"
_LF: Final = 0x0A

#: Parts in which bytes are kept that came before their turn: what follows a request is copied, each time.
_AHEAD_BYTES: Final = 16 * 1024

#: Requests, or parts of a body, taken from what was read ahead before other connections have a turn: most of
#: a millisecond where each is refused at once.
_STEPS_PER_TURN: Final = 32

#: No request begins with a byte up to this one: it is an empty line, or it is refused.
_BLANK: Final = 0x20


class RequestReader(asyncio.Protocol):
    """See the module. Subclasses say what becomes of a whole request, and of one that is refused."""

    __slots__ = (
        "_ahead",
        "_blank",
        "_chunks",
        "_complete",
        "_continues",
        "_head",
        "_headers",
        "_incoming",
        "_lines",
        "_need",
        "_parser",
        "_phase_s",
        "_reading",
        "_requests",
        "server",
        "state",
        "transport",
        "write_paused",
    )

    def __init__(self, server: Server) -> None:
        self.server = server
        self.transport: asyncio.Transport | None = None
        self.state = HEAD
        self.write_paused = False
        self._parser: httptools.HttpRequestParser | None = None
        self._complete = False  # llhttp has read a whole request
        self._blank = b""  # empty lines before a request
        self._head = b""  # a head that is not whole yet
        self._lines = 0  # lines of a head so far
        self._headers: list[tuple[bytes, bytes]] = []
        self._incoming: Exchange | None = None  # a request whose body is coming in
        self._need = 0  # bytes of its body to come
        self._chunks: ChunkedBody | None = None
        self._ahead: list[bytes] = []  # read before its turn
        self._continues = False  # `_next` will be called
        self._requests = 0
        self._reading = False
        self._phase_s: float | None = None  # for the sweep: when this head or body began

    # ---- for subclasses -------------------------------------------------------------------------------

    def _request_read(self, exchange: Exchange) -> None:
        """A request is whole. Leaves the state at BUSY, or beyond."""
        raise NotImplementedError

    def _refuse(self, found: Problem) -> None:
        """What came in is no request that is served. Leaves the state beyond BUSY."""
        raise NotImplementedError

    def pause_reading(self) -> None:
        """Read no more until `resume_reading`."""
        raise NotImplementedError

    def resume_reading(self) -> None:
        """Read on."""
        raise NotImplementedError

    def _read(self, data: bytes) -> None:
        """Take in one request, or a part of it. What follows is kept for `_next`, so that many requests in one
        read, or many small chunks, do not keep other connections waiting."""
        self._reading = True
        requests = self._requests
        try:
            while data and self.state < BUSY and self._requests == requests:
                if self.state == HEAD:
                    data = self._read_head(data)
                elif self.state == LENGTH:
                    data = self._read_length(data)
                else:
                    data = self._read_chunked(data)
                    break
        except Problem as found:
            self._refuse(found)
            return
        except httptools.HttpParserError:
            self._refuse(problem("bad_chunk" if self.state == CHUNKED else "bad_request"))
            return
        finally:
            self._reading = False
        if data and self.state <= BUSY:
            self._keep_ahead(data, 0)

    def _next(self) -> None:
        """Go on with what was read ahead, as far as its turn has come."""
        steps = _STEPS_PER_TURN
        ahead = self._ahead
        while ahead and self.state < BUSY and not (self.write_paused and self.state == HEAD):
            if not steps:
                if not self._continues:
                    self._continues = True
                    self.server.loop.call_soon(self._continue)
                return
            steps -= 1
            data = ahead.pop(0)
            self.server.body_bytes -= len(data)
            self._read(data)
        if not ahead:
            self.resume_reading()

    def _continue(self) -> None:
        self._continues = False
        self._next()

    def _keep_ahead(self, data: bytes, at: int) -> None:
        """Keep what came before its turn, at that place, within bounds."""
        server = self.server
        limits = server.limits
        ahead = self._ahead
        ahead[at:at] = [data[i : i + _AHEAD_BYTES] for i in range(0, len(data), _AHEAD_BYTES)]
        server.body_bytes += len(data)
        if server.body_bytes > limits.body_bytes_total or sum(map(len, ahead)) >= limits.pipelined_bytes:
            self.pause_reading()

    def _drop_ahead(self) -> None:
        if self._ahead:
            self.server.body_bytes -= sum(map(len, self._ahead))
            self._ahead.clear()

    def _drop_unfinished(self) -> None:
        if self._incoming is not None:
            self._incoming.drop_body()
            self._incoming = None

    # ---- httptools ------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header line, or a trailer: those go into a list that nobody looks at."""
        self._headers.append((name.lower(), value))

    def on_message_complete(self) -> None:
        """llhttp has read a request."""
        self._complete = True

    # ---- inside ---------------------------------------------------------------------------------------

    def _read_head(self, data: bytes) -> bytes:
        """Take in a head, or a part of it; return what follows it."""
        before = len(self._head)
        if before:
            data = self._head + data
        elif data[0] <= _BLANK or self._blank:
            data = self._skip_blank(data)
        at = data.find(_HEAD_END, max(0, before - 3))
        end = at + 4 if at >= 0 else len(data)
        if end > self.server.limits.header_bytes:
            raise problem("header_bytes")
        head = data if end == len(data) else data[:end]
        part = head[before:] if before else head
        self._lines += part.count(_LF)
        if self._lines > self.server.limits.header_count + 2:  # the start line and the empty line
            raise problem("header_count")
        parser = self._parser
        if parser is None:
            parser = self._parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(part)
        except httptools.HttpParserUpgrade:
            # It stops where the head ends: for the rest of this request only our own reading counts.
            self._parser = None
        if at < 0:
            if not before:
                self._phase_s = None
            self._head = data
            return b""
        self._head = b""
        self._lines = 0
        headers, self._headers = self._headers, []
        exchange, length = read_head(cast("ClientConnection", self), head, headers, self.server.limits)
        if not length:
            self._whole(exchange)
            return data[end:]
        if self._complete and self._parser is not None:
            raise problem("bad_framing")
        self._phase_s = None
        self._incoming = exchange
        rest = data[end:]
        if exchange.expects_continue and not rest and self.transport is not None:
            self.transport.write(heads.CONTINUE)
        if length == CHUNKED_BODY:
            self._chunks = ChunkedBody(self.server.limits)
            self.state = CHUNKED
            return rest
        self._need = length
        self.state = LENGTH
        return self._read_length(rest) if rest else rest

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

    def _read_length(self, data: bytes) -> bytes:
        """Take in a body of known length, or a part of it; return what follows it."""
        need = self._need
        rest = b""
        if len(data) > need:
            data, rest = data[:need], data[need:]
        if self._parser is not None:
            self._parser.feed_data(data)
        exchange: Exchange = self._incoming  # type: ignore[assignment]  # there is one in this state
        exchange.add_piece(data)
        need -= len(data)
        if need:
            self._need = need
            self._check_total()
        else:
            self._whole(exchange)
        return rest

    def _read_chunked(self, data: bytes) -> bytes:
        """Take in a chunked body, or a part of it; return what follows it."""
        chunks = cast("ChunkedBody", self._chunks)
        pieces: list[bytes] = []
        used = chunks.feed(data, pieces)
        if self._parser is not None:
            self._parser.feed_data(data[:used])
        exchange = cast("Exchange", self._incoming)
        for piece in pieces:
            exchange.add_piece(piece)
        self._check_total()
        if chunks.done:
            self._chunks = None
            self._headers = []
            self._whole(exchange)
        return data[used:]

    def _check_total(self) -> None:
        server = self.server
        if server.body_bytes > server.limits.body_bytes_total:
            raise problem("body_bytes_total")

    def _whole(self, exchange: Exchange) -> None:
        """A request is whole, as we read it; does llhttp say so too?"""
        if not self._complete and self._parser is not None:
            raise problem("bad_framing")
        self._check_total()
        self._complete = False
        self._incoming = None
        self._requests += 1
        self._request_read(exchange)
