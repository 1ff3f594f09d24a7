"""Slow readers are held back, not buffered: measured as the resident memory of a gate in a process of its own."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.gate.wire import (
    PATIENCE_S,
    App,
    ClientSide,
    Engine,
    EngineSide,
    gate,
    request,
    until,
)

from sluicegate_sidecar.http import Limits, serve

READERS = 200
GROWTH_BYTES = 5_000_000
#: Requests answered without a byte of a stream moving, after which the gate holds all that it will hold.
QUIET_REQUESTS = 100


async def passes_on(upstream_port: int) -> None:
    """The process under test: a gate that passes everything, until it is killed."""
    server = await serve(App(keeps_bodies=False), upstream_host="127.0.0.1", upstream_port=upstream_port)
    gc.collect()
    gc.freeze()
    print(server.port, flush=True)
    await asyncio.Event().wait()


@asynccontextmanager
async def gate_process(upstream_port: int) -> AsyncIterator[tuple[int, int]]:
    """The process's id and port."""
    root = Path(__file__).parents[2]
    code = f"import uvloop; from {__name__} import passes_on; uvloop.run(passes_on({upstream_port}))"
    paths = os.pathsep.join([str(root), str(root / "sidecar")])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
    )
    try:
        assert process.stdout is not None
        port = int(await asyncio.wait_for(process.stdout.readline(), PATIENCE_S))
        yield process.pid, port
    finally:
        process.kill()
        await process.wait()


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Flood:
    """An engine whose streams never end, and which knows how much it could send."""

    def __init__(self, framing: bytes) -> None:
        self.framing = framing
        self.sent = 0
        self.flooding = 0

    async def __call__(self, side: EngineSide) -> None:
        while (await side.request()).start.startswith(b"POST /small"):
            side.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        side.send(b"HTTP/1.1 200 OK\r\n" + self.framing + b"\r\n")
        self.flooding += 1
        event = b"data: " + b"x" * 120 + b"\n\n"
        piece = (b"%x\r\n%b\r\n" % (len(event), event)) * 50
        while True:
            side.send(piece)
            await side.writer.drain()
            self.sent += len(piece)

    async def quiet(self, port: int) -> None:
        """Wait until nothing more can be sent: no byte moves while the gate has many turns, each of them seen
        in the answer to another request."""
        other = await ClientSide.connect(port)
        last = -1
        while self.sent != last:
            last = self.sent
            for _ in range(QUIET_REQUESTS):
                assert (await other.ask(path=b"/small")).status == 200
        other.close()


@pytest.mark.slow
@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.parametrize("framing", [b"Transfer-Encoding: chunked\r\n", b"Content-Length: 999999999999\r\n"])
async def test_memory_behind_stuck_readers_of_a_fast_stream(framing):
    flood = Flood(framing)
    engine = Engine(flood)
    await engine.listen()
    async with gate_process(engine.port) as (pid, port):
        clients = [await ClientSide.connect_small(port) for _ in range(READERS)]
        for client in clients:
            client.send(request(b"POST", b"/small"))
        for client in clients:
            assert (await client.response()).status == 200
            client.writer.transport.pause_reading()
        before = resident_bytes(pid)
        for client in clients:
            client.send(request(b"POST", b"/flood"))
        await until(lambda: flood.flooding == READERS)
        await flood.quiet(port)
        assert flood.sent > READERS * 100_000, "the streams were not fast: nothing was put to the test"
        grown = resident_bytes(pid) - before
        print(f"{READERS} stuck readers: {grown / 1e6:.2f} MB more, {flood.sent / 1e6:.0f} MB sent")
        assert grown <= GROWTH_BYTES
        # They are stuck, not lost: one that reads again gets all of it, in order.
        clients[0].writer.transport.resume_reading()
        assert (await clients[0].head()).status == 200
        await clients[0].exactly(2_000_000)
        for client in clients:
            client.reset()
    await engine.close()


async def test_what_one_stuck_reader_can_make_the_gate_hold():
    """The unsent bytes for it: at most the mark at which the engine is paused, and one read more."""
    limits = Limits()
    flood = Flood(b"Transfer-Encoding: chunked\r\n")
    async with gate(flood, App(keeps_bodies=False)) as g:
        client = await g.client()
        client.writer.transport.pause_reading()
        client.send(request())
        await until(lambda: flood.flooding)
        await flood.quiet(g.server.port)
        connection = next(side for side in g.server._clients if side.write_paused)
        held = connection.transport.get_write_buffer_size()
        most = limits.client_buffer_bytes + limits.engine_read_bytes + 16
        assert 0 < held <= most
        client.reset()


async def test_an_engine_that_reads_slowly_holds_the_body_back():
    """A large body is written in pieces, as the engine takes them."""
    go_on = asyncio.Event()

    async def script(side: EngineSide) -> None:
        side.writer.transport.pause_reading()
        await go_on.wait()
        side.writer.transport.resume_reading()
        message = await side.request()
        side.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(message.start) + message.start)
        assert len(message.body) == 40_000_000

    async with gate(script) as g:
        client = await g.client()
        client.send(request(body=b"x" * 40_000_000))
        await until(lambda: g.server.pool.open_connections)
        connection = next(iter(g.server.pool._open))
        await until(lambda: connection._write_paused)
        limits = g.server.limits
        most = limits.engine_buffer_bytes + limits.body_write_bytes
        assert connection.transport.get_write_buffer_size() <= most
        go_on.set()
        assert (await client.response()).status == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_slow_reader_gets_all_of_it_in_the_end(chunked):
    body = bytes(range(256)) * 80_000

    async def script(side: EngineSide) -> None:
        while True:
            await side.request()
            if chunked:
                side.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                for at in range(0, len(body), 3000):
                    piece = body[at : at + 3000]
                    side.send(b"%x\r\n%b\r\n" % (len(piece), piece))
                side.send(b"0\r\n\r\n")
            else:
                side.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    async with gate(script, App(keeps_bodies=False)) as g:
        client = await g.client()
        for _ in range(2):
            client.writer.transport.pause_reading()
            client.send(request())
            await until(lambda: any(side.write_paused for side in g.server._clients))
            client.writer.transport.resume_reading()
            message = await client.response()
            assert message.complete
            assert message.body == body
        assert g.engine.connections == 1


async def test_requests_behind_a_response_that_is_not_taken_wait():
    """Otherwise a client that pipelines and never reads would fill the gate with answers."""
    app = App(lambda exchange: exchange.refuse(429, (), b"x" * 1_000_000))
    async with gate(app=app) as g:
        client = await g.client()
        client.writer.transport.pause_reading()
        client.send(request() * 50)
        await until(lambda: any(side.write_paused for side in g.server._clients))
        asked = len(app.requests)
        for _ in range(100):
            await g.turn_of_the_gate()
        assert len(app.requests) == asked < 50
        client.writer.transport.resume_reading()
        for _ in range(50):
            assert len((await client.response()).body) == 1_000_000


@pytest.mark.parametrize("headers", [(), (b"Connection: close",)])
async def test_a_client_that_never_takes_its_last_answer_is_closed(headers):
    app = App(lambda exchange: exchange.refuse(429, (), b"x" * 20_000_000))
    async with gate(app=app, limits=Limits(stall_s=0.1)) as g:
        client = await g.client()
        client.writer.transport.pause_reading()
        client.send(request(b"POST", b"/", b"", *headers))
        await until(lambda: app.ends)
        await until(lambda: g.server.open_connections == 0)
