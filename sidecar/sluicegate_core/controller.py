"""The Controller: events with `now` in, effects out.

It owns every request from its arrival to its end, and all state of the decision; nothing in it waits, reads a
clock or does I/O. Its shell (the gate, the simulator, a test) calls one method an event, carries out the
returned effects in order, and calls `tick` at `wake_at`.

Invariants, each with a test over thousands of interleavings:

- Closing: offered = served + rejected + evicted + failed + in flight, for each class, after each event.
- Tickets: a request is started at most once and ends exactly once; whatever else is asked asserts.
- Work conservation: no request waits that nothing holds (`handover` has the list of holds), but for
  `LOOK_AGAIN_S` where a hold ended by the mere passing of time.
- No refusal by prediction while there is room for the request and nobody ahead of it (`layers`).

The parts: `estimate` (work), `predict` (times), `pace` (inter-token SLO), `engine` (occupancy), `line` (turns),
`layers` (whom to refuse), `refusal` and `retry` (what to tell them), `handover` (whom to start).
"""

import random
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import Final

from sluicegate_core.effects import Effect, EngineSnapshot, Evict, Reject, Start, Truth
from sluicegate_core.engine import EngineView
from sluicegate_core.estimate import Estimator
from sluicegate_core.handover import HandOver
from sluicegate_core.layers import PROBE_EVERY_S, Scene, decide
from sluicegate_core.line import Line
from sluicegate_core.pace import Pace
from sluicegate_core.policy import Mode, Policy
from sluicegate_core.predict import Predictor
from sluicegate_core.refusal import Refusals
from sluicegate_core.request import DECODE, ENDED, NEW, OUTPUT_TOKEN_COST, PREFILL, WAITING, Request
from sluicegate_core.stats import ClassStats
from sluicegate_core.vocabulary import EngineStatus, Hold, Outcome, Reason

#: While somebody waits, hand-over is tried again after so long without an event: several times within the
#: window of the measured gap.
LOOK_AGAIN_S: Final = 0.02
#: Lessons (lengths, holding times; service apart) are taken at most this often: a hundred a second teach as well
#: as all of them.
LESSON_EVERY_S: Final = 0.01
#: Records of classes that a policy no longer has, kept so that their counters do not jump.
MAX_CLASS_RECORDS: Final = 64

WITH_ENGINE: Final = (PREFILL, DECODE)
NOT_WITH_ENGINE: Final = "released twice, or never started"
SLO_UNREACHABLE: Final = Reason.SLO_UNREACHABLE
SERVED: Final = Outcome.SERVED
REJECTED: Final = Outcome.REJECTED
EVICTED: Final = Outcome.EVICTED
FAILED: Final = Outcome.FAILED
NO_EFFECTS: Final[tuple[Effect, ...]] = ()
NEVER: Final = float("inf")


