"""Estimators that learn online, in constant memory and time, and forget.

Each is permissive by being honest: before it has seen enough it answers None, and its callers let traffic
pass. What uses them: `estimate` (lengths), `predict` (times), `pace` (inter-token curve).
"""

import math
from bisect import bisect_right
from itertools import accumulate
from typing import Final


class FittedLine:
    """`y = intercept + slope * x`, by least squares over a sliding memory of about `memory` samples.

    Sums are weighted by `1 - 1/memory` per later sample (exponential forgetting; Ljung, System
    Identification, section 11.2, in its batch form). Samples that all have the same x make no line by themselves;
    what makes one of them depends on the quantity:

    - `from_origin`, for what is near zero at zero (service time over prompt tokens, tokens over bytes): one
      pseudo-sample at the origin, never forgotten, so that the line leads from there through their mean;
    - else, for what has a level of its own (gap over batch size): the slope is drawn towards zero by a spread of
      `FLATNESS`, so that the line is flat until other x have been seen.

    Neither coefficient is ever negative: if the free fit has a negative one it is set to zero and the other
    refitted.

    Attributes (read only; plain, for the hot path):
        slope: y a unit of x; 0.0 before any sample.
        intercept: y at x = 0.
        relative_deviation: mean absolute error of the line's own forecasts, relative to them.
        samples: taken in so far.
        known: `ENOUGH` samples have come.
    """

    __slots__ = (
        "_flatness", "_forget", "_n", "_pseudo", "_sx", "_sxx", "_sxy", "_sy", "intercept", "known",
        "relative_deviation", "samples", "slope",
    )  # fmt: skip

    #: Samples before the line is used at all.
    ENOUGH: Final = 4
    #: Samples after which the line is steady: outliers are drawn in, and it is refitted with each fourth.
    STEADY: Final = 16
    #: A sample further than this factor from the line, once the line is known, is drawn in to it: one stalled
    #: request does not bend the line, and a change of regime still arrives within a few samples.
    CLIP: Final = 4.0
    #: One sample that is one unit of x away.
    FLATNESS: Final = 1.0

    def __init__(self, memory: int, *, from_origin: bool = True) -> None:
        self._forget = 1.0 - 1.0 / memory
        self._pseudo = 1.0 if from_origin else 0.0
        self._flatness = 0.0 if from_origin else self.FLATNESS
        self._n = self._sx = self._sy = self._sxx = self._sxy = 0.0
        self.slope = self.intercept = 0.0
        self.relative_deviation = 0.0
        self.samples = 0
        self.known = False

    def add(self, x: float, y: float) -> None:
        """Take in one sample; both finite and not negative."""
        samples = self.samples
        if samples >= self.ENOUGH:
            expected = self.intercept + self.slope * x
            if expected > 0.0:
                if samples >= self.STEADY:
                    if y > expected * self.CLIP:
                        y = expected * self.CLIP
                    elif y < expected / self.CLIP:
                        y = expected / self.CLIP
                self.relative_deviation += (abs(y - expected) / expected - self.relative_deviation) * 0.05
        keep = self._forget
        self._n = self._n * keep + 1.0
        self._sx = self._sx * keep + x
        self._sy = self._sy * keep + y
        self._sxx = self._sxx * keep + x * x
        self._sxy = self._sxy * keep + x * y
        self.samples = samples + 1
        self.known = samples + 1 >= self.ENOUGH
        if samples < self.STEADY or not samples & 3:  # a steady line need not be drawn for every sample
            self._refit()

    def _refit(self) -> None:
        n = self._n + self._pseudo
        spread = self._sxx - self._sx * self._sx / n + self._flatness
        if spread <= 1e-12 * (1.0 + self._sxx):
            self.slope, self.intercept = 0.0, self._sy / self._n
            return
        slope = (self._sxy - self._sx * self._sy / n) / spread
        intercept = (self._sy - slope * self._sx) / n
        if slope < 0.0:
            slope, intercept = 0.0, self._sy / self._n
        elif intercept < 0.0:
            slope, intercept = self._sxy / self._sxx, 0.0
        self.slope, self.intercept = slope, intercept

    def at(self, x: float) -> float | None:
        """y at x, or None while unknown."""
        if not self.known:
            return None
        return self.intercept + self.slope * x


class Mean:
    """Exponentially forgetting mean; exact while it has fewer samples than its memory."""

    __slots__ = ("_memory", "_value", "samples")

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._value = 0.0
        self.samples = 0

    def add(self, value: float) -> None:
        self.samples += 1
        self._value += (value - self._value) / min(self.samples, self._memory)

    @property
    def value(self) -> float | None:
        """The mean, or None before the first sample."""
        return self._value if self.samples else None


