"""The gate: one request, step by step, between the data path and the controller.

The handler chain is `Gate.on_request` read from the top: endpoint -> facts -> class and client -> arrive; what
follows is `Passage`: forward -> stream -> release. The gate owns the clock and the one timer; every decision is
the controller's. One event loop runs all of it, so there is exactly one count of everything, and nothing is
awaited between a decision and the act that relies on it.

Bytes and sockets live in `http`, what a body says in `facts` and `usage`, counting for people in `metrics`.
"""

import asyncio
import secrets
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import count
from time import monotonic
from typing import Final, Protocol

from sluicegate_core.classify import Classifier
from sluicegate_core.controller import NEVER, Controller
from sluicegate_core.effects import Effect, EngineSnapshot, Refusal, Reject, Start, Truth
from sluicegate_core.policy import Policy
from sluicegate_core.request import DECODE, ENDED, Request
from sluicegate_core.vocabulary import EngineStatus, Outcome, Reason
from sluicegate_sidecar.endpoints import Endpoint, endpoint_of
from sluicegate_sidecar.facts import parse_facts
from sluicegate_sidecar.http import End, Exchange, LocalReply
from sluicegate_sidecar.replies import failure_reply, refusal_reply
from sluicegate_sidecar.usage import UsageReader, reader_for

#: The longest request id taken from a client; longer ones are replaced.
MAX_REQUEST_ID_BYTES: Final = 128
#: Retry-After of an engine failure, s: about one poll of its health, so that the state is known by then.
FAILURE_RETRY_AFTER_S: Final = 2.0

#: What an admitted client reads where a refused one reads the reason.
ADMITTED: Final = (b"x-sluicegate-reason", b"admitted")
QUEUED: Final = (b"x-sluicegate-reason", b"queued")

_FAILURES: Final[dict[End, Reason]] = {
    End.ENGINE_REFUSED: Reason.ENGINE_REFUSED,
    End.ENGINE_RESET_EARLY: Reason.ENGINE_RESET_EARLY,
    End.ENGINE_RESET_MIDSTREAM: Reason.ENGINE_RESET_MIDSTREAM,
    End.ENGINE_HUNG: Reason.ENGINE_HUNG,
    End.ENGINE_BAD_RESPONSE: Reason.ENGINE_BAD_RESPONSE,
    End.ABORTED: Reason.ABORTED,
}
REJECTED: Final = Outcome.REJECTED
EVICTED: Final = Outcome.EVICTED
#: Statuses by which an engine says that it is full.
_BUSY_STATUSES: Final = frozenset({429, 503, 529})
#: Error codes inside a 200 stream that say the same (vLLM refuses that way).
_BUSY_CODES: Final = frozenset({"429", "503", "rate_limit_exceeded", "server_is_overloaded"})


class Watcher(Protocol):
    """Who writes logs of what the gate does. Called on the event loop; must not block."""

    def refused(self, request: Request, refusal: Refusal, outcome: Outcome) -> None: ...

    def failed(self, request: Request, reason: Reason) -> None: ...


