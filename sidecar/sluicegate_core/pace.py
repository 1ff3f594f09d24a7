"""Pace: are the streams inside still within their inter-token SLO, and would they be with one more?

Measured first. For each class that states an inter-token SLO the mean gap of its residents' tokens over the
last `WINDOW_S` is the time they spent waiting over the tokens they got; a stream that stalls is counted, since
its time runs on without tokens. Hand-over pauses while that mean is past `SAFETY` of the SLO. No parameter of
the engine is used: a gate that paces by a model of the engine loses half its goodput when the model is 30 %
off, one that paces by measurement hardly moves when window or safety change by a factor of two (docs/decisions.md).

The learned curve (gap as a line over batch size) only looks one step ahead: it keeps the next stream out when
the residents would be past their whole SLO with it. It cannot freeze: when residents leave, the gate runs again
at the batch size in question, and the curve learns what it is like there.
"""

import math
from typing import Final

from sluicegate_core.learn import FittedLine
from sluicegate_core.policy import Policy
from sluicegate_core.vocabulary import Hold

#: Memory of the measured gap: long enough for several tokens of each stream, short enough to act on a burst.
WINDOW_S: Final = 0.4
#: Share of the SLO at which hand-over pauses.
SAFETY: Final = 0.9
#: Less observed stream time than this says nothing yet, in seconds of one stream.
ENOUGH_STREAM_S: Final = 0.05
#: The curve takes a sample at most this often.
SAMPLE_EVERY_S: Final = 0.25
CURVE_MEMORY: Final = 64


class _ClassGap:
    """Stream-seconds and tokens of one class's residents, both decaying with the window."""

    __slots__ = ("fresh", "residents", "stream_s", "tokens")

    def __init__(self) -> None:
        self.residents = 0
        self.stream_s = 0.0
        self.tokens = 0.0
        self.fresh = 0  # tokens since the last advance

    def advance(self, keep: float, fresh_weight: float, resident_s: float) -> None:
        self.stream_s = self.stream_s * keep + self.residents * resident_s
        self.tokens = self.tokens * keep + self.fresh * fresh_weight
        self.fresh = 0

    def gap_s(self) -> float | None:
        """Mean gap, or None while too little has been seen. Without any token it is a bound from below."""
        if not self.residents or self.stream_s < ENOUGH_STREAM_S:
            return None
        return self.stream_s / max(self.tokens, 1.0)


class Pace:
    """Watches the residents' tokens. Owned by the `Controller`; `token` is on the path of every chunk."""

    __slots__ = ("_at", "_classes", "_sampled_at", "_slos", "curve", "residents")

    def __init__(self, policy: Policy) -> None:
        self._classes = [_ClassGap() for _ in policy.classes]
        self._slos = [c.slo.itl_s for c in policy.classes]
        self._at = 0.0
        self._sampled_at = 0.0
        self.residents = 0
        self.curve = FittedLine(CURVE_MEMORY)

    def reconfigure(self, policy: Policy, moved: list[int]) -> None:
        """Carry the residents over to the classes of another policy; `moved[old] = new`."""
        old = self._classes
        self._classes = [_ClassGap() for _ in policy.classes]
        self._slos = [c.slo.itl_s for c in policy.classes]
        for index, gap in enumerate(old):
            new = self._classes[moved[index]]
            new.residents += gap.residents
            new.stream_s += gap.stream_s
            new.tokens += gap.tokens
            new.fresh += gap.fresh

    def advance(self, now: float) -> None:
        """Bring the windows up to `now`.

        Stream time decays exactly; tokens since the last call are taken to have come evenly over the time.
        """
        elapsed_s = now - self._at
        if elapsed_s <= 0.0:
            return
        self._at = now
        keep = math.exp(-elapsed_s / WINDOW_S)
        resident_s = WINDOW_S * (1.0 - keep)
        for gap in self._classes:
            gap.advance(keep, resident_s / elapsed_s, resident_s)

    def enter(self, now: float, class_index: int) -> None:
        """A stream had its first token and is a resident from now on."""
        self.advance(now)
        self._classes[class_index].residents += 1
        self.residents += 1

    def leave(self, now: float, class_index: int) -> None:
        self.advance(now)
        self._classes[class_index].residents -= 1
        self.residents -= 1

    def token(self, class_index: int, tokens: int) -> None:
        """Tokens of a resident came; the window is brought up to date later, by `advance`."""
        self._classes[class_index].fresh += tokens

    def sample(self, now: float, prefilling: bool) -> None:
        """Teach the curve from what is measured now, at most each `SAMPLE_EVERY_S`.

        While prompts are being prefilled the gap says nothing about the batch size, and is left out.
        """
        if now - self._sampled_at < SAMPLE_EVERY_S:
            return
        self._sampled_at = now
        if prefilling or not self.residents:
            return
        self.advance(now)
        stream_s = sum(gap.stream_s for gap in self._classes)
        tokens = sum(gap.tokens for gap in self._classes)
        if tokens >= 2.0 and stream_s >= ENOUGH_STREAM_S:
            self.curve.add(self.residents, stream_s / tokens)

    def gap_s(self, class_index: int) -> float | None:
        """Measured mean gap of a class's residents, s; None while unknown."""
        return self._classes[class_index].gap_s()

    def next_gap_s(self) -> float | None:
        """Predicted gap with one more resident, s; None while the curve is unknown."""
        return self.curve.at(self.residents + 1)

    def hold(self, now: float) -> Hold | None:
        """Why no further request may be handed over for the residents' sake, if so."""
        if not self.residents:
            return None
        self.advance(now)
        tightest: float | None = None
        for gap, slo_s in zip(self._classes, self._slos, strict=True):
            if slo_s is None or not gap.residents:
                continue
            measured_s = gap.gap_s()
            if measured_s is not None and measured_s > slo_s * SAFETY:
                return Hold.GAP
            if tightest is None or slo_s < tightest:
                tightest = slo_s
        if tightest is not None:
            ahead_s = self.next_gap_s()
            if ahead_s is not None and ahead_s > tightest:
                return Hold.NEXT_GAP
        return None