class Quantiles:
    """Quantiles of a positive quantity from a histogram of geometric bins, forgetting as it goes.

    Bins grow by `RATIO`, so a quantile is exact to about 10 %; each sample weighs `1 - 1/memory` of the next.
    The forgetting is done by letting the weight of new samples grow, and rescaling rarely.
    """

    __slots__ = ("_bins", "_forget", "_known", "_weight", "samples")

    RATIO: Final = 1.2
    #: The last bin is open: lengths over a million tokens are all "long".
    EDGES: Final = tuple(1.2**k for k in range(77))
    #: Samples before a quantile is used.
    ENOUGH: Final = 16
    #: An answer is kept until so many samples have come since it was computed, at the most.
    RENEW_EVERY: Final = 8
    _RESCALE_AT: Final = 1e12

    def __init__(self, memory: int) -> None:
        self._bins = [0.0] * (len(self.EDGES) + 1)
        self._forget = 1.0 - 1.0 / memory
        self._weight = 1.0
        self._known: dict[float, float] = {}
        self.samples = 0

    def add(self, value: float) -> None:
        self._bins[bisect_right(self.EDGES, value)] += self._weight
        self._weight /= self._forget
        self.samples += 1
        if not self.samples % self.RENEW_EVERY:
            self._known.clear()
        if self._weight > self._RESCALE_AT:
            self._bins = [b / self._weight for b in self._bins]
            self._weight = 1.0

    def at(self, quantile: float) -> float | None:
        """Upper edge of the bin that holds the quantile (0 to 1), or None while unknown."""
        known = self._known.get(quantile)
        if known is not None:
            return known
        if self.samples < self.ENOUGH:
            return None
        cumulated = list(accumulate(self._bins))
        index = min(bisect_right(cumulated, quantile * cumulated[-1]), len(self.EDGES) - 1)
        value = self._known[quantile] = self.EDGES[index]
        return value


class Drain:
    """How fast a line moves while somebody stands in it: cost and requests handed over a second.

    Time counts only while the line is not empty, and so does what is handed over then; so the rate is what the
    engine takes when it could take more, not what happens to be offered. The memory is the last `MIN_TIME_S`
    of such time or the last `MIN_REQUESTS` hand-overs, whichever is longer: a small engine that takes a
    request in ten seconds needs the second, a large one the first. A stalled engine lowers the rate by
    itself: its time counts on while nothing is handed over.
    """

    __slots__ = ("_backlogged", "_cost", "_requests", "_since", "_time_s")

    MIN_TIME_S: Final = 5.0
    MIN_REQUESTS: Final = 16.0
    #: Hand-overs before the rate is used.
    ENOUGH: Final = 4.0

    def __init__(self) -> None:
        self._cost = 0.0
        self._requests = 0.0
        self._time_s = 0.0
        self._since = 0.0
        self._backlogged = False

    def backlogged(self, now: float, yes: bool) -> None:
        """The line became non-empty (`yes`) or empty."""
        if yes == self._backlogged:
            return
        if self._backlogged:
            self._time_s += max(0.0, now - self._since)
        self._backlogged = yes
        self._since = now

    def handed_over(self, now: float, cost: float) -> None:
        """One request left the line for the engine; counted only while backlogged."""
        if not self._backlogged:
            return
        self._time_s += max(0.0, now - self._since)
        self._since = now
        self._cost += cost
        self._requests += 1.0
        if self._time_s > self.MIN_TIME_S and self._requests > self.MIN_REQUESTS:
            keep = max(self.MIN_TIME_S / self._time_s, self.MIN_REQUESTS / self._requests)
            self._cost *= keep
            self._requests *= keep
            self._time_s *= keep

    def rates(self, now: float) -> tuple[float, float] | None:
        """(cost a second, requests a second), or None while unknown."""
        if self._requests < self.ENOUGH:
            return None
        elapsed_s = self._time_s
        if self._backlogged and now > self._since:
            elapsed_s += now - self._since
        if elapsed_s <= 0.0:
            return None
        return self._cost / elapsed_s, self._requests / elapsed_s


class DecayingRate:
    """Events a second over a memory of `tau_s`, by exponential decay; biased low until `tau_s` has passed."""

    __slots__ = ("_at", "_grain_s", "_sum", "_tau_s")

    #: Decayed at most so many times in `tau_s`: an event is then counted late by 1.6 % of it at the most.
    GRAINS: Final = 64

    def __init__(self, tau_s: float) -> None:
        self._tau_s = tau_s
        self._grain_s = tau_s / self.GRAINS
        self._sum = 0.0
        self._at = 0.0

    def add(self, now: float, amount: float = 1.0) -> None:
        if now - self._at > self._grain_s:
            self._decay(now)
        self._sum += amount

    def _decay(self, now: float) -> None:
        if now > self._at:
            self._sum *= math.exp((self._at - now) / self._tau_s)
            self._at = now

    def at(self, now: float) -> float:
        """Events a second as of `now`."""
        self._decay(now)
        return self._sum / self._tau_s
