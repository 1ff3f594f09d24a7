"""One request and its response: the hinge between a client connection and an engine connection.

Life: WAITING (the application has it) -> FORWARDED (an engine connection is sought or busy with it) -> ENDED.
`refuse` goes from WAITING to ENDED at once.

Invariants:
- It ends exactly once, by `_end`, which is also the only place that calls `listener.on_end`.
- The body is held until the first byte of a response, so that one retry is possible when an idle engine
  connection turns out to have been closed: only if that connection had served before and not one byte came.
  The second try is on a new connection, which has not served before: so there is no third.
- What an application callback raises is logged and goes no further; a listener that raised while the response
  passed hears nothing more of it but the end.
- No byte of a second response is ever written: a failure after the head was written cuts the connection, so
  that the client sees an incomplete message.

Framing of the response is ours (see `_frame`); its content and its other headers are the engine's, unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from sluicegate_sidecar.http import heads
from sluicegate_sidecar.http.inbound import InboundRequest
from sluicegate_sidecar.http.interface import End, ExchangeListener, Headers, LocalReply

if TYPE_CHECKING:
    from sluicegate_sidecar.http.client import ClientConnection
    from sluicegate_sidecar.http.engine import EngineConnection

log = logging.getLogger(__name__)

_WAITING, _FORWARDED, _ENDED = range(3)

#: The two ends of everyday: looking a member up in its enum costs more than all else that `_end` does.
_COMPLETE: Final = End.COMPLETE
_REFUSED: Final = End.REFUSED

#: Chunk-size lines of the sizes that streams have, made once: cheaper than formatting.
_SIZE_LINES: Final = tuple(b"%x\r\n" % size for size in range(4096))
_SIZES: Final = len(_SIZE_LINES)


class Exchange(InboundRequest):
    """A request and the commands on it.

    Attributes:
        listener: hears of the response; set it before giving a command.
    """

    __slots__ = (
        "_chunked",
        "_engine",
        "_extra_headers",
        "_head",
        "_hear",
        "_response_headers",
        "_state",
        "head_sent",
        "listener",
    )

    def __init__(
        self,
        client: ClientConnection,
        method: bytes,
        target: bytes,
        headers: list[tuple[bytes, bytes]],
        fields: dict[bytes, bytes],
    ) -> None:
        super().__init__(client, method, target, headers, fields)
        self.listener: ExchangeListener | None = None
        self._state = _WAITING
        self._engine: EngineConnection | None = None
        self._extra_headers: Headers = ()
        self._response_headers: Headers = ()
        self.head_sent = False  # a final response has begun, or is in `_head`
        self._head = b""  # not yet written: it goes out with the first content, where that came with it
        self._chunked = False
        self._hear: Callable[[bytes], None] | None = None  # the listener's `on_response_body`

    # ---- for the application -------------------------------------------------------------------------

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
        if self._state != _WAITING:
            raise RuntimeError("the exchange was already answered or handed over")
        if extra_headers:
            heads.lines(extra_headers)
            self._extra_headers = extra_headers
        if response_headers:
            heads.lines(response_headers)
            self._response_headers = response_headers
        client = self._client
        if client.read_paused and client.has_left():
            self.client_gone()
            return
        self._state = _FORWARDED
        client.server.pool.serve(self)

    def refuse(self, status: int, headers: Headers = (), body: bytes = b"") -> None:
        """Answer from here. The connection lives on.

        Raises:
            RuntimeError: the exchange was already answered or handed over.
            ValueError: a header holds a byte that would break the head.
        """
        if self._state != _WAITING:
            raise RuntimeError("the exchange was already answered or handed over")
        self._reply(status, heads.lines(headers), body, _REFUSED)

    def abort(self, reason: str) -> None:
        """Take the request back, whatever its state; the engine's connection is closed at once.

        A client that has not seen a response is told by `failure_reply`; one that has sees it cut short.
        Does nothing to an exchange that has ended. `reason` is for the log.
        """
        if self._state != _ENDED:
            log.debug("exchange aborted: %s", reason)
            self._fail(End.ABORTED)

    # ---- for the client connection --------------------------------------------------------------------

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

    def fail_application(self) -> None:
        """The application raised before it gave a command."""
        if self._state == _WAITING:
            reply = heads.error_reply(500, "the gate failed on this request", "internal_error")
            self._reply(reply.status, heads.lines(reply.headers), reply.body, End.ABORTED)

    # ---- for the engine connection and the pool -------------------------------------------------------

    def request_head(self) -> bytes:
        """The head of the request to the engine."""
        return self.outbound_head(self._extra_headers)

    def attach(self, engine: EngineConnection) -> None:
        """An engine connection serves this exchange from now on."""
        self._engine = engine

    def detach(self) -> None:
        """The engine connection is of no use; the request will be sent on another."""
        self._engine = None

    @property
    def head_pending(self) -> bool:
        """A response head waits to be written, with the content that came with it if there is any."""
        return bool(self._head)

    def interim(self, status: int, reason: bytes, lines: list[bytes]) -> None:
        """An informational response: 100 ends here (the gate has answered it), others pass to HTTP/1.1."""
        if status != 100 and not self.http10 and self._state == _FORWARDED:
            self._client.send(b"HTTP/1.1 %d %b\r\n%b\r\n" % (status, reason, b"".join(lines)))

    def response_head(
        self, status: int, reason: bytes, headers: Headers, lines: list[bytes], framed: bool
    ) -> None:
        """The final response begins.

        Args:
            status: its code.
            reason: its phrase.
            headers: all header lines, names in lower case.
            lines: those that pass, as they came.
            framed: whether its end is known without ours: it has a length, or no content at all.
        """
        block = self._begin(status, headers, lines)
        if self._state != _ENDED:
            self._head = b"HTTP/1.1 %d %b\r\n%b%b\r\n" % (status, reason, block, self._frame(framed))

    def response_piece(self, data: bytes) -> None:
        """Content of the response, in pieces as they were read; with the head, or the head alone (empty)."""
        if data:
            if self._hear is not None:
                self._tell(data)
                if self._state == _ENDED:
                    return
            if self._chunked:
                size = len(data)
                line = _SIZE_LINES[size] if size < _SIZES else b"%x\r\n" % size
                data = line + data + b"\r\n"
        if self._head:
            data = self._head + data
            self._head = b""
        self._client.send(data)

    def response_end(self, data: bytes) -> None:
        """The last content of the response, if there is any, and the end of it."""
        self._engine = None  # it may serve the next exchange already
        if data and self._hear is not None:
            self._tell(data)
            if self._state == _ENDED:
                return
        if self._chunked:
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else heads.LAST_CHUNK
        if self._head:
            data = self._head + data
            self._head = b""
        if data:
            self._client.send(data)
        self._end(_COMPLETE)

    def switch(self, engine: EngineConnection, reason: bytes, headers: Headers, lines: list[bytes]) -> bool:
        """The engine answered 101: tell the client; False where the client had not asked for it."""
        upgrade = [value for name, value in headers if name == b"upgrade"]
        if self.upgrade is None or self._state != _FORWARDED or len(upgrade) != 1:
            return False
        block = self._begin(101, headers, lines)
        if self._state != _ENDED:
            self._client.send(
                b"HTTP/1.1 101 %b\r\n%bconnection: upgrade\r\nupgrade: %b\r\n\r\n"
                % (reason, block, upgrade[0])
            )
            self._client.open_tunnel(engine)
        return True

    def tunnel_closed(self) -> None:
        """The tunnel that the exchange had become is closed, both ways."""
        self._engine = None
        if self._state != _ENDED:
            self._end(_COMPLETE)

    def engine_failed(self, end: End) -> None:
        """The engine's connection failed, or none could be had."""
        if self._state != _ENDED:
            self._fail(end)

    # ---- inside ---------------------------------------------------------------------------------------

    def _begin(self, status: int, headers: Headers, lines: list[bytes]) -> bytes:
        """A response begins: tell the listener; return the lines of its head that are not ours."""
        self.drop_body()
        self.head_sent = True
        listener = self.listener
        if listener is not None:
            self._hear = listener.on_response_body
            try:
                listener.on_response_head(status, headers)
            except Exception:
                log.exception("on_response_head of the application failed")
                self._hear = None
        if self._response_headers:
            named = {name.lower() for name, _ in self._response_headers}
            lines = [line for line in lines if line[: line.index(b":")].lower() not in named]
            lines.append(heads.lines(self._response_headers))
        return b"".join(lines)

    def _frame(self, framed: bool) -> bytes:
        """The last lines of the response's head: how its end is known, and what becomes of the connection.

        A length stays what it was. Without one: chunks for HTTP/1.1, the end of the connection for 1.0.
        """
        if not framed:
            if self.http10:
                self.keepalive = False
            else:
                self._chunked = True
        line = self._client.connection_line(self)
        return line + b"transfer-encoding: chunked\r\n" if self._chunked else line

    def _tell(self, data: bytes) -> None:
        try:
            self._hear(data)  # type: ignore[misc]  # the caller has looked
        except Exception:
            log.exception("on_response_body of the application failed")
            self._hear = None

    def _fail(self, end: End) -> None:
        """End with a reply of our own where the client has seen none yet, else cut the response short."""
        self._drop_engine()
        if self.head_sent and not self._head:
            self._client.cut(reset=self.http10 and not self._chunked)
            self._end(end)
            return
        reply, lines = self._failure_reply(end)
        if self._state != _ENDED:
            self._head = b""
            self._reply(reply.status, lines, reply.body, end)

    def _failure_reply(self, end: End) -> tuple[LocalReply, bytes]:
        if self.listener is not None:
            try:
                reply = self.listener.failure_reply(end)
                return reply, heads.lines(reply.headers)
            except Exception:
                log.exception("failure_reply of the application failed")
        reply = heads.failure_reply(end)
        return reply, heads.lines(reply.headers)

    def _reply(self, status: int, lines: bytes, body: bytes, end: End) -> None:
        self.head_sent = True
        self._client.reply(self, status, lines, body)
        self._end(end)

    def _drop_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.discard()

    def _end(self, end: End) -> None:
        if self._state == _ENDED:
            raise AssertionError("an exchange ends once")
        self._state = _ENDED
        self._hear = None
        if self._pieces:
            self.drop_body()
        if self.listener is not None:
            try:
                self.listener.on_end(end)
            except Exception:
                log.exception("on_end of the application failed")
        self._client.exchange_ended(self)
