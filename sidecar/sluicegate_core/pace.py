"""Pace: are the streams inside still within their inter-token SLO, and would they be with one more?

Measured first. For each class that states an inter-token SLO the mean gap of its residents' tokens over the
last `WINDOW_S` is the time they spent waiting over the tokens they got; a stream that stalls is counted, since
its time runs on without tokens. Hand-over pauses while that mean is past `SAFETY` of the SLO. No parameter of
the engine is used: a gate that paces by a model of the engine loses half its goodput when the model is 30 %
off, one that paces by measurement hardly moves when window or safety change by a factor of two (docs/decisions.md).

The learned curve (gap as a line over what runs) only looks one step ahead: it keeps the next request out when
those inside would be past that share of their SLO with it. Prompts yet to have their first token count as well:
a burst of hand-overs consists of them, and no gap shows them. It cannot freeze: when some leave, the gate runs
again at the batch size in question, and the curve learns what it is like there; and it is flat as long as it has
seen one batch size only.
"""

import math
from typing import Final

from sluicegate_core.engine import EngineView
from sluicegate_core.learn import FittedLine
from sluicegate_core.policy import Policy
from sluicegate_core.vocabulary import Hold

#: Memory of the measured gap: long enough for several tokens of each stream, short enough to act on a burst.
WINDOW_S: Final = 0.4
#: At least so many gaps of the SLO's length fit into the window, or one stream that stalls would not be seen.
SLOS_A_WINDOW: Final = 3.0
#: Stream time that has decayed to this is gone, s.
NEGLIGIBLE_STREAM_S: Final = 1e-6
#: Share of the SLO at which hand-over pauses, whether measured or looked ahead to.
SAFETY: Final = 0.9
#: Less observed stream time than this says nothing yet, in seconds of one stream.
ENOUGH_STREAM_S: Final = 0.05
#: The curve takes a sample at most this often.
SAMPLE_EVERY_S: Final = 0.25
CURVE_MEMORY: Final = 64
#: The measured gap is looked at anew at most this often: a hundredth of its window.
LOOK_EVERY_S: Final = 0.004


class _ClassGap:
    """Stream-seconds and tokens of one class's residents, both decaying with the window."""

    __slots__ = ("residents", "stream_s", "tokens", "window_s")

    def __init__(self, slo_s: float | None) -> None:
        self.window_s = WINDOW_S if slo_s is None else max(WINDOW_S, SLOS_A_WINDOW * slo_s)
        self.residents = 0
        self.stream_s = 0.0
        self.tokens = 0.0

    def gap_s(self) -> float | None:
        """Mean gap, or None while too little has been seen. Without any token it is a bound from below."""
        if not self.residents or self.stream_s < ENOUGH_STREAM_S:
            return None
        return self.stream_s / max(self.tokens, 1.0)


