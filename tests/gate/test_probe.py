"""The probe against servers on real sockets: engines that load, die, hang, lie and come back."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from sluicegate_core.policy import EngineSpec, EngineType
from sluicegate_core.vocabulary import EngineStatus
from sluicegate_sidecar.engines import EngineReading
from sluicegate_sidecar.probe import (
    LATE_ANSWERS_TO_DOWN,
    MAX_ANSWER_BYTES,
    EngineProbe,
    Observation,
    ProbeTiming,
    get,
)

FAST = ProbeTiming(up_s=0.005, down_s=0.005, answer_s=20.0, retry_metrics_s=0.0)
IMPATIENT = ProbeTiming(up_s=0.005, down_s=0.005, answer_s=0.1, retry_metrics_s=0.0)
PAGE = "llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n"
PROPS = json.dumps({"total_slots": 4, "default_generation_settings": {"n_ctx": 1024}})


def answer(status: int, body: str = "", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *headers, "", body]
    return "\r\n".join(lines).encode()


class Engine:
    """A server whose answer to each path is set by the test; None: it takes the request and says nothing."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes | None] = {}
        self.asked: list[str] = []
        self.open = 0
        self.most_open = 0
        self.closed = asyncio.Event()
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._server.wait_closed()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ")[1].decode()
            self.asked.append(path)
            reply = self.answers.get(path, answer(404))
            if reply is None:
                await reader.read()  # until the client leaves
            else:
                writer.write(reply)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            self.closed.set()
            self._tasks.discard(task)
            writer.close()


@asynccontextmanager
async def running() -> AsyncIterator[Engine]:
    engine = Engine()
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


class Listener:
    """Keeps what the probe tells, and waits for something in particular."""

    def __init__(self) -> None:
        self.seen: list[Observation] = []
        self._news = asyncio.Event()

    def __call__(self, observation: Observation) -> None:
        self.seen.append(observation)
        self._news.set()

    async def until(self, holds: Callable[[Observation], bool]) -> Observation:
        async with asyncio.timeout(20):
            while True:
                self._news.clear()
                if self.seen and holds(self.seen[-1]):
                    return self.seen[-1]
                await self._news.wait()

    async def status(self, status: EngineStatus) -> Observation:
        return await self.until(lambda seen: seen.status is status)

    async def reading(self, reading: EngineReading) -> Observation:
        return await self.until(lambda seen: seen.fresh and seen.reading == reading)


@asynccontextmanager
async def probing(
    port: int, spec: EngineSpec, listener: Callable[[Observation], None], timing: ProbeTiming = FAST
) -> AsyncIterator[EngineProbe]:
    probe = EngineProbe("127.0.0.1", port, spec, listener, timing)
    task = asyncio.create_task(probe.run())
    try:
        yield probe
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled()


LLAMA = EngineSpec(type=EngineType.LLAMA_CPP)
AUTO = EngineSpec()


async def test_an_engine_loads_serves_dies_and_comes_back() -> None:
    listener = Listener()
    async with running() as engine:
        engine.answers = {
            "/health": answer(503, '{"error":"Loading model"}'),
            "/metrics": answer(200, PAGE),
            "/props": answer(200, PROPS),
        }
        async with probing(engine.port, LLAMA, listener) as probe:
            await listener.status(EngineStatus.LOADING)
            assert probe.age_s() is None
            engine.answers["/health"] = answer(200, '{"status":"ok"}')
            whole = EngineReading(slots=4, running=2, waiting=1, context_tokens=1024)
            await listener.reading(whole)
            age_s = probe.age_s()
            assert age_s is not None
            assert age_s >= 0.0

            await engine.stop()
            down = await listener.status(EngineStatus.DOWN)
            assert down.reading == whole  # the last word stays, with its time
            assert not down.fresh

            engine.answers["/props"] = answer(200, PROPS.replace("4", "8", 1))
            await engine.start()
            await listener.reading(whole._replace(slots=8))
    statuses = [seen.status for seen in listener.seen if not seen.fresh]
    assert statuses == [EngineStatus.LOADING, EngineStatus.UP, EngineStatus.DOWN, EngineStatus.UP]
    assert engine.most_open == 1


async def test_an_engine_that_is_not_there() -> None:
    async with running() as engine:
        port = engine.port
    listener = Listener()
    async with probing(port, AUTO, listener):
        await listener.status(EngineStatus.DOWN)


async def test_one_late_answer_is_no_death_and_three_are() -> None:
    listener = Listener()
    async with running() as engine:
        engine.answers = {"/health": answer(200), "/metrics": answer(200, PAGE)}
        async with probing(engine.port, LLAMA, listener, IMPATIENT):
            await listener.reading(EngineReading(running=2, waiting=1))
            before = len(engine.asked)
            engine.answers["/health"] = None
            await listener.status(EngineStatus.DOWN)
            late = engine.asked[before:].count("/health")
            assert late >= LATE_ANSWERS_TO_DOWN
            engine.answers["/health"] = answer(200)
            await listener.status(EngineStatus.UP)


