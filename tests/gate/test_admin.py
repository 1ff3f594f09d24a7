"""The admin port on real sockets, beside a real data port with an engine that does what the test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.gate.wire import ClientSide, Engine, EngineSide, Message, open_fds, request, response, turn, until

from sluicegate_core.vocabulary import EngineStatus
from sluicegate_sidecar.admin import (
    LIMITS,
    AdminError,
    AdminServer,
    LoopLag,
    start_admin,
)
from sluicegate_sidecar.http import serve
from sluicegate_sidecar.policy_file import PolicyFile
from sluicegate_sidecar.run import Process
from sluicegate_sidecar.settings import Address, Settings

POLICY = """
engine: {slots: 1}
classes:
- name: chat
  slo: {ttft: 60s}
"""
CHAT = b"/v1/chat/completions"
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "a secret"}]}).encode()
ANSWER = json.dumps({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}).encode()
SOMEWHERE = Address("127.0.0.1", 0)


class Running:
    """A gate's process with its data port, its admin port, and an engine that answers when it is let go."""

    def __init__(self, process: Process, admin: AdminServer, engine: Engine, go: asyncio.Event) -> None:
        self.process = process
        self.admin = admin
        self.engine = engine
        self.go = go
        self.clients: list[ClientSide] = []

    async def connect(self, port: int) -> ClientSide:
        client = await ClientSide.connect(port)
        self.clients.append(client)
        return client

    async def get(self, path: bytes, method: bytes = b"GET", *headers: bytes) -> Message:
        client = await self.connect(self.admin.port)
        client.send(request(method, path, b"", *headers))
        return await client.response(method)

    async def chat(self, *headers: bytes) -> ClientSide:
        """Send a request to the data port, and leave it on its way."""
        assert self.process.server is not None
        client = await self.connect(self.process.server.port)
        offered = self.process.gate.controller.stats["chat"].offered
        client.send(request(b"POST", CHAT, BODY, b"Content-Type: application/json", *headers))
        await until(lambda: self.process.gate.controller.stats["chat"].offered == offered + 1)
        return client


@asynccontextmanager
async def running(tmp_path: Path, *, listens: bool = True) -> AsyncIterator[Running]:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY, encoding="utf-8")
    policy_file = PolicyFile(path)
    settings = Settings(
        policy=path, upstream=SOMEWHERE, listen=SOMEWHERE, admin=SOMEWHERE, drain_timeout_s=60.0,
        log_format="json", log_level="info", client_salt=None,
    )  # fmt: skip
    go = asyncio.Event()

    async def answers_when_let(side: EngineSide) -> None:
        while True:
            await side.request()
            await go.wait()
            side.send(response(ANSWER, b"200 OK", b"Content-Type: application/json"))

    before = open_fds()
    engine = Engine(answers_when_let)
    await engine.listen()
    process = Process(settings, policy_file, policy_file.load())
    if listens:
        process.server = await serve(
            process.gate, upstream_host="127.0.0.1", upstream_port=engine.port, host="127.0.0.1", port=0
        )
    admin = await start_admin(process, SOMEWHERE)
    gate = Running(process, admin, engine, go)
    try:
        yield gate
    finally:
        for client in gate.clients:
            client.writer.transport.abort()
        await admin.close()
        if process.server is not None:
            await process.server.close()
        await engine.close()
    await until(lambda: open_fds() <= before)


def answer(message: Message) -> object:
    assert message.header(b"content-type") == b"application/json; charset=utf-8" or (
        message.header(b"content-type") == b"application/json"
    )
    return json.loads(message.body)


# Health and readiness.


async def test_it_is_healthy_whatever_the_gate_does(tmp_path: Path) -> None:
    async with running(tmp_path, listens=False) as gate:
        gate.process.gate.drain()
        message = await gate.get(b"/healthz")
        assert (message.status, answer(message)) == (200, {"status": "ok"})


