"""Upgraded connections: bytes both ways."""

from __future__ import annotations

import asyncio

import pytest
from tests.gate.wire import App, ClientSide, EngineSide, Gate, gate, request, response, until

from sluicegate_sidecar.http import End, Limits

ASK = request(
    b"GET", b"/ws", b"", b"Connection: keep-alive, Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Key: x"
)
SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nX-Y: z\r\n\r\n"


async def mirror(side: EngineSide) -> None:
    """Switches, says hello, and sends back what it gets."""
    await side.request()
    side.send(SWITCH + b"hello")
    while piece := await side.reader.read(65536):
        side.send(piece)
        await side.writer.drain()


async def opened(g: Gate) -> ClientSide:
    client = await g.client()
    client.send(ASK)
    head = await client.head()
    assert head.start == b"HTTP/1.1 101 Switching Protocols"
    assert (head.header(b"connection"), head.header(b"upgrade"), head.header(b"x-y")) == (
        b"upgrade",
        b"websocket",
        b"z",
    )
    assert await client.exactly(5) == b"hello"
    return client


async def test_bytes_pass_both_ways_and_the_exchange_ends_with_the_tunnel():
    async with gate(mirror) as g:
        client = await opened(g)
        seen = g.engine.seen[0]
        assert (seen.header(b"connection"), seen.header(b"upgrade")) == (b"upgrade", b"websocket")
        assert g.app.requests[0].exchange.upgrade == b"websocket"
        client.send(b"\x00\x01ping")
        assert await client.exactly(6) == b"\x00\x01ping"
        assert (g.app.requests[0].status, g.app.ends) == (101, [])
        client.writer.write_eof()
        assert await client.rest() == b""
        await until(lambda: g.app.ends == [End.COMPLETE])


async def test_what_was_sent_with_the_request_is_not_lost():
    async with gate(mirror) as g:
        client = await g.client()
        client.send(ASK + b"early")
        await client.head()
        assert await client.exactly(10) == b"helloearly"


async def test_much_passes_with_backpressure():
    async with gate(mirror) as g:
        client = await opened(g)
        data = bytes(range(256)) * 40_000
        client.send(data)
        assert await client.exactly(len(data)) == data


async def test_a_tunnel_whose_client_does_not_read_holds_little():
    async def flood(side: EngineSide) -> None:
        await side.request()
        side.send(SWITCH + b"hello")
        while True:
            side.send(b"x" * 65536)
            await side.writer.drain()

    async with gate(flood) as g:
        client = await opened(g)
        client.writer.transport.pause_reading()
        connection = next(iter(g.server._clients))
        await until(lambda: connection.write_paused)
        for _ in range(100):
            await g.turn_of_the_gate()
        assert connection.transport.get_write_buffer_size() < 64 * 1024


async def test_a_tunnel_whose_engine_does_not_read_holds_little():
    async def deaf(side: EngineSide) -> None:
        await side.request()
        side.send(SWITCH + b"hello")
        side.writer.transport.pause_reading()
        await asyncio.Event().wait()

    async with gate(deaf) as g:
        client = await opened(g)
        client.send(b"x" * 40_000_000)
        connection = next(iter(g.server.pool._open))
        await until(lambda: connection._write_paused)
        for _ in range(100):
            await g.turn_of_the_gate()
        assert connection.transport.get_write_buffer_size() < 1_000_000
        # Reading from the client is paused, so that only the sweep can see that it is gone.
        client.reset()
        await until(lambda: g.app.ends == [End.COMPLETE])


@pytest.mark.parametrize("leave", ["close", "reset"])
async def test_the_client_leaves(leave):
    async with gate(mirror) as g:
        client = await opened(g)
        getattr(client, leave)()
        await until(lambda: g.app.ends == [End.COMPLETE])
        await until(lambda: g.server.pool.open_connections == 0)


@pytest.mark.parametrize("leave", ["close", "reset"])
async def test_the_engine_leaves(leave):
    async with gate(mirror) as g:
        client = await opened(g)
        getattr(g.engine.sides[0], leave)()
        assert await client.rest() == b""
        client.close()
        await until(lambda: g.app.ends == [End.COMPLETE])


async def test_the_engine_half_closes_and_still_reads():
    got = asyncio.Event()

    async def script(side: EngineSide) -> None:
        await side.request()
        side.send(SWITCH + b"hello")
        side.writer.write_eof()
        assert await side.exactly(4) == b"last"
        got.set()
        assert await side.rest() == b""

    async with gate(script) as g:
        client = await opened(g)
        assert await client.rest() == b""
        client.send(b"last")
        await got.wait()
        client.writer.write_eof()
        await until(lambda: g.app.ends == [End.COMPLETE])


async def test_the_client_half_closes_and_still_reads():
    async def script(side: EngineSide) -> None:
        await side.request()
        side.send(SWITCH + b"hello")
        assert await side.rest() == b"last"
        await g.turn_of_the_gate()
        side.send(b"answer")

    async with gate(script) as g:
        client = await opened(g)
        client.send(b"last")
        client.writer.write_eof()
        assert await client.rest() == b"answer"
        await until(lambda: g.app.ends == [End.COMPLETE])


async def test_a_silent_tunnel_is_closed():
    async with gate(mirror, limits=Limits(tunnel_idle_s=0.05)) as g:
        client = await opened(g)
        assert await client.rest() == b""
        await until(lambda: g.app.ends == [End.COMPLETE])


async def test_the_application_closes_a_tunnel():
    async with gate(mirror) as g:
        client = await opened(g)
        g.app.requests[0].exchange.abort("enough")
        assert await client.rest() == b""
        assert g.app.ends == [End.ABORTED]


async def test_an_engine_that_does_not_switch_answers_as_usual():
    async def script(side: EngineSide) -> None:
        while True:
            await side.request()
            side.send(response(b"no", b"426 Upgrade Required"))

    async with gate(script) as g:
        client = await g.client()
        for _ in range(2):
            client.send(ASK)
            message = await client.response()
            assert (message.status, message.body) == (426, b"no")
        client.send(request(b"POST", b"/", b"abc", b"Connection: upgrade", b"Upgrade: x/1"))
        assert (await client.response()).status == 426
        assert g.engine.seen[-1].body == b"abc"
        assert (await client.ask()).status == 426


async def test_an_upgrade_can_be_refused():
    async with gate(app=App(lambda exchange: exchange.refuse(403))) as g:
        client = await g.client()
        client.send(ASK)
        assert (await client.response()).status == 403
        client.send(ASK)
        assert (await client.response()).status == 403


async def test_http10_cannot_upgrade():
    async with gate() as g:
        client = await g.client()
        client.send(b"GET /ws HTTP/1.0\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n")
        assert (await client.response()).status == 200
        assert g.engine.seen[0].header(b"upgrade") is None
