"""Requests and responses through the data path, when nothing goes wrong."""

from __future__ import annotations

import asyncio

from tests.gate.wire import App, EngineSide, gate, request, response, until

from sluicegate_sidecar.http import End


async def test_a_request_and_its_response_pass():
    async with gate() as g:
        client = await g.client()
        message = await client.ask(body=b'{"a": 1}')
        assert message.status == 200
        assert message.body == b'echo:{"a": 1}'
        assert g.app.ends == [End.COMPLETE]
        assert g.app.bodies == [b'{"a": 1}']


async def test_connections_are_kept_on_both_sides():
    async with gate() as g:
        client = await g.client()
        for number in range(5):
            message = await client.ask(body=b"%d" % number)
            assert message.body == b"echo:%d" % number
        assert g.engine.connections == 1
        assert g.server.accepted == 1


async def test_a_stream_passes_piece_by_piece():
    go_on = asyncio.Event()

    async def script(side: EngineSide) -> None:
        await side.request()
        side.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        side.send(b"b\r\ndata: one\n\n\r\n")
        await go_on.wait()
        side.send(b"b\r\ndata: two\n\n\r\n0\r\n\r\n")
        await side.rest()

    async with gate(script) as g:
        client = await g.client()
        client.send(request())
        head = await client.head()
        assert head.header(b"transfer-encoding") == b"chunked"
        assert await client.exactly(16) == b"b\r\ndata: one\n\n\r\n"
        go_on.set()
        assert await client.exactly(21) == b"b\r\ndata: two\n\n\r\n0\r\n\r\n"
        await until(lambda: g.app.ends == [End.COMPLETE])
        assert g.app.requests[0].body == b"data: one\n\ndata: two\n\n"
        assert g.app.requests[0].pieces == 2


async def test_a_head_passes_before_any_content():
    """Some engines send it at once, and the first token much later."""
    go_on = asyncio.Event()

    async def script(side: EngineSide) -> None:
        await side.request()
        side.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await go_on.wait()
        side.send(b"2\r\nhi\r\n0\r\n\r\n")

    async with gate(script) as g:
        client = await g.client()
        client.send(request())
        assert (await client.head()).status == 200
        go_on.set()
        assert await client.exactly(12) == b"2\r\nhi\r\n0\r\n\r\n"


async def test_a_refusal_reads_the_body_and_keeps_the_connection():
    def decide(exchange):
        exchange.refuse(429, ((b"retry-after", b"3"),), b"{}")

    async with gate(app=App(decide)) as g:
        client = await g.client()
        for _ in range(3):
            message = await client.ask(body=b"x" * 100_000)
            assert (message.status, message.header(b"retry-after"), message.body) == (429, b"3", b"{}")
            assert message.header(b"connection") is None
        assert g.engine.connections == 0
        assert g.app.ends == [End.REFUSED] * 3


async def test_a_waiting_request_is_forwarded_later():
    async with gate(app=App(lambda exchange: None)) as g:
        client = await g.client()
        client.send(request())
        await until(lambda: g.app.requests)
        g.app.requests[0].exchange.forward(((b"x-gate", b"1"),), ((b"x-request-id", b"7"),))
        message = await client.response()
        assert message.header(b"x-request-id") == b"7"
        assert message.body == b"echo:hello"


async def test_a_large_body_passes_whole():
    async with gate() as g:
        client = await g.client()
        body = bytes(range(256)) * 12_000
        client.send(request(body=body))
        message = await client.response()
        assert message.body == b"echo:" + body


async def test_the_engine_closing_after_each_response_unannounced_costs_nothing():
    async def script(side: EngineSide) -> None:
        await side.request()
        side.send(response())

    async with gate(script) as g:
        client = await g.client()
        for _ in range(20):
            message = await client.ask()
            assert message.status == 200
        assert g.app.ends == [End.COMPLETE] * 20


async def test_no_engine():
    async with gate() as g:
        await g.engine.close()
        client = await g.client()
        message = await client.ask()
        assert (message.status, message.header(b"x-end")) == (599, b"engine_refused")
        message = await client.ask()
        assert message.status == 599