async def test_it_is_not_ready_before_the_data_port_listens(tmp_path: Path) -> None:
    async with running(tmp_path, listens=False) as gate:
        message = await gate.get(b"/readyz")
        assert (message.status, answer(message)) == (503, {"ready": False, "reason": "starting"})


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (EngineStatus.UNKNOWN, None),
        (EngineStatus.UP, None),
        (EngineStatus.LOADING, "engine_loading"),
        (EngineStatus.DOWN, "engine_down"),
    ],
)
async def test_readiness_follows_the_engine(tmp_path: Path, status: EngineStatus, reason: str | None) -> None:
    async with running(tmp_path) as gate:
        gate.process.gate.engine_status(status)
        message = await gate.get(b"/readyz")
        if reason is None:
            assert (message.status, answer(message)) == (200, {"ready": True})
        else:
            assert (message.status, answer(message)) == (503, {"ready": False, "reason": reason})


async def test_it_is_not_ready_once_it_drains(tmp_path: Path) -> None:
    async with running(tmp_path) as gate:
        gate.process.gate.drain()
        message = await gate.get(b"/readyz")
        assert (message.status, answer(message)) == (503, {"ready": False, "reason": "draining"})


async def test_load_never_makes_it_unready(tmp_path: Path) -> None:
    async with running(tmp_path) as gate:
        for _ in range(20):
            await gate.chat()
        assert gate.process.gate.controller.waiting == 19
        assert (await gate.get(b"/readyz")).status == 200


# What can be seen.


async def test_metrics_and_state_are_of_what_passed(tmp_path: Path) -> None:
    async with running(tmp_path) as gate:
        gate.go.set()
        client = await gate.chat(b"Authorization: Bearer sk-secret-key")
        assert (await client.response()).body == ANSWER
        page = await gate.get(b"/metrics")
        assert page.status == 200
        assert str(page.header(b"content-type")).startswith("b'text/plain")
        assert b'sluicegate_requests_served_total{class="chat"} 1.0\n' in page.body
        assert b'sluicegate_prompt_tokens_total{class="chat"} 7.0\n' in page.body
        assert b"sluicegate_client_connections 1.0\n" in page.body
        assert b"process_resident_memory_bytes " in page.body

        state = await gate.get(b"/debug/state")
        shown = answer(state)
        assert isinstance(shown, dict)
        assert shown["classes"]["chat"]["served"] == 1
        assert shown["http"]["client_connections"] == 1
        assert shown["policy"]["content_hash"] == gate.process.policy_file.content_hash
        for told in (page.body, state.body):
            assert b"secret" not in told


async def test_openmetrics_for_who_asks_for_it(tmp_path: Path) -> None:
    async with running(tmp_path) as gate:
        page = await gate.get(b"/metrics", b"GET", b"Accept: application/openmetrics-text; version=1.0.0")
        assert str(page.header(b"content-type")).startswith("b'application/openmetrics-text; version=1.0.0")
        assert page.body.endswith(b"# EOF\n")


async def test_a_waiting_client_is_shown_by_its_hash(tmp_path: Path) -> None:
    async with running(tmp_path) as gate:
        for _ in range(2):
            await gate.chat(b"Authorization: Bearer sk-secret-key")
        shown = answer(await gate.get(b"/debug/state"))
        assert isinstance(shown, dict)
        (client,) = shown["classes"]["chat"]["clients"]["busiest"]
        assert (client["waiting"], client["running"]) == (1, 1)
        assert len(client["client"]) == 16
        assert int(client["client"], 16) >= 0
        assert shown["classes"]["chat"]["head"]["hold"] == "slots"


# Drain.


@pytest.mark.parametrize("method", [b"GET", b"POST"])
async def test_a_drain_refuses_what_comes_and_ends_with_what_is_in_flight(
    tmp_path: Path, method: bytes
) -> None:
    async with running(tmp_path) as gate:
        served, waiting = await gate.chat(), await gate.chat()
        drain = asyncio.create_task(gate.get(b"/drain", method))
        await until(lambda: gate.process.gate.controller.draining)
        refused = await (await gate.chat()).response()
        assert (refused.status, refused.header(b"x-sluicegate-reason")) == (503, b"draining")
        assert (await gate.get(b"/healthz")).status == 200
        assert not drain.done()
        gate.go.set()
        assert [(await client.response()).status for client in (served, waiting)] == [200, 200]
        result = answer(await drain)
        assert isinstance(result, dict)
        assert (result["drained"], result["in_flight"]) == (True, 0)
        assert result["waited_s"] >= 0.0
        again = answer(await gate.get(b"/drain"))
        assert isinstance(again, dict)
        assert again["drained"] is True


