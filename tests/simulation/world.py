"""A small world for the core: a model of an engine and an open stream of requests, in virtual time.

The engine batches continuously: a step costs `base_s + per_stream_s x streams + per_prompt_token_s x prompt tokens
prefilled in it`, at most `chunk` of them; at most `slots` requests run, the rest stand in the engine's own line,
first come, first served. The world carries out the controller's effects as the gate does, and checks the
controller's invariants after every event.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from sluicegate_core.controller import Controller
from sluicegate_core.effects import Effect, Evict, Reject, Start, Truth
from sluicegate_core.policy import Policy
from sluicegate_core.request import Request, Stage
from sluicegate_core.vocabulary import Reason


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """Parameters of the engine; seconds and tokens."""

    base_s: float = 0.010
    per_stream_s: float = 0.0002
    per_prompt_token_s: float = 0.0001
    chunk: int = 2048
    slots: int = 64


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request as it truly is; the controller is told bytes and class only."""

    at: float
    class_index: int
    prompt_tokens: int
    output_tokens: int
    client: str = ""
    leaves_after_s: float | None = None  # the client's patience
    streams: bool = True


@dataclass
class Running:
    request: Request
    job: Job
    to_prefill: int
    to_decode: int


@dataclass
class Report:
    """What came out, per class index."""

    served: list[int]
    good: list[int]
    good_tokens: list[int]
    refused: list[int]
    ttft_s: list[list[float]] = field(default_factory=list)
    wait_s: list[list[float]] = field(default_factory=list)
    idle_while_waiting_s: float = 0.0


