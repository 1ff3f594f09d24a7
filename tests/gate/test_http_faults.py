"""Engines that fail and clients that leave, at every stage: each has its outcome, and nothing is left behind.

`gate()` checks after each test that no exchange is open, no byte held, and no socket leaked.
"""

from __future__ import annotations

import asyncio

import pytest
from tests.gate.wire import App, EngineSide, Gate, answers, gate, request, response, until

from sluicegate_sidecar.http import End, Limits

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
FAST = 0.05


# ---- the engine ---------------------------------------------------------------------------------------


async def test_refused():
    async with gate() as g:
        port = g.engine.port
        await g.engine.close()
        client = await g.client()
        for _ in range(3):
            message = await client.ask()
            assert (message.status, message.body) == (599, b"failed")
        assert g.app.ends == [End.ENGINE_REFUSED] * 3
        await g.engine.listen(port)
        assert (await client.ask()).status == 200


@pytest.mark.parametrize("reset", [False, True])
async def test_closed_before_any_byte(reset):
    async def script(side: EngineSide) -> None:
        await side.request()
        if reset:
            side.reset()

    async with gate(script) as g:
        client = await g.client()
        message = await client.ask()
        assert message.header(b"x-end") == b"engine_reset_early"
        assert g.app.ends == [End.ENGINE_RESET_EARLY]
        assert g.server.pool.retries == 0  # a new connection is not tried again
        assert g.engine.connections == 1


async def test_closed_within_the_head():
    async def script(side: EngineSide) -> None:
        await side.request()
        side.send(b"HTTP/1.1 200 OK\r\nConte")

    async with gate(script) as g:
        client = await g.client()
        assert (await client.ask()).header(b"x-end") == b"engine_reset_midstream"
        assert (await client.ask()).status == 599  # the client's connection lives on


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("head", [HEAD + b"3\r\nabc\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"])
async def test_closed_in_mid_stream(head, reset):
    seen = asyncio.Event()

    async def script(side: EngineSide) -> None:
        await side.request()
        side.send(head)
        await seen.wait()
        if reset:
            side.reset()

    async with gate(script) as g:
        client = await g.client()
        client.send(request())
        await client.head()
        await until(lambda: g.app.requests[0].body == b"abc")
        seen.set()
        await until(lambda: g.app.ends == [End.ENGINE_RESET_MIDSTREAM])
        rest = await client.rest()
        assert b"abc" in rest
        assert b"0\r\n\r\n" not in rest
        await g.engine.close()


async def test_closed_in_mid_stream_resets_a_client_that_reads_until_the_end():
    """For HTTP/1.0 the end of the connection is the end of the message: only a reset says it is not."""
    seen = asyncio.Event()

    async def script(side: EngineSide) -> None:
        await side.request()
        side.send(HEAD + b"3\r\nabc\r\n")
        await seen.wait()

    async with gate(script) as g:
        client = await g.client()
        client.send(b"GET / HTTP/1.0\r\n\r\n")
        await client.head()
        assert await client.exactly(3) == b"abc"
        seen.set()
        with pytest.raises(ConnectionResetError):
            await client.reader.read(10)


async def test_reset_in_a_response_until_the_end_of_the_connection():
    seen = asyncio.Event()

    async def script(side: EngineSide) -> None:
        await side.request()
        side.send(b"HTTP/1.1 200 OK\r\n\r\nabc")
        await seen.wait()
        side.reset()

    async with gate(script) as g:
        client = await g.client()
        client.send(request())
        await until(lambda: g.app.requests and g.app.requests[0].body == b"abc")
        seen.set()
        assert (await client.response()).complete is False
        assert g.app.ends == [End.ENGINE_RESET_MIDSTREAM]


async def test_hung_before_the_first_byte():
    async def script(side: EngineSide) -> None:
        await side.rest()

    async with gate(script, limits=Limits(first_byte_s=FAST)) as g:
        client = await g.client()
        assert (await client.ask()).header(b"x-end") == b"engine_hung"
        assert g.app.ends == [End.ENGINE_HUNG]
        assert (
            g.server.pool.open_connections == 0
            or await until(lambda: not g.server.pool.open_connections) is None
        )