class Passage:
    """One gated request on its way through: the listener of its exchange."""

    __slots__ = ("exchange", "gate", "reader", "request", "request_id", "status")

    def __init__(self, gate: "Gate", exchange: Exchange, request: Request, request_id: bytes) -> None:
        self.gate = gate
        self.exchange = exchange
        self.request = request
        self.request_id = request_id
        self.reader: UsageReader | None = None
        self.status = 0

    # What the data path reports.

    def on_response_head(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.reader = reader_for(_content_type(headers)) if status < 400 else None

    def on_response_body(self, data: bytes) -> None:
        reader = self.reader
        if reader is None:
            return
        tokens = reader.feed(data)
        if not tokens:
            return
        if self.request.stage is DECODE:
            gate = self.gate
            gate.controller.progress(gate.clock(), self.request, tokens)
        else:
            self._first_tokens(tokens)

    def on_end(self, end: End) -> None:
        request = self.request
        # Exchange, passage and request know each other: apart again, they are freed at once, and the garbage
        # collector has nothing to find (it took a tenth of the time).
        request.owner = self.exchange.listener = None
        if request.stage is ENDED:  # refused: the controller has counted it already
            return
        gate = self.gate
        now = gate.clock()
        if end is End.COMPLETE:
            gate.apply(self._complete(now))
        elif end is End.CLIENT_GONE:
            gate.apply(gate.controller.cancel(now, request))
        else:
            reason = _FAILURES[end]
            if end is End.ENGINE_REFUSED:
                gate.controller.engine.status = EngineStatus.DOWN
                gate.on_engine_refused()
            gate.watcher.failed(request, reason)
            gate.apply(gate.controller.fail(now, request, reason, self._truth()))

    def failure_reply(self, end: End) -> LocalReply:
        return LocalReply(*failure_reply(_FAILURES[end], FAILURE_RETRY_AFTER_S, self.request_id))

    # What the controller asks.

    def forward(self) -> None:
        request_id = (b"x-request-id", self.request_id)
        self.exchange.forward((request_id,), (request_id, QUEUED if self.request.was_queued else ADMITTED))

    def refuse(self, refusal: Refusal) -> None:
        reply = refusal_reply(refusal, self.request_id)
        self.exchange.refuse(reply.status, reply.headers, reply.body)

    # Inside.

    def _first_tokens(self, tokens: int) -> None:
        gate, request = self.gate, self.request
        now = gate.clock()
        gate.apply(gate.controller.first_token(now, request))
        gate.controller.progress(now, request, tokens - 1)

    def _truth(self) -> Truth:
        reader = self.reader
        return Truth() if reader is None else Truth(reader.prompt_tokens, reader.completion_tokens)

    def _complete(self, now: float) -> Sequence[Effect]:
        controller, request, reader = self.gate.controller, self.request, self.reader
        if reader is not None:
            tokens = reader.end()
            if tokens and request.stage is DECODE:
                controller.progress(now, request, tokens)
            elif tokens:
                self._first_tokens(tokens)
        failure: Reason | None = None
        if self.status in _BUSY_STATUSES:
            failure = Reason.ENGINE_BUSY
        elif self.status >= 500:
            failure = Reason.ENGINE_ERROR
        elif reader is not None and reader.error is not None:
            failure = Reason.ENGINE_BUSY if reader.error in _BUSY_CODES else Reason.ENGINE_ERROR
        if failure is not None:
            self.gate.watcher.failed(request, failure)
            return controller.fail(now, request, failure, self._truth())
        # A 4xx is the engine's answer to a request that was wrong: served, and no lesson about the work.
        return controller.finish(now, request, self._truth(), teaches=self.status < 400)


class Gate:
    """The application behind the data path: classifies, decides, forwards."""

    def __init__(
        self,
        policy: Policy,
        controller: Controller,
        *,
        watcher: Watcher,
        client_salt: bytes,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """
        Args:
            policy: in force until `reconfigure`.
            controller: built on the same clock.
            watcher: logs.
            client_salt: keys the hash of client identities, so that it cannot be reversed by trying.
            clock: monotonic seconds.
        """
        self.controller = controller
        self.watcher = watcher
        self.clock = clock
        self.ungated = 0
        self.protocol_errors: Counter[str] = Counter()
        self.generation = 1
        #: Called when a request could not reach the engine: whoever watches the engine should look again.
        self.on_engine_refused: Callable[[], None] = lambda: None
        self._salt = client_salt
        self._classify_by(policy)
        self._id_prefix = secrets.token_hex(6).encode()
        self._ids = count(1)
        self._effects: deque[Effect] = deque()
        self._applying = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = NEVER

    def _classify_by(self, policy: Policy) -> None:
        self._classifier = Classifier(policy, salt=self._salt)
        self._reads_paths = any(rule.path is not None for rule in policy.classify.rules)

    # The data path's calls.

    def on_request(self, exchange: Exchange) -> None:
        """Head and body are here: find out what it is, and ask the controller."""
        endpoint = endpoint_of(exchange.method, exchange.path)
        if endpoint is None:
            self.ungated += 1
            exchange.forward()
            return
        request = self._read(exchange, endpoint)
        request_id = request.request_id or b"%b-%x" % (self._id_prefix, next(self._ids))
        request.owner = exchange.listener = Passage(self, exchange, request, request_id)
        self.apply(self.controller.arrive(self.clock(), request))

    def on_protocol_error(self, kind: str) -> None:
        """A request broke the protocol or a limit and was answered by the data path."""
        self.protocol_errors[kind] += 1

    # The operator's side.

    def reconfigure(self, policy: Policy) -> None:
        """Put another policy in force; nothing in flight is lost."""
        self._classify_by(policy)
        self.generation += 1
        self.apply(self.controller.reconfigure(self.clock(), policy))

    def engine_status(self, status: EngineStatus) -> None:
        self.apply(self.controller.engine_status(self.clock(), status))

    def engine_snapshot(self, snapshot: EngineSnapshot) -> None:
        self.apply(self.controller.engine_snapshot(self.clock(), snapshot))

    def drain(self) -> None:
        self.apply(self.controller.drain(self.clock()))

    def give_up_line(self) -> None:
        self.apply(self.controller.give_up_line(self.clock()))

    @property
    def in_flight(self) -> int:
        """Requests waiting or with the engine."""
        return self.controller.waiting + self.controller.running

    # Effects and time.

    def apply(self, effects: Sequence[Effect]) -> None:
        """Carry out what the controller asks, in order, and set the timer.

        An effect may end a request at once (its connection is gone already) and so ask for more: those are
        carried out after it, by the same loop, however many there are.
        """
        if effects:
            if self._applying:
                self._effects.extend(effects)
                return
            self._applying = True
            try:
                for effect in effects:
                    self._carry_out(effect)
                while self._effects:
                    self._carry_out(self._effects.popleft())
            finally:
                self._applying = False
        if self.controller.line.count:
            self._arm()

    def _carry_out(self, effect: Effect) -> None:
        request = effect.request
        passage = request.owner
        assert isinstance(passage, Passage)
        if isinstance(effect, Start):
            if request.stage is not ENDED:  # its client may have left since
                passage.forward()
            return
        self.watcher.refused(request, effect.refusal, REJECTED if isinstance(effect, Reject) else EVICTED)
        passage.refuse(effect.refusal)

    def _arm(self) -> None:
        wake_at = self.controller.wake_at
        if wake_at >= self._timer_at:  # an earlier timer looks again and sets the next
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = wake_at
        delay_s = max(0.0, wake_at - self.clock())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._timer_at = NEVER
        self.apply(self.controller.tick(self.clock()))

    # Reading a request.

    def _read(self, exchange: Exchange, endpoint: Endpoint) -> Request:
        header = exchange.header
        facts = parse_facts(endpoint, header(b"content-type"), exchange.body)
        class_index, client = self._classifier.classify(
            header, facts.model, exchange.path.decode("latin-1") if self._reads_paths else ""
        )
        retries = header(b"x-stainless-retry-count")
        return Request(
            class_index=class_index,
            client=client,
            model=facts.model,
            prompt_bytes=facts.prompt_bytes,
            known_prompt_tokens=facts.prompt_tokens_exact,
            max_output_tokens=facts.max_output_tokens,
            choices=facts.choices,
            streams=facts.stream,
            generates=facts.generates,
            is_retry=retries is not None and retries not in (b"", b"0"),
            request_id=_usable_id(header(b"x-request-id")),
        )


def _usable_id(given: bytes | None) -> bytes:
    """The client's own request id, or nothing where it is too long or not plain text."""
    if given and len(given) <= MAX_REQUEST_ID_BYTES and given.isascii() and given.decode().isprintable():
        return given
    return b""


def _content_type(headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
    for name, value in headers:
        if name == b"content-type":
            return value
    return None
