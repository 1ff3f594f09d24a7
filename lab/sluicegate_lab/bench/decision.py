"""What parsing and deciding cost, without sockets: the gate's own handler, called with parked requests.

The gate is the real one, with four classes; its engine has one slot, which is taken, so that every request is
parsed, classified, estimated, predicted for, and joins a line of given length from 200 clients. Then its client
leaves, so that the next finds the line as long as before. Timed is `Gate.on_request` alone. Medians: the
operating system's own interruptions are not the gate's. One decision after the other finds warm caches; between
two requests of real traffic they cool, and what that costs is in the bars on CPU a request.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Sequence
from statistics import median
from time import monotonic, perf_counter_ns
from typing import Any, Final, cast

from sluicegate_core.controller import Controller
from sluicegate_core.effects import Refusal
from sluicegate_core.policy import Classify, ClassPolicy, EngineSpec, Policy, Rule, Slo
from sluicegate_core.request import Request
from sluicegate_core.vocabulary import EngineStatus, Outcome, Reason
from sluicegate_lab.bench.bars import Bar
from sluicegate_lab.bench.clients import post
from sluicegate_sidecar.gate import Gate
from sluicegate_sidecar.http import End, Exchange

CLIENTS: Final = 200
WAITING: Final = 2_000
#: The longest is the gate's own bound: one less, so that one more still joins.
LENGTHS: Final = (10, 1_000, 99_999)
CLASS_NAMES: Final = ("interactive", "standard", "batch", "background")
#: The longest line may cost this much more than the shortest: memory that no longer fits the cache, no work.
FLAT_RATIO: Final = 1.5
_PATIENCE_S: Final = 3600.0


def _policy() -> Policy:
    classes = tuple(
        ClassPolicy(name=name, slo=Slo(ttft_s=_PATIENCE_S, itl_s=None), weight=weight)
        for name, weight in zip(CLASS_NAMES, (10, 4, 2, 1), strict=True)
    )
    rules = tuple(
        Rule(class_name=name, header="x-admission-class", values=(name,)) for name in CLASS_NAMES[1:]
    )
    return Policy(
        engine=EngineSpec(slots=1),
        classes=classes,
        classify=Classify(default=CLASS_NAMES[0], client_header="x-tenant", rules=rules),
    )


class _Silent:
    """A watcher that writes nothing."""

    def refused(self, request: Request, refusal: Refusal, outcome: Outcome) -> None:
        """Nothing is written."""

    def failed(self, request: Request, reason: Reason) -> None:
        """Nothing is written."""


class _Parked:
    """The part of an exchange that the gate's handler reads; commands are taken and lead nowhere."""

    __slots__ = (
        "_headers",
        "body",
        "headers",
        "listener",
        "method",
        "path",
        "peer_host",
        "started",
        "target",
    )

    def __init__(self, body: bytes, class_name: str, client: int) -> None:
        self.method = b"POST"
        self.target = self.path = b"/v1/chat/completions"
        self.headers = [
            (b"host", b"bench.local:8000"),
            (b"content-type", b"application/json"),
            (b"user-agent", b"OpenAI/Python 2.0.0"),
            (b"x-admission-class", class_name.encode()),
            (b"x-tenant", b"tenant-%d" % client),
        ]
        self._headers = dict(self.headers)
        self.body = body
        self.peer_host = "127.0.0.1"
        self.listener: Any = None
        self.started = False

    def header(self, name: bytes) -> bytes | None:
        return self._headers.get(name)

    def forward(self, extra_headers: object = (), response_headers: object = ()) -> None:
        self.started = True

    def refuse(self, status: int, headers: object, body: object) -> None:
        raise AssertionError(f"refused with {status}: the line was to take everybody in")


class _Scene:
    """A gate whose one slot is taken, and a line of given length."""

    def __init__(self, waiting: int) -> None:
        policy = _policy()
        controller = Controller(policy, now=monotonic(), rng=random.Random(1))
        self.gate = Gate(policy, controller, watcher=_Silent(), client_salt=b"bench")
        self.gate.engine_status(EngineStatus.UP)
        self._rng = random.Random(2)
        body = _body(1024)
        for _ in range(waiting + 1):
            self._arrive(self._parked(body))
        if controller.waiting != waiting or controller.running != 1:
            raise AssertionError(f"{controller.waiting} wait and {controller.running} run")

    def _parked(self, body: bytes) -> _Parked:
        return _Parked(body, self._rng.choice(CLASS_NAMES), self._rng.randrange(CLIENTS))

    def _arrive(self, parked: _Parked) -> None:
        self.gate.on_request(cast("Exchange", parked))

    def cost_us(self, body: bytes, decisions: int) -> float:
        """Median time of one decision on such a body, us."""
        times_ns = []
        for _ in range(decisions):
            parked = self._parked(body)
            began_ns = perf_counter_ns()
            self._arrive(parked)
            times_ns.append(perf_counter_ns() - began_ns)
            parked.listener.on_end(End.CLIENT_GONE)
        return median(times_ns) / 1e3


def _body(size_bytes: int) -> bytes:
    return post(size_bytes, stream=True).partition(b"\r\n\r\n")[2]


def measure(decisions: int) -> tuple[dict[int, float], dict[int, float]]:
    """Cost of a decision, us: by body size in bytes at `WAITING`, and by length of the line at 1 KB."""

    async def on_a_loop() -> tuple[dict[int, float], dict[int, float]]:
        by_size, by_length = {}, {}
        scene = _Scene(WAITING)
        gc.freeze()  # as the gate does once it has started
        for size_bytes in (1024, 32 * 1024, 1_000_000):
            count = max(20, decisions * 1024 // max(1024, size_bytes // 8))
            by_size[size_bytes] = scene.cost_us(_body(size_bytes), count)
        for length in LENGTHS:
            scene = _Scene(length)
            gc.freeze()
            by_length[length] = scene.cost_us(_body(1024), decisions)
        return by_size, by_length

    collects = gc.isenabled()
    gc.enable()  # it is on in the gate, and what it takes is part of the cost
    try:
        return asyncio.run(on_a_loop())
    finally:
        gc.unfreeze()
        if not collects:
            gc.disable()


def decision_bars(decisions: int = 4000) -> list[Bar]:
    """The bars on the cost of a decision, measured now, on this core."""
    by_size, by_length = measure(decisions)
    lengths: Sequence[int] = LENGTHS
    bars = [
        Bar(
            name=f"decision_{label}",
            title=f"parse and decide, {text} body, {WAITING:,} waiting",
            value=by_size[size_bytes],
            bar=bar_us,
            unit="us",
        )
        for size_bytes, label, text, bar_us in (
            (1024, "1kb", "1 KB", 10.0),
            (32 * 1024, "32kb", "32 KB", 40.0),
            (1_000_000, "1mb", "1 MB", 1000.0),
        )
    ]
    bars.append(
        Bar(
            name="decision_flat",
            title="the same at 1 KB with 100,000 waiting, against 10",
            value=by_length[lengths[-1]] / by_length[lengths[0]],
            bar=FLAT_RATIO,
            unit="x",
            absolute={f"{length:,} waiting": value for length, value in by_length.items()},
            absolute_unit="us",
        )
    )
    return bars
