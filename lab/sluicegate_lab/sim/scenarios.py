"""The settings that are compared: the reference policy, the traffic, the engines, and the rivals with their grids.

One `Case` is one traffic on one engine; one `Contender` is one policy with one setting. Both are plain values, so that
a pool of processes can run them; `play` runs one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from sluicegate_core.policy import ClassPolicy, Policy, Slo
from sluicegate_lab.sim.clients import Habits, Retry
from sluicegate_lab.sim.engine import EngineModel
from sluicegate_lab.sim.gate import GateFront
from sluicegate_lab.sim.limits import Aimd, EnvoyGradient, Gradient
from sluicegate_lab.sim.measures import Measures, measure
from sluicegate_lab.sim.rivals import Bucket, Cap, EngineCap, Passes
from sluicegate_lab.sim.traces import Trace, load_trace
from sluicegate_lab.sim.workload import Mix, Workload, make_workload
from sluicegate_lab.sim.world import Change, Front, Run, World

INTERACTIVE: Final = "interactive"
BATCH: Final = "batch"
#: 70 % of the requests are interactive.
SHARES: Final[Mapping[str, float]] = {INTERACTIVE: 0.7, BATCH: 0.3}

#: The policy of every comparison, one setting throughout; nothing about the engine is told.
REFERENCE: Final = Policy(
    classes=(
        ClassPolicy(INTERACTIVE, Slo(ttft_s=2.0, itl_s=0.1), weight=10),
        ClassPolicy(BATCH, Slo(ttft_s=30.0), weight=1),
    )
)
#: Clients leave after so many times their TTFT, s; a class without one has `DEFAULT_PATIENCE_S`.
PATIENCE_SLOS: Final = 3.0
DEFAULT_PATIENCE_S: Final = 120.0

#: An 8B model on one accelerator with 40 GB: 160,000 tokens of KV. A step of 64 conversations takes 22 ms, one that is
#: full of prefill 145 ms.
STANDARD: Final = EngineModel()
#: A small engine: llama.cpp with four slots, about 10 s a request of the conversation trace.
SMALL: Final = EngineModel(
    step_s=0.030,
    sequence_s=0.004,
    prefill_token_s=1.0e-3,
    kv_token_s=5e-7,
    chunk_tokens=512,
    max_sequences=4,
    kv_blocks=4 * 8192 // 16,
    reports_slots=True,
    keeps_aborted=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One traffic on one engine.

    Attributes:
        trace: a name of the package's, or a path.
        changes: (share of the span, model) from when on the engine is another.
    """

    name: str
    trace: str
    overload: float
    model: EngineModel = STANDARD
    policy: Policy = REFERENCE
    shares: tuple[tuple[str, float], ...] = tuple(SHARES.items())
    start: int = 0
    count: int | None = None
    retry: Retry = Retry.NONE
    tries: int = 3
    users: int | None = None
    changes: tuple[tuple[float, EngineModel], ...] = ()
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One policy with one setting: a name of `KINDS` and its numbers."""

    kind: str
    setting: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return " ".join([self.kind, *(f"{number:g}" for number in self.setting)])


GATE: Final = Contender(kind="gate")

#: Seconds of the reference engine's work that a bucket lets through at once.
BUCKET_BURST_S: Final = 2.0

Maker = Callable[[Case, tuple[float, ...]], Front]
KINDS: Final[Mapping[str, Maker]] = {
    "gate": lambda case, _: GateFront(case.policy, seed=case.seed),
    "none": lambda _, __: Passes(),
    "cap": lambda _, setting: Cap(setting[0], int(setting[1])),
    "priority": lambda case, setting: Cap(
        setting[0], int(setting[1]), [one.weight for one in case.policy.classes]
    ),
    "queued-requests": lambda _, setting: EngineCap(requests=int(setting[0])),
    "queued-tokens": lambda _, setting: EngineCap(tokens=int(setting[0])),
    "bucket": lambda _, setting: Bucket(setting[0], BUCKET_BURST_S),
    "aimd": lambda _, setting: Aimd(setting[0]),
    "gradient": lambda _, setting: Gradient(setting[0]),
    "envoy": lambda _, setting: EnvoyGradient(setting[0], setting[1]),
}

#: Every rival with its settings, doubling where a number has no natural value.
GRID: Final[Mapping[str, tuple[tuple[float, ...], ...]]] = {
    "none": ((),),
    "cap": tuple((float(n), float(line)) for n in (2, 4, 8, 16, 32, 64, 96, 128) for line in (0, 4)),
    "priority": tuple((float(n), 8.0) for n in (2, 4, 8, 16, 32, 64, 96, 128)),
    "queued-requests": tuple((float(n),) for n in (1, 2, 4, 8, 16, 32)),
    "queued-tokens": tuple((1000.0 * n,) for n in (2, 4, 8, 16, 32, 64)),
    "bucket": tuple((1000.0 * n,) for n in (1, 2, 4, 6, 8, 12, 16)),
    "aimd": ((0.25,), (0.5,), (1.0,), (2.0,)),
    "gradient": ((1.5,), (2.0,), (4.0,)),
    "envoy": ((0.25, 60.0), (1.0, 60.0), (1.0, 300.0)),
}


def rivals() -> list[Contender]:
    """Every rival in every setting."""
    return [Contender(kind=kind, setting=setting) for kind, settings in GRID.items() for setting in settings]


def patience_s(policy: Policy) -> list[float]:
    """By class."""
    return [
        DEFAULT_PATIENCE_S if one.slo.ttft_s is None else PATIENCE_SLOS * one.slo.ttft_s
        for one in policy.classes
    ]


@cache
def _trace(name: str, seed: int) -> Trace:
    return load_trace(name, seed=seed)


def workload_of(case: Case) -> Workload:
    """The demands of a case: the same for every contender. Raises `TraceError`."""
    mix = Mix(shares=dict(case.shares), overload=case.overload, start=case.start, count=case.count)
    return make_workload(_trace(case.trace, case.seed), case.model, mix, seed=case.seed)


def simulate(case: Case, contender: Contender, workload: Workload | None = None) -> Run:
    """Run one contender."""
    if workload is None:
        workload = workload_of(case)
    world = World(
        workload,
        case.model,
        KINDS[contender.kind](case, contender.setting),
        Habits(patience_s=patience_s(case.policy), retry=case.retry, tries=case.tries, users=case.users),
        seed=case.seed,
        changes=[Change(at_s=share * workload.span_s, model=model) for share, model in case.changes],
        polls=contender.kind == "gate",
    )
    return world.run()


def play(case: Case, contender: Contender) -> Measures:
    """Run one contender and measure it."""
    return measure(simulate(case, contender), case.policy)


def variant(case: Case, name: str, model: EngineModel) -> Case:
    """The same traffic, at the same multiple of what another engine can do."""
    return replace(case, name=name, model=model)
