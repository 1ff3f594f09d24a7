"""Rivals that adapt: concurrency limits that follow the latency they see.

All three watch the time from hand-over to the first token. Their originals watch whole responses, whose length here
says more about the answer than about the load: the first token is the kinder signal. What is over the limit is
refused; nothing waits in front of the engine. Bounds are wider than the originals' defaults, which were made for
requests of milliseconds.

Sources: Netflix concurrency-limits `AIMDLimit` and `Gradient2Limit`; Envoy `adaptive_concurrency` with its gradient
controller.
"""

from __future__ import annotations

import math
import statistics
from typing import Final

from sluicegate_lab.sim.rivals import Cap
from sluicegate_lab.sim.world import Attempt

LEAST: Final = 1.0
MOST: Final = 1000.0
#: Where all start (Netflix's default).
FIRST: Final = 20.0


class Adaptive(Cap):
    """A cap that each first token moves."""

    def __init__(self) -> None:
        super().__init__(FIRST, 0)

    def first_token(self, now: float, attempt: Attempt) -> None:
        self.sample(now, now - attempt.started_at, late=False)

    def cancel(self, now: float, attempt: Attempt) -> None:
        if attempt.started_at == attempt.started_at:
            self.sample(now, now - attempt.started_at, late=True)
        super().cancel(now, attempt)

    def sample(self, now: float, rtt_s: float, *, late: bool) -> None:
        """Learn from one request; `late`: its client left."""
        raise NotImplementedError

    def move(self, limit: float) -> None:
        """Set the limit within its bounds."""
        self.cap = min(max(limit, LEAST), MOST)


class Aimd(Adaptive):
    """Additive increase, multiplicative decrease: one more a good sample while half used, a tenth less a bad one."""

    BACKOFF: Final = 0.9

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._timeout_s = timeout_s

    def sample(self, now: float, rtt_s: float, *, late: bool) -> None:
        if late or rtt_s > self._timeout_s:
            self.move(self.cap * self.BACKOFF)
        elif self.inside * 2 >= self.cap:
            self.move(self.cap + 1.0)


class Gradient(Adaptive):
    """Netflix's second: the long-term mean over the present latency, with a tolerance and room for a short queue."""

    LONG_SAMPLES: Final = 600
    SMOOTHING: Final = 0.2
    QUEUE: Final = 4.0

    def __init__(self, tolerance: float) -> None:
        super().__init__()
        self._tolerance = tolerance
        self._long_s = 0.0
        self._samples = 0

    def sample(self, now: float, rtt_s: float, *, late: bool) -> None:
        rtt_s = max(rtt_s, 1e-6)
        self._samples += 1
        self._long_s += (rtt_s - self._long_s) / min(self._samples, self.LONG_SAMPLES)
        if self._long_s > 2.0 * rtt_s:
            self._long_s *= 0.95
        if self.inside < self.cap / 2:
            return
        gradient = max(0.5, min(1.0, self._tolerance * self._long_s / rtt_s))
        self.move(self.cap * (1.0 - self.SMOOTHING) + self.SMOOTHING * (self.cap * gradient + self.QUEUE))


class EnvoyGradient(Adaptive):
    """Envoy's: the best latency, measured anew now and then at a concurrency of three, over the present one."""

    UPDATE_S: Final = 0.1
    PROBE_LIMIT: Final = 3.0
    PROBE_SAMPLES: Final = 50

    def __init__(self, buffer: float, probe_every_s: float) -> None:
        super().__init__()
        self._buffer = buffer
        self._probe_every_s = probe_every_s
        self._best_s = 0.0
        self._probing = True
        self._next_probe_at = 0.0
        self._update_at = 0.0
        self._before = FIRST
        self._samples: list[float] = []
        self.cap = self.PROBE_LIMIT

    def sample(self, now: float, rtt_s: float, *, late: bool) -> None:
        self._samples.append(max(rtt_s, 1e-6))
        if self._probing:
            if len(self._samples) >= self.PROBE_SAMPLES:
                self._best_s = statistics.median(self._samples)
                self._samples = []
                self._probing = False
                self._next_probe_at = now + self._probe_every_s
                self.move(self._before)
            return
        if now >= self._next_probe_at:
            self._before = self.cap
            self._probing = True
            self._samples = []
            self.cap = self.PROBE_LIMIT
        elif now >= self._update_at:
            self._update_at = now + self.UPDATE_S
            gradient = self._best_s * (1.0 + self._buffer) / statistics.median(self._samples)
            self._samples = []
            self.move(self.cap * max(0.5, min(gradient, 2.0)) + math.sqrt(self.cap))
