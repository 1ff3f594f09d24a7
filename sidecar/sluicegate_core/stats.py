"""Counts and histograms of what the gate did: plain numbers, exported by the shell.

They are the core's so that the simulator, the tests and `/metrics` count alike, and cheap enough for the path of
every token: one bisection and one addition.
"""

from bisect import bisect_left
from collections import Counter
from typing import Final

from sluicegate_core.vocabulary import Outcome, Reason

#: Bounds in seconds; the last bucket is open.
DELAY_BOUNDS_S: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    30.0,
    60.0,
)
TTFT_BOUNDS_S: Final = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0,
)  # fmt: skip
ITL_BOUNDS_S: Final = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)
TOTAL_BOUNDS_S: Final = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
#: Predicted over actual TTFT: 1.0 is right, below it the gate was too hopeful.
RATIO_BOUNDS: Final = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)


SERVED: Final = Outcome.SERVED
REJECTED: Final = Outcome.REJECTED
EVICTED: Final = Outcome.EVICTED


class Histogram:
    """Counts by bucket, cumulated only when read. A value on a bound belongs below it, as in Prometheus."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def samples(self) -> int:
        return sum(self.counts)


class ClassStats:
    """Everything counted for one class.

    Work is in prompt tokens, an output token as `OUTPUT_TOKEN_COST` of them:

    - `work_offered`: as estimated at arrival, of requests that were no retries: one demand is counted once.
    - `work_predicted`: the same estimates, of those served; what they proved to be is `tokens_in` and `tokens_out`.
    - `work_failed`: done for requests that failed after their first token.
    """

    __slots__ = (
        "evicted", "failed", "itl_s", "name", "offered", "prediction_ratio", "queue_delay_s",
        "queued", "rejected", "retries", "served", "served_in_slo", "started", "tokens_in", "tokens_out",
        "total_s", "ttft_s", "work_failed", "work_offered", "work_predicted",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.offered = 0
        self.retries = 0
        self.started = 0
        self.queued = 0
        self.served = 0
        self.served_in_slo = 0
        self.rejected: Counter[Reason] = Counter()
        self.evicted: Counter[Reason] = Counter()
        self.failed: Counter[Reason] = Counter()
        self.tokens_in = 0
        self.tokens_out = 0
        self.work_offered = 0.0
        self.work_predicted = 0.0
        self.work_failed = 0.0
        self.queue_delay_s = Histogram(DELAY_BOUNDS_S)
        self.ttft_s = Histogram(TTFT_BOUNDS_S)
        self.itl_s = Histogram(ITL_BOUNDS_S)
        self.total_s = Histogram(TOTAL_BOUNDS_S)
        self.prediction_ratio = Histogram(RATIO_BOUNDS)

    def ended(self, outcome: Outcome, reason: Reason | None) -> None:
        """Count one end."""
        if outcome is SERVED:
            self.served += 1
            return
        assert reason is not None
        if outcome is REJECTED:
            self.rejected[reason] += 1
        elif outcome is EVICTED:
            self.evicted[reason] += 1
        else:
            self.failed[reason] += 1

    @property
    def in_flight(self) -> int:
        """Offered and not yet ended: waiting or with the engine. The counts close by this."""
        return self.offered - self.served - self.rejected.total() - self.evicted.total() - self.failed.total()