class Pace:
    """Watches the residents' tokens. Owned by the `Controller`.

    Attributes:
        fresh: tokens a class since the windows were last advanced; the path of every chunk adds to it directly.
        sample_due: when `sample` wants to be called, s.
        residents: streams between first token and end.
        curve: gap over the number of requests that run.
    """

    __slots__ = (
        "_at",
        "_classes",
        "_engine",
        "_hold",
        "_looked_at",
        "_slos",
        "curve",
        "fresh",
        "residents",
        "sample_due",
    )

    def __init__(self, policy: Policy, engine: EngineView) -> None:
        self._engine = engine
        self._classes = [_ClassGap(c.slo.itl_s) for c in policy.classes]
        self._slos = [c.slo.itl_s for c in policy.classes]
        self._at = 0.0
        self._hold: Hold | None = None
        self._looked_at = -LOOK_EVERY_S
        self.fresh = [0] * len(policy.classes)
        self.sample_due = 0.0
        self.residents = 0
        self.curve = FittedLine(CURVE_MEMORY, from_origin=False)

    def reconfigure(self, policy: Policy, moved: list[int]) -> None:
        """Carry the residents over to the classes of another policy; `moved[old] = new`."""
        old, old_fresh = self._classes, self.fresh
        self._classes = [_ClassGap(c.slo.itl_s) for c in policy.classes]
        self._slos = [c.slo.itl_s for c in policy.classes]
        self.fresh = [0] * len(policy.classes)
        self._looked_at = -LOOK_EVERY_S
        for index, gap in enumerate(old):
            new = self._classes[moved[index]]
            new.residents += gap.residents
            new.stream_s += gap.stream_s
            new.tokens += gap.tokens
            self.fresh[moved[index]] += old_fresh[index]

    def advance(self, now: float) -> None:
        """Bring the windows up to `now`.

        Stream time decays exactly; tokens since the last call are taken to have come evenly over the time.
        """
        elapsed_s = now - self._at
        if elapsed_s <= 0.0:
            return
        self._at = now
        fresh = self.fresh
        for index, gap in enumerate(self._classes):
            if not gap.residents and not gap.stream_s:
                continue
            keep = math.exp(-elapsed_s / gap.window_s)
            resident_s = gap.window_s * (1.0 - keep)
            gap.stream_s = gap.stream_s * keep + gap.residents * resident_s
            gap.tokens = gap.tokens * keep + fresh[index] * resident_s / elapsed_s
            if gap.stream_s < NEGLIGIBLE_STREAM_S:
                gap.stream_s = gap.tokens = 0.0
            fresh[index] = 0

    def enter(self, now: float, class_index: int) -> None:
        """A stream had its first token and is a resident from now on."""
        self.advance(now)
        self._classes[class_index].residents += 1
        self.residents += 1
        self._looked_at = -LOOK_EVERY_S

    def leave(self, now: float, class_index: int) -> None:
        self.advance(now)
        self._classes[class_index].residents -= 1
        self.residents -= 1
        self._looked_at = -LOOK_EVERY_S

    def sample(self, now: float) -> None:
        """Teach the curve from what is measured now, at most each `SAMPLE_EVERY_S`.

        While prompts are being prefilled the gap says nothing about the batch size, and is left out.
        """
        if now < self.sample_due:
            return
        self.sample_due = now + SAMPLE_EVERY_S
        if self._engine.pending or not self.residents:
            return
        self.advance(now)
        stream_s = sum(gap.stream_s for gap in self._classes)
        tokens = sum(gap.tokens for gap in self._classes)
        if tokens >= 2.0 and stream_s >= ENOUGH_STREAM_S:
            self.curve.add(self._engine.running, stream_s / tokens)

    def gap_s(self, class_index: int) -> float | None:
        """Measured mean gap of a class's residents, s; None while unknown."""
        return self._classes[class_index].gap_s()

    def next_gap_s(self) -> float | None:
        """Predicted gap with one more request running, s; None while the curve is unknown."""
        return self.curve.at(self._engine.running + 1)

    def hold(self, now: float) -> Hold | None:
        """Why no further request may be handed over for the sake of those inside, if so.

        What is measured stands for `LOOK_EVERY_S`, or until a resident comes or goes.
        """
        if self.residents:
            if not 0.0 <= now - self._looked_at < LOOK_EVERY_S:
                self._looked_at = now
                self._hold = self._look(now)
            if self._hold is not None:
                return self._hold
        ahead_s = self.next_gap_s()
        if ahead_s is None:
            return None
        for running, slo_s in zip(self._engine.running_of, self._slos, strict=True):
            if running and slo_s is not None and ahead_s > slo_s * SAFETY:
                return Hold.NEXT_GAP
        return None

    def _look(self, now: float) -> Hold | None:
        self.advance(now)
        for gap, slo_s in zip(self._classes, self._slos, strict=True):
            if slo_s is None or not gap.residents:
                continue
            measured_s = gap.gap_s()
            if measured_s is not None and measured_s > slo_s * SAFETY:
                return Hold.GAP
        return None

    def state(self, now: float) -> dict[str, object]:
        """What is measured and learned, for `/debug/state`; classes in the policy's order."""
        self.advance(now)
        return {
            "residents": self.residents,
            "next_gap_s": self.next_gap_s(),
            "curve": {
                "seconds_per_resident": self.curve.slope if self.curve.known else None,
                "overhead_s": self.curve.intercept if self.curve.known else None,
                "relative_error": self.curve.relative_deviation if self.curve.known else None,
                "samples": self.curve.samples,
                "learned": self.curve.known,
            },
            "classes": [
                {"residents": gap.residents, "gap_s": gap.gap_s(), "slo_itl_s": slo_s}
                for gap, slo_s in zip(self._classes, self._slos, strict=True)
            ],
        }
