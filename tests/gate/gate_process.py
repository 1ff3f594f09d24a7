"""What the tests of the whole gate stand on: the gate as a real process, and an engine that does as it is told.

`gate_before` starts `python -m sluicegate_sidecar run` as a user would, on ports of its own, and holds every test
that leaves it well to the same promises: no ticket held, counts that close, no descriptor leaked, exit 0 after
SIGTERM, no traceback in its log. `ScriptedEngine` hands each inference request to the test as a `Call`, which
answers it piece by piece; the requests of the gate's probe it answers itself.

Nothing here waits for a time: lines of the process's output and sockets are events; only what another process
holds in its memory is asked for again, in `until`, with an end. Raw clients are those of `wire`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from prometheus_client.parser import text_string_to_metric_families
from tests.gate.wire import PATIENCE_S, ClientSide, Engine, EngineSide, Message, request

from sluicegate_lab.engine import EngineOptions, LlamaServer
from sluicegate_lab.tiny_model import SMALLEST, ensure_model

ROOT = Path(__file__).parents[2]

#: Between two questions to another process.
ASK_AGAIN_S = 0.02

CHAT = b"/v1/chat/completions"

#: Two classes by a header, clients by another, and nothing that refuses by prediction.
POLICY = """\
engine: {slots: 2}
classes:
- {name: interactive, weight: 10, maxQueueTime: 60s}
- {name: batch, weight: 1, maxQueueTime: 60s}
classify:
  default: interactive
  client: {header: x-client}
  rules:
  - {header: x-admission-class, values: [batch], class: batch}
