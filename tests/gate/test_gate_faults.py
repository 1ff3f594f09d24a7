"""An engine that dies, loads or says no, and clients that leave: the whole gate, as a process.

After each: no ticket held, counts close, no descriptor leaked (`gate_before` sees to it), the next request works.
What a hung engine does needs minutes with the limits that a gate has; it is tested where limits can be given.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator

import pytest
from tests.gate.gate_process import (
    DONE,
    Call,
    GateProcess,
    ScriptedEngine,
    ask,
    body_of,
    connect,
    error_code,
    event,
    gate_before,
    number,
    reason,
    serve_three,
    token,
)
from tests.gate.wire import PATIENCE_S, Message

from sluicegate_lab.engine import EngineOptions, LlamaServer
from sluicegate_lab.tiny_model import SMALLEST, ensure_model

STREAM = body_of(stream=True)

ONE_SLOT = """\
engine: {slots: 1}
classes:
- {name: interactive, maxQueueTime: 60s}
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    """A real engine of one slot, with room for an answer of thousands of tokens."""
    model = ensure_model(SMALLEST, tmp_path_factory.mktemp("model"))
    with LlamaServer(EngineOptions(model=model, slots=1, ctx_tokens=8192)) as server:
        yield server


def long_stream() -> bytes:
    """A request to a real engine for thousands of tokens: a second of work at the least."""
    return body_of("the gate is open 999", stream=True, max_tokens=8000, ignore_eos=True)


def assert_nobody_home(message: Message) -> None:
    """A 503 that says when to come back."""
    assert (message.status, message.complete) == (503, True)
    error = json.loads(message.body)["error"]
    assert error["type"] == "service_unavailable_error"
    assert 1 <= number(message, b"retry-after") <= 120
    assert 1000 <= number(message, b"retry-after-ms") <= 1000 * number(message, b"retry-after")


async def failed(gate: GateProcess, why: str) -> float:
    return await gate.count("requests_failed_total", **{"class": "interactive", "reason": why})


# Engines.


async def test_an_engine_that_dies_in_mid_stream_and_comes_back() -> None:
    async with ScriptedEngine(None) as engine, gate_before(engine.url, ONE_SLOT) as gate:
        client = await connect(gate.port, STREAM)
        (await engine.call()).begin(token(" 3"))
        assert (await client.head()).status == 200
        assert int(await client.line(), 16) > 0
        await engine.stop()
        rest = await client.rest()
        client.close()
        assert b"[DONE]" not in rest
        assert not rest.endswith(b"0\r\n\r\n")
        assert await failed(gate, "engine_reset_midstream") == 1

        await gate.until_state(lambda s: s["engine"]["status"] == "down")
        refused = await ask(gate.port)
        assert_nobody_home(refused)
        assert (reason(refused), error_code(refused)) == ("engine_down", "server_is_overloaded")
        assert (await gate.admin("/readyz"))[0] == 503

        engine.answer = serve_three
        await engine.start()
        await gate.until_state(lambda s: s["engine"]["status"] == "up")
        assert (await gate.admin("/readyz"))[0] == 200
        await gate.works()
        counts = (await gate.settled())["classes"]["interactive"]
        assert counts["failed"] == {"engine_reset_midstream": 1}
        assert counts["rejected"] == {"engine_down": 1}
        assert counts["served"] == 1


@pytest.mark.engine
async def test_a_real_engine_that_dies_in_mid_stream_and_comes_back(llama: LlamaServer) -> None:
    async with gate_before(llama.url, ONE_SLOT) as gate:
        await gate.until_state(lambda s: s["engine"]["status"] == "up")
        client = await connect(gate.port, long_stream())
        assert (await client.head()).status == 200
        await client.line()
        waits = await connect(gate.port, body_of())
        await gate.until_state(lambda s: s["waiting"] == 1)
        try:
            os.kill(llama.pid, signal.SIGSTOP)  # so that the answer is not over before its engine is
            os.kill(llama.pid, signal.SIGKILL)
            await asyncio.to_thread(llama.kill)
            assert b"[DONE]" not in await client.rest()
            client.close()
        finally:
            await asyncio.to_thread(llama.start)
        # Who waited was handed over to a port that was just closing, or went on waiting until the engine was back.
        answer = await waits.response()
        waits.close()
        assert answer.complete
        assert answer.status in (200, 502, 503)
        if answer.status != 200:
            assert reason(answer) in ("engine_reset_early", "engine_refused", "engine_down")
            assert number(answer, b"retry-after") >= 1
        assert await failed(gate, "engine_reset_midstream") == 1
        await gate.until_state(lambda s: s["engine"]["status"] == "up")
        await gate.works()