async def test_hung_in_mid_stream():
    async def script(side: EngineSide) -> None:
        await side.request()
        side.send(HEAD + b"3\r\nabc\r\n")
        await side.rest()

    async with gate(script, limits=Limits(inter_chunk_s=FAST)) as g:
        client = await g.client()
        message = await client.ask()
        assert (message.complete, message.body) == (False, b"abc")
        assert g.app.ends == [End.ENGINE_HUNG]


async def test_an_engine_that_does_not_read_is_hung():
    async def script(side: EngineSide) -> None:
        side.writer.transport.pause_reading()
        await asyncio.Event().wait()

    async with gate(script, limits=Limits(inter_chunk_s=FAST)) as g:
        client = await g.client()
        assert (await client.ask(body=b"x" * 30_000_000)).header(b"x-end") == b"engine_hung"


async def test_a_slow_engine_is_not_hung():
    async def script(side: EngineSide) -> None:
        await side.request()
        side.send(HEAD)
        for _ in range(12):
            side.send(b"1\r\nx\r\n")
            loop = asyncio.get_running_loop()
            tick = asyncio.Event()
            loop.call_later(FAST / 2, tick.set)
            await tick.wait()
        side.send(b"0\r\n\r\n")

    async with gate(script, limits=Limits(inter_chunk_s=4 * FAST)) as g:
        client = await g.client()
        message = await client.ask()
        assert (message.complete, message.body) == (True, b"x" * 12)


async def test_restarted_engine():
    async with gate() as g:
        client = await g.client()
        assert (await client.ask()).status == 200
        port = g.engine.port
        await g.engine.close()
        assert (await client.ask()).status == 599
        await g.engine.listen(port)
        assert (await client.ask()).status == 200


async def test_an_engine_that_answers_before_it_has_read_the_body():
    async def script(side: EngineSide) -> None:
        await side.head()
        side.send(response(b"too large", b"413 Content Too Large"))
        await side.rest()

    async with gate(script) as g:
        client = await g.client()
        for _ in range(2):
            message = await client.ask(body=b"x" * 20_000_000)
            assert (message.status, message.body) == (413, b"too large")
        assert g.engine.connections == 2


async def test_without_a_listener_the_client_gets_an_error_in_openai_shape():
    def decide(exchange):
        exchange.listener = None
        g.app.requests.clear()
        exchange.forward()

    async with gate(app=App(decide)) as g:
        await g.engine.close()
        client = await g.client()
        message = await client.ask()
        assert message.status == 503
        assert b'"code":"engine_refused"' in message.body
        assert message.header(b"content-type") == b"application/json"


# ---- the client ---------------------------------------------------------------------------------------

PARTS = [b"POST / HTTP/1.1\r\nHo", b"st: g\r\nContent-Length: 10\r\n\r\nhel"]


@pytest.mark.parametrize("leave", ["close", "reset"])
@pytest.mark.parametrize("sent", [b"", PARTS[0], PARTS[0] + PARTS[1]])
async def test_client_leaves_before_its_request_is_whole(sent, leave):
    async with gate() as g:
        client = await g.client()
        client.send(sent)
        await until(lambda: g.server.open_connections == 1)
        await g.turn_of_the_gate()
        getattr(client, leave)()
        await until(lambda: g.server.open_connections == 0)
        assert not g.app.requests
        await g.works()


@pytest.mark.parametrize("leave", ["close", "reset"])
async def test_client_leaves_while_it_waits_and_is_never_handed_over(leave):
    app = App(lambda exchange: None)
    async with gate(app=app) as g:
        client = await g.client()
        client.send(request())
        await until(lambda: app.requests)
        getattr(client, leave)()
        await until(lambda: app.ends == [End.CLIENT_GONE])
        with pytest.raises(RuntimeError):
            app.requests[0].exchange.forward()
        assert g.engine.connections == 0
        app.decide = lambda exchange: exchange.forward()
        await g.works()


