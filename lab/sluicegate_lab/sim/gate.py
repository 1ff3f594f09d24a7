"""The gate in the simulator: the very Controller of `sluicegate_core`, driven by the shell's calls.

It is told what the gate in a pod is told: bytes of the prompt, class, client, each token as it comes, and at the end
what the engine counted. Not the true lengths, and nothing of the engine's parameters.

Tokens are told in bulk. The Controller's `progress` adds each chunk to `pace.fresh` and samples the pace when that is
due; between two looks at it the order of chunks has no effect. So `tokens` adds all streams' tokens of a run of steps
at once, runs are cut where a sample is due, and each stream's own progress (its last token, its mean gap) is told when
it ends. With `each_token` it is told stream by stream and step by step instead: the slow truth, that tests hold the
fast way against.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from sluicegate_core.controller import Controller
from sluicegate_core.effects import Effect, EngineSnapshot, Evict, Reject, Start, Truth
from sluicegate_core.policy import Policy
from sluicegate_core.request import DECODE, Request
from sluicegate_core.vocabulary import EngineStatus, Reason
from sluicegate_lab.sim.world import Attempt, World


class GateFront:
    """The Controller as a front.

    Attributes:
        controller: for what it has learned and counted.
    """

    def __init__(self, policy: Policy, *, seed: int, each_token: bool = False) -> None:
        self.controller = Controller(policy, now=0.0, rng=random.Random(f"{seed} gate"))
        self._each_token = each_token
        self._world: World

    @property
    def wake_at(self) -> float:
        return self.controller.wake_at

    @property
    def look_at(self) -> float:
        return 0.0 if self._each_token else self.controller.pace.sample_due

    def attach(self, world: World) -> None:
        self._world = world

    def arrive(self, now: float, attempt: Attempt) -> None:
        workload = self._world.workload
        demand = attempt.demand
        request = Request(
            class_index=attempt.class_index,
            client=workload.clients[demand],
            prompt_bytes=workload.prompt_bytes[demand],
            streams=attempt.streams,
            is_retry=attempt.tries > 1,
            owner=attempt,
        )
        attempt.handle = request
        effects = self.controller.arrive(now, request)
        attempt.predicted_ttft_s = request.predicted_ttft_s
        self._carry_out(effects)

    def tokens(self, now: float, steps: int, decoding_of: Sequence[int]) -> None:
        if self._each_token:
            self._tell_each(now)
            return
        pace = self.controller.pace
        fresh = pace.fresh
        for index in range(len(fresh)):
            fresh[index] += steps * decoding_of[index]
        if now >= pace.sample_due:
            pace.sample(now)

    def _tell_each(self, now: float) -> None:
        engine = self._world.engine
        for request in list(self.controller.running_requests):
            if request.stage is DECODE:
                attempt = request.owner
                assert isinstance(attempt, Attempt)
                assert attempt.inside is not None
                self.controller.progress(now, request, engine.tokens_out(attempt.inside) - request.tokens_out)

    def first_token(self, now: float, attempt: Attempt) -> None:
        request = attempt.handle
        assert isinstance(request, Request)
        self._carry_out(self.controller.first_token(now, request))

    def finish(self, now: float, attempt: Attempt) -> None:
        request = attempt.handle
        assert isinstance(request, Request)
        self._settle(now, attempt, request)
        truth = Truth(attempt.prompt_tokens, attempt.output_tokens)
        self._carry_out(self.controller.finish(now, request, truth))

    def cancel(self, now: float, attempt: Attempt) -> None:
        request = attempt.handle
        assert isinstance(request, Request)
        self._carry_out(self.controller.cancel(now, request))

    def fail(self, now: float, attempt: Attempt) -> None:
        request = attempt.handle
        assert isinstance(request, Request)
        self._carry_out(self.controller.fail(now, request, Reason.ENGINE_ERROR, Truth()))

    def tick(self, now: float) -> None:
        self._carry_out(self.controller.tick(now))

    def status(self, now: float, status: EngineStatus) -> None:
        self._carry_out(self.controller.engine_status(now, status))

    def poll(self, now: float, snapshot: EngineSnapshot) -> None:
        self._carry_out(self.controller.engine_snapshot(now, snapshot))

    def _settle(self, now: float, attempt: Attempt, request: Request) -> None:
        """Tell a stream's own progress, whose tokens the pace has had already."""
        if request.stage is DECODE:
            missing = attempt.output_tokens - request.tokens_out
            if missing > 0:
                if not self._each_token:
                    self.controller.pace.fresh[request.class_index] -= missing
                self.controller.progress(now, request, missing)

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        world = self._world
        for effect in effects:
            attempt = effect.request.owner
            assert isinstance(attempt, Attempt)
            if isinstance(effect, Start):
                world.start(attempt)
            else:
                assert isinstance(effect, Reject | Evict)
                refusal = effect.refusal
                world.refuse(
                    attempt,
                    refusal.reason.value,
                    retry_after_s=refusal.retry_after_s,
                    should_retry=refusal.should_retry,
                )
