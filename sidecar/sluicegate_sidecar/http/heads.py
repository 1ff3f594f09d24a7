"""Heads of messages: which header lines stop here, and how a head is written.

Pure functions on bytes. Header names are in lower case wherever they are compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Final

from sluicegate_sidecar.http.interface import End, LocalReply

Lines = Sequence[tuple[bytes, bytes]]

#: Header fields that concern one connection only (RFC 9110, 7.6.1), whether or not `Connection` lists them.
HOP_BY_HOP: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)

#: Not passed to the engine: what belongs to this hop, and what the gate has dealt with. The length is written
#: anew, since a chunked body goes on with its length; credentials for a proxy are not the engine's.
REQUEST_STOPS: Final = HOP_BY_HOP | {
    b"content-length",
    b"expect",
    b"http2-settings",
    b"proxy-authorization",
    b"proxy-authenticate",
}

#: Fields that routing and framing stand on: a client cannot have them removed by listing them in Connection.
PROTECTED: Final = frozenset((b"host", b"content-length", b"content-type", b"transfer-encoding"))

#: Methods for which an absent body is announced as such (RFC 9110, 8.6).
BODY_EXPECTED: Final = frozenset((b"POST", b"PUT", b"PATCH"))

#: Statuses whose responses never have content (besides 1xx).
NO_CONTENT: Final = (204, 304)

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
CLOSE: Final = b"connection: close\r\n"
KEEP_ALIVE: Final = b"connection: keep-alive\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"

#: Status -> status line of a response that the gate makes itself.
_STATUS_LINES: Final = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode("ascii"))
    for status in HTTPStatus
}

#: How a failure of the engine reads to a client that has not yet had a response.
_FAILURES: Final = {
    End.ENGINE_REFUSED: (503, "the engine refused the connection"),
    End.ENGINE_RESET_EARLY: (502, "the engine closed the connection before it answered"),
    End.ENGINE_RESET_MIDSTREAM: (502, "the engine closed the connection before its answer began"),
    End.ENGINE_BAD_RESPONSE: (502, "the engine's answer was not understood"),
    End.ENGINE_HUNG: (504, "the engine did not answer in time"),
    End.ABORTED: (503, "the request was taken back"),
}


def connection_tokens(values: Iterable[bytes]) -> frozenset[bytes]:
    """The names listed in one or more Connection fields, in lower case."""
    return frozenset(
        token for value in values for part in value.split(b",") if (token := part.strip(b" \t").lower())
    )


def local(status: int, lines: bytes, more: bytes, body: bytes, method: bytes) -> bytes:
    """A whole response that the gate makes itself.

    Args:
        status: its code; one without a standard phrase gets none.
        lines: its header lines.
        more: more of them.
        body: its content; left out where the answer to `method` or the status has none.
        method: of the request.
    """
    start = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
    if status in NO_CONTENT:
        return b"%b%b%b\r\n" % (start, lines, more)
    content = b"" if method == b"HEAD" else body
    return b"%b%b%bcontent-length: %d\r\n\r\n%b" % (start, lines, more, len(body), content)


def lines(headers: Lines) -> bytes:
    """Header lines as they go on the wire.

    Raises:
        ValueError: a name or value holds a byte that would break the head apart.
    """
    if not headers:
        return b""
    block = b"".join([name + b": " + value + b"\r\n" for name, value in headers])
    if len(block.splitlines()) != len(headers) or 0 in block:
        raise ValueError("a header cannot be sent: its name or value holds a line break or a NUL")
    return block


def error_body(status: int, message: str, code: str) -> bytes:
    """An error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return json.dumps({"error": error}, separators=(",", ":")).encode()


def error_reply(status: int, message: str, code: str) -> LocalReply:
    """A local reply with an error in OpenAI's shape."""
    return LocalReply(status, ((b"content-type", b"application/json"),), error_body(status, message, code))


def failure_reply(end: End) -> LocalReply:
    """The default answer when the engine failed before a response began."""
    status, message = _FAILURES[end]
    return error_reply(status, message, end.value)
