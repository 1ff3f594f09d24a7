"""A request as it came in: what it says, its body, and how it reads for the engine.

`Exchange` is the whole: this is its still half, before anything happens to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sluicegate_sidecar.http import heads
from sluicegate_sidecar.http.interface import Headers

if TYPE_CHECKING:
    from sluicegate_sidecar.http.client import ClientConnection

#: Pieces of a body smaller than this are merged: an object for each byte of a dripping sender would cost forty
#: times the body.
_MERGE_BYTES: Final = 16 * 1024


class InboundRequest:
    """A request as the application sees it.

    Attributes:
        method: as received, in upper case.
        target: the request target as received.
        path: its path, without the query and without an authority; still percent-encoded. Exactly what the
            engine will be asked for.
        headers: all header lines of the request in order, names in lower case; values as received, where
            blanks may follow.
        upgrade: the protocol that the client asks to switch to, or None.
        body_bytes: length of the body.
    """

    __slots__ = (
        "_client",
        "_fields",
        "_pieces",
        "asked_close",
        "body_bytes",
        "expects_continue",
        "headers",
        "http10",
        "keepalive",
        "listed",
        "method",
        "origin",
        "path",
        "target",
        "upgrade",
    )

    def __init__(
        self,
        client: ClientConnection,
        method: bytes,
        target: bytes,
        headers: list[tuple[bytes, bytes]],
        fields: dict[bytes, bytes],
    ) -> None:
        self._client = client
        self.method = method
        self.target = target
        self.origin = target  # what the engine is asked for: the target in origin-form
        self.path = target
        self.headers = headers
        self._fields = fields
        self._pieces: list[bytes] = []
        self.body_bytes = 0
        # What the head says, beyond the usual.
        self.http10 = False
        self.keepalive = True  # the connection lives on after this request
        self.asked_close = False  # the client wants it closed
        self.expects_continue = False
        self.listed: frozenset[bytes] | None = None  # names that Connection lists
        self.upgrade: bytes | None = None

    @property
    def peer_host(self) -> str:
        """Address of the client's end of the connection."""
        return self._client.peer_host

    def header(self, name: bytes) -> bytes | None:
        """The value of the first header line of that (lower-case) name, without blanks around it."""
        value = self._fields.get(name)
        return value if value is None else value.rstrip(b" \t")

    @property
    def body(self) -> bytes:
        """The whole body, joined on first use. Empty once a response has begun: it is let go then.

        Its length stays known: `body_bytes`.
        """
        pieces = self._pieces
        if len(pieces) != 1:
            if not pieces:
                return b""
            pieces[:] = (b"".join(pieces),)
        return pieces[0]

    # ---- for the connections --------------------------------------------------------------------------

    def replace_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Other header lines than were received."""
        self.headers = headers
        self._fields = dict(reversed(headers))

    def add_piece(self, piece: bytes) -> None:
        """Keep a piece of the body. Small pieces are merged, so that a dripping sender costs what it sends."""
        pieces = self._pieces
        size = len(piece)
        self.body_bytes += size
        self._client.server.body_bytes += size
        if pieces and len(pieces[-1]) + size <= _MERGE_BYTES:
            pieces[-1] += piece
        else:
            pieces.append(piece)

    def drop_body(self) -> None:
        """Let the body go."""
        pieces = self._pieces
        if pieces:
            self._client.server.body_bytes -= self.body_bytes
            self._pieces = []

    def outbound_head(self, extra_headers: Headers) -> bytes:
        """The head of the request to the engine; `extra_headers` in place of the client's of that name."""
        stops = heads.REQUEST_STOPS
        if self.listed:
            stops |= self.listed
        if extra_headers:
            stops |= {name.lower() for name, _ in extra_headers}
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] not in stops]
        if extra_headers:
            lines.append(heads.lines(extra_headers))
        if b"host" not in self._fields:
            lines.append(b"host: %b\r\n" % self._client.server.pool.authority)
        if self.upgrade is not None:
            lines.append(b"connection: upgrade\r\nupgrade: %b\r\n" % self.upgrade)
        if self.body_bytes or self.method in heads.BODY_EXPECTED or b"content-length" in self._fields:
            lines.append(b"content-length: %d\r\n" % self.body_bytes)
        return b"%b %b HTTP/1.1\r\n%b\r\n" % (self.method, self.origin, b"".join(lines))

    def body_pieces(self) -> list[bytes]:
        """The body as it was read."""
        return self._pieces
