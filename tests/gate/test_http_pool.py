"""Connections to the engine: kept, found stale, tried once more, let go."""

from __future__ import annotations

import asyncio

import pytest
from tests.gate.wire import App, EngineSide, gate, request, response, until

from sluicegate_sidecar.http import End, Limits


async def test_the_trap_an_engine_that_closes_after_each_response_without_saying_so():
    """The next request is sent in the very callback that brought the end of the last response: no turn of the
    loop lies between, in which it could have learned that the connection is closed."""

    async def script(side: EngineSide) -> None:
        await side.request()
        side.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n")
        side.shut()
        await side.rest()

    async with gate(script) as g:
        client = await g.client()
        count = 100
        client.send(request() * count)
        for _ in range(count):
            message = await client.response()
            assert (message.status, message.body) == (200, b"hello")
        assert g.app.ends == [End.COMPLETE] * count
        pool = g.server.pool
        assert g.engine.connections == count
        assert (pool.connects, pool.stale, pool.retries) == (count, count - 1, 0)


async def test_a_connection_closed_as_the_request_is_under_way_is_retried_once():
    """The engine reads the second request, and closes without a byte: that looks like a stale connection."""

    async def script(side: EngineSide) -> None:
        await side.request()
        side.send(response(b"%d" % g.engine.connections))
        await side.request()

    async with gate(script) as g:
        client = await g.client()
        assert (await client.ask()).body == b"1"
        body = b"x" * 100_000
        message = await client.ask(body=body)
        assert message.body == b"2"
        assert g.server.pool.retries == 1
        assert g.engine.seen[-1].body == body
        assert g.app.ends == [End.COMPLETE] * 2


async def test_only_once():
    async def script(side: EngineSide) -> None:
        await side.request()
        if g.engine.connections == 1:
            side.send(response())
            await side.request()

    async with gate(script) as g:
        client = await g.client()
        assert (await client.ask()).status == 200
        assert (await client.ask()).header(b"x-end") == b"engine_reset_early"
        assert g.engine.connections == 2
        assert g.server.pool.retries == 1


async def test_never_after_a_byte_of_the_response():
    async def script(side: EngineSide) -> None:
        await side.request()
        side.send(response())
        await side.request()
        side.send(b"H")

    async with gate(script) as g:
        client = await g.client()
        assert (await client.ask()).status == 200
        assert (await client.ask()).header(b"x-end") == b"engine_reset_midstream"
        assert (g.server.pool.retries, g.engine.connections) == (0, 1)


async def test_a_retry_whose_client_has_left_is_dropped():
    taken = asyncio.Event()

    async def script(side: EngineSide) -> None:
        await side.request()
        if g.engine.connections > 1:
            return
        side.send(response())
        await side.request()
        taken.set()
        await side.rest()

    async with gate(script) as g:
        client = await g.client()
        assert (await client.ask()).status == 200
        client.send(request())
        await taken.wait()
        client.reset()
        await until(lambda: g.app.ends == [End.COMPLETE, End.CLIENT_GONE])
        assert g.server.pool.retries == 0


async def test_idle_connections_are_bounded():
    app = App(lambda exchange: None)
    async with gate(app=app, limits=Limits(engine_idle_connections=3)) as g:
        clients = [await g.client() for _ in range(8)]
        for client in clients:
            client.send(request())
        await until(lambda: len(app.requests) == 8)
        for listener in app.requests:
            listener.exchange.forward()
        for client in clients:
            assert (await client.response()).status == 200
        assert g.engine.connections == 8
        await until(lambda: g.server.pool.open_connections == 3)
        assert g.server.pool.idle_connections == 3


async def test_idle_connections_are_closed_before_the_engine_does():
    async with gate(limits=Limits(engine_idle_s=0.05)) as g:
        client = await g.client()
        assert (await client.ask()).status == 200
        await until(lambda: g.server.pool.open_connections == 0)
        assert (await client.ask()).status == 200
        assert g.server.pool.retries == 0


async def test_the_connection_used_last_is_used_next():
    async with gate() as g:
        app = g.app
        app.decide = lambda exchange: None
        clients = [await g.client() for _ in range(4)]
        for client in clients:
            client.send(request())
        await until(lambda: len(app.requests) == 4)
        for listener in app.requests:
            listener.exchange.forward()
        for client in clients:
            await client.response()
        app.decide = lambda exchange: exchange.forward()
        for _ in range(10):
            assert (await clients[0].ask()).status == 200
        assert g.engine.connections == 4


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_the_engine_is_found_by_name(host):
    from tests.gate.wire import ClientSide, Engine, answers

    from sluicegate_sidecar.http import serve

    engine = Engine(answers)
    await engine.listen()
    server = await serve(App(), upstream_host=host, upstream_port=engine.port)
    client = await ClientSide.connect(server.port)
    assert (await client.ask()).status == 200
    client.close()
    await server.close()
    await engine.close()


async def test_a_name_that_does_not_resolve_is_no_engine():
    from tests.gate.wire import ClientSide

    from sluicegate_sidecar.http import serve

    app = App()
    server = await serve(app, upstream_host="engine.invalid", upstream_port=1)
    client = await ClientSide.connect(server.port)
    assert (await client.ask()).header(b"x-end") == b"engine_refused"
    client.close()
    await server.close()