"""

#: One class that refuses nothing within a test's time.
PATIENT = """\
engine: {slots: 2}
classes:
- {name: interactive, slo: {ttft: 30s}}
"""

State = dict[str, Any]
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]
T = TypeVar("T")


async def until(ask: Callable[[], Awaitable[T]], what: Callable[[], object] = lambda: "it never held") -> T:
    """Ask until the answer is true, and return it; AssertionError when it is not for `PATIENCE_S`."""
    loop = asyncio.get_running_loop()
    give_up_at_s = loop.time() + PATIENCE_S
    never = asyncio.Event()
    while not (answer := await ask()):
        assert loop.time() < give_up_at_s, what()
        with suppress(TimeoutError):
            await asyncio.wait_for(never.wait(), ASK_AGAIN_S)
    return answer


class Lines:
    """What a process writes, line by line, collected by a thread as it comes."""

    def __init__(self, stream: IO[str]) -> None:
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._ended = False
        self._stream = stream
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        for line in self._stream:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def wait_for(self, pattern: str, times: int = 1) -> re.Match[str]:
        """The `times`-th match in the lines so far and to come; AssertionError after `PATIENCE_S`, or at the end."""

        def found() -> re.Match[str] | None:
            matches = [match for line in self.lines if (match := re.search(pattern, line))]
            return matches[times - 1] if len(matches) >= times else None

        with self._news:
            self._news.wait_for(lambda: found() or self._ended, PATIENCE_S)
            match = found()
        assert match is not None, f"no {pattern!r} in:\n{self.text}"
        return match

    async def line(self, pattern: str, times: int = 1) -> re.Match[str]:
        """`wait_for`, off the loop."""
        return await asyncio.to_thread(self.wait_for, pattern, times)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def close(self) -> None:
        """After the process has ended: read the rest."""
        self._thread.join(PATIENCE_S)
        self._stream.close()


class GateProcess:
    """One running gate. `start` and `end` block; all else is for the loop."""

    def __init__(
        self, upstream: str, policy: str | Path = POLICY, flags: Sequence[str] = ("--log-level=debug",)
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="sluicegate-test-")
        if isinstance(policy, str):
            self.policy = Path(self._folder.name) / "policy.yaml"
            self.policy.write_text(policy)
        else:
            self.policy = policy
        self._upstream = upstream
        self._flags = flags
        self._process: subprocess.Popen[str] | None = None
        self._idle_fds = 0
        self.port = self.admin_port = 0
        self.exit_status: int | None = None

    def start(self) -> None:
        """Start it, and return once both ports listen."""
        arguments = [
            f"--policy={self.policy}",
            f"--upstream={self._upstream}",
            "--listen=127.0.0.1:0",
            "--admin=127.0.0.1:0",
            "--log-format=json",
            *self._flags,
        ]
        path = os.pathsep.join(str(ROOT / part) for part in ("sidecar", "lab"))
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "sluicegate_sidecar", "run", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        self.out, self.log = Lines(process.stdout), Lines(process.stderr)
        self.port = int(self.out.wait_for(r"^sluicegate: listening on http://127\.0\.0\.1:(\d+)$")[1])
        self.admin_port = int(self.log.wait_for(r"admin port on 127\.0\.0\.1:(\d+)")[1])

    def end(self) -> None:
        """End it, and keep its exit status. Ending twice is no error."""
        if self._process is not None and self.exit_status is None:
            self._process.terminate()
            self.wait()
        self._folder.cleanup()

    def wait(self) -> int:
        """Block until it has ended by itself, and return its exit status."""
        assert self._process is not None
        try:
            self.exit_status = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self.exit_status = self._process.wait()
        self.out.close()
        self.log.close()
        return self.exit_status

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    @property
    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # What it says of itself.

    async def admin(self, path: str, method: str = "GET") -> tuple[int, bytes]:
        """Status and body of a request to the admin port, on a connection of its own."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.admin_port)
        try:
            writer.write(f"{method} {path} HTTP/1.0\r\nHost: admin\r\n\r\n".encode())
            answer = await asyncio.wait_for(reader.read(-1), PATIENCE_S)
        finally:
            writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split(b" ")[1]), body

    async def state(self) -> State:
        status, body = await self.admin("/debug/state")
        assert status == 200
        state: State = json.loads(body)
        return state

    async def until_state(self, holds: Callable[[State], object]) -> State:
        """The first state of which that holds."""
        seen: State = {}

        async def ask() -> object:
            seen.update(await self.state())
            return holds(seen)

        await until(ask, lambda: json.dumps(seen, indent=1))
        return seen

    async def metrics_text(self) -> str:
        status, body = await self.admin("/metrics")
        assert status == 200
        return body.decode()

    async def metrics(self) -> Series:
        """Every sample of a scrape, by its name and its sorted labels."""
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(await self.metrics_text())
            for sample in family.samples
        }

    async def count(self, name: str, **labels: str) -> float:
        """The value of one series, `sluicegate_` left out."""
        return (await self.metrics())[f"sluicegate_{name}", tuple(sorted(labels.items()))]

    # What it promises after everything.

    async def know_idle(self) -> None:
        """Note which descriptors an idle gate has. The probe's own come and go: the fewest of some looks."""
        self._idle_fds = min([await self._unexplained_fds() for _ in range(5)])

    async def _unexplained_fds(self) -> int:
        """Open descriptors but for the connections that it knows of."""
        http = (await self.state())["http"]
        fds = len(os.listdir(f"/proc/{self._process.pid}/fd"))  # type: ignore[union-attr]  # it runs
        return int(fds - http["client_connections"] - http["engine_connections"])

    async def settled(self) -> State:
        """Wait until nothing is in flight: no ticket held, counts close, no byte and no descriptor too many."""
        state = await self.until_state(lambda s: not s["in_flight"] and not s["http"]["body_bytes_held"])
        assert (state["waiting"], state["running"]) == (0, 0)
        assert (state["engine"]["prefilling"], state["engine"]["prefill_backlog_tokens"]) == (0, 0)
        assert state["learned"]["pace"]["residents"] == 0
        for counts in state["classes"].values():
            assert counts["in_flight"] == 0
            assert closes(counts), counts

        async def none_leaked() -> bool:
            return await self._unexplained_fds() <= self._idle_fds

        await until(none_leaked, lambda: f"descriptors leaked; an idle gate has {self._idle_fds}")
        return state

    async def works(self) -> None:
        """The next request is served."""
        assert (await ask(self.port)).status == 200


def closes(counts: dict[str, Any]) -> bool:
    """offered = served + rejected + evicted + failed + in flight, of one class in `/debug/state`."""
    refused = sum(sum(counts[outcome].values()) for outcome in ("rejected", "evicted", "failed"))
    return bool(counts["offered"] == counts["served"] + refused + counts["in_flight"])


@contextmanager
def gate_running(upstream: str, policy: str | Path = POLICY, *flags: str) -> Iterator[GateProcess]:
    """A gate for a module: started and ended, and held to a clean end. Blocks."""
    gate = GateProcess(upstream, policy, flags or ("--log-level=debug",))
    try:
        gate.start()
        yield gate
    finally:
        gate.end()
    assert gate.exit_status == 0, gate.log.text
    assert "Traceback" not in gate.log.text


