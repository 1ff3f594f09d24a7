"""A real gate on a clock that stands still until it is moved, for the tests of what can be seen of one.

The controller is driven by its own events, in place of the data path: what metrics, state and logs say is then
known exactly.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

from sluicegate_core.capacity import CapacityMeter
from sluicegate_core.controller import Controller
from sluicegate_core.effects import EngineSnapshot, Truth
from sluicegate_core.policy import Classify, ClassPolicy, EngineSpec, Mode, Policy, Slo
from sluicegate_core.request import Request, Stage
from sluicegate_core.vocabulary import EngineStatus, Reason
from sluicegate_sidecar.gate import Gate
from sluicegate_sidecar.http import Server
from sluicegate_sidecar.logs import LogWatcher
from sluicegate_sidecar.settings import Address, Settings
from sluicegate_sidecar.state import ReloadState

START_S = 1000.0
TWO_CLASSES = Policy(
    engine=EngineSpec(slots=2),
    classes=(
        ClassPolicy("interactive", Slo(ttft_s=2.0, itl_s=0.5), weight=10),
        ClassPolicy("batch", weight=1, max_queue_time_s=60.0),
    ),
    classify=Classify(default="interactive"),
)
INTERACTIVE, BATCH = 0, 1


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = START_S

    def __call__(self) -> float:
        return self.now


def settings(drain_timeout_s: float = 300.0) -> Settings:
    return Settings(
        policy=Path("policy.yaml"),
        upstream=Address("127.0.0.1", 1),
        listen=Address("127.0.0.1", 0),
        admin=Address("127.0.0.1", 0),
        drain_timeout_s=drain_timeout_s,
        log_format="json",
        log_level="info",
        client_salt=b"salt",
    )


@dataclass
class Observed:
    """A gate, and what the process around it would know."""

    policy: Policy = TWO_CLASSES
    clock: Clock = field(default_factory=Clock)
    settings: Settings = field(default_factory=settings)
    server: Server | None = None

    def __post_init__(self) -> None:
        controller = Controller(self.policy, now=self.clock.now, rng=random.Random(7))
        self.gate = Gate(self.policy, controller, watcher=LogWatcher(), client_salt=b"salt", clock=self.clock)
        self.reload = ReloadState(
            generation=1,
            content_hash="0123456789abcdef" * 4,
            last_error=None,
            problems=(),
            loaded_at=START_S - 60.0,
            mode=Mode.ENFORCE,
        )

    @property
    def leaving(self) -> bool:
        return self.controller.draining

    async def drain(self, timeout_s: float, settle_s: float = 0.0) -> bool:
        self.gate.drain()
        return not self.gate.in_flight

    # Events, at the clock's time.

    @property
    def controller(self) -> Controller:
        return self.gate.controller

    def arrives(self, class_index: int = INTERACTIVE, client: str = "c0ffee", **facts: object) -> Request:
        given: dict[str, object] = {"prompt_bytes": 400, "model": "tiny", **facts}
        request = Request(class_index=class_index, client=client, **given)  # type: ignore[arg-type]
        self.controller.arrive(self.clock.now, request)
        return request

    def streams(self, request: Request, *, ttft_s: float = 0.1, tokens: int = 8, gap_s: float = 0.05) -> None:
        """The engine answers with so many tokens, the first after `ttft_s`."""
        assert request.stage is Stage.PREFILL
        self.clock.now += ttft_s
        self.controller.first_token(self.clock.now, request)
        for _ in range(tokens - 1):
            self.clock.now += gap_s
            self.controller.progress(self.clock.now, request, 1)

    def finishes(self, request: Request, prompt_tokens: int = 100, output_tokens: int = 8) -> None:
        self.controller.finish(self.clock.now, request, Truth(prompt_tokens, output_tokens))

    def lives(self) -> None:
        """See everything once: each outcome, a line that drains, enough streams to have learned all there is."""
        self.controller.engine_status(self.clock.now, EngineStatus.UP)
        for class_index in (INTERACTIVE, BATCH):
            first, second = self.arrives(class_index), self.arrives(class_index)
            waiting = [self.arrives(class_index) for _ in range(8)]
            self.controller.cancel(self.clock.now, waiting.pop())
            for one in (first, second, *waiting):
                if one.stage is Stage.PREFILL:
                    self.streams(one, ttft_s=0.02, tokens=2, gap_s=0.01)
                    self.finishes(one, output_tokens=2)
        for _ in range(30):
            running = self.arrives()
            self.streams(running, tokens=16)
            self.finishes(running, output_tokens=16)
        broken = self.arrives(BATCH)
        self.controller.fail(self.clock.now, broken, Reason.ENGINE_RESET_EARLY, Truth())
        self.controller.engine_snapshot(self.clock.now, EngineSnapshot(2, 1, 0, 8192, 0.25))
        self.controller.engine_status(self.clock.now, EngineStatus.DOWN)
        self.arrives(is_retry=True)  # rejected
        self.controller.engine_status(self.clock.now, EngineStatus.UP)

    def is_pressed(self) -> CapacityMeter:
        """Ten seconds in which somebody waits and one is served each half second, then the rest; who measured it."""
        meter = CapacityMeter()
        waiting = [self.arrives(BATCH) for _ in range(24)]
        for number in range(24):
            begun = next(one for one in waiting if one.stage is Stage.PREFILL)
            self.streams(begun, ttft_s=0.4, tokens=2, gap_s=0.1)
            self.finishes(begun, output_tokens=2)
            if number < 20:
                meter.sample(self.clock.now, self.controller)
        return meter
