"""Reads responses of the engine: what llhttp finds, noted down.

Parser callbacks only take notes. What they mean is acted on after the parser has returned (`engine.py`), so
that whatever the application does in its callbacks never happens inside the parser.

`EngineConnection` is the whole; this is its reading half, apart only to be read apart.
"""

from __future__ import annotations

import asyncio

import httptools

from sluicegate_sidecar.http.heads import HOP_BY_HOP, NO_CONTENT, PROTECTED, connection_tokens


class ResponseReader(asyncio.BufferedProtocol):
    """See the module.

    A callback that raises makes the parser raise, and stop: what it read is no answer, or no answer any more.
    """

    __slots__ = (
        "_asked_head",
        "_body",
        "_complete",
        "_content",
        "_framed",
        "_head_bytes",
        "_headers",
        "_interims",
        "_keep",
        "_lines",
        "_most_headers",
        "_parser",
        "_passed",
        "_reason",
        "_status",
        "_until_close",
        "_whole",
        "on_body",
    )

    def __init__(self, most_headers: int) -> None:
        self._most_headers = most_headers
        self._asked_head = False  # the request was HEAD: no content follows, whatever the head says
        self._body: list[bytes] = []  # content that the parser found in this read
        self.on_body = self._body.append  # the parser's callback: nothing but a note
        self._parser = httptools.HttpResponseParser(self)
        self._reset()

    def _reset(self) -> None:
        """Ready for the next response."""
        self._head_bytes = 0  # bytes read before the final head was whole
        self._interims: list[tuple[int, bytes, list[bytes]]] = []
        self._passed = False  # the final head was handed on
        self._complete = False
        self._whole = 0  # pieces in `_body` when it was complete
        self._keep = False
        self._begin()

    def _begin(self) -> None:
        """Ready for the next head."""
        self._status = 0
        self._reason = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._lines: list[bytes] = []
        self._content = False  # content may follow
        self._framed = True  # its end shows before the connection does, and without chunks of ours
        self._until_close = False  # its end is the end of the connection

    # ---- httptools ------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A response begins. One that nobody asked for ends the reading, and the connection."""
        if self._complete:
            raise ValueError("a second response")

    def on_status(self, reason: bytes) -> None:
        """The reason phrase, perhaps in parts."""
        self._reason = self._reason + reason if self._reason else reason

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header line, or a trailer of a chunked response: those are dropped."""
        if not self._passed:
            low = name.lower()
            self._headers.append((low, value))
            if low not in HOP_BY_HOP:
                self._lines.append(name + b": " + value + b"\r\n")

    def on_headers_complete(self) -> None:
        """A head is whole."""
        if self._complete:
            return
        status = self._status = self._parser.get_status_code()
        if status >= 200:
            self._final_head(status)
        elif status < 100:
            raise ValueError("no such status")

    def on_message_complete(self) -> None:
        """A response is whole."""
        if self._complete:
            return
        if 100 <= self._status < 200:
            if self._status != 101:
                self._interims.append((self._status, self._reason, self._lines))
                self._begin()
            return
        self._keep = self._parser.should_keep_alive()
        self._complete = True
        self._whole = len(self._body)

    # ---- inside ---------------------------------------------------------------------------------------

    def _final_head(self, status: int) -> None:
        headers = self._headers
        if len(headers) > self._most_headers:
            raise ValueError("too many header lines")
        fields = dict(headers)
        coding = fields.get(b"transfer-encoding")
        if coding is not None and coding.rstrip(b" \t").lower() != b"chunked":
            raise ValueError("a transfer coding that was not asked for")
        if b"connection" in fields:
            listed = connection_tokens(value for name, value in headers if name == b"connection")
            self._drop_lines(listed - PROTECTED)
        if status in NO_CONTENT:
            if status == 204:
                self._drop_lines(frozenset((b"content-length",)))
            return
        self._framed = b"content-length" in fields
        self._until_close = coding is None and not self._framed
        if self._asked_head:
            # The parser does not know that no content follows, and waits for it: the head is all there is.
            self._keep = self._parser.should_keep_alive() and not self._until_close
            self._complete = True
            self._whole = len(self._body)
            self._parser = httptools.HttpResponseParser(self)
            self._framed = True
            return
        self._content = True

    def _drop_lines(self, names: frozenset[bytes]) -> None:
        self._lines = [line for line in self._lines if line[: line.index(b":")].lower() not in names]