async def test_an_engine_that_is_not_there_at_the_start() -> None:
    async with ScriptedEngine() as engine:
        await engine.stop()
        async with gate_before(engine.url, ONE_SLOT) as gate:
            await gate.until_state(lambda s: s["engine"]["status"] == "down")
            refused = await ask(gate.port)
            assert_nobody_home(refused)
            assert reason(refused) == "engine_down"
            await engine.start()
            await gate.until_state(lambda s: s["engine"]["status"] == "up")
            await gate.works()
            assert len(engine.calls) == 1


async def test_an_engine_that_was_away_between_two_looks_is_found_again() -> None:
    """A request finds the port closed; the probe, which looks once a second, may never have seen it so."""
    async with ScriptedEngine() as engine, gate_before(engine.url, ONE_SLOT) as gate:
        for _ in range(3):
            await gate.until_state(lambda s: s["engine"]["status"] == "up")
            await engine.stop()
            refused = await ask(gate.port)
            assert_nobody_home(refused)
            assert reason(refused) in ("engine_refused", "engine_down")
            await engine.start()
        await gate.until_state(lambda s: s["engine"]["status"] == "up")
        await gate.works()


async def test_an_engine_that_loads() -> None:
    async with ScriptedEngine() as engine:
        engine.health = 503
        async with gate_before(engine.url, ONE_SLOT) as gate:
            await gate.until_state(lambda s: s["engine"]["status"] == "loading")
            assert json.loads((await gate.admin("/readyz"))[1]) == {
                "ready": False,
                "reason": "engine_loading",
            }
            refused = await ask(gate.port)
            assert_nobody_home(refused)
            assert reason(refused) == "engine_down"
            assert engine.calls == []
            engine.health = 200
            await gate.until_state(lambda s: s["engine"]["status"] == "up")
            await gate.works()


def _garbage(call: Call) -> None:
    call.raw(b"this is no HTTP\r\n\r\n")


@pytest.mark.parametrize(
    ("answer", "why"), [(Call.cut, "engine_reset_early"), (_garbage, "engine_bad_response")]
)
async def test_an_engine_that_fails_before_it_answers(answer: Callable[[Call], None], why: str) -> None:
    async with ScriptedEngine(answer) as engine, gate_before(engine.url, ONE_SLOT) as gate:
        message = await ask(gate.port, None, b"X-Request-Id: mine-1")
        assert (message.status, message.complete) == (502, True)
        assert (reason(message), error_code(message)) == (why, why)
        assert message.header(b"x-request-id") == b"mine-1"
        assert 1 <= number(message, b"retry-after") <= 120
        assert await failed(gate, why) == 1
        engine.answer = serve_three
        await gate.works()


REFUSALS = [
    ("engine_busy", lambda call: call.reply("429 Too Many Requests", {"error": {"code": 429}}), 429),
    ("engine_busy", lambda call: call.reply("503 Service Unavailable", {"error": {"code": 503}}), 503),
    ("engine_error", lambda call: call.reply("500 Internal Server Error", {"error": {"code": 500}}), 500),
    ("engine_busy", lambda call: call.reply("200 OK", {"error": {"code": "server_is_overloaded"}}), 200),
    ("engine_error", lambda call: call.reply("200 OK", {"error": {"message": "out of memory"}}), 200),
]


@pytest.mark.parametrize(("why", "answer", "status"), REFUSALS)
async def test_an_engine_that_refuses(why: str, answer: Callable[[Call], None], status: int) -> None:
    """Its answer passes as it is, and is not counted as served, nor learned from."""
    async with ScriptedEngine(answer) as engine, gate_before(engine.url, ONE_SLOT) as gate:
        message = await ask(gate.port)
        assert message.status == status
        assert "error" in json.loads(message.body)
        counts = (await gate.settled())["classes"]["interactive"]
        assert counts["failed"] == {why: 1}
        assert (counts["served"], counts["ttft_predictions"]) == (0, 0)
        engine.answer = serve_three
        await gate.works()