class World:
    """Runs jobs through a controller and an engine model until all have ended."""

    BYTES_A_TOKEN = 4

    def __init__(
        self, policy: Policy, engine: EngineModel, jobs: list[Job], *, seed: int = 1, gated: bool = True
    ) -> None:
        self.rng = random.Random(seed)
        self.controller = Controller(policy, now=0.0, rng=random.Random(seed + 1))
        self.policy = policy
        self.engine = engine
        self.gated = gated
        self.now = 0.0
        self.sequence = count()
        self.events: list[tuple[float, int, str, object]] = []
        for job in jobs:
            self.push(job.at, "arrive", job)
        self.own_line: deque[Running] = deque()
        self.running: list[Running] = []
        self.stepping = False
        self.wake: float | None = None
        self.starts: set[int] = set()
        classes = len(policy.classes)
        self.report = Report(
            served=[0] * classes,
            good=[0] * classes,
            good_tokens=[0] * classes,
            refused=[0] * classes,
            ttft_s=[[] for _ in range(classes)],
            wait_s=[[] for _ in range(classes)],
        )

    def push(self, at: float, kind: str, what: object) -> None:
        heappush(self.events, (at, next(self.sequence), kind, what))

    def run(self, limit: int = 10_000_000) -> Report:
        for _ in range(limit):
            if not self.events:
                break
            at, _, kind, what = heappop(self.events)
            self.now = max(self.now, at)
            getattr(self, f"on_{kind}")(what)
            self.arm()
        else:
            raise AssertionError("the world did not come to rest")
        return self.report

    def arm(self) -> None:
        wake = self.controller.wake_at
        if wake != float("inf") and (self.wake is None or wake < self.wake):
            self.wake = wake
            self.push(wake, "wake", wake)

    def on_wake(self, at: object) -> None:
        if at == self.wake:
            self.wake = None
            self.apply(self.controller.tick(self.now))

    def on_arrive(self, job: object) -> None:
        assert isinstance(job, Job)
        request = Request(
            class_index=job.class_index,
            client=job.client,
            prompt_bytes=job.prompt_tokens * self.BYTES_A_TOKEN,
            streams=job.streams,
            owner=job,
        )
        if job.leaves_after_s is not None:
            self.push(self.now + job.leaves_after_s, "leave", request)
        self.apply(self.controller.arrive(self.now, request))

    def on_leave(self, request: object) -> None:
        assert isinstance(request, Request)
        if request.stage in (Stage.WAITING, Stage.PREFILL, Stage.DECODE):
            self.running = [r for r in self.running if r.request is not request]
            self.own_line = deque(r for r in self.own_line if r.request is not request)
            self.apply(self.controller.cancel(self.now, request))
            self.step_soon()

    def apply(self, effects: object) -> None:
        for effect in effects:  # type: ignore[attr-defined]
            self.carry_out(effect)

    def carry_out(self, effect: Effect) -> None:
        request = effect.request
        job = request.owner
        assert isinstance(job, Job)
        match effect:
            case Start():
                assert request.sequence not in self.starts, "started twice"
                self.starts.add(request.sequence)
                self.report.wait_s[job.class_index].append(self.now - job.at)
                self.own_line.append(Running(request, job, job.prompt_tokens, job.output_tokens))
                self.step_soon()
            case Reject() | Evict():
                assert 1.0 <= effect.refusal.retry_after_s <= 120.0
                self.report.refused[job.class_index] += 1

    def step_soon(self) -> None:
        while self.own_line and len(self.running) < self.engine.slots:
            self.running.append(self.own_line.popleft())
        if self.running and not self.stepping:
            self.stepping = True
            budget = self.engine.chunk
            plan: list[tuple[Running, int]] = []
            decoding = 0
            for one in self.running:
                if one.to_prefill:
                    part = min(one.to_prefill, budget)
                    budget -= part
                    plan.append((one, part))
                else:
                    decoding += 1
                    plan.append((one, 0))
            cost_s = (
                self.engine.base_s
                + self.engine.per_stream_s * decoding
                + self.engine.per_prompt_token_s * (self.engine.chunk - budget)
            )
            self.push(self.now + cost_s, "stepped", plan)

    def on_stepped(self, plan: object) -> None:
        self.stepping = False
        for one, part in plan:  # type: ignore[attr-defined]
            if one.request.stage is Stage.ENDED:
                continue
            if one.to_prefill:
                one.to_prefill -= part
                if one.to_prefill:
                    continue
                self.token(one, first=True)
            else:
                self.token(one, first=False)
        self.step_soon()

    def token(self, one: Running, *, first: bool) -> None:
        one.to_decode -= 1
        if one.job.streams:
            if first:
                self.report.ttft_s[one.job.class_index].append(self.now - one.job.at)
                self.apply(self.controller.first_token(self.now, one.request))
            else:
                self.controller.progress(self.now, one.request, 1)
        if one.to_decode <= 0:
            self.running.remove(one)
            self.step_soon()
            self.end(one)

    def end(self, one: Running) -> None:
        stats = one.request.stats
        assert stats is not None
        before = stats.served_in_slo
        truth = Truth(one.job.prompt_tokens, one.job.output_tokens)
        if self.rng.random() < 0.0:  # pragma: no cover
            self.apply(self.controller.fail(self.now, one.request, Reason.ENGINE_ERROR, truth))
            return
        self.apply(self.controller.finish(self.now, one.request, truth))
        index = one.job.class_index
        self.report.served[index] += 1
        if stats.served_in_slo > before:
            self.report.good[index] += 1
            self.report.good_tokens[index] += one.job.prompt_tokens + 2 * one.job.output_tokens


def poisson_jobs(
    rng: random.Random,
    *,
    rate: float,
    seconds: float,
    mix: list[float],
    prompt: float,
    output: float,
    clients: int = 5,
) -> list[Job]:
    """Poisson arrivals, lengths exponential around their means, classes by `mix`."""
    jobs = []
    at = 0.0
    while True:
        at += rng.expovariate(rate)
        if at > seconds:
            return jobs
        jobs.append(
            Job(
                at=at,
                class_index=rng.choices(range(len(mix)), mix)[0],
                prompt_tokens=1 + int(rng.expovariate(1 / prompt)),
                output_tokens=1 + int(rng.expovariate(1 / output)),
                client=f"client-{rng.randrange(clients)}",
            )
        )
