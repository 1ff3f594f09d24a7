"""The Controller under every interleaving that hypothesis can think of, held against a naive model.

Each rule is one event of the shell; after each, every figure of the controller is compared with a count over a
plain list of requests (`tests/simulation/ledger.py`), and every effect is checked against the rules of a ticket.
"""

import random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.simulation.ledger import Ledger, Life

from sluicegate_core.controller import Controller
from sluicegate_core.effects import EngineSnapshot, Truth
from sluicegate_core.policy import Classify, ClassPolicy, EngineSpec, Mode, Policy, Slo
from sluicegate_core.request import Request
from sluicegate_core.vocabulary import EngineStatus, Outcome, Reason

CLASS_NAMES = ("interactive", "standard", "batch")
FAILURES = (
    Reason.ENGINE_REFUSED,
    Reason.ENGINE_RESET_EARLY,
    Reason.ENGINE_RESET_MIDSTREAM,
    Reason.ENGINE_HUNG,
    Reason.ENGINE_BUSY,
    Reason.ENGINE_ERROR,
    Reason.ABORTED,
)

#: What an engine does takes time, however little.
WORK_S = 0.001

maybe = st.none


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    names = draw(st.lists(st.sampled_from(CLASS_NAMES), min_size=1, max_size=3, unique=True))
    classes = tuple(
        ClassPolicy(
            name,
            slo=Slo(
                ttft_s=draw(maybe() | st.sampled_from((0.3, 2.0))),
                itl_s=draw(maybe() | st.sampled_from((0.05, 0.2))),
            ),
            weight=draw(st.sampled_from((1, 2, 10))),
            max_queue_time_s=draw(st.sampled_from((0.0, 0.5, 5.0))),
            max_concurrency=draw(maybe() | st.integers(1, 3)),
            reserved_slots=draw(maybe() | st.integers(0, 3)),
        )
        for name in names
    )
    return Policy(
        mode=draw(st.sampled_from((Mode.ENFORCE, Mode.ENFORCE, Mode.ENFORCE, Mode.OFF, Mode.SHADOW))),
        engine=EngineSpec(slots=draw(maybe() | st.integers(1, 5))),
        classes=classes,
        classify=Classify(default=draw(st.sampled_from(names))),
    )