async def test_a_drains_bound_evicts_who_waits_and_leaves_what_the_engine_has(tmp_path: Path) -> None:
    async with running(tmp_path) as gate:
        served, waiting = await gate.chat(), await gate.chat()
        result = answer(await gate.get(b"/drain?timeout=0"))
        assert isinstance(result, dict)
        assert (result["drained"], result["in_flight"]) == (False, 1)
        evicted = await waiting.response()
        assert (evicted.status, evicted.header(b"x-sluicegate-reason")) == (503, b"drained")
        gate.go.set()
        assert (await served.response()).status == 200


async def test_a_client_of_the_drain_that_leaves_changes_nothing(tmp_path: Path) -> None:
    """Kubernetes gives up on a hook after a time of its own; the drain goes on."""
    async with running(tmp_path) as gate:
        served = await gate.chat()
        hook = await gate.connect(gate.admin.port)
        hook.send(request(b"GET", b"/drain", b""))
        await until(lambda: gate.process.gate.controller.draining)
        hook.reset()
        gate.go.set()
        assert (await served.response()).status == 200
        assert gate.process.gate.controller.draining
        assert (await gate.get(b"/drain")).status == 200


@pytest.mark.parametrize("text", [b"soon", b"-1", b"nan", b"inf", b"1e9", b""])
async def test_a_drain_with_a_bad_bound_is_none(tmp_path: Path, text: bytes) -> None:
    async with running(tmp_path) as gate:
        message = await gate.get(b"/drain?timeout=" + text)
        assert (message.status, answer(message)) == (
            400,
            {"error": "timeout is a number of seconds from 0 to 86400"},
        )
        assert not gate.process.gate.controller.draining


async def test_to_ask_about_the_drain_does_not_begin_one(tmp_path: Path) -> None:
    async with running(tmp_path) as gate:
        assert (await gate.get(b"/drain", b"HEAD")).status == 405
        assert not gate.process.gate.controller.draining


# Bounds and errors.


async def test_an_unknown_path_and_a_wrong_method_are_told_in_json(tmp_path: Path) -> None:
    async with running(tmp_path) as gate:
        message = await gate.get(b"/v1/chat/completions")
        assert (message.status, answer(message)) == (404, {"error": "Not Found"})
        message = await gate.get(b"/metrics", b"DELETE")
        assert (message.status, answer(message)) == (405, {"error": "Method Not Allowed"})
        assert message.header(b"allow") == b"GET, HEAD"


async def test_a_head_that_is_too_large_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as gate:
        for path, header in (
            (b"/healthz?" + LIMITS.target_bytes * b"x", b"A: b"),
            (b"/healthz", b"A: " + 2 * LIMITS.header_bytes * b"b"),
        ):
            message = await gate.get(path, b"GET", header)
            assert 400 <= message.status < 500
        assert (await gate.get(b"/healthz")).status == 200


async def test_connections_are_bounded(tmp_path: Path) -> None:
    async with running(tmp_path) as gate:
        idle = [await gate.connect(gate.admin.port) for _ in range(LIMITS.connections)]
        assert (await idle[-1].ask(b"GET", b"/healthz", b"")).status == 200
        one_too_many = await gate.connect(gate.admin.port)
        assert (await one_too_many.response()).status == 503
        idle.pop().reset()

        async def answers() -> bool:
            client = await gate.connect(gate.admin.port)
            client.send(request(b"GET", b"/healthz", b"", b"Connection: close"))
            return b"200 OK" in await client.rest()

        while not await answers():
            await turn()


async def test_a_port_that_is_taken_is_told_in_one_line(tmp_path: Path) -> None:
    async with running(tmp_path) as gate:
        taken = Address("127.0.0.1", gate.admin.port)
        with pytest.raises(AdminError) as caught:
            await start_admin(gate.process, taken)
        assert caught.value.strerror == f"cannot open the admin port on {taken}: Address already in use"
        assert (await gate.get(b"/healthz")).status == 200


async def test_the_loops_lag_is_sampled_until_it_is_closed() -> None:
    lag = LoopLag(asyncio.get_running_loop())
    await until(lambda: lag.seconds.samples >= 2)
    lag.close()
    assert lag.seconds.total < 60.0