@asynccontextmanager
async def gate_before(upstream: str, policy: str | Path = POLICY, *flags: str) -> AsyncIterator[GateProcess]:
    """A gate for one test, held to all its promises at the end; one that was ended, to its clean end."""
    gate = GateProcess(upstream, policy, flags or ("--log-level=debug",))
    try:
        await asyncio.to_thread(gate.start)
        await gate.know_idle()
        yield gate
        if not gate.ended:
            await gate.settled()
    finally:
        for client in _clients:
            client.writer.transport.abort()
        _clients.clear()
        await asyncio.to_thread(gate.end)
    assert gate.exit_status == 0, gate.log.text
    assert "Traceback" not in gate.log.text, gate.log.text


#: What differs between two answers of llama.cpp to the same request at temperature 0: ids, times, speeds.
_CHANGES = [
    (re.compile(rb'"(id|item_id|response_id)":"(chatcmpl|resp|msg|rs|fc|call)[-_]?\w+"'), rb'"\1":"ID"'),
    (re.compile(rb'"(created|created_at|completed_at)":\d+'), rb'"\1":0'),
    (re.compile(rb'"(\w+_(?:ms|second|per_second))":[\d.eE+-]+'), rb'"\1":0'),
]

#: What the gate adds to a response, and what belongs to a connection; a length changes with the above.
NOT_COMPARED = {
    "x-request-id", "x-sluicegate-reason", "connection", "keep-alive", "transfer-encoding", "date", "content-length",
}  # fmt: skip


def normal(data: bytes) -> bytes:
    """An answer of llama.cpp without what changes from one to the next."""
    for pattern, instead in _CHANGES:
        data = pattern.sub(instead, data)
    return data


class Both(NamedTuple):
    """A real engine, and the gate in front of it."""

    engine: LlamaServer
    gate: GateProcess

    @property
    def urls(self) -> tuple[str, str]:
        """The engine's own first."""
        return self.engine.url, self.gate.url


@contextmanager
def engine_and_gate(folder: Path, *, slots: int = 2, policy: str = PATIENT) -> Iterator[Both]:
    """For a module: llama.cpp with the smallest model, written into that folder, and a gate. Blocks."""
    options = EngineOptions(model=ensure_model(SMALLEST, folder), slots=slots, ctx_tokens=1024 * slots)
    with LlamaServer(options) as engine, gate_running(engine.url, policy) as gate:
        yield Both(engine, gate)
        state = asyncio.run(gate.until_state(lambda s: not s["in_flight"]))
        assert all(closes(counts) for counts in state["classes"].values())


# Clients.


def body_of(prompt: str = "hello 3", **fields: object) -> bytes:
    """The body of a chat request."""
    return json.dumps({"messages": [{"role": "user", "content": prompt}], **fields}).encode()


def chat(body: bytes, *headers: bytes) -> bytes:
    """The bytes of a chat request."""
    return request(b"POST", CHAT, body, b"Content-Type: application/json", *headers)


#: Every client of the test that runs, so that one that fails leaves none behind.
_clients: list[ClientSide] = []


async def connect(port: int, body: bytes, *headers: bytes) -> ClientSide:
    """A client that has sent a chat request; closed at the latest when the gate is left."""
    client = await ClientSide.connect(port)
    _clients.append(client)
    client.send(chat(body, *headers))
    return client


async def ask(port: int, body: bytes | None = None, *headers: bytes) -> Message:
    """A chat request on a connection of its own, and its whole answer."""
    client = await connect(port, body_of() if body is None else body, *headers)
    try:
        return await client.response()
    finally:
        client.close()


def number(message: Message, name: bytes) -> int:
    """A header that must be there, as a number."""
    value = message.header(name)
    assert value is not None, name
    return int(value)


def reason(message: Message) -> str | None:
    """What the gate says of this request."""
    value = message.header(b"x-sluicegate-reason")
    return None if value is None else value.decode()


def error_code(message: Message) -> str:
    """The code of an answer in the shape of OpenAI's errors."""
    error = json.loads(message.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    code: str = error["code"]
    return code


# The engine.


def event(data: object) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % (data if isinstance(data, bytes) else json.dumps(data).encode())


def token(text: str = " x") -> bytes:
    """An event with one token, as engines write it."""
    return event(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "scripted",
            "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}],
        }
    )