class ControllerMachine(RuleBasedStateMachine):
    """Rules are the shell's events; time moves by `pass_time`, and a little with all that the engine does."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.settled = True
        self.ticked = False
        self.refused_ids: set[bytes] = set()

    @initialize(policy=policies(), seed=st.integers(0, 9), service_s=maybe() | st.sampled_from((0.02, 0.5)))
    def begin(self, policy: Policy, seed: int, service_s: float | None) -> None:
        """A controller that knows nothing, or one that has learned from requests of every class."""
        self.controller = Controller(policy, now=self.now, rng=random.Random(seed))
        self.ledger = Ledger(policy)
        if service_s is not None:
            for number in range(20 * len(policy.classes)):
                self.learn_from_one(number % len(policy.classes), 100 + number, service_s)

    def learn_from_one(self, class_index: int, size: int, service_s: float) -> None:
        request = Request(class_index=class_index, client="a", prompt_bytes=4 * size, model="m")
        self.let_arrive(request, retry=False)
        self.now += service_s
        if self.ledger.by_request[request].stage == "prefill":  # not yet refused as too long for its SLO
            self.ledger.first_token(request)
            self.took(self.controller.first_token(self.now, request))
            self.ledger.ended(request, Outcome.SERVED, None)
            self.took(self.controller.finish(self.now, request, Truth(size, 32)))

    def pick(self, choice: int, *stages: str) -> Life:
        lives = self.ledger.of(*stages)
        return lives[choice % len(lives)]

    def some(self, *stages: str) -> bool:
        return bool(self.ledger.of(*stages))

    # Requests.

    def let_arrive(self, request: Request, *, retry: bool) -> None:
        life = self.ledger.arriving(self.now, request, retry=retry)
        self.ledger.arrived(self.controller, self.now, life, self.controller.arrive(self.now, request))
        self.remember_refused()
        self.ticked = False

    @rule(
        count=st.integers(1, 6),
        which=st.integers(0, 2),
        clients=st.sampled_from(("a", "ab", "abc")),
        size=st.sampled_from((1, 40, 700, 3_000)) | st.integers(1, 9_000),
        facts=st.fixed_dictionaries(
            {
                "streams": st.sampled_from((True, True, False)),
                "generates": st.sampled_from((True, True, True, False)),
                "max_output_tokens": maybe() | st.sampled_from((1, 64)),
                "choices": st.integers(1, 2),
                "model": st.sampled_from(("m", "n")),
            }
        ),
        known=st.booleans(),
    )
    def some_arrive(  # noqa: PLR0917  # hypothesis passes them by name
        self, count: int, which: int, clients: str, size: int, facts: dict[str, object], known: bool
    ) -> None:
        for number in range(count):
            request = Request(
                class_index=which % len(self.ledger.policy.classes),
                client=clients[number % len(clients)],
                prompt_bytes=4 * size,
                known_prompt_tokens=size if known else None,
                **facts,  # type: ignore[arg-type]
            )
            self.let_arrive(request, retry=False)

    @rule(which=st.integers(0, 2), marked=st.booleans(), request_id=st.sampled_from((b"x", b"y")))
    def one_comes_again(self, which: int, marked: bool, request_id: bytes) -> None:
        """Marked as a retry by its client, or known by its id if one of that id was refused."""
        request = Request(
            class_index=which % len(self.ledger.policy.classes),
            prompt_bytes=400,
            is_retry=marked,
            request_id=request_id,
        )
        self.let_arrive(request, retry=marked or request_id in self.refused_ids)

    def remember_refused(self) -> None:
        for life in self.ledger.lives:
            if life.outcome in (Outcome.REJECTED, Outcome.EVICTED) and life.reason is not Reason.CLIENT_GONE:
                self.refused_ids.add(life.request.request_id)
        self.refused_ids.discard(b"")

    def took(self, effects: object, *, ticked: bool = False) -> None:
        self.ledger.apply(self.controller, self.now, effects)  # type: ignore[arg-type]
        self.remember_refused()
        self.settled, self.ticked = True, ticked

    @precondition(lambda self: self.some("prefill", "decode"))
    @rule(count=st.integers(1, 4))
    def engine_works(self, count: int) -> None:
        """The oldest inside move on: a first token, or the end."""
        for life in self.ledger.of("prefill", "decode")[:count]:
            request = life.request
            self.now += WORK_S
            if life.stage == "prefill" and request.streams:
                self.ledger.first_token(request)
                self.took(self.controller.first_token(self.now, request))
            else:
                self.ledger.ended(request, Outcome.SERVED, None)
                truth = Truth(request.prompt_bytes // 4, 20)
                self.took(self.controller.finish(self.now, request, truth))

    @precondition(lambda self: self.some("prefill"))
    @rule(choice=st.integers(0, 50))
    def first_token(self, choice: int) -> None:
        request = self.pick(choice, "prefill").request
        self.now += WORK_S
        if request.streams:
            self.ledger.first_token(request)
            self.took(self.controller.first_token(self.now, request))

    @precondition(lambda self: self.some("decode"))
    @rule(choice=st.integers(0, 50), tokens=st.integers(1, 5))
    def progress(self, choice: int, tokens: int) -> None:
        life = self.pick(choice, "decode")
        before = life.request.tokens_out
        self.controller.progress(self.now, life.request, tokens)
        assert life.request.tokens_out == before + tokens
        self.settled = self.ticked = False

    @precondition(lambda self: self.some("prefill", "decode"))
    @rule(
        choice=st.integers(0, 50),
        prompt=maybe() | st.integers(1, 4_000),
        output=maybe() | st.integers(0, 500),
        teaches=st.sampled_from((True, True, False)),
    )
    def finish(self, choice: int, prompt: int | None, output: int | None, teaches: bool) -> None:
        request = self.pick(choice, "prefill", "decode").request
        self.now += WORK_S
        self.ledger.ended(request, Outcome.SERVED, None)
        self.took(self.controller.finish(self.now, request, Truth(prompt, output), teaches=teaches))

    @precondition(lambda self: self.some("prefill", "decode"))
    @rule(choice=st.integers(0, 50), reason=st.sampled_from(FAILURES))
    def fail(self, choice: int, reason: Reason) -> None:
        request = self.pick(choice, "prefill", "decode").request
        self.ledger.ended(request, Outcome.FAILED, reason)
        self.took(self.controller.fail(self.now, request, reason, Truth()))

    @precondition(lambda self: self.some("waiting", "prefill", "decode"))
    @rule(choice=st.integers(0, 50), stage=st.sampled_from(("waiting", "prefill", "decode")))
    def client_leaves(self, choice: int, stage: str) -> None:
        life = self.pick(choice, *((stage,) if self.some(stage) else ("waiting", "prefill", "decode")))
        outcome = Outcome.EVICTED if life.stage == "waiting" else Outcome.FAILED
        self.ledger.ended(life.request, outcome, Reason.CLIENT_GONE)
        self.took(self.controller.cancel(self.now, life.request))

    # What must be refused by an assertion, or do nothing.

    @precondition(lambda self: self.some("ended", "waiting"))
    @rule(choice=st.integers(0, 50), how=st.sampled_from(("finish", "fail", "cancel", "arrive")))
    def end_a_second_time_or_too_early(self, choice: int, how: str) -> None:
        life = self.pick(choice, "ended", "waiting")
        if life.stage == "waiting" and how == "cancel":
            return  # a client may leave the line
        calls = {
            "finish": lambda: self.controller.finish(self.now, life.request, Truth(1, 1)),
            "fail": lambda: self.controller.fail(self.now, life.request, Reason.ENGINE_ERROR, Truth()),
            "cancel": lambda: self.controller.cancel(self.now, life.request),
            "arrive": lambda: self.controller.arrive(self.now, life.request),
        }
        with pytest.raises(AssertionError):
            calls[how]()

    @precondition(lambda self: self.some("waiting", "decode", "ended"))
    @rule(choice=st.integers(0, 50))
    def tokens_out_of_turn(self, choice: int) -> None:
        """A first token of one that has had it, does not wait for it or has ended, changes nothing."""
        life = self.pick(choice, "waiting", "decode", "ended")
        assert not self.controller.first_token(self.now, life.request)
        if life.stage != "decode":
            before = life.request.tokens_out
            self.controller.progress(self.now, life.request, 3)
            assert life.request.tokens_out == before

    # Everything else.

    @rule(passed_s=st.sampled_from((1e-6, 0.001, 0.02, 0.1, 0.7, 4.0)))
    def pass_time(self, passed_s: float) -> None:
        """As in a shell whose timer is exact, or a little late."""
        self.now += passed_s
        self.settled = self.ticked = False
        if self.controller.wake_at <= self.now:
            self.tick()

    @rule()
    def tick(self) -> None:
        self.took(self.controller.tick(self.now), ticked=True)

    @rule(status=st.sampled_from(list(EngineStatus)))
    def engine_status(self, status: EngineStatus) -> None:
        """Down or loading is soon over, or there would be little else to see."""
        bad = self.ledger.status in (EngineStatus.DOWN, EngineStatus.LOADING)
        self.ledger.status = EngineStatus.UP if bad else status
        self.took(self.controller.engine_status(self.now, self.ledger.status))

    @rule(
        slots=maybe() | st.integers(1, 6),
        running=maybe() | st.integers(0, 6),
        waiting=maybe() | st.integers(0, 3),
        kv_used=maybe() | st.floats(0.0, 1.0),
    )
    def engine_snapshot(
        self, slots: int | None, running: int | None, waiting: int | None, kv_used: float | None
    ) -> None:
        snapshot = EngineSnapshot(slots=slots, running=running, waiting=waiting, kv_used=kv_used)
        self.took(self.controller.engine_snapshot(self.now, snapshot))

    @rule(policy=policies())
    def reconfigure(self, policy: Policy) -> None:
        self.ledger.reconfigured(policy)
        self.took(self.controller.reconfigure(self.now, policy))

    @precondition(lambda self: len(self.ledger.lives) > 60 and not self.ledger.draining)
    @rule()
    def drain(self) -> None:
        self.ledger.draining = True
        self.took(self.controller.drain(self.now))

    @precondition(lambda self: self.ledger.draining)
    @rule()
    def give_up_line(self) -> None:
        self.took(self.controller.give_up_line(self.now))
        assert self.controller.waiting == 0

    @invariant()
    def figures_agree(self) -> None:
        self.ledger.check(self.controller, self.now, settled=self.settled, ticked=self.ticked)

    def teardown(self) -> None:
        """Everybody ends, and nothing is left of anybody."""
        if not hasattr(self, "controller"):
            return
        self.took(self.controller.give_up_line(self.now))
        for life in self.ledger.of("prefill", "decode"):
            self.ledger.ended(life.request, Outcome.SERVED, None)
            self.took(self.controller.finish(self.now, life.request, Truth()))
        self.figures_agree()
        assert (
            self.controller.running == self.controller.waiting == self.controller.engine.pending_tokens == 0
        )
        assert sum(stats.in_flight for stats in self.controller.stats.values()) == 0


COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}

TestController = ControllerMachine.TestCase
TestController.settings = settings(max_examples=60, stateful_step_count=40, derandomize=True, **COMMON)  # type: ignore[arg-type]


class LongControllerMachine(ControllerMachine):
    """The same, longer and with new examples each time; a failure prints what reproduces it."""


TestControllerAtLength = pytest.mark.timeout(600)(pytest.mark.slow(LongControllerMachine.TestCase))
TestControllerAtLength.settings = settings(
    max_examples=200,
    stateful_step_count=100,
    phases=[p for p in Phase if p is not Phase.explain],
    **COMMON,
)  # type: ignore[arg-type]
