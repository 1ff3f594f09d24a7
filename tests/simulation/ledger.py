"""The naive model of the controller: every request in one plain list, every figure counted anew from it.

It knows nothing of virtual time, heaps, linked lists or predictions. It is told each event and each effect, keeps
what must be true of them, and compares the controller's figures with its own. Slow and obvious on purpose: the
state machine and the simulations hold the controller against it after every event.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from sluicegate_core.controller import NEVER, Controller
from sluicegate_core.effects import Effect, Evict, Reject, Start
from sluicegate_core.policy import Mode, Policy
from sluicegate_core.request import Request, Stage
from sluicegate_core.vocabulary import EngineStatus, Hold, Outcome, Reason

#: Reasons that rest on a prediction: none of them may meet a request for which there is room.
BY_PREDICTION = frozenset({Reason.TTFT, Reason.QUEUE_TIME, Reason.QUEUE_FULL})
REJECTING = BY_PREDICTION | {Reason.DRAINING, Reason.ENGINE_DOWN, Reason.SLO_UNREACHABLE}
EVICTING = frozenset({Reason.DEADLINE, Reason.DRAINED})


@dataclass
class Life:
    """One request as the model sees it."""

    request: Request
    name: str  # of the class it was offered in: its counters stay there
    index: int  # of the class it is in now
    arrived_at: float
    latest: float  # it must not wait longer, whatever is predicted
    stage: str = "new"  # new, waiting, prefill, decode, ended
    outcome: Outcome | None = None
    reason: Reason | None = None


class Ledger:
    """Told what happens; checks it against the rules, and the controller against the count."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.lives: list[Life] = []
        self.by_request: dict[Request, Life] = {}
        self.living: dict[Request, Life] = {}  # in the order of their arrival
        self.offered: Counter[str] = Counter()
        self.ends: Counter[tuple[str, Outcome, Reason | None]] = Counter()
        self.marks: Counter[tuple[str, str]] = Counter()  # started, queued, retry
        self.status = EngineStatus.UNKNOWN
        self.draining = False

    # What happens.

    def arriving(self, now: float, request: Request, *, retry: bool = False) -> Life:
        """Call before `Controller.arrive`."""
        one = self.policy.classes[request.class_index]
        bound_s = min(one.max_queue_time_s, NEVER if one.slo.ttft_s is None else one.slo.ttft_s)
        life = Life(
            request=request,
            name=one.name,
            index=request.class_index,
            arrived_at=now,
            latest=now + bound_s if self.policy.mode is Mode.ENFORCE else NEVER,
        )
        self.lives.append(life)
        self.by_request[request] = self.living[request] = life
        self.offered[life.name] += 1
        self.marks[life.name, "retry"] += retry
        return life

    def arrived(self, controller: Controller, now: float, life: Life, effects: Iterable[Effect]) -> None:
        """Call with the effects of `Controller.arrive`."""
        others_wait = any(o.index == life.index for o in self.of("waiting"))
        life.stage = "waiting"
        self.apply(controller, now, effects, arriving=life)
        if life.stage == "waiting":
            self.marks[life.name, "queued"] += 1
        if life.outcome is Outcome.REJECTED:
            self._fair_refusal(controller, now, life, others_wait=others_wait)
        elif self.draining and self.policy.mode is Mode.ENFORCE:
            raise AssertionError("let in while draining")

    def _fair_refusal(self, controller: Controller, now: float, life: Life, *, others_wait: bool) -> None:
        """Nobody is refused by prediction while there is room for it and nobody ahead."""
        assert self.policy.mode is Mode.ENFORCE, "only enforcing refuses"
        if life.reason in BY_PREDICTION:
            hold = controller._hand_over.hold(now, life.request)
            assert others_wait or hold is not None, f"refused though there is room: {life}"
        if life.reason is Reason.SLO_UNREACHABLE:
            assert (
                controller.predictor.service_s(life.request, 0) > self.policy.classes[life.index].slo.ttft_s
            )  # type: ignore[operator]
        if life.reason is Reason.DRAINING:
            assert self.draining
        if life.reason is Reason.ENGINE_DOWN:
            assert self.status in (EngineStatus.DOWN, EngineStatus.LOADING)

    def apply(
        self, controller: Controller, now: float, effects: Iterable[Effect], *, arriving: Life | None = None
    ) -> None:
        """Check and take in effects, in order."""
        for effect in effects:
            life = self.by_request[effect.request]
            assert life.stage == "waiting", f"{effect} for one that is {life.stage}"
            match effect:
                case Start():
                    self._may_start(life)
                    life.stage = "prefill"
                    self.marks[life.name, "started"] += 1
                case Reject(_, refusal):
                    assert life is arriving, "rejected, but not at its arrival"
                    assert refusal.reason in REJECTING
                    self._refused(life, Outcome.REJECTED, refusal.reason, refusal.retry_after_s)
                    assert refusal.should_retry == (refusal.reason is not Reason.SLO_UNREACHABLE)
                case Evict(_, refusal):
                    assert refusal.reason in EVICTING
                    if refusal.reason is Reason.DEADLINE:
                        assert life.request.deadline <= now, "evicted before its deadline"
                    self._refused(life, Outcome.EVICTED, refusal.reason, refusal.retry_after_s)

    def _refused(self, life: Life, outcome: Outcome, reason: Reason, retry_after_s: float) -> None:
        assert 1.0 <= retry_after_s <= 120.0
        self.ended(life.request, outcome, reason)

    def _may_start(self, life: Life) -> None:
        """Room for this one, by the policy's stated numbers alone."""
        if self.policy.mode is not Mode.ENFORCE:
            return
        assert self.status not in (EngineStatus.DOWN, EngineStatus.LOADING), (
            "started on an engine that is down"
        )
        inside = self.of("prefill", "decode")
        one = self.policy.classes[life.index]
        if inside and one.max_concurrency is not None:
            assert sum(o.index == life.index for o in inside) < one.max_concurrency, "past the class's cap"
        slots = self.policy.engine.slots
        if inside and slots is not None:
            assert len(inside) < slots, "past the engine's slots"
            above = [i for i, other in enumerate(self.policy.classes) if other.weight > one.weight]
            above_inside = sum(o.index in above for o in inside)
            stated = [(i, self.policy.classes[i].reserved_slots or 0) for i in above]
            kept = sum(max(0, n - sum(o.index == i for o in inside)) for i, n in stated)
            kept = min(kept, slots - 1 - above_inside)  # one slot in all is left to those below
            assert slots - len(inside) > kept, "took a slot kept for a class above"
        earlier = [
            o for o in self.of("waiting") if o.index == life.index and o.request.client == life.request.client
        ]
        assert min(o.request.sequence for o in earlier) == life.request.sequence, "overtook its own client"

    def first_token(self, request: Request) -> None:
        self.by_request[request].stage = "decode"

    def ended(self, request: Request, outcome: Outcome, reason: Reason | None) -> None:
        """Call before the effects of `finish`, `fail` and `cancel` are applied."""
        life = self.by_request[request]
        assert life.stage != "ended"
        life.stage, life.outcome, life.reason = "ended", outcome, reason
        del self.living[request]
        self.ends[life.name, outcome, reason] += 1

    def reconfigured(self, policy: Policy) -> None:
        """Call before the effects of `reconfigure` are applied."""
        names = [one.name for one in policy.classes]
        default = names.index(policy.classify.default)
        old = [one.name for one in self.policy.classes]
        for life in self.living.values():
            name = old[life.index]
            life.index = names.index(name) if name in names else default
        self.policy = policy

    # What must be true.

    def of(self, *stages: str) -> list[Life]:
        """Those in one of these stages, in the order of their arrival."""
        among = self.lives if "ended" in stages else self.living.values()
        return [life for life in among if life.stage in stages]

    def check(self, controller: Controller, now: float, *, settled: bool, ticked: bool = False) -> None:
        """Compare every figure.

        Args:
            settled: an event that looks at the whole line was the last, at this very time.
            ticked: that event was a tick.
        """
        self._check_counts(controller)
        self._check_occupancy(controller, now)
        self._check_line(controller)
        self._check_times(controller, now, ticked=ticked)
        if settled:
            self._check_work_conservation(controller, now)

    def _check_counts(self, controller: Controller) -> None:
        """The closing, for each class and in all."""
        living = Counter(life.name for life in self.living.values())
        for name, offered in self.offered.items():
            stats = controller.stats[name]
            assert stats.offered == offered
            assert stats.served == self.ends[name, Outcome.SERVED, None]
            for outcome, counter in (
                (Outcome.REJECTED, stats.rejected),
                (Outcome.EVICTED, stats.evicted),
                (Outcome.FAILED, stats.failed),
            ):
                mine = {r: n for (of, how, r), n in self.ends.items() if of == name and how is outcome}
                assert {r: n for r, n in counter.items() if n} == mine
            assert stats.in_flight == living[name] >= 0
            assert stats.started == self.marks[name, "started"] == stats.queue_delay_s.samples
            assert stats.queued == self.marks[name, "queued"]
            assert stats.retries == self.marks[name, "retry"]
            assert 0 <= stats.served_in_slo <= stats.served
            assert stats.tokens_in >= 0
            assert stats.tokens_out >= 0
        every = controller.stats.values()
        assert sum(s.offered for s in every) == self.offered.total() == len(self.lives)
        ended = sum(s.served + s.rejected.total() + s.evicted.total() + s.failed.total() for s in every)
        assert ended == self.ends.total()
        assert len(self.lives) == ended + controller.waiting + controller.running
        assert len(controller.refusals.recent) <= 100

    def _check_occupancy(self, controller: Controller, now: float) -> None:
        engine, pace = controller.engine, controller.pace
        inside = self.of("prefill", "decode")
        decoding = self.of("decode")
        classes = range(len(self.policy.classes))
        assert controller.running == engine.running == len(inside)
        assert engine.running_of == [sum(o.index == i for o in inside) for i in classes]
        engine.advance(now)
        pending = [o.request for o in self.of("prefill") if not self._silently_done(o.request, now)]
        for request in set(pending) - set(engine.pending):  # one that hangs by itself is not counted for ever
            assert request.predicted_service_s is not None
            assert now - request.started_at > 3.0 * request.predicted_service_s
        assert set(engine.pending) <= set(pending)
        assert engine.pending_tokens == sum(r.prompt_tokens for r in engine.pending)
        assert pace.residents == len(decoding)
        assert [pace._classes[i].residents for i in classes] == [
            sum(o.index == i for o in decoding) for i in classes
        ]

    @staticmethod
    def _silently_done(request: Request, now: float) -> bool:
        expected_s = request.predicted_service_s
        return not request.streams and expected_s is not None and request.started_at + expected_s <= now

    def _check_line(self, controller: Controller) -> None:
        line = controller.line
        waiting = self.of("waiting")
        assert controller.waiting == line.count == len(waiting)
        assert sorted(r.sequence for r in line) == sorted(o.request.sequence for o in waiting)
        for index, queue in enumerate(line.queues):
            mine = [o.request for o in waiting if o.index == index]
            assert queue.count == len(mine)
            assert queue.cost == sum(r.cost for r in mine)
            assert queue.active_flows == len({id(r.flow) for r in mine})
            for flow in queue.flows.values():
                members = [r for r in mine if r.flow is flow]
                assert flow.count == len(members)
                assert flow.cost == sum(r.cost for r in members)
        for life in waiting:
            assert life.request.stage is Stage.WAITING

    def _check_times(self, controller: Controller, now: float, *, ticked: bool) -> None:
        waiting = self.of("waiting")
        for life in waiting:
            assert life.request.deadline <= life.latest
            if ticked:
                assert life.request.deadline > now, "waits past its deadline after a tick"
        if waiting:
            assert controller.wake_at <= min(o.request.deadline for o in waiting)
        else:
            assert controller.wake_at == NEVER
        assert len(controller._deadlines) <= 2 * len(waiting) + 64

    @staticmethod
    def _check_work_conservation(controller: Controller, now: float) -> None:
        """No request that is first of its class waits unless something holds it, and who waits for its turn
        waits for one that a long prompt holds: nobody waits for nobody."""
        heads = [queue.next_flow().head for queue in controller.line.queues if queue.count]
        holds = [controller.hold(now, head) for head in heads if head is not None]
        assert None not in holds, f"nothing holds one of {heads}"
        if Hold.TURN in holds:
            assert Hold.PROMPT in holds, f"waiting for a turn that nobody has: {holds}"
