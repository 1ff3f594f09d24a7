"""How a gate leaves a Service: it admits while others still send, closes each connection, and asks for its token."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from pathlib import Path

import pytest
from tests.gate.gate_process import (
    POLICY,
    GateProcess,
    ScriptedEngine,
    ask,
    body_of,
    chat,
    connect,
    gate_before,
    reason,
    serve_three,
)
from tests.gate.wire import App, ClientSide, request

from sluicegate_sidecar.http import serve
from sluicegate_sidecar.settings import Address, parse_settings

TOKEN = "a-token-of-this-pod-alone"
#: Longer than any test: a drain that settles for so long goes on only where something else ends it.
LONG = 3600


async def admin(gate: GateProcess, path: str, *headers: bytes) -> tuple[int, dict[str, object]]:
    client = await ClientSide.connect(gate.admin_port)
    try:
        client.send(request(b"GET", path.encode(), b"", *headers))
        answer = await client.response(b"GET")
    finally:
        client.close()
    return answer.status, json.loads(answer.body)


async def test_who_has_not_heard_yet_is_still_served_and_sent_elsewhere() -> None:
    async with ScriptedEngine() as engine, gate_before(engine.url) as gate:
        before = await ClientSide.connect(gate.port)
        before.send(chat(body_of()))
        assert (await before.response()).header(b"connection") is None
        idle = await ClientSide.connect(gate.port)
        hook = asyncio.ensure_future(gate.admin(f"/drain?timeout={LONG}&settle={LONG}"))
        await gate.until_state(lambda s: s["leaving"])
        assert json.loads((await gate.admin("/readyz"))[1]) == {"ready": False, "reason": "draining"}
        assert json.loads((await gate.admin("/report"))[1])["draining"] is True
        assert await gate.count("draining") == 1

        # On a connection that was there before, and on one that comes now.
        before.send(chat(body_of()))
        for answer in (await before.response(), await ask(gate.port)):
            assert (answer.status, answer.header(b"connection")) == (200, b"close")
        assert await before.rest() == b""
        assert (await gate.state())["draining"] is False

        gate.signal(signal.SIGTERM)  # whoever sends it is done with waiting
        assert json.loads((await hook)[1])["drained"] is True
        assert await idle.rest() == b""
        for client in (before, idle):
            client.close()
        assert await asyncio.to_thread(gate.wait) == 0


async def test_after_that_it_refuses_and_closes() -> None:
    async with ScriptedEngine(None) as engine, gate_before(engine.url) as gate:
        client = await connect(gate.port, body_of(stream=True))
        call = await engine.call()
        hook = asyncio.ensure_future(gate.admin(f"/drain?timeout={LONG}&settle=0.01"))
        await gate.until_state(lambda s: s["draining"])
        refused = await ask(gate.port)
        assert (refused.status, reason(refused), refused.header(b"connection")) == (503, "draining", b"close")
        assert not hook.done()
        serve_three(call)
        assert (await client.response()).complete
        client.close()
        assert json.loads((await hook)[1])["drained"] is True


async def test_the_time_to_settle_is_within_the_bound() -> None:
    async with ScriptedEngine(None) as engine, gate_before(engine.url) as gate:
        client = await connect(gate.port, body_of())
        call = await engine.call()
        status, told = await admin(gate, f"/drain?timeout=0.01&settle={LONG}")
        assert (status, told["drained"], told["in_flight"]) == (200, False, 1)
        serve_three(call)
        assert (await client.response()).complete
        client.close()


async def test_a_second_hook_joins_the_first() -> None:
    async with ScriptedEngine() as engine, gate_before(engine.url) as gate:
        first = asyncio.ensure_future(gate.admin(f"/drain?settle={LONG}"))
        await gate.until_state(lambda s: s["leaving"])
        second = asyncio.ensure_future(gate.admin("/drain"))
        assert (await ask(gate.port)).status == 200
        assert not first.done()
        assert not second.done()
        gate.signal(signal.SIGTERM)
        for hook in (first, second):
            assert json.loads((await hook)[1])["drained"] is True
        assert await asyncio.to_thread(gate.wait) == 0


@pytest.mark.parametrize(
    "query", ["settle=soon", "settle=-1", "settle=inf", "settle=", "timeout=1&settle=1e9"]
)
async def test_a_time_that_is_none_drains_nothing(query: str) -> None:
    async with ScriptedEngine() as engine, gate_before(engine.url) as gate:
        assert (await gate.admin(f"/drain?{query}"))[0] == 400
        assert (await ask(gate.port)).status == 200


async def test_only_who_has_the_token_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICEGATE_DRAIN_TOKEN", TOKEN)
    async with ScriptedEngine() as engine, gate_before(engine.url) as gate:
        for headers in ((), (b"x-sluicegate-token: ",), (b"x-sluicegate-token: " + TOKEN[:-1].encode(),)):
            status, told = await admin(gate, "/drain?timeout=0", *headers)
            assert status == 403
            assert TOKEN not in json.dumps(told)
        assert (await ask(gate.port)).status == 200
        assert (await gate.state())["leaving"] is False
        status, told = await admin(gate, "/drain?timeout=1", b"X-Sluicegate-Token: " + TOKEN.encode())
        assert (status, told["drained"]) == (200, True)
        assert TOKEN not in gate.log.text
        assert TOKEN not in json.dumps(await gate.state())


async def test_whether_the_engine_accepts_is_found_out_by_asking_it() -> None:
    engine = ScriptedEngine()
    await engine.start()
    async with gate_before(engine.url) as gate:
        assert await admin(gate, "/enginez") == (200, {"accepts": True})
        await engine.stop()
        status, told = await admin(gate, "/enginez")
        assert (status, told) == (503, {"accepts": False, "reason": os.strerror(111)})


async def test_a_gate_whose_policy_is_not_there_yet_lets_everything_pass(tmp_path: Path) -> None:
    """As a pod that starts before its ConfigMap is written."""
    async with ScriptedEngine() as engine, gate_before(engine.url, tmp_path) as gate:
        await gate.log.line("everything passes until there is one")
        assert (await ask(gate.port)).status == 200
        state = await gate.state()
        assert (state["policy"]["mode"], state["policy"]["content_hash"]) == ("Off", "")
        (tmp_path / "next").write_text(POLICY)
        (tmp_path / "next").rename(tmp_path / "policy.yaml")
        state = await gate.until_state(lambda s: s["policy"]["mode"] == "Enforce")
        assert "batch" in state["classes"]
        assert state["policy"]["last_error"] is None


async def test_an_empty_host_is_every_interface_of_both_families() -> None:
    settings = parse_settings(
        ["--policy=p", "--upstream=http://127.0.0.1:1", "--listen=:8000", "--admin=:9901"], {}
    )
    assert (settings.listen, str(settings.listen), settings.admin) == (
        Address("", 8000),
        "*:8000",
        Address("", 9901),
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    app = App(lambda exchange: exchange.refuse(204, (), b""))
    server = await serve(app, upstream_host="", upstream_port=0, host="", port=port)
    try:
        for host in ("127.0.0.1", "::1"):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(request(b"GET", b"/", b""))
            assert (await reader.readline()).startswith(b"HTTP/1.1 204")
            writer.close()
    finally:
        await server.close()
