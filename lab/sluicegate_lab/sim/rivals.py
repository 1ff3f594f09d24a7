"""Rivals: what others put before an engine. Each is a front with a few settings; `grid` has the settings compared.

- `Passes`: nothing. The engine's own line is unbounded.
- `Cap`: at most so many with the engine, so many wait in a line, first come, first served, or the greater weight
  first (strict priority); the rest is refused. Envoy's circuit breaker, nginx, Knative's queue-proxy.
- `EngineCap`: passes until the engine's own line has so many requests, or prompt tokens: vLLM's `--max-num-queued-reqs`
  and `--max-num-queued-tokens`.
- `Bucket`: a token bucket of work in tokens a second (prompt, and twice an assumed answer).

Those that adapt live in `limits`. None refuses for a predicted time, so none predicts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from sluicegate_core.effects import EngineSnapshot
from sluicegate_core.request import OUTPUT_TOKEN_COST
from sluicegate_core.vocabulary import EngineStatus
from sluicegate_lab.sim.world import NEVER, Attempt, World

#: Answers are taken for this long by who cannot know, tokens.
ASSUMED_OUTPUT_TOKENS: Final = 256


class Passes:
    """No gate, and the base of the others: it keeps no state but what is with the engine."""

    def __init__(self) -> None:
        self.inside = 0
        self._world: World

    @property
    def wake_at(self) -> float:
        return NEVER

    @property
    def look_at(self) -> float:
        return NEVER

    def attach(self, world: World) -> None:
        self._world = world

    def arrive(self, now: float, attempt: Attempt) -> None:
        self._start(attempt)

    def _start(self, attempt: Attempt) -> None:
        self.inside += 1
        self._world.start(attempt)

    def first_token(self, now: float, attempt: Attempt) -> None:
        """Nothing is learned."""

    def tokens(self, now: float, steps: int, decoding_of: Sequence[int]) -> None:
        """Nothing is learned."""

    def finish(self, now: float, attempt: Attempt) -> None:
        self.inside -= 1
        self.freed(now)

    def cancel(self, now: float, attempt: Attempt) -> None:
        if attempt.started_at == attempt.started_at:
            self.inside -= 1
            self.freed(now)

    def fail(self, now: float, attempt: Attempt) -> None:
        self.inside -= 1
        self.freed(now)

    def freed(self, now: float) -> None:
        """There is one fewer with the engine."""

    def tick(self, now: float) -> None:
        """Nothing waits."""

    def status(self, now: float, status: EngineStatus) -> None:
        """Not looked at."""

    def poll(self, now: float, snapshot: EngineSnapshot) -> None:
        """Not looked at."""


class Cap(Passes):
    """A cap on concurrency with a bounded line.

    Attributes:
        cap: requests with the engine.
        line: that may wait.
        weights: of the classes, where the greater goes first and takes the place of a lesser in a full line;
            None: first come, first served.
    """

    def __init__(self, cap: float, line: int, weights: Sequence[int] | None = None) -> None:
        super().__init__()
        self.cap = cap
        self.line = line
        self._by_class = None if weights is None else [max(weights) - w for w in weights]
        self._queues: dict[int, deque[Attempt]] = {}
        self._waiting = 0

    def arrive(self, now: float, attempt: Attempt) -> None:
        if self.inside < self.cap and not self._waiting:
            self._start(attempt)
            return
        level = 0 if self._by_class is None else self._by_class[attempt.class_index]
        if self._waiting >= self.line and not self._evict_below(level):
            self._world.refuse(attempt, "line_full")
            return
        self._queues.setdefault(level, deque()).append(attempt)
        self._waiting += 1

    def _evict_below(self, level: int) -> bool:
        """Make room by the last of the lowest class that waits, if it is lower than this one."""
        lowest = max((one for one, queue in self._queues.items() if queue), default=level)
        if lowest <= level:
            return False
        queue = self._queues[lowest]
        while queue:
            last = queue.pop()
            if not last.ended:
                self._waiting -= 1
                self._world.refuse(last, "displaced")
                return True
        return False

    def cancel(self, now: float, attempt: Attempt) -> None:
        if attempt.started_at != attempt.started_at:
            self._waiting -= 1  # it stays in its queue, and is dropped when its turn comes
        super().cancel(now, attempt)

    def freed(self, now: float) -> None:
        while self._waiting and self.inside < self.cap:
            queue = self._queues[min(level for level, queue in self._queues.items() if queue)]
            attempt = queue.popleft()
            if not attempt.ended:
                self._waiting -= 1
                self._start(attempt)


class EngineCap(Passes):
    """The engine's own caps on what waits in it."""

    def __init__(self, *, requests: int | None = None, tokens: int | None = None) -> None:
        super().__init__()
        self._requests = requests
        self._tokens = tokens

    def arrive(self, now: float, attempt: Attempt) -> None:
        engine = self._world.engine
        if (self._requests is not None and engine.waiting_count >= self._requests) or (
            self._tokens is not None and engine.waiting_tokens + attempt.prompt_tokens > self._tokens
        ):
            self._world.refuse(attempt, "engine_queue")
        else:
            self._start(attempt)


class Bucket(Passes):
    """A token bucket on work."""

    def __init__(self, tokens_per_s: float, burst_s: float) -> None:
        super().__init__()
        self._rate = tokens_per_s
        self._most = tokens_per_s * burst_s
        self._level = self._most
        self._at = 0.0

    def arrive(self, now: float, attempt: Attempt) -> None:
        self._level = min(self._most, self._level + (now - self._at) * self._rate)
        self._at = now
        cost = attempt.prompt_tokens + OUTPUT_TOKEN_COST * ASSUMED_OUTPUT_TOKENS
        # A prompt larger than the bucket passes when it is full, and leaves a debt.
        if self._level < min(cost, self._most):
            self._world.refuse(
                attempt, "bucket", retry_after_s=(min(cost, self._most) - self._level) / self._rate
            )
            return
        self._level -= cost
        self._start(attempt)
