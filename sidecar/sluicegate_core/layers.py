"""The layers of the decision at arrival, in order: each may refuse, the first to do so gives the reason.

`LAYERS` is the list to read. A layer is a function of the scene (what is known as the request arrives) that
returns a reason, or None to let it pass on to the next. Who passes them all joins the line, from which
`handover` starts it, at once where there is room. Adding a rule is a function here, a line in the list, a
reason in `vocabulary` and its settings in `policy`. The order is the design's:

    1 availability    draining, engine down                        503
    2 quota           the client's share                            with client quotas
    3 breaker         the class's latency and errors                with breakers
    4 kv              free KV tokens against the reservation        with KV accounting
    5 time            predicted TTFT against the SLO                429
    6 concurrency     caps and kept slots: they hold (`handover`), they do not refuse
    7 queue           what cannot be reached in time is not let in  429

Layers 2 to 4 are not built yet and have no entry in the list.

Two promises hold whatever the estimates say, and have tests: nobody is refused by prediction while there is room
for it and nobody ahead, unless its own service alone is past the SLO; and even then one such request passes each
`PROBE_EVERY_S` on an idle engine, because what is refused for good teaches nothing.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from sluicegate_core.policy import ClassPolicy
from sluicegate_core.request import Request
from sluicegate_core.vocabulary import NOT_READY, EngineStatus, Hold, Reason

#: Requests that may wait in the gate, all classes together: a bound on memory, far above any bound by time.
MAX_WAITING: Final = 100_000
#: An idle engine is tried with a request that seems too long for its SLO this often, s.
PROBE_EVERY_S: Final = 30.0


class Scene(NamedTuple):
    """What is known as a request arrives.

    Attributes:
        request: with its estimate filled in.
        policy: of its class.
        status: of the engine.
        draining: the pod is going away.
        idle: nothing waits and nothing runs.
        probe_due: an idle engine was not tried for `PROBE_EVERY_S`.
        waiting: requests in the line, all classes.
        hold: what would keep it from the engine at this moment if its turn came; None where nothing would.
        wait_s: predicted wait for its turn; 0.0 where it can go at once and only there, None while unknown.
        service_s: predicted hand-over to first token with what the engine has in hand, None while unknown.
        alone_s: the same on an idle engine.
    """

    request: Request
    policy: ClassPolicy
    status: EngineStatus
    draining: bool
    idle: bool
    probe_due: bool
    waiting: int
    hold: Hold | None
    wait_s: float | None
    service_s: float | None
    alone_s: float | None

    @property
    def at_once(self) -> bool:
        """There is room for it and nobody ahead. Room alone is not enough: those ahead may be held where this
        one is not, such as by a longer prompt."""
        return self.wait_s == 0.0

    @property
    def ttft_s(self) -> float | None:
        """Predicted time to first token, s; None while a part of it is unknown."""
        if self.wait_s is None or self.service_s is None:
            return None
        return self.wait_s + self.service_s


def availability(scene: Scene) -> Reason | None:
    """Nobody home: another pod should have it."""
    if scene.draining:
        return Reason.DRAINING
    if scene.status in NOT_READY:
        return Reason.ENGINE_DOWN
    return None


def time(scene: Scene) -> Reason | None:
    """Predicted TTFT against the class's SLO.

    Example: at 1,200 prompt tokens a second, an 800-token prompt with 1,100 tokens ahead has its first token
    after (1,100 + 800) / 1,200 = 1.58 s, within an SLO of 2 s; with 2,400 ahead after 2.67 s.
    """
    slo_s = scene.policy.slo.ttft_s
    if slo_s is None:
        return None
    if scene.alone_s is not None and scene.alone_s > slo_s:
        return None if scene.idle and scene.probe_due else Reason.SLO_UNREACHABLE
    if scene.at_once:
        return None
    if scene.wait_s is not None and scene.service_s is not None and scene.wait_s + scene.service_s > slo_s:
        return Reason.TTFT
    return None


def queue(scene: Scene) -> Reason | None:
    """The line is as long as can be served in time (Little's law: length = rate x time), and bounded."""
    if scene.at_once:
        return None
    if scene.waiting >= MAX_WAITING:
        return Reason.QUEUE_FULL
    if scene.wait_s is not None and scene.wait_s > scene.policy.max_queue_time_s:
        return Reason.QUEUE_TIME
    return None


LAYERS: Final[tuple[Callable[[Scene], Reason | None], ...]] = (availability, time, queue)


def decide(scene: Scene) -> Reason | None:
    """The first layer's reason to refuse, or None."""
    for layer in LAYERS:
        reason = layer(scene)
        if reason is not None:
            return reason
    return None
