"""One request and its response: the hinge between a client connection and an engine connection.

Life: WAITING (the application has it) -> FORWARDED (an engine connection is sought or busy with it) -> ENDED.
`refuse` goes from WAITING to ENDED at once.

Invariants:
- It ends exactly once, by `_end`, which is also the only place that calls `listener.on_end`.
- The body is held until the first byte of a response, so that one retry is possible when an idle engine
  connection turns out to have been closed: only if that connection had served before and not one byte came.
- What an application callback raises is logged and goes no further; a listener that raised while the response
  passed hears nothing more of it but the end.
- No byte of a second response head is ever written: a failure after the head cuts the connection, so that the
  client sees an incomplete message.

Framing of the response is ours (see `_frame`); its content and its other headers are the engine's, unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from sluicegate_sidecar.http import heads
from sluicegate_sidecar.http.interface import End, ExchangeListener, Headers, LocalReply

if TYPE_CHECKING:
    from sluicegate_sidecar.http.client import ClientConnection
    from sluicegate_sidecar.http.engine import EngineConnection

log = logging.getLogger(__name__)

_WAITING, _FORWARDED, _ENDED = range(3)

#: Pieces of a body smaller than this are merged: an object for each byte of a dripping sender would cost forty
#: times the body.
_MERGE_BYTES: Final = 16 * 1024

#: Chunk-size lines of the sizes that one read from the engine can have, made once: cheaper than formatting.
_SIZE_LINES: Final = tuple(b"%x\r\n" % size for size in range(4096))


class Exchange:
    """A request as the application sees it, and the commands on it.

    Attributes:
        method: as received, in upper case.
        target: the request target as received.
        path: its path, without the query and without an authority; still percent-encoded. Exactly what the
            engine will be asked for.
        headers: all header lines of the request in order, names in lower case.
        upgrade: the protocol that the client asks to switch to, or None.
        peer_host: address of the client's end of the connection.
        listener: hears of the response; set it before giving a command.
    """

    __slots__ = (
        "_body_bytes",
        "_chunked",
        "_client",
        "_engine",
        "_extra_headers",
        "_fields",
        "_head",
        "_muted",
        "_pieces",
        "_response_headers",
        "_retried",
        "_state",
        "asked_close",
        "head_sent",
        "headers",
        "http10",
        "keepalive",
        "listed",
        "listener",
        "method",
        "origin",
        "path",
        "peer_host",
        "target",
        "upgrade",
    )

    def __init__(
        self,
        client: ClientConnection,
        method: bytes,
        target: bytes,
        headers: list[tuple[bytes, bytes]],
        http10: bool,
    ) -> None:
        self._client = client
        self.method = method
        self.target = target
        self.origin = target  # what the engine is asked for: the target in origin-form
        self.path = target
        self.headers = headers
        self._fields: dict[bytes, bytes] = {}
        self.listed: frozenset[bytes] | None = None  # names that Connection lists, beyond the usual
        self.http10 = http10
        self.keepalive = True  # the connection lives on after this exchange
        self.asked_close = False  # the client wants it closed
        self.upgrade: bytes | None = None
        self.peer_host = client.peer_host
        self.listener: ExchangeListener | None = None
        self._pieces: list[bytes] = []
        self._body_bytes = 0
        self._state = _WAITING
        self._engine: EngineConnection | None = None
        self._retried = False
        self._muted = False
        self._head = b""  # response head not yet written: it goes out with the first piece of content
        self.head_sent = False  # a final response has begun, or is in `_head`
        self._chunked = False
        self._extra_headers: Headers = ()
        self._response_headers: Headers = ()

    # ---- for the application -------------------------------------------------------------------------

    def header(self, name: bytes) -> bytes | None:
        """The value of the first header line of that (lower-case) name."""
        return self._fields.get(name)

    @property
    def body(self) -> bytes:
        """The whole body, joined on first use. Empty once a response has begun: it is let go then."""
        pieces = self._pieces
        if len(pieces) != 1:
            if not pieces:
                return b""
            pieces[:] = (b"".join(pieces),)
        return pieces[0]

    @property
    def body_bytes(self) -> int:
        """Length of the body."""
        return self._body_bytes

    @property
    def ended(self) -> bool:
        """True once `on_end` was called, or is about to be."""
        return self._state == _ENDED

    def forward(self, extra_headers: Headers = (), response_headers: Headers = ()) -> None:
        """Hand the request to the engine now.

        Args:
            extra_headers: added to the request that the engine gets, in place of the client's of that name.
            response_headers: added to the head of the response, in place of the engine's of that name.

        Raises:
            RuntimeError: the exchange was already answered or handed over.
            ValueError: a header holds a byte that would break the head.
        """
        self._expect(_WAITING)
        if extra_headers:
            heads.check_headers(extra_headers)
        if response_headers:
            heads.check_headers(response_headers)
        if self._client.has_left():
            self.client_gone()
            return
        self._state = _FORWARDED
        self._extra_headers = extra_headers
        self._response_headers = response_headers
        self._client.server.pool.serve(self)

    def refuse(self, status: int, headers: Headers = (), body: bytes = b"") -> None:
        """Answer from here. The connection lives on.

        Raises:
            RuntimeError: the exchange was already answered or handed over.
            ValueError: a header holds a byte that would break the head.
        """
        self._expect(_WAITING)
        heads.check_headers(headers)
        self._reply(LocalReply(status, headers, body), End.REFUSED)

    def abort(self, reason: str) -> None:
        """Take the request back, whatever its state; the engine's connection is closed at once.

        A client that has not seen a response is told by `failure_reply`; one that has sees it cut short.
        Does nothing to an exchange that has ended. `reason` is for the log.
        """
        if self._state != _ENDED:
            log.debug("exchange aborted: %s", reason)
            self._fail(End.ABORTED)

    # ---- for the client connection --------------------------------------------------------------------

    def add_piece(self, piece: bytes) -> None:
        """Keep a piece of the body. Small pieces are merged, so that a dripping sender costs what it sends."""
        pieces = self._pieces
        self._body_bytes += len(piece)
        if pieces and len(pieces[-1]) + len(piece) <= _MERGE_BYTES:
            pieces[-1] += piece
        else:
            pieces.append(piece)

    def set_fields(self, fields: dict[bytes, bytes]) -> None:
        """Header name -> first value."""
        self._fields = fields

    def drop_body(self) -> None:
        """Let the body go."""
        pieces = self._pieces
        if pieces:
            self._client.server.body_bytes -= sum(map(len, pieces))
            self._pieces = []

    def client_gone(self) -> None:
        """The client left: the engine's connection is closed at once, which frees its slot."""
        if self._state != _ENDED:
            self._drop_engine()
            self._client.abort()
            self._end(End.CLIENT_GONE)

    def client_paused(self) -> None:
        """The client takes no more for now: hold the engine back."""
        if self._engine is not None:
            self._engine.pause()

    def client_resumed(self) -> None:
        """The client takes data again."""
        if self._engine is not None:
            self._engine.resume()

    # ---- for the engine connection and the pool -------------------------------------------------------

    def request_head(self) -> bytes:
        """The head of the request to the engine."""
        headers: Sequence[tuple[bytes, bytes]] = self.headers
        stops: frozenset[bytes] | set[bytes] = heads.REQUEST_STOPS
        if self.listed:
            stops = stops | self.listed
        if self._extra_headers:
            stops = stops | {name.lower() for name, _ in self._extra_headers}
        parts = [b"%b %b HTTP/1.1\r\n" % (self.method, self.origin)]
        parts += [b"%b: %b\r\n" % header for header in headers if header[0] not in stops]
        if self._extra_headers:
            parts.append(heads.lines(self._extra_headers))
        if self._body_bytes or self.method in heads.BODY_EXPECTED or b"content-length" in self._fields:
            parts.append(b"content-length: %d\r\n" % self._body_bytes)
        if self.upgrade is not None:
            parts.append(b"connection: upgrade\r\nupgrade: %b\r\n" % self.upgrade)
        parts.append(b"\r\n")
        return b"".join(parts)

    def body_pieces(self) -> list[bytes]:
        """The body as it was read."""
        return self._pieces

    def attach(self, engine: EngineConnection) -> None:
        """An engine connection serves this exchange from now on."""
        self._engine = engine
        if self._client.write_paused:
            engine.pause()

    def may_retry(self) -> bool:
        """Whether to try again on a new connection; at most once."""
        if self._retried or self._state != _FORWARDED or self.head_sent:
            return False
        self._retried = True
        self._engine = None
        return True

    @property
    def head_pending(self) -> bool:
        """A response head waits to be written, with the content that came with it if there is any."""
        return bool(self._head)

    def interim(self, status: int, reason: bytes, headers: Headers) -> None:
        """An informational response: 100 ends here (the gate has answered it), others pass to HTTP/1.1."""
        if status != 100 and not self.http10 and self._state == _FORWARDED:
            lines = heads.lines([header for header in headers if header[0].lower() not in heads.HOP_BY_HOP])
            self._client.write(b"HTTP/1.1 %d %b\r\n%b\r\n" % (status, reason, lines))

    def response_head(
        self, status: int, reason: bytes, headers: Headers, *, length: bytes | None, content: bool
    ) -> None:
        """The final response begins.

        Args:
            status, reason, headers: as the engine sent them.
            length: its Content-Length, or None.
            content: whether content may follow.
        """
        self.drop_body()
        self.head_sent = True
        lowered = [(name.lower(), value) for name, value in headers]
        self._tell_head(status, lowered)
        if self._state == _ENDED:
            return
        stops: set[bytes] | frozenset[bytes] = heads.HOP_BY_HOP
        for name, value in lowered:
            if name == b"connection":
                stops = stops | (heads.connection_tokens((value,)) - heads.PROTECTED)
        if self._response_headers:
            stops = stops | {name.lower() for name, _ in self._response_headers}
        if status == 204:
            stops = stops | {b"content-length"}
        parts = [b"HTTP/1.1 %d %b\r\n" % (status, reason)]
        parts += [
            b"%b: %b\r\n" % header
            for header, low in zip(headers, lowered, strict=True)
            if low[0] not in stops
        ]
        if self._response_headers:
            parts.append(heads.lines(self._response_headers))
        parts.append(self._frame(length, content))
        self._head = b"".join(parts)

    def response_body(self, data: bytes, last: bool) -> None:
        """Content of the response, at most one piece a read; `last` with the end of the message."""
        if last:
            self._engine = None  # it may serve the next exchange already
        if data:
            listener = self.listener
            if listener is not None and not self._muted:
                try:
                    listener.on_response_body(data)
                except Exception:
                    log.exception("on_response_body of the application failed")
                    self._muted = True
                if self._state == _ENDED:
                    return
            if self._chunked:
                size = len(data)
                line = _SIZE_LINES[size] if size < 4096 else b"%x\r\n" % size
                data = line + data + (b"\r\n0\r\n\r\n" if last else b"\r\n")
        elif last and self._chunked:
            data = heads.LAST_CHUNK
        if self._head:
            data = self._head + data
            self._head = b""
        if data:
            self._client.write(data)
        if last:
            self._end(End.COMPLETE)

    def switch(self, engine: EngineConnection, reason: bytes, headers: Headers) -> bool:
        """The engine answered 101: tell the client; False where the client had not asked for it."""
        if self.upgrade is None or self._state != _FORWARDED:
            return False
        self.drop_body()
        self.head_sent = True
        lowered = [(name.lower(), value) for name, value in headers]
        self._tell_head(101, lowered)
        if self._state == _ENDED:
            return True
        self._client.write(
            b"HTTP/1.1 101 %b\r\n%b%b\r\n"
            % (reason, heads.lines(headers), heads.lines(self._response_headers))
        )
        self._client.open_tunnel(engine)
        return True

    def tunnel_closed(self) -> None:
        """The tunnel that the exchange had become is closed, both ways."""
        self._engine = None
        if self._state != _ENDED:
            self._end(End.COMPLETE)

    def engine_failed(self, end: End) -> None:
        """The engine's connection failed, or none could be had."""
        if self._state != _ENDED:
            self._fail(end)

    # ---- inside ---------------------------------------------------------------------------------------

    def _expect(self, state: int) -> None:
        if self._state != state:
            raise RuntimeError("the exchange was already answered or handed over")

    def _frame(self, length: bytes | None, content: bool) -> bytes:
        """The last lines of the response's head: how its end is known, and what becomes of the connection.

        A length stays what it was. Without one: chunks for HTTP/1.1, the end of the connection for 1.0.
        """
        client = self._client
        if content and length is None:
            if self.http10:
                self.keepalive = False
            else:
                self._chunked = True
        if not client.keeps_alive(self):
            self.keepalive = False
        connection = heads.connection_line(self)
        return connection + (b"transfer-encoding: chunked\r\n\r\n" if self._chunked else b"\r\n")

    def _fail(self, end: End) -> None:
        """End with a reply of our own where the client has seen none yet, else cut the response short."""
        self._drop_engine()
        if self.head_sent and not self._head:
            self._client.cut(reset=self.http10 and not self._chunked)
            self._end(end)
            return
        reply = None
        if self.listener is not None:
            try:
                reply = self.listener.failure_reply(end)
                heads.check_headers(reply.headers)
            except Exception:
                log.exception("failure_reply of the application failed")
                self._muted = True
                reply = None
        if self._state != _ENDED:
            self._reply(reply or heads.failure_reply(end), end)

    def _reply(self, reply: LocalReply, end: End) -> None:
        self.head_sent = True
        self._head = b""
        self._client.reply(self, reply)
        self._end(end)

    def fail_application(self) -> None:
        """The application raised before it gave a command."""
        if self._state == _WAITING:
            self._reply(
                heads.error_reply(500, "the gate failed on this request", "internal_error"), End.ABORTED
            )

    def _tell_head(self, status: int, headers: Headers) -> None:
        if self.listener is not None and not self._muted:
            try:
                self.listener.on_response_head(status, headers)
            except Exception:
                log.exception("on_response_head of the application failed")
                self._muted = True

    def _drop_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.discard()

    def _end(self, end: End) -> None:
        if self._state == _ENDED:
            raise AssertionError("an exchange ends once")
        self._state = _ENDED
        self.drop_body()
        if self.listener is not None:
            try:
                self.listener.on_end(end)
            except Exception:
                log.exception("on_end of the application failed")
                self._muted = True
        self._client.exchange_ended(self)