async def test_metrics_that_stop_leave_the_last_reading_with_its_time() -> None:
    listener = Listener()
    async with running() as engine:
        engine.answers = {"/health": answer(200), "/metrics": answer(200, PAGE)}
        async with probing(engine.port, EngineSpec(type=EngineType.LLAMA_CPP), listener) as probe:
            read = await listener.reading(EngineReading(running=2, waiting=1))
            engine.answers["/metrics"] = answer(501)
            engine.answers["/health"] = answer(503)
            await listener.status(EngineStatus.LOADING)
            engine.answers["/health"] = answer(200)
            up = await listener.status(EngineStatus.UP)
            assert up.reading == read.reading
            assert up.reading_at_s is not None
            assert read.reading_at_s is not None
            assert up.reading_at_s >= read.reading_at_s
            assert not probe.last.fresh


async def test_an_engine_without_metrics_still_tells_its_slots() -> None:
    listener = Listener()
    async with running() as engine:
        engine.answers = {
            "/health": answer(200),
            "/metrics": answer(501, "", "Server: llama.cpp"),
            "/props": answer(200, PROPS),
        }
        async with probing(engine.port, AUTO, listener):
            seen = await listener.reading(EngineReading(slots=4, context_tokens=1024))
            assert seen.engine is EngineType.LLAMA_CPP


async def test_an_unknown_engine_is_up_and_says_nothing() -> None:
    async with running() as engine:
        listener = Listener()
        async with probing(engine.port, AUTO, listener) as probe:
            await listener.until(lambda seen: seen.engine is EngineType.OTHER)
            assert probe.last.status is EngineStatus.UP
            assert probe.last.reading == EngineReading()
            assert probe.last.reading_at_s is None


async def test_paths_of_the_policy_are_used() -> None:
    listener = Listener()
    spec = EngineSpec(type=EngineType.VLLM, health_path="/ping", metrics_path="/m")
    async with running() as engine:
        engine.answers = {
            "/ping": answer(200),
            "/health": answer(503),
            "/m": answer(200, "vllm:num_requests_running 3\n"),
        }
        async with probing(engine.port, spec, listener):
            await listener.reading(EngineReading(running=3))
    assert set(engine.asked) == {"/ping", "/m"}


async def test_another_engine_on_the_same_port_is_found_out() -> None:
    listener = Listener()
    async with running() as engine:
        engine.answers = {"/health": answer(200), "/metrics": answer(200, "vllm:num_requests_running 3\n")}
        async with probing(engine.port, AUTO, listener):
            assert (await listener.reading(EngineReading(running=3))).engine is EngineType.VLLM
            engine.answers = {"/health": answer(503)}
            await listener.status(EngineStatus.LOADING)
            engine.answers = {"/health": answer(200), "/metrics": answer(200, "tgi_queue_size 3\n")}
            assert (await listener.reading(EngineReading(waiting=3))).engine is EngineType.TGI


async def test_a_listener_that_fails_does_not_end_the_probe(caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener()

    def failing(observation: Observation) -> None:
        listener(observation)
        raise ValueError("a fault of the listener")

    async with running() as engine:
        engine.answers = {"/health": answer(200), "/metrics": answer(200, PAGE)}
        async with probing(engine.port, LLAMA, failing):
            await listener.reading(EngineReading(running=2, waiting=1))
            await engine.stop()
            await listener.status(EngineStatus.DOWN)
    assert "a fault of the listener" in caplog.text


# --- The client ---


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 2",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (MAX_ANSWER_BYTES + 1),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * (MAX_ANSWER_BYTES + 1),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=range(9),
)
async def test_what_is_no_answer_raises_an_os_error(reply: bytes) -> None:
    async with running() as engine:
        engine.answers["/"] = reply
        with pytest.raises(OSError):
            await get("127.0.0.1", engine.port, "/")


@pytest.mark.parametrize(
    ("reply", "body"),
    [
        (answer(200, "hello"), b"hello"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", b"hello"),
        (b"HTTP/1.0 200 OK\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    ],
)
async def test_every_framing_is_read(reply: bytes, body: bytes) -> None:
    async with running() as engine:
        engine.answers["/x?y"] = reply
        assert (await get("127.0.0.1", engine.port, "/x?y")).body == body


async def test_a_hung_answer_leaves_no_connection() -> None:
    async with running() as engine:
        engine.answers["/"] = None
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await get("127.0.0.1", engine.port, "/")
        async with asyncio.timeout(20):
            while engine.open:
                engine.closed.clear()
                await engine.closed.wait()


@pytest.mark.engine
async def test_a_real_llama_cpp_server() -> None:
    from sluicegate_lab.engine import EngineOptions, LlamaServer
    from sluicegate_lab.tiny_model import SMALLEST, ensure_model

    options = EngineOptions(model=ensure_model(SMALLEST), slots=3, ctx_tokens=1536)
    listener = Listener()
    async with LlamaServer(options) as engine, probing(engine.port, AUTO, listener):
        seen = await listener.until(lambda seen: seen.fresh and seen.reading.running is not None)
        assert seen.engine is EngineType.LLAMA_CPP
        assert seen.reading.slots == 3
        assert seen.reading.context_tokens == 512
        assert (seen.reading.running, seen.reading.waiting) == (0, 0)
        assert seen.reading.prompt_tokens_total == 0
        await asyncio.to_thread(engine.kill)
        await listener.status(EngineStatus.DOWN)