async def test_client_that_pipelined_much_and_left_is_never_handed_over():
    app = App(lambda exchange: None)
    async with gate(app=app, limits=Limits(pipelined_bytes=100, idle_s=1000)) as g:
        client = await g.client()
        client.send(request())
        await until(lambda: app.requests)
        client.send(request(body=b"x" * 1000))
        await until(lambda: g.server.body_bytes > 1000)
        client.close()
        await client.writer.wait_closed()
        app.requests[0].exchange.forward()
        assert app.ends == [End.CLIENT_GONE]
        assert g.engine.connections == 0


@pytest.mark.parametrize("leave", ["close", "reset"])
@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200", HEAD, HEAD + b"3\r\nabc\r\n"])
async def test_client_leaves_after_the_hand_over_and_the_engine_hears_at_once(said, leave):
    asked, freed = asyncio.Event(), asyncio.Event()

    async def script(side: EngineSide) -> None:
        await side.request()
        side.send(said)
        asked.set()
        assert await side.rest() == b""
        freed.set()

    async with gate(script) as g:
        client = await g.client()
        client.send(request())
        await asked.wait()
        await g.turn_of_the_gate()
        getattr(client, leave)()
        await asyncio.wait_for(freed.wait(), 5)
        await until(lambda: g.app.ends == [End.CLIENT_GONE])
        g.engine.script = answers
        await g.works()


async def test_client_leaves_while_the_engine_is_being_connected():
    async with gate() as g:
        client = await g.client()
        client.send(request())
        await until(lambda: g.app.requests)
        client.reset()
        await until(lambda: g.app.ends)
        await g.works()


async def test_client_leaves_in_the_middle_of_a_stream_that_it_does_not_read():
    async def script(side: EngineSide) -> None:
        await side.request()
        side.send(HEAD)
        while True:
            side.send(b"400\r\n" + b"x" * 1024 + b"\r\n")
            await side.writer.drain()

    async with gate(script, App(keeps_bodies=False)) as g:
        client = await g.client()
        client.writer.transport.pause_reading()
        client.send(request())
        await until(lambda: g.app.requests and g.app.requests[0].pieces > 10)
        client.reset()
        await until(lambda: g.app.ends == [End.CLIENT_GONE])


async def test_a_client_that_takes_nothing_is_gone_after_a_while():
    async def script(side: EngineSide) -> None:
        await side.request()
        side.send(HEAD)
        while True:
            side.send(b"400\r\n" + b"x" * 1024 + b"\r\n")
            await side.writer.drain()

    # The engine is silent all the while, since it is held back: that is not its fault.
    async with gate(script, App(keeps_bodies=False), Limits(stall_s=6 * FAST, inter_chunk_s=FAST)) as g:
        client = await g.client()
        client.writer.transport.pause_reading()
        client.send(request())
        await until(lambda: g.app.ends)
        assert g.app.ends == [End.CLIENT_GONE]


async def test_a_client_that_takes_nothing_and_half_closes_is_gone_at_once():
    async def script(side: EngineSide) -> None:
        await side.request()
        side.send(HEAD)
        while True:
            side.send(b"400\r\n" + b"x" * 1024 + b"\r\n")
            await side.writer.drain()

    async with gate(script, App(keeps_bodies=False)) as g:
        client = await g.client()
        client.writer.transport.pause_reading()
        client.send(request())
        await until(lambda: any(side.write_paused for side in g.server._clients))
        client.writer.write_eof()
        await until(lambda: g.app.ends == [End.CLIENT_GONE])
        await until(lambda: g.server.open_connections == 0)


# ---- the application ----------------------------------------------------------------------------------


async def test_the_application_takes_a_request_back():
    asked, freed = asyncio.Event(), asyncio.Event()

    async def script(side: EngineSide) -> None:
        await side.request()
        asked.set()
        await side.rest()
        freed.set()

    async with gate(script) as g:
        client = await g.client()
        client.send(request())
        await asked.wait()
        g.app.requests[0].exchange.abort("preempted")
        g.app.requests[0].exchange.abort("twice does nothing")
        assert (await client.response()).header(b"x-end") == b"aborted"
        await freed.wait()
        assert g.app.ends == [End.ABORTED]


