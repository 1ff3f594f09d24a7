"""An open-loop client: it sends each request when the schedule says, whatever became of those before.

Every request is one streamed `POST /v1/chat/completions` on a connection of its own, and is measured from
the moment it is offered: status, time to the first token, the gap before each further token, and the end.
A chunk counts as a token only if it carries text (llama.cpp opens its streams with one that names the role).

What a client does, the same on both sides of a comparison:
- it leaves, closing its connection, when no token has come within its patience (`Patience`);
- it takes a refusal for an answer: nothing is sent again;
- once tokens flow it reads to the end.

Invariants: a replay is bounded in requests (`traffic.MAX_REQUESTS`) and in time (`drain_s` after the last
arrival; whoever is still served then is cut off, and counted as that); every record ends in exactly one
outcome; all times are seconds on one monotonic clock, as offsets from the start of the replay.

What the requests are is decided in `traffic.py`; what the records amount to, in `outcome.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import json
import resource
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from sluicegate_lab.traffic import MAX_TOKENS, Request, prompt_text

CLASS_HEADER = "x-admission-class"
CLIENT_HEADER = "x-client-id"
"""How a request says which class and which client it belongs to; an engine alone ignores both."""

CONNECT_TIMEOUT_S = 5.0

MAX_LINE_BYTES = 1 << 20
"""The longest line of a stream: beyond it the answer is no event stream, and the request has failed."""

MAX_ERROR_BYTES = 4096
"""What is kept of the body of an answer that is not 200."""

FILE_LIMIT = 16_384
"""Open files asked of the system: a connection for each request under way, and room for the rest."""


class Outcome(enum.Enum):
    """How a request ended, as its client saw it."""

    SERVED = "served"
    REFUSED = "refused"
    """Answered 429 or 503."""
    GAVE_UP = "gave up"
    """Its client left before the first token."""
    CUT_OFF = "cut off"
    """Still under way when the replay ended."""
    FAILED = "failed"
    """Any other status, an error inside the stream, or a broken connection."""


@dataclass(slots=True)
class Record:
    """One request as its client saw it. Offsets in seconds from the start of the replay; None: has not been.

    `token_at_s` holds the arrival of each token received; `served_tokens` is the engine's own count where it
    gave one (it counts the end of the text, too). `outcome` is None while the request is under way.
    """

    request: Request
    offered_s: float
    outcome: Outcome | None = None
    status: int | None = None
    ended_s: float | None = None
    token_at_s: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    served_tokens: int | None = None
    reason: str | None = None
    retry_after_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the offer to the first token."""
        return self.token_at_s[0] - self.offered_s if self.token_at_s else None

    @property
    def total_s(self) -> float | None:
        return None if self.ended_s is None else self.ended_s - self.offered_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between each token and the next."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_at_s)]

    @property
    def mean_gap_s(self) -> float | None:
        """The mean inter-token time; None with fewer than two tokens."""
        count = len(self.token_at_s)
        return (self.token_at_s[-1] - self.token_at_s[0]) / (count - 1) if count > 1 else None


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests are sent: a plain HTTP address, and the model's name in the API."""

    host: str
    port: int
    model: str

    @classmethod
    def of(cls, url: str, model: str) -> Target:
        """Raises `ValueError` unless `url` is `http://HOST[:PORT]`."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is no address of the form http://HOST:PORT")
        return cls(parts.hostname, parts.port or 80, model)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the clients of each class wait for a first token, in seconds, and how long a replay drains."""

    first_token_s: dict[str, float]
    drain_s: float


@dataclass(frozen=True, slots=True)
class Wording:
    """How the texts of a replay are written: see `traffic.prompt_text`."""

    salt: str
    counts_down: bool


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


