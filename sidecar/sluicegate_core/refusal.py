"""Refusals: the honest no, and the memory of the last of them.

What refuses is `layers` (at arrival) and the deadline (in the line); here is what the client is told, above all
when to come back, and what `/debug/state` shows to whoever asks "why was I refused?".
"""

import random
from collections import deque
from typing import Final, NamedTuple

from sluicegate_core.effects import Refusal
from sluicegate_core.layers import Scene
from sluicegate_core.retry import MAX_RETRY_AFTER_S, RetryMemory, retry_after_s
from sluicegate_core.vocabulary import Reason

#: Refusals kept for `/debug/state`.
RECENT_REFUSALS: Final = 100

SLO_UNREACHABLE: Final = Reason.SLO_UNREACHABLE


class RecentRefusal(NamedTuple):
    """One line of "why was I refused?"; times in seconds."""

    at: float
    class_name: str
    client: str
    reason: Reason
    prompt_tokens: int
    predicted_ttft_s: float | None
    predicted_wait_s: float | None
    slo_ttft_s: float | None
    waited_s: float
    retry_after_s: float


class Refusals:
    """Makes refusals. Owned by the `Controller`.

    Attributes:
        recent: the last `RECENT_REFUSALS`, oldest first.
        retries: ids of refused requests, by which their retries are known.
    """

    __slots__ = ("_rng", "recent", "retries")

    def __init__(self, rng: random.Random) -> None:
        self.recent: deque[RecentRefusal] = deque(maxlen=RECENT_REFUSALS)
        self.retries = RetryMemory()
        self._rng = rng

    def refuse(self, now: float, reason: Reason, scene: Scene) -> Refusal:
        """The refusal of a request that `scene` shows, remembered."""
        request, policy = scene.request, scene.policy
        ttft_s = scene.ttft_s
        after_s = retry_after_s(_fits_in_s(reason, scene), self._rng)
        self.retries.refused(request.request_id)
        self.recent.append(
            RecentRefusal(
                now,
                policy.name,
                request.client,
                reason,
                request.prompt_tokens,
                ttft_s,
                scene.wait_s,
                policy.slo.ttft_s,
                now - request.arrived_at,
                after_s,
            )
        )
        return Refusal(reason, after_s, reason is not SLO_UNREACHABLE, ttft_s)


def _fits_in_s(reason: Reason, scene: Scene) -> float | None:
    """Time until the request would be admitted, s; None where nothing can be said.

    It fits once the wait has shrunk to what its SLO and its class's bound leave for waiting.
    """
    if reason is SLO_UNREACHABLE:
        return MAX_RETRY_AFTER_S
    if scene.wait_s is None or reason.nobody_home:
        return None
    room_s = scene.policy.max_queue_time_s
    slo_s = scene.policy.slo.ttft_s
    if slo_s is not None:
        left_s = slo_s - (scene.service_s or 0.0)
        if left_s < room_s:
            room_s = left_s
    return scene.wait_s - room_s
