"""A small world for the core: an engine, its clients and a shell around the controller, in virtual time.

The engine batches continuously: a step costs `base_s + per_stream_s x streams + per_prompt_token_s x prompt tokens
prefilled in it`, at most `chunk` of them; at most `slots` requests run, the rest stand in the engine's own line,
first come, first served. Requests can fail, be cut, hang and be refused by it; it can stall, die, come back and
change its number of slots. Clients can leave, and come back after a refusal.

The world carries out the controller's effects as the gate does. With `checked` it holds the controller against the
naive model (`ledger`) after every event. Everything follows from the jobs and the seed.
"""

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from tests.simulation.ledger import Ledger

from sluicegate_core.controller import NEVER, Controller
from sluicegate_core.effects import Effect, EngineSnapshot, Evict, Refusal, Reject, Start, Truth
from sluicegate_core.policy import Policy
from sluicegate_core.request import OUTPUT_TOKEN_COST, Request, Stage
from sluicegate_core.vocabulary import EngineStatus, Outcome, Reason

#: After so long without a byte the shell gives a request up.
HANG_BOUND_S = 20.0


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """Parameters of the engine; seconds and tokens."""

    base_s: float = 0.010
    per_stream_s: float = 0.0002
    per_prompt_token_s: float = 0.0001
    chunk: int = 2048
    slots: int = 64
    reports_every_s: float | None = None  # how often the shell polls what runs and waits in it
    reports_slots: bool = False


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request as it truly is; the controller is told bytes and class only."""

    at: float
    class_index: int  # in the policy that the world began with
    prompt_tokens: int
    output_tokens: int
    client: str = ""
    leaves_after_s: float | None = None  # the client's patience
    streams: bool = True
    generates: bool = True
    fate: str = "served"  # served, error, cut, hang, busy: what the engine does with it
    retries: int = 0  # how often its client comes back after a refusal
    request_id: bytes = b""
    tells: bool = True  # the engine reports its usage at the end


class Happening(NamedTuple):
    """Something that befalls everybody: slots, stall (s), down, up, reconfigure, drain, give_up."""

    at: float
    kind: str
    what: object = None


@dataclass(eq=False)
class Running:
    request: Request
    job: Job
    to_prefill: int
    to_decode: int


@dataclass
class Report:
    """What came out, per class index of the first policy."""

    served: list[int]
    good: list[int]  # within the SLO of their class
    good_tokens: list[int]
    refused: list[int]
    ttft_s: list[list[float]] = field(default_factory=list)
    wait_s: list[list[float]] = field(default_factory=list)
    served_of_client: dict[str, float] = field(default_factory=dict)  # work


class World:
    """Runs jobs through a controller and an engine model until all have ended.

    Attributes:
        controller: under test.
        now: s.
        running: inside the engine, with a slot.
        own_line: inside the engine, without one.
    """

    BYTES_A_TOKEN = 4

    def __init__(
        self,
        policy: Policy,
        engine: EngineModel,
        jobs: Iterable[Job],
        *,
        seed: int = 1,
        happenings: Sequence[Happening] = (),
        checked: bool = False,
    ) -> None:
        self.controller = Controller(policy, now=0.0, rng=random.Random(seed + 1))
        self.class_names = policy.class_names
        self.policy = policy
        self.engine = engine
        self.slots = engine.slots
        self.now = 0.0
        self.sequence = count()
        self.events: list[tuple[float, int, str, object]] = []
        self.own_line: deque[Running] = deque()
        self.running: list[Running] = []
        self.inside: dict[Request, Running] = {}
        self.stepping = False
        self.down = False
        self.stalled_until = 0.0
        self.wake: float | None = None
        self.to_come = 0
        self.ledger = Ledger(policy) if checked else None
        self.settled_at = 0.0
        self.refused_ids: set[bytes] = set()
        for job in jobs:
            self.expect(job.at, job)
        for happening in happenings:
            self.push(happening.at, happening.kind, happening.what)
        if engine.reports_every_s:
            self.push(engine.reports_every_s, "poll", None)
        classes = range(len(policy.classes))
        self.report = Report(
            served=[0 for _ in classes],
            good=[0 for _ in classes],
            good_tokens=[0 for _ in classes],
            refused=[0 for _ in classes],
            ttft_s=[[] for _ in classes],
            wait_s=[[] for _ in classes],
        )

    # Time.

    def push(self, at: float, kind: str, what: object) -> None:
        heappush(self.events, (at, next(self.sequence), kind, what))

    def expect(self, at: float, job: Job) -> None:
        self.to_come += 1
        self.push(at, "arrive", job)

    def run(self, limit: int = 10_000_000) -> Report:
        """Until nothing happens any more."""
        for _ in range(limit):
            if not self.events:
                break
            at, _, kind, what = heappop(self.events)
            self.now = max(self.now, at)
            getattr(self, f"on_{kind}")(what)
            self.arm()
            if self.ledger is not None:
                ticked = kind == "wake" and self.settled_at == self.now
                self.ledger.check(
                    self.controller, self.now, settled=self.settled_at == self.now, ticked=ticked
                )
        else:
            raise AssertionError("the world did not come to rest")
        self.at_rest()
        return self.report

    def at_rest(self) -> None:
        controller = self.controller
        assert controller.waiting == controller.running == 0
        assert controller.engine.pending_tokens == controller.pace.residents == 0
        assert not controller.engine.pending
        assert controller.engine.running_of == [0] * len(controller.policy.classes)
        assert all(stats.in_flight == 0 for stats in controller.stats.values())
        assert controller.wake_at == NEVER

    def arm(self) -> None:
        wake = self.controller.wake_at
        if wake != NEVER and (self.wake is None or wake < self.wake):
            self.wake = wake
            self.push(wake, "wake", wake)

    def on_wake(self, at: object) -> None:
        if at == self.wake:
            self.wake = None
            self.took(self.controller.tick(self.now))

    # The controller's word.

    def took(
        self, effects: Iterable[Effect], *, settles: bool = True, arriving: Request | None = None
    ) -> None:
        effects = list(effects)
        if self.ledger is not None:
            if arriving is not None:
                self.ledger.arrived(self.controller, self.now, self.ledger.by_request[arriving], effects)
            else:
                self.ledger.apply(self.controller, self.now, effects)
        if settles:
            self.settled_at = self.now
        for effect in effects:
            request = effect.request
            job = request.owner
            assert isinstance(job, Job)
            match effect:
                case Start():
                    self.hand_over(request, job)
                case Reject(_, refusal) | Evict(_, refusal):
                    self.refuse(request, job, refusal)

    def hand_over(self, request: Request, job: Job) -> None:
        self.report.wait_s[job.class_index].append(self.now - request.arrived_at)
        one = self.inside[request] = Running(request, job, job.prompt_tokens, job.output_tokens)
        if self.down:
            self.push(self.now, "failure", (one, Reason.ENGINE_REFUSED))
        elif job.fate == "busy":
            self.push(self.now + 0.001, "failure", (one, Reason.ENGINE_BUSY))
        else:
            if job.fate == "hang":
                self.push(self.now + HANG_BOUND_S, "failure", (one, Reason.ENGINE_HUNG))
            self.own_line.append(one)
            self.step_soon()

    def refuse(self, request: Request, job: Job, refusal: Refusal) -> None:
        assert 1.0 <= refusal.retry_after_s <= 120.0
        self.report.refused[job.class_index] += 1
        if request.request_id:
            self.refused_ids.add(request.request_id)
        if job.retries and refusal.should_retry:
            self.expect(self.now + refusal.retry_after_s, replace(job, retries=job.retries - 1))

    # Clients.

    def on_arrive(self, job: object) -> None:
        assert isinstance(job, Job)
        self.to_come -= 1
        policy = self.controller.policy
        name = self.class_names[job.class_index]
        request = Request(
            class_index=policy.class_index(name if name in policy.class_names else policy.classify.default),
            client=job.client,
            prompt_bytes=job.prompt_tokens * self.BYTES_A_TOKEN,
            streams=job.streams,
            generates=job.generates,
            request_id=job.request_id,
            owner=job,
        )
        if job.leaves_after_s is not None:
            self.push(self.now + job.leaves_after_s, "leave", request)
        if self.ledger is not None:
            self.ledger.arriving(self.now, request, retry=request.request_id in self.refused_ids)
        self.took(self.controller.arrive(self.now, request), settles=False, arriving=request)

    def on_leave(self, request: object) -> None:
        assert isinstance(request, Request)
        if request.stage in (Stage.WAITING, Stage.PREFILL, Stage.DECODE):
            outcome = Outcome.EVICTED if request.stage is Stage.WAITING else Outcome.FAILED
            self.gone(request, outcome, Reason.CLIENT_GONE)
            self.took(self.controller.cancel(self.now, request))

    # The engine.

    def gone(self, request: Request, outcome: Outcome, reason: Reason | None) -> None:
        """Out of the engine, and of the model's book."""
        one = self.inside.pop(request, None)
        if one is not None:
            if one in self.running:
                self.running.remove(one)
            else:
                self.own_line = deque(o for o in self.own_line if o is not one)
            self.step_soon()
        if self.ledger is not None:
            self.ledger.ended(request, outcome, reason)

    def on_failure(self, what: object) -> None:
        one, reason = what  # type: ignore[misc]
        self.fail(one, reason)

    def fail(self, one: Running, reason: Reason) -> None:
        if one.request in self.inside:
            self.gone(one.request, Outcome.FAILED, reason)
            self.took(self.controller.fail(self.now, one.request, reason, Truth()))

    def step_soon(self) -> None:
        while self.own_line and len(self.running) < self.slots:
            self.running.append(self.own_line.popleft())
        if self.stepping or self.down or self.now < self.stalled_until:
            return
        budget = self.engine.chunk
        plan: list[tuple[Running, int]] = []
        decoding = 0
        for one in self.running:
            if one.job.fate == "hang":
                continue
            if one.to_prefill:
                part = min(one.to_prefill, budget)
                budget -= part
                plan.append((one, part))
            else:
                decoding += 1
                plan.append((one, 0))
        if plan:
            self.stepping = True
            cost_s = (
                self.engine.base_s
                + self.engine.per_stream_s * decoding
                + self.engine.per_prompt_token_s * (self.engine.chunk - budget)
            )
            self.push(self.now + cost_s, "stepped", plan)

    def on_stepped(self, plan: object) -> None:
        self.stepping = False
        for one, part in plan:  # type: ignore[attr-defined]
            if one.request not in self.inside:
                continue
            if one.to_prefill:
                one.to_prefill -= part
                if one.to_prefill:
                    continue
                if one.job.fate == "error":
                    self.fail(one, Reason.ENGINE_ERROR)
                else:
                    self.token(one, first=True)
            else:
                self.token(one, first=False)
        self.step_soon()

    def token(self, one: Running, *, first: bool) -> None:
        one.to_decode -= 1
        if one.job.streams:
            if first:
                self.report.ttft_s[one.job.class_index].append(self.now - one.request.arrived_at)
                if self.ledger is not None:
                    self.ledger.first_token(one.request)
                self.took(self.controller.first_token(self.now, one.request))
            else:
                self.controller.progress(self.now, one.request, 1)
                self.settled_at = -1.0
        if one.job.fate == "cut" and one.to_decode <= one.job.output_tokens // 2:
            self.fail(one, Reason.ENGINE_RESET_MIDSTREAM)
        elif one.to_decode <= 0:
            self.end(one)

    def end(self, one: Running) -> None:
        stats = one.request.stats
        assert stats is not None
        before = stats.served_in_slo
        job = one.job
        truth = Truth(job.prompt_tokens, job.output_tokens) if job.tells else Truth()
        self.gone(one.request, Outcome.SERVED, None)
        self.took(self.controller.finish(self.now, one.request, truth))
        work = job.prompt_tokens + OUTPUT_TOKEN_COST * job.output_tokens
        report = self.report
        report.served[job.class_index] += 1
        report.served_of_client[job.client] = report.served_of_client.get(job.client, 0.0) + work
        if stats.served_in_slo > before:
            report.good[job.class_index] += 1
            report.good_tokens[job.class_index] += int(work)

    def on_poll(self, _: object) -> None:
        snapshot = EngineSnapshot(
            slots=self.slots if self.engine.reports_slots else None,
            running=len(self.running),
            waiting=len(self.own_line),
        )
        if not self.down:
            self.took(self.controller.engine_snapshot(self.now, snapshot))
        if self.to_come or self.inside or self.controller.waiting:
            assert self.engine.reports_every_s is not None
            self.push(self.now + self.engine.reports_every_s, "poll", None)

    # What befalls everybody.

    def on_slots(self, slots: object) -> None:
        assert isinstance(slots, int)
        self.slots = slots
        self.step_soon()

    def on_stall(self, seconds: object) -> None:
        """The engine does nothing for a while; what it had in hand is done afterwards."""
        assert isinstance(seconds, float)
        self.stalled_until = max(self.stalled_until, self.now + seconds)
        self.push(self.stalled_until, "resume", None)

    def on_resume(self, _: object) -> None:
        self.step_soon()

    def on_down(self, _: object) -> None:
        """It dies: what is inside is cut, and the shell finds it down."""
        self.down = True
        self.status(EngineStatus.DOWN)
        for one in list(self.inside.values()):
            early = one.request.stage is Stage.PREFILL
            self.fail(one, Reason.ENGINE_RESET_EARLY if early else Reason.ENGINE_RESET_MIDSTREAM)

    def on_up(self, _: object) -> None:
        self.down = False
        self.status(EngineStatus.UP)
        self.step_soon()

    def status(self, status: EngineStatus) -> None:
        if self.ledger is not None:
            self.ledger.status = status
        self.took(self.controller.engine_status(self.now, status))

    def on_reconfigure(self, policy: object) -> None:
        assert isinstance(policy, Policy)
        if self.ledger is not None:
            self.ledger.reconfigured(policy)
        self.took(self.controller.reconfigure(self.now, policy))

    def on_drain(self, _: object) -> None:
        if self.ledger is not None:
            self.ledger.draining = True
        self.took(self.controller.drain(self.now))

    def on_give_up(self, _: object) -> None:
        self.took(self.controller.give_up_line(self.now))
        assert self.controller.waiting == 0


def poisson_jobs(
    rng: random.Random,
    *,
    rate: float,
    seconds: float,
    mix: list[float],
    prompt: float,
    output: float,
    clients: int = 5,
    start: float = 0.0,
    streams: bool = True,
) -> list[Job]:
    """Poisson arrivals, lengths exponential around their means, classes by `mix`."""
    jobs = []
    at = start
    while True:
        at += rng.expovariate(rate)
        if at > start + seconds:
            return jobs
        jobs.append(
            Job(
                at=at,
                class_index=rng.choices(range(len(mix)), mix)[0],
                prompt_tokens=1 + int(rng.expovariate(1 / prompt)),
                output_tokens=1 + int(rng.expovariate(1 / output)),
                client=f"client-{rng.randrange(clients)}",
                streams=streams,
            )
        )
