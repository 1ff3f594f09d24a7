"""The demo's client against scripted engines on real sockets: each way in which a request can end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from sluicegate_lab.load import Outcome, Patience, Record, Replay, Target, Wording
from sluicegate_lab.traffic import BATCH, INTERACTIVE, Request

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

ENDLESS = Patience({INTERACTIVE: 60.0, BATCH: 60.0}, drain_s=60.0)
WORDING = Wording("test", counts_down=True)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(data: bytes) -> bytes:
    return chunk(b"data: " + data + b"\n\n")


def token(text: bytes) -> bytes:
    return event(b'{"choices":[{"index":0,"delta":{"content":"' + text + b'"}}]}')


ROLE = event(b'{"choices":[{"index":0,"delta":{"role":"assistant","content":null}}]}')
USAGE = event(b'{"choices":[],"usage":{"prompt_tokens":12,"completion_tokens":3,"total_tokens":15}}')
DONE = event(b"[DONE]") + chunk(b"")


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    return head + await reader.readexactly(length)


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[Target]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await read_request(reader)
            await script(reader, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield Target("127.0.0.1", server.sockets[0].getsockname()[1], "m")


def request(index: int = 0, *, offset_s: float = 0.0, class_name: str = INTERACTIVE) -> Request:
    return Request(index, offset_s, class_name, "chat-web", 10, 3)


async def sent(script: Script, patience: Patience = ENDLESS) -> Record:
    async with scripted(script) as target:
        return await Replay(target, WORDING, patience).send(request())


def answering(data: bytes) -> Script:
    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return script


async def test_a_stream_is_measured_from_its_first_text_on() -> None:
    record = await sent(answering(HEAD + ROLE + token(b" 2") + token(b" 1") + USAGE + DONE))
    assert record.outcome is Outcome.SERVED
    assert record.status == 200
    assert len(record.token_at_s) == 2
    assert record.prompt_tokens == 12
    assert record.served_tokens == 3
    assert record.ttft_s is not None
    assert record.total_s is not None
    assert 0 <= record.ttft_s <= record.total_s


async def test_a_stream_in_pieces_is_the_same_stream() -> None:
    whole = HEAD + ROLE + token(b" 2") + token(b" 1") + USAGE + DONE

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for index in range(0, len(whole), 7):
            writer.write(whole[index : index + 7])
            await writer.drain()

    record = await sent(script)
    assert record.outcome is Outcome.SERVED
    assert len(record.token_at_s) == 2


@pytest.mark.parametrize("status", [b"429 Too Many Requests", b"503 Service Unavailable"])
async def test_a_refusal_is_an_answer_with_its_reason_and_its_delay(status: bytes) -> None:
    record = await sent(
        answering(
            b"HTTP/1.1 " + status + b"\r\nRetry-After: 4\r\nretry-after-ms: 3500\r\n"
            b"x-sluicegate-reason: queue_full\r\nContent-Length: 2\r\n\r\n{}"
        )
    )
    assert record.outcome is Outcome.REFUSED
    assert record.reason == "queue_full"
    assert record.retry_after_s == 3.5
    assert record.ttft_s is None


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\noops",
        b"nonsense\r\n\r\n",
        b"",
        HEAD + token(b" 2"),
        HEAD + token(b" 2") + chunk(b""),
        HEAD + token(b" 2") + event(b'{"error":{"code":503}}') + DONE,
        HEAD + event(b"{not json") + DONE,
    ],
    ids=["500", "not-http", "closed", "cut", "no-done", "error-in-stream", "not-json"],
)
async def test_anything_else_is_a_failure(data: bytes) -> None:
    assert (await sent(answering(data))).outcome is Outcome.FAILED


async def test_a_line_without_end_is_a_failure_and_not_a_memory_leak() -> None:
    record = await sent(answering(HEAD + chunk(b"data: " + b"x" * (1 << 20)) + chunk(b"x" * 1024)))
    assert record.outcome is Outcome.FAILED


async def test_no_engine_is_a_failure() -> None:
    async with scripted(answering(b"")) as target:
        pass
    record = await Replay(target, WORDING, ENDLESS).send(request())
    assert record.outcome is Outcome.FAILED
    assert record.reason is not None
    assert record.reason.startswith("no connection")


async def test_an_impatient_client_leaves_and_closes_its_connection() -> None:
    left = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + ROLE)
        assert await reader.read() == b""
        left.set()

    async with scripted(script) as target:
        patience = Patience({INTERACTIVE: 0.05, BATCH: 60.0}, drain_s=60.0)
        record = await Replay(target, WORDING, patience).send(request())
        await left.wait()
    assert record.outcome is Outcome.GAVE_UP
    assert record.ttft_s is None


async def test_patience_ends_with_the_first_token() -> None:
    released = asyncio.Event()
    patience = Patience({INTERACTIVE: 1.0, BATCH: 60.0}, drain_s=60.0)

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + token(b" 2"))
        await writer.drain()
        asyncio.get_running_loop().call_later(1.2, released.set)
        await released.wait()
        writer.write(token(b" 1") + DONE)

    assert (await sent(script, patience)).outcome is Outcome.SERVED


async def test_a_replay_is_open_loop_and_ends_although_an_engine_never_does() -> None:
    everyone = asyncio.Barrier(6)  # five requests at once, and this test

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + token(b" 2"))
        await everyone.wait()
        await reader.read()

    async with scripted(script) as target:
        replay = Replay(target, WORDING, Patience({INTERACTIVE: 60.0, BATCH: 60.0}, drain_s=1.0))
        requests = [request(index, offset_s=index * 0.01) for index in range(5)]
        running = asyncio.create_task(replay.run(requests, 0.05))
        await everyone.wait()
        await running
    assert [record.outcome for record in replay.records] == [Outcome.CUT_OFF] * 5
    assert [record.request for record in replay.records] == requests


async def test_a_closed_loop_keeps_its_number_and_no_more() -> None:
    inside = most = 0

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0)
        writer.write(HEAD + token(b" 1") + DONE)
        await writer.drain()
        inside -= 1

    async with scripted(script) as target:
        replay = Replay(target, WORDING, ENDLESS)
        await replay.run_closed((request(index) for index in range(20)), concurrency=3, seconds=60.0)
    assert len(replay.records) == 20
    assert {record.outcome for record in replay.records} == {Outcome.SERVED}
    assert most <= 3


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "127.0.0.1:80", "ftp://x", "http://"])
def test_an_address_that_is_no_plain_http_is_an_error(url: str) -> None:
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        Target.of(url, "m")
