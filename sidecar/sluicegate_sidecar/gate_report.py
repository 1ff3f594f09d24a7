"""`/report`: what the operator reads of a gate, to add it up over all gates of a policy.

A contract between two programs that are upgraded apart: `version` grows when a field changes its meaning or goes;
fields may be added without that, and a reader passes over those it does not know. docs/metrics.md has the whole of
it, and a test compares the two.

Invariants: counts are monotonic since the start of the process, which `instance` names, so whoever asks twice can
tell a difference from a restart; unknown is null, never 0; everything is bounded, whatever clients send; no client,
no prompt, no key. All numbers are of one moment.

Also here: who samples the capacity (`GateReport`), so that a gate without an admin port does not.
"""

import asyncio
import secrets
from typing import Final

from sluicegate_core.capacity import SAMPLE_EVERY_S, CapacityMeter, work_served
from sluicegate_core.stats import ClassStats
from sluicegate_sidecar.state import GateProcess

REPORT_VERSION: Final = 1
#: Problems of a policy's file that are told: a person mends them one by one, and the log has them all.
MAX_PROBLEMS: Final = 20
#: Characters of one such line.
MAX_PROBLEM_CHARS: Final = 500
#: What one unit of work is: a prompt token, and each output token as two of them.
WORK_UNIT: Final = "prompt_token_equivalents"


class GateReport:
    """Builds the report of one gate, and samples its capacity while it is open. All on the gate's event loop."""

    def __init__(self, process: GateProcess, loop: asyncio.AbstractEventLoop) -> None:
        self.capacity = CapacityMeter()
        self.instance = secrets.token_hex(8)
        self._process = process
        self._started_at = process.gate.clock()
        self._loop = loop
        self._timer = loop.call_later(SAMPLE_EVERY_S, self._sample)

    def _sample(self) -> None:
        self.capacity.sample(self._process.gate.clock(), self._process.gate.controller)
        self._timer = self._loop.call_later(SAMPLE_EVERY_S, self._sample)

    def close(self) -> None:
        """Sample no more."""
        self._timer.cancel()

    def build(self) -> dict[str, object]:
        """The report, as plain data."""
        gate = self._process.gate
        controller, now = gate.controller, gate.clock()
        reported = controller.engine.fresh_snapshot(now)
        return {
            "version": REPORT_VERSION,
            "instance": self.instance,
            "uptime_s": now - self._started_at,
            "policy": self._policy(),
            "engine": {
                "status": controller.engine.status.value,
                "slots": controller.engine.slots(now),
                "running": controller.running,
                "reported_running": None if reported is None else reported.running,
                "reported_waiting": None if reported is None else reported.waiting,
                "reported_age_s": controller.engine.snapshot_age_s(now),
            },
            "draining": self._process.leaving,
            "classes": self._classes(),
            "work": self._work(now),
        }

    def _policy(self) -> dict[str, object]:
        reload = self._process.reload
        return {
            "content_hash": reload.content_hash,
            "generation": reload.generation,
            "mode": reload.mode.value,
            "error": None if reload.last_error is None else reload.last_error[:MAX_PROBLEM_CHARS],
            "problems": [problem[:MAX_PROBLEM_CHARS] for problem in reload.problems[:MAX_PROBLEMS]],
        }

    def _classes(self) -> dict[str, object]:
        """The classes of the policy in force, and those gone: what was counted of them stays."""
        controller = self._process.gate.controller
        indices = {name: index for index, name in enumerate(controller.policy.class_names)}
        classes: dict[str, object] = {}
        for name, stats in controller.stats.items():
            index = indices.get(name)
            classes[name] = {
                **_counts(stats),
                "waiting": 0 if index is None else controller.line.queues[index].count,
                "running": 0 if index is None else controller.engine.running_of[index],
            }
        return classes

    def _work(self, now: float) -> dict[str, object]:
        controller = self._process.gate.controller
        measured = self.capacity.capacity(now)
        return {
            "unit": WORK_UNIT,
            "waiting": sum(queue.cost for queue in controller.line.queues),
            "pressed": self.capacity.pressed,
            "pressed_s": self.capacity.pressed_s,
            "capacity": {
                "work_per_s": measured.work_per_s,
                "pressed_s": measured.pressed_s,
                "ended": measured.ended,
                "age_s": measured.age_s,
            },
        }


def _counts(stats: ClassStats) -> dict[str, object]:
    return {
        "offered": stats.offered,
        "retries": stats.retries,
        "admitted": stats.started,
        "queued": stats.queued,
        "served": stats.served,
        "served_in_slo": stats.served_in_slo,
        "rejected": {reason.value: count for reason, count in stats.rejected.items()},
        "evicted": {reason.value: count for reason, count in stats.evicted.items()},
        "failed": {reason.value: count for reason, count in stats.failed.items()},
        "work_offered": stats.work_offered,
        "work_predicted": stats.work_predicted,
        "work_served": work_served(stats),
        "work_failed": stats.work_failed,
    }
