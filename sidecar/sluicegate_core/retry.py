"""Retries: when a refused request should come back, and which arrivals are ones that did.

Retry-After is the time at which this request is predicted to fit, jittered by the gate, because clients honour
it to the millisecond and would come back as the herd they left as. Between 1 s and 120 s: SDKs take neither a
shorter nor a longer one seriously (openai-python waits for exactly 0 < s <= 120).
"""

import random
from typing import Final

MIN_RETRY_AFTER_S: Final = 1.0
MAX_RETRY_AFTER_S: Final = 120.0
#: Without any prediction: the engine is down or unknown; about as long as a readiness probe needs.
UNKNOWN_RETRY_AFTER_S: Final = 5.0
#: Jitter: up to this share of the time is added, and never less than this many seconds.
JITTER_SHARE: Final = 0.5
MIN_JITTER_S: Final = 1.0
#: Refused request ids that are remembered.
MAX_REMEMBERED: Final = 4096


def retry_after_s(fits_in_s: float | None, rng: random.Random) -> float:
    """Seconds to wait before this request is worth sending again.

    Args:
        fits_in_s: predicted time until it would be admitted, s; None where nothing can be predicted.
        rng: the controller's seeded source.
    """
    base_s = UNKNOWN_RETRY_AFTER_S if fits_in_s is None else fits_in_s
    base_s = min(max(base_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
    jittered_s = base_s + rng.random() * max(MIN_JITTER_S, JITTER_SHARE * base_s)
    if jittered_s > MAX_RETRY_AFTER_S:  # spread below the ceiling rather than pile up on it
        jittered_s = MAX_RETRY_AFTER_S * (1.0 - 0.25 * rng.random())
    return jittered_s


class RetryMemory:
    """Ids of requests refused lately (`ids`): one that comes again is a retry, not new demand."""

    __slots__ = ("ids",)

    def __init__(self) -> None:
        self.ids: dict[bytes, None] = {}

    def refused(self, request_id: bytes) -> None:
        """Remember a client's own request id; the oldest is forgotten past `MAX_REMEMBERED`."""
        if not request_id:
            return
        self.ids.pop(request_id, None)
        self.ids[request_id] = None
        if len(self.ids) > MAX_REMEMBERED:
            del self.ids[next(iter(self.ids))]
