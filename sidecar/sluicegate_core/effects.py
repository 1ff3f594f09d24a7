"""What the `Controller` asks of its shell, and what the engine's end of a request tells it."""

from typing import NamedTuple

from sluicegate_core.request import Request
from sluicegate_core.vocabulary import Reason


class Refusal(NamedTuple):
    """An honest no.

    Attributes:
        reason: why; `reason.nobody_home` decides between 503 and 429.
        retry_after_s: seconds after which this request is predicted to fit, jittered, 1 to 120.
        should_retry: False where no retry of this very request can succeed.
        predicted_ttft_s: the prediction that it failed on; None where none was made.
    """

    reason: Reason
    retry_after_s: float
    should_retry: bool
    predicted_ttft_s: float | None


class Start(NamedTuple):
    """Hand the request to the engine now."""

    request: Request


class Reject(NamedTuple):
    """Refuse the request: it has not waited."""

    request: Request
    refusal: Refusal


class Evict(NamedTuple):
    """Take the request out of the line: it has waited in vain."""

    request: Request
    refusal: Refusal


Effect = Start | Reject | Evict


class Truth(NamedTuple):
    """What the engine reported about one request at its end; None where it said nothing.

    Attributes:
        prompt_tokens: prompt tokens as the engine counted them.
        output_tokens: tokens generated, all choices together.
    """

    prompt_tokens: int | None = None
    output_tokens: int | None = None


class EngineSnapshot(NamedTuple):
    """What the engine says of itself; None where it says nothing.

    Attributes:
        slots: sequences it can run at once.
        running: sequences running.
        waiting: requests in its own queue.
        kv_capacity_tokens: tokens its KV cache holds.
        kv_used: fraction of that in use, 0 to 1.
    """

    slots: int | None = None
    running: int | None = None
    waiting: int | None = None
    kv_capacity_tokens: int | None = None
    kv_used: float | None = None