async def test_the_application_takes_a_stream_back():
    async def script(side: EngineSide) -> None:
        await side.request()
        side.send(HEAD + b"3\r\nabc\r\n")
        await side.rest()

    async with gate(script) as g:
        client = await g.client()
        client.send(request())
        await until(lambda: g.app.requests and g.app.requests[0].body == b"abc")
        g.app.requests[0].exchange.abort("preempted")
        message = await client.response()
        assert (message.complete, message.body) == (False, b"abc")


async def test_commands_out_of_order_are_errors():
    app = App(lambda exchange: None)
    async with gate(app=app) as g:
        client = await g.client()
        client.send(request())
        await until(lambda: app.requests)
        exchange = app.requests[0].exchange
        with pytest.raises(ValueError, match="line break"):
            exchange.forward(((b"x-a", b"1\r\nx: y"),))
        with pytest.raises(ValueError, match="line break"):
            exchange.refuse(429, ((b"x\ny", b"1"),))
        exchange.forward()
        with pytest.raises(RuntimeError):
            exchange.forward()
        with pytest.raises(RuntimeError):
            exchange.refuse(429)
        assert (await client.response()).status == 200
        with pytest.raises(RuntimeError):
            exchange.refuse(429)
        exchange.abort("too late does nothing")
        assert app.ends == [End.COMPLETE]


class BrokenError(Exception):
    """Raised by an application."""


def break_at(g: Gate, name: str) -> None:
    def broken(*_args: object) -> None:
        raise BrokenError

    def decide(exchange):
        setattr(exchange.listener, name, broken)
        exchange.forward()

    g.app.decide = decide


@pytest.mark.parametrize("name", ["on_response_head", "on_response_body", "on_end"])
async def test_a_listener_that_raises_does_no_harm(name, caplog):
    async with gate() as g:
        break_at(g, name)
        client = await g.client()
        for _ in range(2):
            assert (await client.ask()).body == b"echo:hello"
        assert f"{name} of the application failed" in caplog.text
        assert g.app.ends == ([] if name == "on_end" else [End.COMPLETE] * 2)
        for listener in g.app.requests:
            listener.ends = listener.ends or [End.COMPLETE]


async def test_an_application_whose_error_hook_raises_does_no_harm(caplog):
    async with gate() as g:

        def broken(kind: str) -> None:
            raise BrokenError

        g.app.on_protocol_error = broken
        client = await g.client()
        client.send(b"nonsense\r\n\r\n")
        assert (await client.response()).status == 400
        assert "on_protocol_error of the application failed" in caplog.text


async def test_a_failure_reply_that_raises_falls_back(caplog):
    async with gate() as g:
        break_at(g, "failure_reply")
        await g.engine.close()
        client = await g.client()
        assert (await client.ask()).status == 503
        assert (await client.ask()).status == 503


@pytest.mark.parametrize("first", [None, "forward", "refuse"])
async def test_an_application_that_raises_on_a_request(first, caplog):
    def decide(exchange):
        if first == "forward":
            exchange.forward()
        if first == "refuse":
            exchange.refuse(429)
        raise BrokenError

    async with gate(app=App(decide)) as g:
        client = await g.client()
        for _ in range(2):
            status = (await client.ask()).status
            assert status == {None: 500, "forward": 200, "refuse": 429}[first]
        end = {None: End.ABORTED, "forward": End.COMPLETE, "refuse": End.REFUSED}[first]
        assert g.app.ends == [end] * 2
        assert "on_request of the application failed" in caplog.text


async def test_an_application_that_aborts_from_within_the_response():
    def decide(exchange):
        exchange.listener.on_response_body = lambda data: exchange.abort("enough")
        exchange.forward()

    async with gate(app=App(decide)) as g:
        client = await g.client()
        message = await client.ask()
        assert message.header(b"x-end") == b"aborted"  # nothing had been written yet
        assert g.app.ends == [End.ABORTED]