class Controller:
    """The decision for one engine. Not thread-safe: one task owns it."""

    def __init__(self, policy: Policy, *, now: float, rng: random.Random) -> None:
        """
        Args:
            policy: validated (`parse_policy`).
            now: seconds of the shell's monotonic clock.
            rng: seeded source of jitter.
        """
        self.policy = policy
        self.line = Line([c.weight for c in policy.classes])
        self.engine = EngineView(len(policy.classes), policy.engine.slots)
        self.pace = Pace(policy, self.engine)
        self.predictor = Predictor(policy)
        self.estimator = Estimator()
        self.stats: dict[str, ClassStats] = {c.name: ClassStats(c.name) for c in policy.classes}
        self.refusals = Refusals(rng)
        self.draining = False
        self._enforces = policy.mode is Mode.ENFORCE
        self._hand_over = HandOver(policy, self.engine, self.pace, self.predictor)
        self._running: dict[Request, None] = {}
        self._deadlines: list[tuple[float, int, Request]] = []
        self._sequence = 0
        self._probed_at = now - PROBE_EVERY_S
        self._looked_at = now
        self._lesson_due = self._service_due = now

    # What the shell needs besides effects.

    @property
    def wake_at(self) -> float:
        """When `tick` is due, s; infinity while nobody waits."""
        if not self.line.count:
            return NEVER
        deadlines = self._deadlines
        while deadlines and deadlines[0][2].stage is not WAITING:
            heappop(deadlines)
        again = self._looked_at + LOOK_AGAIN_S
        if deadlines and deadlines[0][0] < again:
            return deadlines[0][0]
        return again

    @property
    def waiting(self) -> int:
        return self.line.count

    @property
    def running(self) -> int:
        return self.engine.running

    @property
    def running_requests(self) -> Iterable[Request]:
        """Those with the engine, in the order of their hand-over."""
        return self._running.keys()

    # Events.

    def arrive(self, now: float, request: Request) -> Sequence[Effect]:
        """A request came: it starts, waits, or is refused."""
        assert request.stage is NEW
        policy = self.policy.classes[request.class_index]
        stats = request.stats = self.stats[policy.name]
        stats.offered += 1
        if request.is_retry or request.request_id in self.refusals.retries.ids:
            request.is_retry = True
            stats.retries += 1
        request.arrived_at = now
        self._sequence += 1
        request.sequence = self._sequence
        self.estimator.estimate(request, policy.name)
        if not request.is_retry:
            stats.work_offered += request.cost

        line = self.line
        if self._enforces:
            scene = self._scene(now, request)
            request.predicted_ttft_s = scene.ttft_s
            reason = decide(scene)
            if reason is not SLO_UNREACHABLE:
                self.predictor.classes[request.class_index].arrived(now)
            if reason is not None:
                self._end(request, REJECTED, reason)
                return (Reject(request, self.refusals.refuse(now, reason, scene)),)
            if scene.idle and scene.probe_due and scene.alone_s is not None:
                self._probed_at = now
            if scene.hold is None and not line.count:
                # Nobody waits, so it takes nobody's turn: its work is charged to no share.
                return (self._hand_to_engine(now, request, scene.service_s),)
            hold = scene.hold
            request.deadline = self._deadline(now, request)
        elif not line.count:
            return (self._hand_to_engine(now, request, None),)
        else:
            hold = None
            request.deadline = NEVER
        request.stage = WAITING
        line.append(request)
        if line.queues[request.class_index].count == 1:
            self.predictor.line_changed(now, line)
        # Those who were held before are so still, but for the time that has passed: `tick` looks after them.
        effects = NO_EFFECTS if hold is not None else self._start_those_who_may(now)
        if request.stage is WAITING:
            request.was_queued = True
            stats.queued += 1
            heappush(self._deadlines, (request.deadline, request.sequence, request))
        return effects

    def first_token(self, now: float, request: Request) -> Sequence[Effect]:
        """The first token of a streamed answer came."""
        if request.stage is not PREFILL:
            return NO_EFFECTS
        request.stage = DECODE
        request.first_token_at = request.last_token_at = now
        request.tokens_out = 1
        self.engine.begun(now, request)
        self.pace.enter(now, request.class_index)
        if now >= self._service_due:
            self._service_due = now + LESSON_EVERY_S
            self._learn_service(request, self.engine.own_service_s(now, request))
        self._observe_ttft(request, now - request.arrived_at)
        return self._start_those_who_may(now)

    def progress(self, now: float, request: Request, tokens: int) -> None:
        """Further tokens came, all at once. On the path of every chunk; has no effects."""
        if request.stage is not DECODE or tokens <= 0:
            return
        gap_s = (now - request.last_token_at) / tokens
        request.last_token_at = now
        request.tokens_out += tokens
        request.stats.itl_s.add(gap_s)  # type: ignore[union-attr]  # set at arrival
        pace = self.pace
        pace.fresh[request.class_index] += tokens
        if now >= pace.sample_due:
            pace.sample(now)

    def finish(self, now: float, request: Request, truth: Truth, *, teaches: bool = True) -> Sequence[Effect]:
        """The answer reached the client whole.

        Args:
            truth: what the engine reported of it.
            teaches: False where the answer says nothing about the work, such as one to a malformed request.
        """
        assert request.stage in WITH_ENGINE, NOT_WITH_ENGINE
        stats = request.stats
        assert stats is not None
        output_tokens = truth.output_tokens if truth.output_tokens is not None else request.tokens_out or None
        if not request.generates and teaches:
            # Nothing is generated token by token: its end is its first token.
            request.first_token_at = now
            self._observe_ttft(request, now - request.arrived_at)
        if teaches and now >= self._lesson_due:
            self._lesson_due = now + LESSON_EVERY_S
            self._learn(now, request, truth.prompt_tokens, output_tokens)
        stats.total_s.add(now - request.arrived_at)
        stats.tokens_in += truth.prompt_tokens if truth.prompt_tokens is not None else request.prompt_tokens
        stats.tokens_out += output_tokens or 0
        stats.work_predicted += request.cost
        if self._within_slo(request, output_tokens):
            stats.served_in_slo += 1
        return self._release(now, request, SERVED, None, truth)

    def fail(self, now: float, request: Request, reason: Reason, truth: Truth) -> Sequence[Effect]:
        """A request with the engine came to nothing. It teaches no estimator."""
        return self._release(now, request, FAILED, reason, truth)

    def cancel(self, now: float, request: Request) -> Sequence[Effect]:
        """The client left. One that waits is dropped and never handed over."""
        if request.stage is WAITING:
            self._leave_line(now, request)
            self._end(request, EVICTED, Reason.CLIENT_GONE)
            return self._start_those_who_may(now)
        return self._release(now, request, FAILED, Reason.CLIENT_GONE, Truth())

    def engine_status(self, now: float, status: EngineStatus) -> Sequence[Effect]:
        """The engine was found up, loading or down."""
        self.engine.status = status
        return self._start_those_who_may(now)

    def engine_snapshot(self, now: float, snapshot: EngineSnapshot) -> Sequence[Effect]:
        """The engine's own word on itself."""
        self.engine.snapshot(now, snapshot)
        return self._start_those_who_may(now)

    def tick(self, now: float) -> Sequence[Effect]:
        """Time passed: evict whose last moment is over, start who may go."""
        effects: list[Effect] = []
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= now or deadlines[0][2].stage is not WAITING):
            request = heappop(deadlines)[2]
            if request.stage is WAITING:
                effects.append(self._evict(now, request, Reason.DEADLINE))
        effects.extend(self._start_those_who_may(now))
        return effects

    def drain(self, now: float) -> Sequence[Effect]:
        """The pod is going away: refuse what comes, serve what waits."""
        self.draining = True
        return self._start_those_who_may(now)

    def give_up_line(self, now: float) -> Sequence[Effect]:
        """The drain's bound is over: evict everybody who still waits."""
        return [self._evict(now, request, Reason.DRAINED) for request in list(self.line)]

    def reconfigure(self, now: float, policy: Policy) -> Sequence[Effect]:
        """Another policy is in force from now on; nothing in flight is lost.

        What was learned of a class stays with its name. Requests of a class that is gone continue in the
        default class; those that wait keep their deadline.
        """
        waiting = sorted(self.line, key=lambda r: r.sequence)
        index_of = {c.name: i for i, c in enumerate(policy.classes)}
        default = index_of[policy.classify.default]
        moved = [index_of.get(c.name, default) for c in self.policy.classes]

        self.policy = policy
        self._enforces = policy.mode is Mode.ENFORCE
        self.line = Line([c.weight for c in policy.classes])
        for request in waiting:
            request.class_index = moved[request.class_index]
            self.line.append(request)
        for request in self._running:
            request.class_index = moved[request.class_index]
            request.flow = None
        self.engine.reconfigure(len(policy.classes), moved, policy.engine.slots)
        self.pace.reconfigure(policy, moved)
        self.predictor.reconfigure(policy)
        self.predictor.line_changed(now, self.line)
        self._hand_over.reconfigure(policy)
        for c in policy.classes:
            self.stats.setdefault(c.name, ClassStats(c.name))
        for name in [n for n, s in self.stats.items() if n not in index_of and not s.in_flight]:
            if len(self.stats) <= MAX_CLASS_RECORDS:
                break
            del self.stats[name]
        return self._start_those_who_may(now)

    # What holds the line, for `/debug/state` and tests.

    def hold(self, now: float, request: Request) -> Hold | None:
        """What keeps a waiting request from the engine, or None if it may go."""
        self.engine.advance(now)
        hold = self._hand_over.hold(now, request)
        if hold is None and self.line.count:
            turn = self.line.turn(lambda index: self._hand_over.hold_class(now, index))
            if turn is None or turn.next_flow().head is not request:
                return Hold.TURN
        return hold

    def kept_slots(self, now: float, class_index: int) -> int | None:
        """Slots kept for a class; None where the engine's slots are unknown."""
        slots = self.engine.slots(now)
        return None if slots is None else self._hand_over.kept_for(now, class_index, slots)

    # Arrival.

    def _scene(self, now: float, request: Request) -> Scene:
        line, engine = self.line, self.engine
        if engine.expected:
            engine.advance(now)
        own_queue = line.queues[request.class_index]
        hold = self._hand_over.hold(now, request)
        if hold is None and own_queue.count == 0:
            wait_s: float | None = 0.0
        else:
            wait_s = self.predictor.wait_s(now, request, line, engine.running)
        backlog = engine.pending_tokens
        service_s = self.predictor.service_s(request, backlog)
        alone_s = service_s if not backlog else self.predictor.service_s(request, 0)
        return Scene(  # by position: by name it costs three times as much
            request,
            self.policy.classes[request.class_index],
            engine.status,
            self.draining,
            not engine.running and not line.count,  # idle
            now - self._probed_at >= PROBE_EVERY_S,  # probe_due
            line.count,
            hold,
            wait_s,
            service_s,
            alone_s,
        )

    def _deadline(self, now: float, request: Request) -> float:
        """The last moment at which the request may still wait: service must yet make its SLO."""
        policy = self.policy.classes[request.class_index]
        patience_s = policy.max_queue_time_s
        if policy.slo.ttft_s is not None:
            service_s = self.predictor.cautious_service_s(request)
            left_s = policy.slo.ttft_s - (service_s or 0.0)
            if left_s < patience_s:
                patience_s = left_s if left_s > 0.0 else 0.0
        return now + patience_s

    def _evict(self, now: float, request: Request, reason: Reason) -> Evict:
        self._leave_line(now, request)
        refusal = self.refusals.refuse(now, reason, self._scene(now, request))
        self._end(request, EVICTED, reason)
        return Evict(request, refusal)

    # The line.

    def _start_those_who_may(self, now: float) -> Sequence[Effect]:
        self._looked_at = now
        if not self.line.count:
            return NO_EFFECTS
        self.engine.advance(now)
        line, hand_over = self.line, self._hand_over
        effects: list[Effect] = []
        while line.count and hand_over.hold_all(now) is None:
            request = line.next(lambda index: hand_over.hold_class(now, index))
            if request is None or hand_over.hold_prompt(request) is not None:
                break
            effects.append(self._start(now, request))
        if effects:
            self._trim_deadlines()
        return effects

    def _start(self, now: float, request: Request) -> Start:
        self.predictor.handed_over(now, request)
        self.line.take(request)
        if not self.line.queues[request.class_index].count:
            self.predictor.line_changed(now, self.line)
        service_s = self.predictor.service_s(request, self.engine.pending_tokens) if self._enforces else None
        return self._hand_to_engine(now, request, service_s)

    def _hand_to_engine(self, now: float, request: Request, service_s: float | None) -> Start:
        """The request is the engine's from now on; `service_s` is predicted with the backlog as it stands."""
        request.stage = PREFILL
        request.started_at = now
        request.backlog_at_start = self.engine.pending_tokens
        request.predicted_service_s = service_s
        self._running[request] = None
        self.engine.started(request, service_s)
        stats = request.stats
        assert stats is not None
        stats.started += 1
        stats.queue_delay_s.add(now - request.arrived_at)
        return Start(request)

    def _leave_line(self, now: float, request: Request) -> None:
        self.line.remove(request)
        if not self.line.queues[request.class_index].count:
            self.predictor.line_changed(now, self.line)
        self._trim_deadlines()

    def _trim_deadlines(self) -> None:
        """Those who leave the line in time leave entries behind; rebuilt when they are most of the heap."""
        if len(self._deadlines) > 2 * self.line.count + 64:
            self._deadlines[:] = [entry for entry in self._deadlines if entry[2].stage is WAITING]
            heapify(self._deadlines)

    # The end.

    def _learn(
        self, now: float, request: Request, prompt_tokens: int | None, output_tokens: int | None
    ) -> None:
        """Learn from an answer that reached its client whole."""
        class_index = request.class_index
        name = self.policy.classes[class_index].name
        total_s = now - request.started_at
        self.estimator.learn(request, name, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        self.predictor.learn_holding(class_index, total_s)
        if request.stage is not PREFILL:  # streamed: its service was learned at the first token
            return
        service_s: float | None = None
        if not request.generates:
            service_s = total_s
        elif output_tokens:
            service_s = self.predictor.silent_service_s(
                total_s, output_tokens, self.pace.curve.at(self.running)
            )
        if service_s is not None:
            self._learn_service(request, service_s)

    def _learn_service(self, request: Request, service_s: float) -> None:
        self.predictor.learn_service(request, service_s)
        self.engine.allow_backlog(self.predictor.service.slope)

    def _observe_ttft(self, request: Request, ttft_s: float) -> None:
        stats = request.stats
        assert stats is not None
        stats.ttft_s.add(ttft_s)
        if request.predicted_ttft_s is not None and ttft_s > 0.0:
            stats.prediction_ratio.add(request.predicted_ttft_s / ttft_s)

    def _within_slo(self, request: Request, output_tokens: int | None) -> bool:
        """Was the answer within its class's SLO?

        An answer that generates but is not streamed shows its first token to nobody: it is judged by its wait
        and the service predicted for it, and by its wait alone while that is unknown.
        """
        slo = self.policy.classes[request.class_index].slo
        if request.first_token_at:
            ttft_s = request.first_token_at - request.arrived_at
        else:
            ttft_s = request.started_at - request.arrived_at + (request.predicted_service_s or 0.0)
        if slo.ttft_s is not None and ttft_s > slo.ttft_s:
            return False
        if slo.itl_s is not None and request.tokens_out > 1:
            tokens = max(request.tokens_out, output_tokens or 0)
            mean_gap_s = (request.last_token_at - request.first_token_at) / (tokens - 1)
            return mean_gap_s <= slo.itl_s
        return True

    def _release(
        self, now: float, request: Request, outcome: Outcome, reason: Reason | None, truth: Truth
    ) -> Sequence[Effect]:
        """Give the ticket back: once, whatever the way it ends."""
        assert request.stage in WITH_ENGINE, NOT_WITH_ENGINE
        del self._running[request]
        if request.stage is DECODE:
            self.pace.leave(now, request.class_index)
            if outcome is FAILED:
                assert request.stats is not None
                request.stats.work_failed += request.prompt_tokens + OUTPUT_TOKEN_COST * request.tokens_out
        self.engine.ended(now, request)
        if request.flow is not None:
            prompt_tokens = truth.prompt_tokens if truth.prompt_tokens is not None else request.prompt_tokens
            output_tokens = truth.output_tokens if truth.output_tokens is not None else request.tokens_out
            self.line.settle(request, prompt_tokens + OUTPUT_TOKEN_COST * output_tokens)
        self._end(request, outcome, reason)
        return self._start_those_who_may(now)

    def _end(self, request: Request, outcome: Outcome, reason: Reason | None) -> None:
        request.stage = ENDED
        request.flow = None
        assert request.stats is not None
        request.stats.ended(outcome, reason)
