"""Many connections: idle, opened and dropped, and at the same time."""

from __future__ import annotations

import asyncio
import resource

import pytest
from tests.gate.wire import App, EngineSide, Gate, gate, request, until

from sluicegate_sidecar.http import End, Limits

IDLE = 1000
DROPPED = 10_000
AT_ONCE = 100


@pytest.fixture(autouse=True)
def many_descriptors():
    """Both ends of each connection are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_thousand_idle_connections():
    async with gate() as g:
        clients = [await g.client() for _ in range(IDLE)]
        await until(lambda: g.server.open_connections == IDLE)
        await g.works()
        for client in clients[::100]:
            assert (await client.ask()).status == 200
        for client in clients:
            client.close()
        await until(lambda: g.server.open_connections == 0)
        await g.works()


async def test_a_thousand_waiting_requests_that_leave():
    app = App(lambda exchange: None)
    async with gate(app=app) as g:
        clients = [await g.client() for _ in range(IDLE)]
        for client in clients:
            client.send(request())
        await until(lambda: len(app.requests) == IDLE)
        for client in clients:
            client.close()
        await until(lambda: len(app.ends) == IDLE)
        assert set(app.ends) == {End.CLIENT_GONE}
        assert g.engine.connections == 0
        app.decide = lambda exchange: exchange.forward()
        await g.works()


async def open_and_drop(g: Gate, number: int) -> None:
    """One connection of seven kinds."""
    client = await g.client()
    kind = number % 7
    if kind == 1:
        client.send(b"POST / HTTP/1.1\r\nHo")
    elif kind == 2:
        client.send(request(body=b"x" * 5000)[:-1000])
    elif kind == 3:
        client.send(request())
    elif kind == 4:
        assert (await client.ask()).status == 200
    elif kind == 5:
        client.send(request(b"POST", b"/stream"))
        await client.head()
    elif kind == 6:
        client.send(b"\x00\x01nonsense\r\n\r\n")
    if number % 2:
        client.reset()
    else:
        client.close()
    g.forget(client)


async def streams(side: EngineSide) -> None:
    while True:
        message = await side.request()
        if b"/stream" in message.start:
            side.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
            await side.rest()
            return
        side.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")


@pytest.mark.slow
async def test_ten_thousand_connections_opened_and_dropped():
    async with gate(streams, limits=Limits(linger_s=0.2)) as g:
        for start in range(0, DROPPED, AT_ONCE):
            await asyncio.gather(*(open_and_drop(g, number) for number in range(start, start + AT_ONCE)))
        await until(lambda: g.server.open_connections == 0)
        await g.idle()
        assert g.server.accepted == DROPPED
        await g.works()


async def test_many_clients_at_once_share_connections():
    async with gate() as g:

        async def asks(number: int) -> None:
            client = await g.client()
            for turn in range(20):
                body = b"%d-%d" % (number, turn)
                assert (await client.ask(body=body)).body == b"echo:" + body

        await asyncio.gather(*(asks(number) for number in range(50)))
        assert g.engine.connections <= 50
        assert g.app.ends == [End.COMPLETE] * 1000
