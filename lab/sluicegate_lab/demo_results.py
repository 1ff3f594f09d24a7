"""One trial of a demo and what came of it: the comparison that is shown, and the same as JSON.

The numbers are `outcome.py`, the drawing of them is `report.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sluicegate_lab.calibrate import Capacity
from sluicegate_lab.demo_engine import Engine
from sluicegate_lab.demo_policy import DemoPolicy
from sluicegate_lab.load import Patience, Record
from sluicegate_lab.outcome import summarise, table, verdict
from sluicegate_lab.report import Comparison
from sluicegate_lab.traffic import BATCH, INTERACTIVE, OUTPUT_DIVISOR, PROMPT_DIVISOR, Schedule

PATIENCE = Patience({INTERACTIVE: 8.0, BATCH: 30.0}, drain_s=30.0)
"""How long clients wait for a first token before they leave: a reader at a screen, and a job with a timeout.
Nobody who still waits within patience when the arrivals end is cut off."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What both replays of a demo share."""

    engine: Engine
    capacity: Capacity
    policy: DemoPolicy
    schedule: Schedule
    seed: int


def compare(trial: Trial, alone: list[Record], gated: list[Record]) -> Comparison:
    """The records of both replays as a comparison."""
    goals, cost = trial.policy.goals, trial.capacity.cost
    results = summarise(alone, goals, cost), summarise(gated, goals, cost)
    return Comparison(
        alone=alone,
        gated=gated,
        results=results,
        rows=table(*results),
        verdict=verdict(*results),
        goals=goals,
        seconds=trial.schedule.seconds,
        policy_text=trial.policy.text,
        setup=_setup(trial),
    )


def _setup(trial: Trial) -> list[tuple[str, str]]:
    """What was compared on what, as pairs of a name and a value."""
    engine, capacity, schedule = trial.engine, trial.capacity, trial.schedule
    answers = (
        "each request's own from the trace; the model itself ends them, no field of a request tells"
        if engine.counts_down
        else "as the model ends them; the trace gives arrivals and prompts"
    )
    patience_s = PATIENCE.first_token_s
    return [
        ("engine", f"{engine.kind}, {engine.slots} slots"),
        ("model", engine.model),
        (
            "measured",
            f"{capacity.requests_per_s:.2f} requests/s, {capacity.output_tokens_per_s:.0f} tokens/s",
        ),
        ("overload", f"{len(schedule.requests)} requests offered, {schedule.overload:.2f} x what it can do"),
        ("arrivals", f"Azure 2023 conversation trace, {schedule.seconds:.0f} s, seed {trial.seed}"),
        ("lengths", f"prompts 1/{PROMPT_DIVISOR}, answers 1/{OUTPUT_DIVISOR} of the trace's"),
        ("length of answers", answers),
        (
            "patience",
            f"{patience_s[INTERACTIVE]:.0f} s {INTERACTIVE}, {patience_s[BATCH]:.0f} s {BATCH}; no retries",
        ),
    ]


def as_json(trial: Trial, comparison: Comparison) -> dict[str, Any]:
    """The result for programs; times in seconds, names as in `outcome.ClassResult`."""
    engine, gate = comparison.results
    return {
        "seed": trial.seed,
        "seconds": trial.schedule.seconds,
        "overload": trial.schedule.overload,
        "requests": len(trial.schedule.requests),
        "capacity": asdict(trial.capacity),
        "goals": {name: asdict(goal) for name, goal in comparison.goals.items()},
        "engine": {name: result.as_dict() for name, result in engine.items()},
        "gate": {name: result.as_dict() for name, result in gate.items()},
        "verdict": list(comparison.verdict),
    }
