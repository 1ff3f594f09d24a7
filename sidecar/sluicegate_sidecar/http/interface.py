"""What the data path and the application on top of it say to each other.

The application is told of whole requests and answers with a command on the exchange: forward it, refuse it,
or (by doing nothing) let it wait. A listener per exchange hears of the response. All calls are synchronous
and on the event loop's thread; whatever a callback raises is logged and never reaches a connection.

Nothing here knows of classes, policies or metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sluicegate_sidecar.http.exchange import Exchange

#: Header lines in order: names in lower case, values without surrounding blanks.
Headers = Sequence[tuple[bytes, bytes]]


class End(StrEnum):
    """How an exchange ended; each exchange ends exactly once."""

    #: The whole response went to the client's socket (or the tunnel after an upgrade was closed).
    COMPLETE = "complete"
    #: The application answered by itself.
    REFUSED = "refused"
    #: The client left, or took nothing for too long; before or after the hand-over.
    CLIENT_GONE = "client_gone"
    #: No connection to the engine.
    ENGINE_REFUSED = "engine_refused"
    #: The engine closed before any byte of a response.
    ENGINE_RESET_EARLY = "engine_reset_early"
    #: The engine closed after the first byte and before the end of a response.
    ENGINE_RESET_MIDSTREAM = "engine_reset_midstream"
    #: The engine sent nothing within the bound.
    ENGINE_HUNG = "engine_hung"
    #: What the engine sent is not HTTP, or not an answer to this request.
    ENGINE_BAD_RESPONSE = "engine_bad_response"
    #: The application took it back, or failed, or the server was closed.
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class LocalReply:
    """A response made by the gate. Content-Length, Date and Connection are added on the way out."""

    status: int
    headers: Headers
    body: bytes


class ExchangeListener(Protocol):
    """Hears what becomes of one exchange. Set as `exchange.listener` before a command is given."""

    def on_response_head(self, status: int, headers: Headers) -> None:
        """The engine's final response began (1xx are not reported, except 101, which is final)."""

    def on_response_body(self, data: bytes) -> None:
        """A piece of the response's content, framing removed; one call per piece read."""

    def on_end(self, end: End) -> None:
        """The exchange is over: exactly once, the last call."""

    def failure_reply(self, end: End) -> LocalReply:
        """What to tell the client when the engine failed before a response began."""


class Application(Protocol):
    """Decides about requests."""

    def on_request(self, exchange: Exchange) -> None:
        """A request is here, head and whole body. Answer now or later, by a command on the exchange."""

    def on_protocol_error(self, kind: str) -> None:
        """A client broke the protocol or hit a limit (`kind`: one of `errors.KINDS`); it got its answer."""
