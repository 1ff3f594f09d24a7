"""The end of a gate: streams end whole, who comes is sent elsewhere, and a second signal is obeyed at once."""

from __future__ import annotations

import asyncio
import json
import signal

import pytest
from tests.gate.gate_process import (
    DONE,
    ScriptedEngine,
    ask,
    body_of,
    connect,
    error_code,
    gate_before,
    number,
    reason,
    serve_three,
    token,
)
from tests.gate.wire import ClientSide, request

STREAM = body_of(stream=True)

ONE_SLOT = """\
engine: {slots: 1}
classes:
- {name: interactive, maxQueueTime: 60s}
"""


@pytest.mark.parametrize("number_", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_streams_end_and_sends_others_elsewhere(number_: signal.Signals) -> None:
    async with ScriptedEngine(None) as engine, gate_before(engine.url) as gate:
        client = await connect(gate.port, STREAM)
        call = await engine.call()
        call.begin(token(" 2"))
        gate.signal(number_)
        await gate.log.line("draining: 1 in flight")
        for connection in (ask(gate.port), ask(gate.port)):
            refused = await connection
            assert (refused.status, refused.complete) == (503, True)
            assert (reason(refused), error_code(refused)) == ("draining", "server_is_overloaded")
            assert 1 <= number(refused, b"retry-after") <= 120
        assert json.loads((await gate.admin("/readyz"))[1]) == {"ready": False, "reason": "draining"}
        assert (await gate.admin("/healthz"))[0] == 200
        state = await gate.state()
        assert state["classes"]["interactive"]["rejected"] == {"draining": 2}
        call.end(token(" 1"))
        answer = await client.response()
        client.close()
        assert answer.complete
        assert answer.body == token(" 2") + token(" 1") + DONE
        assert await asyncio.to_thread(gate.wait) == 0
        assert "nothing in flight" in gate.log.text


async def test_who_waits_when_a_drain_begins_is_served() -> None:
    async with ScriptedEngine(None) as engine, gate_before(engine.url, ONE_SLOT) as gate:
        first = await connect(gate.port, STREAM)
        call = await engine.call()
        second = await connect(gate.port, STREAM)
        await gate.until_state(lambda s: s["waiting"] == 1)
        gate.signal(signal.SIGTERM)
        await gate.log.line("draining: 2 in flight")
        serve_three(call)
        serve_three(await engine.call())
        for client in (first, second):
            answer = await client.response()
            client.close()
            assert (answer.status, answer.complete) == (200, True)
        assert await asyncio.to_thread(gate.wait) == 0


async def test_a_second_signal_cuts() -> None:
    """Who waits, who has no answer yet and who is in mid-stream: the first two are told, the third is cut."""
    async with ScriptedEngine(None) as engine, gate_before(engine.url) as gate:
        streams = await connect(gate.port, STREAM)
        call = await engine.call()
        call.begin(token())
        assert (await streams.head()).status == 200
        prefills = await connect(gate.port, STREAM)
        await engine.call()
        waits = await connect(gate.port, STREAM)
        await gate.until_state(lambda s: s["waiting"] == 1)
        gate.signal(signal.SIGTERM)
        await gate.log.line("draining: 3 in flight")
        gate.signal(signal.SIGTERM)
        assert await asyncio.to_thread(gate.wait) == 0
        rest = await streams.rest()
        assert b"[DONE]" not in rest
        assert not rest.endswith(b"0\r\n\r\n")
        evicted, taken_back = await waits.response(), await prefills.response()
        assert [(m.status, reason(m)) for m in (evicted, taken_back)] == [(503, "drained"), (503, "aborted")]
        assert all(m.complete and number(m, b"retry-after") >= 1 for m in (evicted, taken_back))
        for client in (streams, prefills, waits):
            client.close()
        assert "no longer waiting for 3 requests in flight" in gate.log.text


async def test_a_drain_has_a_bound() -> None:
    async with (
        ScriptedEngine(None) as engine,
        gate_before(engine.url, ONE_SLOT, "--drain-timeout=0.2") as gate,
    ):
        client = await connect(gate.port, STREAM)
        (await engine.call()).begin(token())
        waits = await connect(gate.port, STREAM)
        await gate.until_state(lambda s: s["waiting"] == 1)
        gate.signal(signal.SIGTERM)
        evicted = await waits.response()
        assert (evicted.status, reason(evicted)) == (503, "drained")
        assert b"[DONE]" not in await client.rest()
        for one in (client, waits):
            one.close()
        assert await asyncio.to_thread(gate.wait) == 0


async def test_a_hook_that_drains_waits_for_what_is_in_flight() -> None:
    """As a preStop does it: by GET, before the signal."""
    async with ScriptedEngine(None) as engine, gate_before(engine.url) as gate:
        client = await connect(gate.port, STREAM)
        call = await engine.call()
        call.begin(token(" 2"))
        hook = asyncio.ensure_future(gate.admin("/drain"))
        await gate.until_state(lambda s: s["draining"])
        assert reason(await ask(gate.port)) == "draining"
        assert not hook.done()
        assert await gate.count("draining") == 1
        call.end()
        assert (await client.response()).complete
        client.close()
        status, body = await hook
        told = json.loads(body)
        assert (status, told["drained"], told["in_flight"]) == (200, True, 0)
        assert reason(await ask(gate.port)) == "draining"


async def test_a_hook_with_a_bound_of_its_own() -> None:
    async with ScriptedEngine(None) as engine, gate_before(engine.url) as gate:
        client = await connect(gate.port, STREAM)
        call = await engine.call()
        status, body = await gate.admin("/drain?timeout=0", "POST")
        told = json.loads(body)
        assert (status, told["drained"], told["in_flight"]) == (200, False, 1)
        serve_three(call)  # what the hook no longer waits for still ends whole
        assert (await client.response()).complete
        client.close()
        assert (await gate.admin("/drain?timeout=never"))[0] == 400


async def test_a_client_that_reads_slowly_gets_the_end_of_its_answer() -> None:
    """The answer is over for the gate when it is written; a drain that ends then must not cut what is not sent."""
    size = 8 << 20
    async with ScriptedEngine(None) as engine, gate_before(engine.url) as gate:
        client = await connect(gate.port, body_of())
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        call = await engine.call()
        call.reply("200 OK", {"text": "x" * size})
        gate.signal(signal.SIGTERM)
        await gate.log.line("draining")
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        answer = await client.response()
        client.close()
        assert answer.complete
        assert len(answer.body) > size
        assert await asyncio.to_thread(gate.wait) == 0


async def test_an_ungated_answer_under_way_ends_whole() -> None:
    async with ScriptedEngine(None) as engine, gate_before(engine.url) as gate:
        client = await ClientSide.connect(gate.port)
        client.send(request(b"POST", b"/tokenize", b"{}"))
        call = await engine.call()
        gate.signal(signal.SIGTERM)
        await gate.log.line("drained: nothing in flight")
        call.reply("200 OK", {"tokens": []})
        answer = await client.response()
        client.close()
        assert (answer.status, answer.complete) == (200, True)
        assert await asyncio.to_thread(gate.wait) == 0


async def test_idle_connections_do_not_hold_a_drain() -> None:
    async with ScriptedEngine() as engine, gate_before(engine.url) as gate:
        clients = [await ClientSide.connect(gate.port) for _ in range(20)]
        clients[0].send(request(b"GET", b"/health", b""))
        assert (await clients[0].response(b"GET")).status == 200
        gate.signal(signal.SIGTERM)
        assert await asyncio.to_thread(gate.wait) == 0
        for client in clients:
            assert await client.rest() == b""
            client.close()