async def test_a_refusal_inside_a_stream() -> None:
    """vLLM's own cap answers 200, then an error of code 503, then `[DONE]`."""
    error = event({"error": {"message": "the queue is full", "type": "ServiceUnavailable", "code": 503}})

    def full(call: Call) -> None:
        call.stream(error)

    async with ScriptedEngine(full) as engine, gate_before(engine.url, ONE_SLOT) as gate:
        message = await ask(gate.port, STREAM)
        assert (message.status, message.body) == (200, error + DONE)
        counts = (await gate.settled())["classes"]["interactive"]
        assert counts["failed"] == {"engine_busy": 1}
        assert counts["served"] == 0
        engine.answer = serve_three
        await gate.works()


# Clients.


@pytest.mark.parametrize("leaves", ["close", "reset"])
async def test_a_client_that_leaves_while_it_waits_never_reaches_the_engine(leaves: str) -> None:
    async with ScriptedEngine(None) as engine, gate_before(engine.url, ONE_SLOT) as gate:
        first = await connect(gate.port, body_of("first 3"))
        call = await engine.call()
        second = await connect(gate.port, body_of("second 3"))
        await gate.until_state(lambda s: s["waiting"] == 1)
        third = await connect(gate.port, body_of("third 3"))
        await gate.until_state(lambda s: s["waiting"] == 2)
        getattr(second, leaves)()
        state = await gate.until_state(lambda s: s["waiting"] == 1)
        assert state["classes"]["interactive"]["evicted"] == {"client_gone": 1}
        serve_three(call)
        assert (await first.response()).complete
        serve_three(await engine.call())
        assert (await third.response()).complete
        for client in (first, third):
            client.close()
        engine.answer_all()
        await gate.works()
        assert [call.prompt for call in engine.calls] == ["first 3", "third 3", "hello 3"]


@pytest.mark.parametrize("begun", [False, True], ids=["before a token", "in mid-stream"])
async def test_a_client_that_leaves_frees_its_slot(begun: bool) -> None:
    async with ScriptedEngine(None) as engine, gate_before(engine.url, ONE_SLOT) as gate:
        first = await connect(gate.port, STREAM)
        call = await engine.call()
        second = await connect(gate.port, STREAM)
        await gate.until_state(lambda s: s["waiting"] == 1)
        if begun:
            call.begin(token())
            assert (await first.head()).status == 200
        first.close()
        await asyncio.wait_for(call.gone.wait(), PATIENCE_S)
        serve_three(await engine.call())
        assert (await second.response()).complete
        second.close()
        counts = (await gate.settled())["classes"]["interactive"]
        assert (counts["failed"], counts["served"]) == ({"client_gone": 1}, 1)
        engine.answer_all()
        await gate.works()


@pytest.mark.engine
async def test_a_client_that_leaves_frees_the_slot_of_a_real_engine(llama: LlamaServer) -> None:
    """The only slot: the next request is served only once the engine has let go of the first."""
    async with gate_before(llama.url, ONE_SLOT) as gate:
        await gate.until_state(lambda s: s["engine"]["status"] == "up")
        first = await connect(gate.port, long_stream())
        assert (await first.head()).status == 200
        second = await connect(gate.port, body_of("the gate is open 7"))
        await gate.until_state(lambda s: s["waiting"] == 1)
        first.close()
        answer = await second.response()
        second.close()
        assert json.loads(answer.body)["usage"]["completion_tokens"] == 7
        counts = (await gate.settled())["classes"]["interactive"]
        assert (counts["failed"], counts["served"]) == ({"client_gone": 1}, 1)


async def test_clients_that_leave_at_every_stage_all_at_once() -> None:
    """Forty clients on two slots, left in every state; what is left over works."""
    async with ScriptedEngine(None) as engine, gate_before(engine.url) as gate:
        clients = [await connect(gate.port, STREAM, b"X-Client: %d" % (index % 5)) for index in range(40)]
        (await engine.call()).begin(token())
        await engine.call()
        state = await gate.until_state(lambda s: s["waiting"] == 38)
        assert state["running"] == 2
        for index, client in enumerate(clients):
            if index % 2:
                client.reset()
            else:
                client.close()
        await gate.until_state(lambda s: not s["in_flight"])
        counts = (await gate.settled())["classes"]["interactive"]
        assert counts["offered"] == 40
        # Those next in line may be handed over as the first two leave; they are taken back, most of them before
        # the engine has heard of them.
        assert 2 <= len(engine.calls) <= counts["admitted"] == counts["failed"]["client_gone"]
        assert counts["evicted"] == {"client_gone": 40 - counts["admitted"]}
        engine.answer_all()
        await gate.works()
