"""What the gate itself says to a client: refusals and engine failures, in the OpenAI error shape.

429 when busy, so that a router tries another pod and keeps this one; 503 when nobody is home, so that it looks
elsewhere for good. `Retry-After` (whole seconds, rounded up) and `retry-after-ms` say when this request is
predicted to fit; `x-should-retry: false` stops SDKs where no retry of it can succeed; `x-sluicegate-reason` is
the core's reason. A reply never holds anything of the request: its body is built from the reason alone.
"""

import json
from math import ceil
from typing import Final, NamedTuple

from sluicegate_core.effects import Refusal
from sluicegate_core.vocabulary import Reason

Headers = tuple[tuple[bytes, bytes], ...]

#: One sentence a reason, for the person who reads the error.
MESSAGES: Final[dict[Reason, str]] = {
    Reason.DRAINING: "This replica is shutting down.",
    Reason.ENGINE_DOWN: "The inference engine is not available.",
    Reason.SLO_UNREACHABLE: "The prompt is too long to be served within the objective of its traffic class.",
    Reason.TTFT: "The engine is busy: the first token would come later than its traffic class allows.",
    Reason.QUEUE_TIME: "The engine is busy: the request would wait longer than its traffic class allows.",
    Reason.QUEUE_FULL: "The engine is busy: too many requests are waiting.",
    Reason.DEADLINE: "The engine is busy: the request's time to wait ran out.",
    Reason.DRAINED: "This replica is shutting down.",
    Reason.ENGINE_REFUSED: "The inference engine refused the connection.",
    Reason.ENGINE_RESET_EARLY: "The inference engine closed the connection before it answered.",
    Reason.ENGINE_HUNG: "The inference engine did not answer in time.",
    Reason.ENGINE_BAD_RESPONSE: "The inference engine's answer was not valid HTTP.",
    Reason.ABORTED: "This replica took the request back before the inference engine answered.",
}

#: Status of a failure of the engine, where no byte of an answer has gone out.
FAILURE_STATUS: Final[dict[Reason, int]] = {
    Reason.ENGINE_REFUSED: 503,
    Reason.ENGINE_RESET_EARLY: 502,
    Reason.ENGINE_HUNG: 504,
    Reason.ENGINE_BAD_RESPONSE: 502,
    Reason.ABORTED: 503,
}


class Reply(NamedTuple):
    """A whole local reply."""

    status: int
    headers: Headers
    body: bytes


def error_body(message: str, kind: str, code: str) -> bytes:
    """The error object that OpenAI's clients read."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    return json.dumps({"error": error}).encode()


_JSON: Final = (b"content-type", b"application/json")
_NO_RETRY: Final = (b"x-should-retry", b"false")
_REASON_HEADERS: Final = {reason: (b"x-sluicegate-reason", reason.value.encode()) for reason in Reason}


def _refusal(reason: Reason, message: str) -> tuple[int, bytes]:
    """Status and body of a refusal: all of it that the reason alone decides."""
    if reason.nobody_home:
        return 503, error_body(message, "service_unavailable_error", "server_is_overloaded")
    return 429, error_body(message, "rate_limit_error", "rate_limit_exceeded")


_REFUSALS: Final = {reason: _refusal(reason, message) for reason, message in MESSAGES.items()}


def refusal_reply(refusal: Refusal, request_id: bytes) -> Reply:
    """The reply to a request that was rejected or evicted."""
    status, body = _REFUSALS[refusal.reason]
    headers = _headers(refusal.reason, refusal.retry_after_s, request_id)
    return Reply(status, headers if refusal.should_retry else (*headers, _NO_RETRY), body)


def failure_reply(reason: Reason, retry_after_s: float, request_id: bytes) -> Reply:
    """The reply where the engine failed before any byte of its answer went out."""
    body = error_body(MESSAGES[reason], "service_unavailable_error", reason.value)
    return Reply(FAILURE_STATUS[reason], _headers(reason, retry_after_s, request_id), body)


def _headers(reason: Reason, retry_after_s: float, request_id: bytes) -> Headers:
    retry_after_ms = ceil(retry_after_s * 1000.0)
    return (
        _JSON,
        (b"retry-after", b"%d" % -(-retry_after_ms // 1000)),
        (b"retry-after-ms", b"%d" % retry_after_ms),
        _REASON_HEADERS[reason],
        (b"x-request-id", request_id),
    )
