"""What can be wrong with a request before the application sees it: kind, status, words for the client.

The kinds are few and fixed: they are a metric label. Words never repeat what the client sent.
"""

from __future__ import annotations

from typing import Final


class Problem(Exception):  # noqa: N818  # it is an answer as much as an error
    """A request that is answered by the protocol layer; the connection is closed after the answer.

    Attributes:
        kind: label for metrics, a key of `KINDS`.
        status: of the answer.
        message: what the client is told.
    """

    def __init__(self, kind: str, status: int, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status
        self.message = message


#: kind -> (status, message).
KINDS: Final[dict[str, tuple[int, str]]] = {
    "bad_request": (400, "the request is not valid HTTP"),
    "bad_target": (400, "the request target is not valid"),
    "bad_host": (400, "the request needs exactly one valid Host"),
    "bad_repeat": (400, "a header field that can occur once is repeated"),
    "bad_version": (505, "only HTTP/1.1 and HTTP/1.0 are spoken here"),
    "bad_framing": (400, "the length of the request is ambiguous"),
    "bad_chunk": (400, "the chunked body is not valid"),
    "method": (405, "this method is not served"),
    "expectation": (417, "only 100-continue can be expected"),
    "header_bytes": (431, "the request's head is too large"),
    "header_count": (431, "the request has too many header fields"),
    "target_bytes": (414, "the request target is too long"),
    "body_bytes": (413, "the request body is too large"),
    "body_bytes_total": (503, "too many request bodies are held at once"),
    "connections": (503, "too many connections"),
    "header_s": (408, "the request's head took too long"),
    "body_s": (408, "the request's body took too long"),
}


def problem(kind: str) -> Problem:
    """The problem of that kind."""
    status, message = KINDS[kind]
    return Problem(kind, status, message)