def request_bytes(target: Target, request: Request, wording: Wording) -> bytes:
    """The request as it goes over the wire. Nothing in it says how long the answer will be."""
    body = json.dumps(
        {
            "model": target.model,
            "messages": [
                {
                    "role": "user",
                    "content": prompt_text(request, salt=wording.salt, counts_down=wording.counts_down),
                }
            ],
            "max_tokens": MAX_TOKENS[request.class_name],
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\n"
        f"Host: {target.host}:{target.port}\r\n"
        "Content-Type: application/json\r\n"
        "Accept: text/event-stream\r\n"
        f"{CLASS_HEADER}: {request.class_name}\r\n"
        f"{CLIENT_HEADER}: {request.client}\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body


class _Exchange(asyncio.Protocol):
    """One request on one connection: writes it, reads the answer into a record, resolves `done` once."""

    def __init__(self, record: Record, payload: bytes, clock: Callable[[], float]) -> None:
        self._record = record
        self._payload = payload
        self._clock = clock
        self._parser: Any = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._line = bytearray()
        self._stream_ended = False
        self.done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not of asyncio's classes: a cast, where a check would never hold.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._payload)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._record.reason = f"not HTTP: {error}"
            self._end(Outcome.FAILED)

    def connection_lost(self, exc: Exception | None) -> None:
        # An answer without a length ends with the connection; any other has called on_message_complete.
        self._end(Outcome.SERVED if self._stream_ended else Outcome.FAILED)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _end(self, outcome: Outcome) -> None:
        if not self.done.done():
            self.done.set_result(outcome)

    # What httptools calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        lowered = name.lower()
        if lowered == b"retry-after-ms":
            with contextlib.suppress(ValueError):
                self._record.retry_after_s = float(value) / 1000
        elif lowered == b"retry-after" and self._record.retry_after_s is None:
            with contextlib.suppress(ValueError):
                self._record.retry_after_s = float(value)
        elif lowered == b"x-sluicegate-reason":
            self._record.reason = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._record.status = int(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        self._line += body
        if self._record.status != 200:
            del self._line[MAX_ERROR_BYTES:]
            return
        *lines, rest = self._line.split(b"\n")
        self._line = rest
        if len(rest) > MAX_LINE_BYTES:
            self._record.reason = "a line of the stream has no end"
            self._end(Outcome.FAILED)
        for line in lines:
            if line.startswith(b"data:"):
                self._on_event(bytes(line[5:]).strip())

    def on_message_complete(self) -> None:
        status = self._record.status
        if status == 200:
            self._end(Outcome.SERVED if self._stream_ended else Outcome.FAILED)
        elif status in (429, 503):
            self._end(Outcome.REFUSED)
        elif status is not None and status >= 200:
            self._record.reason = self._record.reason or bytes(self._line).decode(errors="replace")
            self._end(Outcome.FAILED)

    def _on_event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._stream_ended = True
            return
        try:
            event = _decode_event(data)
        except msgspec.DecodeError as error:
            self._record.reason = f"an event that is no JSON: {error}"
            self._end(Outcome.FAILED)
            return
        if event.error is not None:
            self._record.reason = str(event.error)
            self._end(Outcome.FAILED)
        if event.usage is not None:
            self._record.prompt_tokens = event.usage.prompt_tokens
            self._record.served_tokens = event.usage.completion_tokens
        deltas = (choice.delta for choice in event.choices)
        if any(delta is not None and (delta.content or delta.reasoning_content) for delta in deltas):
            self._record.token_at_s.append(self._clock())


class Replay:
    """One run of a schedule against one target. Its records may be read while it goes on.

    The task that runs `run` owns `records` and everything in it.
    """

    def __init__(self, target: Target, wording: Wording, patience: Patience) -> None:
        self._target = target
        self._wording = wording
        self._patience = patience
        self._started_at: float | None = None
        self._stop = asyncio.Event()
        self.records: list[Record] = []

    def now_s(self) -> float:
        """Seconds since the replay began; 0 before."""
        return 0.0 if self._started_at is None else asyncio.get_running_loop().time() - self._started_at

    async def run(self, requests: Sequence[Request], seconds: float) -> None:
        """Offers `requests` at their times, and returns when all have ended or `drain_s` after `seconds`."""
        raise_file_limit()
        self._started_at = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            for request in requests:
                await asyncio.sleep(request.offset_s - self.now_s())
                group.create_task(self.send(request))
            loop = asyncio.get_running_loop()
            cut_off = loop.call_later(seconds + self._patience.drain_s - self.now_s(), self._stop.set)
        cut_off.cancel()

    async def run_closed(self, requests: Iterable[Request], *, concurrency: int, seconds: float) -> None:
        """Keeps `concurrency` requests under way for `seconds`, then lets them end: the engine's own pace."""
        raise_file_limit()
        loop = asyncio.get_running_loop()
        self._started_at = loop.time()
        cut_off = loop.call_later(seconds + self._patience.drain_s, self._stop.set)
        source = iter(requests)

        async def worker() -> None:
            while self.now_s() < seconds:
                request = next(source, None)
                if request is None:
                    return
                await self.send(request)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker())
        cut_off.cancel()

    async def send(self, request: Request) -> Record:
        """Sends one request now and returns its record once it has ended."""
        if self._started_at is None:
            self._started_at = asyncio.get_running_loop().time()
        record = Record(request, self.now_s())
        self.records.append(record)
        payload = request_bytes(self._target, request, self._wording)
        exchange = _Exchange(record, payload, self.now_s)
        try:
            record.outcome = await self._watch(exchange, record)
        except OSError as error:
            record.reason = f"no connection: {error.strerror or str(error) or 'timed out'}"
            record.outcome = Outcome.FAILED
        finally:
            exchange.close()
            record.ended_s = self.now_s()
        return record

    async def _watch(self, exchange: _Exchange, record: Record) -> Outcome:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await loop.create_connection(lambda: exchange, self._target.host, self._target.port)
        patience_s = self._patience.first_token_s[record.request.class_name]
        stopped = loop.create_task(self._stop.wait())
        try:
            waited_s = self.now_s() - record.offered_s
            await asyncio.wait(
                (exchange.done, stopped),
                timeout=max(0.0, patience_s - waited_s),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if record.token_at_s and not exchange.done.done():
                await asyncio.wait((exchange.done, stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        if exchange.done.done():
            return exchange.done.result()
        return Outcome.CUT_OFF if self._stop.is_set() else Outcome.GAVE_UP


def raise_file_limit() -> None:
    """Lets this process hold as many connections as a replay may need, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILE_LIMIT if hard == resource.RLIM_INFINITY else min(hard, FILE_LIMIT)
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
