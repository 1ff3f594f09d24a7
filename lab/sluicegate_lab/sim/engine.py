"""The engine model: continuous batching with chunked prefill, as vLLM's scheduler does it, and llama.cpp's slots.

A step takes

    step_s + sequence_s x sequences in it + prefill_token_s x prompt tokens in it + kv_token_s x KV tokens read

and gives each decoding sequence one token. What is left of `chunk_tokens` after those goes to prompts, first come,
first served: those begun before new ones. Every sequence holds KV blocks for the tokens it has; where a block is
wanted and none is free, the sequence admitted last loses all of its own, goes back to the head of the engine's line,
and is computed anew (vLLM's recomputation). With `prefix_cache`, prompts that share leading blocks compute them once
while they stay cached (least recently used go first). An engine of slots is one with few `max_sequences`.

Exact and fast: while nothing joins or leaves, steps differ only by the KV that grows, so a run of them is one sum
(`begin` with a horizon). Sequences are not touched by each step: a decoding one knows at which step it will end.

Times are seconds; the engine has no clock: its `World` says when a run begins, and calls `end` at its end.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from enum import IntEnum
from heapq import heappop, heappush
from typing import Final

from sluicegate_lab.sim.prefix_cache import BLOCK_TOKENS, PrefixCache

_PHASE: Final = BLOCK_TOKENS - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """Parameters of an engine.

    Attributes:
        step_s: cost of a step whatever is in it.
        sequence_s: cost of each sequence in a step.
        prefill_token_s: cost of each prompt token computed.
        kv_token_s: cost of each token of KV cache read.
        chunk_tokens: tokens a step computes at the most.
        max_sequences: sequences it runs at once; an engine of slots has few.
        kv_blocks: blocks of `BLOCK_TOKENS` tokens.
        prefix_cache: whether blocks of prompts are kept for those that begin alike.
        reports_slots: whether it tells its number of slots (llama.cpp does, vLLM does not).
        keeps_aborted: whether a request whose client left stays in its line until its turn (llama.cpp).
        loading_s: time before it serves at all.
        warming_s: time after that in which steps take longer, at first by `warming_factor`, then ever less.
    """

    step_s: float = 0.012
    sequence_s: float = 50e-6
    prefill_token_s: float = 60e-6
    kv_token_s: float = 87e-9
    chunk_tokens: int = 2048
    max_sequences: int = 256
    kv_blocks: int = 10_000
    prefix_cache: bool = False
    reports_slots: bool = False
    keeps_aborted: bool = False
    loading_s: float = 0.0
    warming_s: float = 0.0
    warming_factor: float = 3.0

    def __post_init__(self) -> None:
        if (
            min(self.step_s, self.sequence_s, self.prefill_token_s, self.kv_token_s) < 0.0
            or self.step_s == 0.0
        ):
            raise ValueError("costs are not negative, and a step takes time")
        if self.max_sequences < 1 or self.kv_blocks < 1 or self.chunk_tokens < 1:
            raise ValueError("an engine has a sequence, a block and a token at the least")

    @property
    def kv_tokens(self) -> int:
        """Capacity of the KV cache, tokens."""
        return self.kv_blocks * BLOCK_TOKENS

    def faster(self, factor: float) -> EngineModel:
        """The same engine, `factor` times as fast."""
        return replace(
            self,
            step_s=self.step_s / factor,
            sequence_s=self.sequence_s / factor,
            prefill_token_s=self.prefill_token_s / factor,
            kv_token_s=self.kv_token_s / factor,
        )

    def alone_ttft_s(self, prompt_tokens: int) -> float:
        """Time to the first token of a prompt on an idle engine."""
        steps = -(-prompt_tokens // self.chunk_tokens)
        read = self.chunk_tokens * steps * (steps - 1) // 2
        return (
            steps * (self.step_s + self.sequence_s)
            + prompt_tokens * self.prefill_token_s
            + read * self.kv_token_s
        )


class State(IntEnum):
    """Where a sequence is in the engine."""

    QUEUED = 0
    PREFILL = 1
    DECODE = 2
    GONE = 3


QUEUED: Final = State.QUEUED
PREFILL: Final = State.PREFILL
DECODE: Final = State.DECODE
GONE: Final = State.GONE


class Sequence:
    """One request inside the engine.

    Attributes:
        owner: the world's own.
        lane: index by which tokens are counted (`Engine.decoding_of`).
        prompt_tokens, output_tokens: as they truly are.
        prefix: chain of ids of the prompt's leading blocks, each of `prefix_block` tokens; empty: unique.
        tokens_out: given out so far; while decoding, as of `begun_step`.
        computed_tokens: prompt tokens computed for it, in all.
        recomputed_tokens: of these, those computed before and lost.
        saved_tokens: prompt tokens that the prefix cache spared.
    """

    __slots__ = (
        "begun_step", "blocks", "computed_tokens", "end_step", "held", "lane", "output_tokens", "owner", "phase",
        "prefilled", "prefix", "prompt_tokens", "recomputed_tokens", "saved_tokens", "state", "to_prefill",
        "tokens_out", "was_computed",
    )  # fmt: skip

    def __init__(
        self, owner: object, lane: int, prompt_tokens: int, output_tokens: int, prefix: tuple[int, ...] = ()
    ) -> None:
        self.owner = owner
        self.lane = lane
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.prefix = prefix
        self.state: State = QUEUED
        self.to_prefill = prompt_tokens
        self.prefilled = 0
        self.was_computed = 0  # of `to_prefill`, what had been computed before it was lost
        self.blocks = 0
        self.held: tuple[int, ...] = ()  # prefix blocks that it refers to
        self.tokens_out = 0
        self.begun_step = 0
        self.end_step = 0
        self.phase = 0
        self.computed_tokens = 0
        self.recomputed_tokens = 0
        self.saved_tokens = 0


class Engine:
    """The state of one engine.

    Attributes:
        first: sequences that had their first token at the end of the last run of steps.
        gave: sequences that had a token in each step of the last run, by lane; first tokens left out.
        finished: sequences that ended then.
        decoding_of: sequences decoding, by lane.
        preempted: sequences that lost their KV so far.
        waiting_tokens: prompt tokens in the engine's own line.
        busy_s: time in steps so far.
    """

    def __init__(self, model: EngineModel, lanes: int, prefix_tokens: int = 512) -> None:
        self.model = model
        self.waiting: deque[Sequence] = deque()
        self.waiting_count = 0
        self.waiting_tokens = 0
        self.running: dict[Sequence, None] = {}
        self.decoding = 0
        self.decoding_of = [0] * lanes
        self.first: list[Sequence] = []
        self.gave = [0] * lanes
        self.finished: list[Sequence] = []
        self.preempted = 0
        self.busy_s = 0.0
        self.steps = 0
        self.warm_at = 0.0
        self.free_blocks = model.kv_blocks
        self._prefilling: list[Sequence] = []
        self._plan: list[tuple[Sequence, int]] = []
        self._run = 0  # steps under way
        self._gave_way = False  # a sequence was preempted for this step: none is admitted to it
        self._context = 0  # KV tokens of all that decode
        self._phases = [
            0
        ] * BLOCK_TOKENS  # decoding sequences by the step at which they want their next block
        self._ends: list[tuple[int, int, Sequence]] = []
        self._order = 0
        self._cache = PrefixCache(prefix_tokens) if model.prefix_cache else None

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.running) or self.waiting_count > 0

    @property
    def kv_used(self) -> float:
        """Share of the KV cache that sequences hold."""
        idle = self._cache.idle_blocks if self._cache is not None else 0
        return 1.0 - (self.free_blocks + idle) / self.model.kv_blocks

    def change(self, model: EngineModel) -> None:
        """The engine is another from now on, at the same KV cache; what runs goes on."""
        self.free_blocks += model.kv_blocks - self.model.kv_blocks
        self.model = model

    def submit(self, sequence: Sequence) -> None:
        """A request joins the engine's own line."""
        self.waiting.append(sequence)
        self.waiting_count += 1
        self.waiting_tokens += sequence.to_prefill

    def abort(self, sequence: Sequence) -> None:
        """Its client left. Takes effect at once, as far as the step under way allows."""
        state = sequence.state
        if state is QUEUED:
            if self.model.keeps_aborted:
                sequence.output_tokens = 0  # found out when its turn comes
                return
            self._forget_waiting(sequence)
        elif state is not GONE:
            if state is DECODE:
                self._stop_decoding(sequence)
            self._leave(sequence)
        sequence.state = GONE

    def tokens_out(self, sequence: Sequence) -> int:
        """Tokens that it has given out by the end of the last step."""
        if sequence.state is DECODE:
            return sequence.tokens_out + self.steps - sequence.begun_step
        return sequence.tokens_out

    # A run of steps.

    def begin(self, now: float, horizon_s: float) -> float:
        """Begin the next step, or as many as end by `horizon_s`; gives the time at which they end."""
        model = self.model
        self._plan = []
        self._gave_way = False
        need = self._phases[self.steps & _PHASE]
        if need > self.free_blocks:
            self._make_room(need)
        decoding = self.decoding
        self.free_blocks -= self._phases[self.steps & _PHASE]
        self._run = 1
        duration_s = model.step_s + model.sequence_s * decoding + model.kv_token_s * self._context
        if self._prefilling or (self.waiting and len(self.running) < model.max_sequences):
            duration_s += self._plan_prefill(model.chunk_tokens - decoding)
        if self.warm_at > now and model.warming_s > 0.0:
            left = (self.warm_at - now) / model.warming_s
            duration_s *= 1.0 + (model.warming_factor - 1.0) * min(left, 1.0)
        elif not self._plan and decoding:
            duration_s = self._further_steps(duration_s, horizon_s - now)
        self.busy_s += duration_s
        return now + duration_s

    def _further_steps(self, first_s: float, budget_s: float) -> float:
        """Let the run go on while nothing can happen within it; gives its duration."""
        decoding = self.decoding
        growth_s = self.model.kv_token_s * decoding
        ends = self._ends
        while ends and (ends[0][2].state is not DECODE or ends[0][2].end_step != ends[0][0]):
            heappop(ends)
        # Up to the next end, and while there are blocks for the greediest way to want them.
        free = self.free_blocks + (self._cache.idle_blocks if self._cache is not None else 0)
        most = min(ends[0][0] - self.steps if ends else 1, 1 + free * BLOCK_TOKENS // decoding - BLOCK_TOKENS)
        if most <= 1 or budget_s < 2.0 * first_s:
            return first_s
        run = most if budget_s / first_s > most else int(budget_s / first_s)
        while run > 1 and run * first_s + growth_s * run * (run - 1) / 2 > budget_s:
            run -= 1
        if run <= 1:
            return first_s
        self._run = run
        phases, steps = self._phases, self.steps
        whole, rest = divmod(run - 1, BLOCK_TOKENS)
        self.free_blocks -= whole * decoding
        for step in range(steps + 1, steps + 1 + rest):
            self.free_blocks -= phases[step & _PHASE]
        if self.free_blocks < 0 and self._cache is not None:
            self.free_blocks += self._cache.evict(-self.free_blocks)
        return run * first_s + growth_s * run * (run - 1) / 2

    def end(self) -> int:
        """The run of steps is over: gives how many it were. `first` and `finished` say what came of it."""
        run = self._run
        self._run = 0
        self.steps += run
        self._context += run * self.decoding
        self.gave = self.decoding_of[:]
        self.first = []
        self.finished = []
        ends = self._ends
        while ends and ends[0][0] <= self.steps:
            _, _, sequence = heappop(ends)
            if sequence.state is DECODE and sequence.end_step <= self.steps:
                self._finish(sequence)
        for sequence, taken in self._plan:
            if sequence.state is not PREFILL:  # aborted, or preempted by one before it
                continue
            sequence.prefilled += taken
            if sequence.prefilled >= sequence.to_prefill:
                self._prefilled(sequence)
        return run

    def _finish(self, sequence: Sequence) -> None:
        self._stop_decoding(sequence)
        self._leave(sequence)
        sequence.state = GONE
        self.finished.append(sequence)

    def _prefilled(self, sequence: Sequence) -> None:
        """Its prompt is done, and with it one token."""
        self._prefilling.remove(sequence)
        if self._cache is not None and sequence.prefix:
            new = self._cache.keep(sequence.prefix)
            sequence.held += new
            sequence.blocks -= len(new) * self._cache.blocks_each
        if sequence.tokens_out:
            self.gave[sequence.lane] += 1  # computed anew, and goes on: the run was one step
        else:
            self.first.append(sequence)
        sequence.tokens_out += 1
        left = sequence.output_tokens - sequence.tokens_out
        if left <= 0:
            self._leave(sequence)
            sequence.state = GONE
            self.finished.append(sequence)
            return
        sequence.state = DECODE
        sequence.begun_step = self.steps
        sequence.end_step = self.steps + left
        sequence.phase = (self.steps - sequence.to_prefill) & _PHASE
        self._phases[sequence.phase] += 1
        self.decoding += 1
        self.decoding_of[sequence.lane] += 1
        self._context += sequence.to_prefill
        self._order += 1
        heappush(self._ends, (sequence.end_step, self._order, sequence))

    def _stop_decoding(self, sequence: Sequence) -> None:
        """It gives out no more. Its blocks are counted, with those that a run under way has taken for it."""
        grown = self.steps - sequence.begun_step
        sequence.tokens_out += grown
        context = sequence.to_prefill + grown
        shared = 0
        if self._cache is not None:
            shared = len(sequence.held) * self._cache.blocks_each
        sequence.blocks = -(-(context + self._run) // BLOCK_TOKENS) - shared
        self._phases[sequence.phase] -= 1
        self.decoding -= 1
        self.decoding_of[sequence.lane] -= 1
        self._context -= context
        sequence.begun_step = self.steps
        sequence.to_prefill = context

    # Room.

    def _plan_prefill(self, budget: int) -> float:
        """Give what a step has left to prompts; gives the time they take."""
        model = self.model
        taken_tokens = read = 0
        for sequence in list(self._prefilling):
            if budget <= 0:
                break
            if sequence.state is not PREFILL:  # preempted for one before it
                continue
            take = self._allocate(sequence, budget)
            if take:
                budget -= take
                taken_tokens += take
                read += sequence.prefilled
        waiting = self.waiting
        while waiting and budget > 0 and len(self.running) < model.max_sequences and not self._gave_way:
            sequence = waiting[0]
            if sequence.state is GONE or not sequence.output_tokens:
                waiting.popleft()
                if sequence.state is not GONE:
                    self._forget_waiting(sequence)
                    sequence.state = GONE
                continue
            if not self._admit(sequence, budget):
                break
            waiting.popleft()
            self._forget_waiting(sequence)
            take = self._allocate(sequence, budget)
            budget -= take
            taken_tokens += take
            read += sequence.prefilled
        return (
            taken_tokens * model.prefill_token_s
            + len(self._plan) * model.sequence_s
            + read * model.kv_token_s
        )

    def _admit(self, sequence: Sequence, budget: int) -> bool:
        """Let the head of the line run if there are blocks for its first chunk."""
        cache = self._cache
        hits: tuple[int, ...] = ()
        if cache is not None and sequence.prefix:
            hits = sequence.prefix[: cache.hits(sequence.prefix)]
            if len(hits) * cache.tokens >= sequence.to_prefill:  # one token at the least is computed
                hits = hits[:-1]
            cache.refer(hits)
            known = len(hits) * cache.tokens
        else:
            known = 0
        first = min(sequence.to_prefill - known, budget)
        idle = cache.idle_blocks if cache is not None else 0
        if -(-first // BLOCK_TOKENS) > self.free_blocks + idle:
            if cache is not None and hits:
                cache.release(hits)
            return False
        sequence.held = hits
        sequence.prefilled = known
        sequence.saved_tokens += known
        sequence.blocks = 0
        sequence.state = PREFILL
        self.running[sequence] = None
        self._prefilling.append(sequence)
        return True

    def _allocate(self, sequence: Sequence, budget: int) -> int:
        """Blocks for the next chunk of a prompt; gives its length, 0 where the sequence had to give way."""
        take = min(sequence.to_prefill - sequence.prefilled, budget)
        shared = len(sequence.held) * self._cache.blocks_each if self._cache is not None else 0
        need = -(-(sequence.prefilled + take) // BLOCK_TOKENS) - shared - sequence.blocks
        while need > self.free_blocks:
            if self._evict(need):
                continue
            victim = next(reversed(self.running))
            self._preempt(victim)
            if victim is sequence:
                return 0
        self.free_blocks -= need
        sequence.blocks += need
        sequence.computed_tokens += take
        again = min(sequence.was_computed - sequence.prefilled, take)
        if again > 0:
            sequence.recomputed_tokens += again
        self._plan.append((sequence, take))
        return take

    def _make_room(self, need: int) -> None:
        """Blocks for those that decode in this step, at the cost of those admitted last."""
        while need > self.free_blocks:
            if not self._evict(need):
                self._preempt(next(reversed(self.running)))
            need = self._phases[self.steps & _PHASE]

    def _evict(self, need: int) -> bool:
        if self._cache is None:
            return False
        freed = self._cache.evict(need - self.free_blocks)
        self.free_blocks += freed
        return freed > 0

    def _preempt(self, victim: Sequence) -> None:
        """It loses its KV and goes to the head of the line, to be computed anew with what it has given out."""
        had = victim.prefilled
        if victim.state is DECODE:
            self._stop_decoding(victim)
            had = victim.to_prefill
        self._leave(victim)
        self._plan = [entry for entry in self._plan if entry[0] is not victim]
        self._gave_way = True
        victim.was_computed = max(victim.was_computed, had)
        victim.to_prefill = victim.prompt_tokens + victim.tokens_out
        victim.prefilled = 0
        victim.state = QUEUED
        self.waiting.appendleft(victim)
        self.waiting_count += 1
        self.waiting_tokens += victim.to_prefill
        self.preempted += 1

    def _leave(self, sequence: Sequence) -> None:
        """It runs no more: its blocks are free, those of its prefix cached."""
        del self.running[sequence]
        if sequence.state is PREFILL and sequence in self._prefilling:
            self._prefilling.remove(sequence)
        self.free_blocks += sequence.blocks
        sequence.blocks = 0
        if self._cache is not None and sequence.held:
            self._cache.release(sequence.held)
            sequence.held = ()

    def _forget_waiting(self, sequence: Sequence) -> None:
        self.waiting_count -= 1
        self.waiting_tokens -= sequence.to_prefill