DONE = event(b"[DONE]")


class Call:
    """An inference request as it reached the engine, and the hands to answer it with.

    Attributes:
        gone: set once the gate has closed the connection before the answer was over.
    """

    def __init__(self, side: EngineSide, message: Message) -> None:
        self.message = message
        self.gone = asyncio.Event()
        self._side = side
        self._over = asyncio.Event()

    def _write(self, data: bytes) -> None:
        """To a gate that has left, nothing: an engine notices late."""
        if not self._side.writer.transport.is_closing():
            self._side.send(data)

    @property
    def prompt(self) -> str:
        """Content of the last message."""
        content: str = json.loads(self.message.body)["messages"][-1]["content"]
        return content

    def begin(self, *first: bytes) -> None:
        """Begin a stream, with these events."""
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
        self._write(head + b"Connection: close\r\n\r\n")
        self.send(*first)

    def send(self, *events: bytes) -> None:
        for one in events:
            self._write(b"%x\r\n%b\r\n" % (len(one), one))

    def end(self, *last: bytes) -> None:
        """End the stream, with these events and `[DONE]`."""
        self.send(*last, DONE)
        self._write(b"0\r\n\r\n")
        self._over.set()

    def stream(self, *events: bytes) -> None:
        """A whole stream."""
        self.begin(*events)
        self.end()

    def reply(self, status: str, body: object) -> None:
        """A whole JSON answer."""
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        self._write(head.encode() + b"Connection: close\r\n\r\n" + data)
        self._over.set()

    def raw(self, data: bytes) -> None:
        """Say that and nothing more."""
        self._write(data)
        self._over.set()

    def cut(self) -> None:
        """Reset the connection."""
        self._side.reset()
        self._over.set()

    def leave(self) -> None:
        """Close the connection as the system does for a process that ends."""
        self._side.close()
        self._over.set()

    async def over(self) -> None:
        """Return once it is answered, or nobody waits for the answer any more."""
        watching = asyncio.ensure_future(self._watch())
        answered = asyncio.ensure_future(self._over.wait())
        await asyncio.wait((watching, answered), return_when=asyncio.FIRST_COMPLETED)
        for task in (watching, answered):
            task.cancel()
        await asyncio.gather(watching, answered, return_exceptions=True)

    async def _watch(self) -> None:
        """The gate says nothing after its request: what can be read is the end."""
        with suppress(ConnectionError):
            assert await self._side.reader.read(1) == b""
        if not self._over.is_set():
            self.gone.set()


def serve_three(call: Call) -> None:
    """The answer of an engine that works."""
    call.stream(token(" 2"), token(" 1"))


class ScriptedEngine:
    """An engine whose inference requests are answered by `answer`, or by the test where it is None.

    Attributes:
        calls: every inference request, in the order in which they came.
        health: status of the health page.
        pages: status of other pages, by path; 404 where none is given.
    """

    def __init__(self, answer: Callable[[Call], None] | None = serve_three) -> None:
        self.answer = answer
        self.calls: list[Call] = []
        self.health = 200
        self.pages: dict[bytes, int] = {}
        self._arrived: asyncio.Queue[Call] = asyncio.Queue()
        self._engine = Engine(self._serve)
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen; after `stop`, on the same port again."""
        self._engine = Engine(self._serve)
        await self._engine.listen(self.port)
        self.port = self._engine.port

    async def stop(self) -> None:
        """Close the port and every connection."""
        await self._engine.close()

    async def __aenter__(self) -> ScriptedEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def call(self) -> Call:
        """The next inference request."""
        return await asyncio.wait_for(self._arrived.get(), PATIENCE_S)

    def answer_all(self, answer: Callable[[Call], None] = serve_three) -> None:
        """From now on answer by itself, those included that nobody has taken."""
        self.answer = answer
        while not self._arrived.empty():
            answer(self._arrived.get_nowait())

    async def _serve(self, side: EngineSide) -> None:
        message = await side.request()
        method, path, _ = message.start.split(b" ")
        if method != b"POST":
            status = self.health if path == b"/health" else self.pages.get(path, 404)
            side.send(b"HTTP/1.1 %d Scripted\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % status)
            return
        call = Call(side, message)
        self.calls.append(call)
        if self.answer is not None:
            self.answer(call)
        else:
            self._arrived.put_nowait(call)
        await call.over()
