"""Hand-over: may this waiting request go to the engine now, and if not, what does it wait for?

Three lists, read from the top: what holds everybody, what holds a class (others pass it), what holds the request
whose turn it is (nobody passes it). The line moves whenever none of them holds that request: that is work
conservation, and its only exception is `RESERVED`, slots that are kept free for a class above.

Slots kept for a class: what its policy states (`reservedSlots`), or else its offered load in Erlangs plus the
square root of it (square-root staffing; Halfin and Whitt 1981), never all of them. Kept slots are for classes
with a greater weight against those with a lesser one. They matter on engines with few slots: there the class
that cannot wait is rarely in line when a slot frees, and the one that can takes every slot.

Room of the KV cache (see `layers`) will be one more line in the first list.
"""

import math
from typing import Final

from sluicegate_core.engine import UNLEARNED_PENDING, EngineView
from sluicegate_core.pace import Pace
from sluicegate_core.policy import Mode, Policy
from sluicegate_core.predict import Predictor
from sluicegate_core.request import Request
from sluicegate_core.vocabulary import NOT_READY, Hold

#: A class that offers less than one request in a hundred holding times has no slot kept for it.
NEGLIGIBLE_LOAD: Final = 0.01


class HandOver:
    """The conditions, over the parts that measure. Changes nothing but the windows of what it reads."""

    __slots__ = (
        "_caps",
        "_enforces",
        "_engine",
        "_has_above",
        "_pace",
        "_predictor",
        "_reserved",
        "_weights",
    )

    def __init__(self, policy: Policy, engine: EngineView, pace: Pace, predictor: Predictor) -> None:
        self._engine = engine
        self._pace = pace
        self._predictor = predictor
        self.reconfigure(policy)

    def reconfigure(self, policy: Policy) -> None:
        self._enforces = policy.mode is Mode.ENFORCE
        self._caps = [c.max_concurrency for c in policy.classes]
        self._weights = [c.weight for c in policy.classes]
        self._reserved = [c.reserved_slots for c in policy.classes]
        self._has_above = [any(other > w for other in self._weights) for w in self._weights]

    def hold_all(self, now: float) -> Hold | None:
        """What holds every request, or None."""
        if not self._enforces:
            return None
        engine = self._engine
        if engine.status in NOT_READY:
            return Hold.ENGINE_DOWN
        if not engine.running:
            return None
        slots = engine.slots(now)
        if slots is not None and engine.running >= slots:
            return Hold.SLOTS
        if engine.pending:
            if engine.pending_tokens >= engine.backlog_bound:
                return Hold.BACKLOG
            if len(engine.pending) >= UNLEARNED_PENDING and not self._predictor.service.known:
                return Hold.BACKLOG
            if engine.stalled(now):
                return Hold.STALLED
        return self._pace.hold(now)

    def hold_class(self, now: float, class_index: int) -> Hold | None:
        """What holds every request of a class, if nothing holds every request: then others may pass it."""
        if not self._enforces:
            return None
        engine = self._engine
        cap = self._caps[class_index]
        if cap is not None and engine.running_of[class_index] >= cap:
            return Hold.CLASS_CAP
        if self._has_above[class_index]:
            slots = engine.slots(now)
            if slots is not None and slots - engine.running <= self._kept_from(now, class_index, slots):
                return Hold.RESERVED
        return None

    def hold_prompt(self, request: Request) -> Hold | None:
        """What holds this request when its turn has come: nobody passes it, or long prompts would never go.

        It goes at the latest when the engine has begun all that it was given.
        """
        engine = self._engine
        if (
            engine.pending
            and self._enforces
            and engine.pending_tokens + request.prompt_tokens > engine.backlog_bound
        ):
            return Hold.PROMPT
        return None

    def kept_for(self, now: float, class_index: int, slots: int) -> int:
        """Slots kept for a class, those it occupies included."""
        stated = self._reserved[class_index]
        if stated is not None:
            return min(stated, slots)
        load = self._predictor.load(now, class_index)
        if load < NEGLIGIBLE_LOAD:
            return 0
        return min(math.ceil(load + math.sqrt(load)), slots - 1)

    def _kept_from(self, now: float, class_index: int, slots: int) -> int:
        """Free slots that this class may not touch, for the sake of the classes above it.

        However many those are and whatever they state, one slot in all is left to the classes below.
        """
        weight = self._weights[class_index]
        kept = above = 0
        for other, other_weight in enumerate(self._weights):
            if other_weight > weight:
                running = self._engine.running_of[other]
                above += running
                kept += max(0, self.kept_for(now, other, slots) - running)
        return max(0, min(kept, slots - 1 - above))

    def hold(self, now: float, request: Request) -> Hold | None:
        """What holds this request now, its turn apart, or None if it may go."""
        return self.hold_all(now) or self.hold_class(now, request.class_index) or self.hold_prompt(request)
