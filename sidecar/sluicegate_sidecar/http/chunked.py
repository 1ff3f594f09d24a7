"""The body of a chunked request, decoded a second time.

llhttp decodes it too, and strictly. This reading is here for two reasons: it tells exactly where the body
ends, so that a request pipelined behind it is never parsed before its turn; and it has limits on what llhttp
takes at any length (size lines, extensions, trailers). A body is accepted only where both readings agree.

Trailers are read and dropped: no engine asks for them, and a gate that merged them into the head would let
them past every check made on the head.
"""

from __future__ import annotations

import re
from typing import Final

from sluicegate_sidecar.http.errors import problem
from sluicegate_sidecar.http.limits import Limits

#: chunk-size of at most 16 digits (what 64 bits hold), then at most extensions of visible ASCII.
_SIZE_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[\t\x20-\x7e]*)?")
#: Lines read in one call: a body of one-byte chunks must not keep other connections waiting.
_LINES_AT_ONCE: Final = 64

_TRAILER: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*")

_SIZE, _DATA, _DATA_END, _TRAILERS, _DONE = range(5)


class ChunkedBody:
    """Decodes one body, piece by piece.

    Owned by one client connection. `room` bytes of content may still come; more is `body_bytes`.
    """

    __slots__ = ("_left", "_limits", "_line", "_state", "_trailer_bytes", "room")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._state = _SIZE
        self._line = b""
        self._left = 0
        self._trailer_bytes = 0
        self.room = limits.body_bytes

    @property
    def done(self) -> bool:
        """The last chunk and its trailers were read."""
        return self._state == _DONE

    def feed(self, data: bytes, pieces: list[bytes]) -> int:
        """Append content in `data` to `pieces`; return how many bytes were taken.

        What is left belongs to what follows where this is `done`; else too many lines came at once, and it
        is for the next call.

        Raises:
            Problem: `bad_chunk` or `body_bytes`.
        """
        at, end = 0, len(data)
        lines = _LINES_AT_ONCE
        while at < end and self._state != _DONE and lines:
            if self._state == _DATA:
                piece = data[at : at + self._left]
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if not self._left:
                    self._state = _DATA_END
                continue
            lines -= 1
            line, at = self._take_line(data, at)
            if line is None:
                break
            if self._state == _SIZE:
                self._size(line)
            elif self._state == _DATA_END:
                if line:
                    raise problem("bad_chunk")
                self._state = _SIZE
            else:
                self._trailer(line)
        return at

    def _take_line(self, data: bytes, at: int) -> tuple[bytes | None, int]:
        """A whole line without its CRLF, or None when its end has not come yet; and where to go on."""
        cut = data.find(b"\n", at)
        stop = len(data) if cut < 0 else cut + 1
        if len(self._line) + stop - at > self._limits.chunk_line_bytes + 2 and self._state != _TRAILERS:
            raise problem("bad_chunk")
        if len(self._line) + stop - at > self._limits.trailer_bytes:
            raise problem("bad_chunk")
        line = self._line + data[at:stop]
        if cut < 0:
            self._line = line
            return None, stop
        self._line = b""
        if line[-2:-1] != b"\r":
            raise problem("bad_chunk")
        return line[:-2], stop

    def _size(self, line: bytes) -> None:
        match = _SIZE_LINE.fullmatch(line)
        if match is None:
            raise problem("bad_chunk")
        self._left = int(match[1], 16)
        if self._left > self.room:
            raise problem("body_bytes")
        self.room -= self._left
        self._state = _DATA if self._left else _TRAILERS

    def _trailer(self, line: bytes) -> None:
        if not line:
            self._state = _DONE
            return
        self._trailer_bytes += len(line) + 2
        if self._trailer_bytes > self._limits.trailer_bytes or _TRAILER.fullmatch(line) is None:
            raise problem("bad_chunk")
