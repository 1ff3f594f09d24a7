"""What the gate is doing right now, as plain data: `/debug/state`.

Read on the event loop between two events, so every number is of one moment, and closes. Nothing is kept for it:
what is not asked for costs nothing.

Invariants: unknown is None, never 0. Everything is bounded, whatever clients send: `CLIENTS_SHOWN` clients a
class, `RECENT_REFUSALS` refusals, the models that the estimators keep. Clients appear by the hash that the gate
knows them by; no prompt, no key, no request id.

Also here: what the process around the gate offers to those who look at it (`GateProcess`, `ReloadState`). Counts
over time live in `metrics`, the serving of both in `admin`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import nlargest
from typing import Final, Protocol

from sluicegate_core.controller import Controller
from sluicegate_core.policy import ClassPolicy, Mode
from sluicegate_core.refusal import RecentRefusal
from sluicegate_core.request import Request
from sluicegate_core.stats import ClassStats, Histogram
from sluicegate_core.vocabulary import Hold
from sluicegate_sidecar.gate import Gate
from sluicegate_sidecar.http import Server
from sluicegate_sidecar.settings import Settings

#: Clients shown of each class: those with the most requests in the gate.
CLIENTS_SHOWN: Final = 20
#: Body of the imagined request that predictions are shown for: about a thousand tokens.
SAMPLE_PROMPT_BYTES: Final = 4096
#: Its client: no hash looks like this, so it is one that has nothing waiting.
SAMPLE_CLIENT: Final = "sample"
#: Significant digits of the numbers shown: more would be noise.
DIGITS: Final = 6


@dataclass(slots=True)
class ReloadState:
    """The policy in force, and what became of the last change of its file.

    Attributes:
        generation: of the policy in force, from 1.
        content_hash: of the text that it came from.
        last_error: why the file as it is now was refused; None where it is what is in force.
        problems: the same, one line for each thing to mend.
        loaded_at: when the policy in force was loaded, s on the gate's clock.
        mode: of the policy in force.
    """

    generation: int
    content_hash: str
    last_error: str | None
    problems: tuple[str, ...]
    loaded_at: float
    mode: Mode


class GateProcess(Protocol):
    """The process around a gate, as far as the admin port needs it."""

    @property
    def settings(self) -> Settings: ...

    @property
    def gate(self) -> Gate: ...

    @property
    def reload(self) -> ReloadState: ...

    @property
    def server(self) -> Server | None:
        """The data port; None until it listens."""

    @property
    def leaving(self) -> bool:
        """A drain has begun: no new request should be sent here."""

    async def drain(self, timeout_s: float, settle_s: float = 0.0) -> bool:
        """Admit for `settle_s` more, then refuse what comes, and wait for what is in flight; True when nothing was
        left."""


def snapshot(process: GateProcess) -> dict[str, object]:
    """All that is known now. Numbers are finite or None, units are in the names."""
    gate = process.gate
    controller, now = gate.controller, gate.clock()
    state = {
        "in_flight": gate.in_flight,
        "waiting": controller.waiting,
        "running": controller.running,
        "leaving": process.leaving,
        "draining": controller.draining,
        "ungated": gate.ungated,
        "protocol_errors": dict(gate.protocol_errors),
        "policy": _policy(process.reload, now),
        "engine": controller.engine.state(now),
        "classes": _classes(controller, now),
        "learned": {
            "times": controller.predictor.state(now),
            "lengths": controller.estimator.state(),
            "pace": _pace(controller, now),
        },
        "recent_refusals": [_refusal(one, now) for one in reversed(controller.refusals.recent)],
        "http": _http(process.server),
    }
    return {key: _plain(value) for key, value in state.items()}


def _policy(reload: ReloadState, now: float) -> dict[str, object]:
    return {
        "generation": reload.generation,
        "content_hash": reload.content_hash,
        "mode": reload.mode.value,
        "loaded_ago_s": now - reload.loaded_at,
        "last_error": reload.last_error,
        "problems": reload.problems,
    }


def _classes(controller: Controller, now: float) -> dict[str, object]:
    """The classes of the policy in force, and those gone whose requests are not yet all ended."""
    running = list(controller.running_requests)
    classes: dict[str, object] = {}
    for index, policy in enumerate(controller.policy.classes):
        classes[policy.name] = {
            **_counts(controller.stats[policy.name]),
            "waiting": controller.line.queues[index].count,
            "running": controller.engine.running_of[index],
            "waiting_cost_tokens": controller.line.queues[index].cost,
            "kept_slots": controller.kept_slots(now, index),
            "promised": _promised(policy),
            "head": _head(controller, now, index),
            "new_request": _new_request(controller, now, index, policy.name),
            "clients": _clients(controller, index, (r for r in running if r.class_index == index)),
        }
    for name, stats in controller.stats.items():
        if name not in classes and stats.in_flight:
            classes[name] = _counts(stats)
    return classes


def _counts(stats: ClassStats) -> dict[str, object]:
    return {
        "offered": stats.offered,
        "retries": stats.retries,
        "admitted": stats.started,
        "queued": stats.queued,
        "served": stats.served,
        "served_in_slo": stats.served_in_slo,
        "rejected": dict(stats.rejected),
        "evicted": dict(stats.evicted),
        "failed": dict(stats.failed),
        "in_flight": stats.in_flight,
        "queue_delay_mean_s": _mean(stats.queue_delay_s),
        "ttft_mean_s": _mean(stats.ttft_s),
        "ttft_predicted_over_actual_mean": _mean(stats.prediction_ratio),
        "ttft_predictions": stats.prediction_ratio.samples,
    }


def _mean(histogram: Histogram) -> float | None:
    samples = histogram.samples
    return histogram.total / samples if samples else None


def _promised(policy: ClassPolicy) -> dict[str, object]:
    return {
        "ttft_s": policy.slo.ttft_s,
        "itl_s": policy.slo.itl_s,
        "weight": policy.weight,
        "max_queue_time_s": policy.max_queue_time_s,
        "max_concurrency": policy.max_concurrency,
    }


def _head(controller: Controller, now: float, index: int) -> dict[str, object] | None:
    """The request whose turn it is within a class, and what it waits for now."""
    queue = controller.line.queues[index]
    request = queue.next_flow().head if queue.count else None
    if request is None:
        return None
    return {
        "client": request.client,
        "prompt_tokens": request.prompt_tokens,
        "waited_s": now - request.arrived_at,
        "predicted_ttft_s": request.predicted_ttft_s,
        "evicted_in_s": request.deadline - now,
        "hold": controller.hold(now, request),
    }


def _new_request(controller: Controller, now: float, index: int, name: str) -> dict[str, object]:
    """What would become of a request of `SAMPLE_PROMPT_BYTES` from a new client, were it to arrive now."""
    request = Request(class_index=index, client=SAMPLE_CLIENT, prompt_bytes=SAMPLE_PROMPT_BYTES)
    controller.estimator.estimate(request, name)
    engine, line, predictor = controller.engine, controller.line, controller.predictor
    hold = controller.hold(now, request)
    if hold is Hold.TURN:  # there is room; nobody has a turn before it has arrived
        hold = None
    wait_s: float | None = 0.0
    if hold is not None or line.queues[index].count:
        wait_s = predictor.wait_s(now, request, line, engine.running)
    service_s = predictor.service_s(request, engine.pending_tokens)
    return {
        "prompt_tokens": request.prompt_tokens,
        "hold": hold,
        "predicted_wait_s": wait_s,
        "predicted_service_s": service_s,
        "predicted_ttft_s": None if wait_s is None or service_s is None else wait_s + service_s,
    }


def _clients(controller: Controller, index: int, running: Iterable[Request]) -> dict[str, object]:
    """Who waits and runs in a class, the busiest `CLIENTS_SHOWN`; the rest are counted."""
    waiting_of: dict[str, int] = {}
    running_of: dict[str, int] = {}
    for flow in controller.line.queues[index].flows.values():
        if flow.count:
            waiting_of[flow.client] = flow.count
    for request in running:
        running_of[request.client] = running_of.get(request.client, 0) + 1
    clients = waiting_of.keys() | running_of.keys()

    def requests(client: str) -> int:
        return waiting_of.get(client, 0) + running_of.get(client, 0)

    return {
        "count": len(clients),
        "busiest": [
            {"client": client, "waiting": waiting_of.get(client, 0), "running": running_of.get(client, 0)}
            for client in nlargest(CLIENTS_SHOWN, clients, key=requests)
        ],
    }


def _pace(controller: Controller, now: float) -> dict[str, object]:
    """The pace's own words, its classes by name."""
    state = controller.pace.state(now)
    classes = state["classes"]
    assert isinstance(classes, list)
    return {**state, "classes": dict(zip(controller.policy.class_names, classes, strict=True))}


def _refusal(refusal: RecentRefusal, now: float) -> dict[str, object]:
    shown = refusal._asdict()
    return {"ago_s": now - shown.pop("at"), **shown}


def _http(server: Server | None) -> dict[str, object] | None:
    if server is None:
        return None
    pool = server.pool
    return {
        "address": f"{server.host}:{server.port}",
        "client_connections": server.open_connections,
        "client_connections_limit": server.limits.connections,
        "accepted": server.accepted,
        "exchanges": server.exchanges,
        "body_bytes_held": server.body_bytes,
        "engine_connections": pool.open_connections,
        "engine_connections_idle": pool.idle_connections,
        "engine_connects": pool.connects,
        "engine_connections_found_closed": pool.stale,
        "engine_retries": pool.retries,
    }


def _plain(value: object) -> object:
    """The value with numbers rounded to `DIGITS`, and None where one is not finite."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
