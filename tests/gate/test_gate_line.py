"""Who goes first: classes by header, clients of a class in turn; and who is refused where there is no room."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.gate.gate_process import (
    POLICY,
    Call,
    GateProcess,
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
from tests.gate.wire import ClientSide

from sluicegate_lab.engine import EngineOptions, LlamaServer
from sluicegate_lab.tiny_model import SMALLEST, ensure_model

#: As long as it says, so that turns are of equal cost from the first on.
STREAM = body_of(stream=True, max_tokens=2)
BATCH = b"X-Admission-Class: batch"


async def test_the_class_is_that_of_the_first_rule_that_fits() -> None:
    rules = """\
engine: {slots: 2}
classes: [{name: interactive}, {name: batch}, {name: large}, {name: embedding}]
classify:
  default: interactive
  rules:
  - {header: x-admission-class, values: [batch, night], class: batch}
  - {model: "large-*", class: large}
  - {path: /v1/embeddings, class: embedding}
"""
    requests: list[tuple[str, bytes, tuple[bytes, ...]]] = [
        ("interactive", body_of(), ()),
        ("interactive", body_of(), (b"X-Admission-Class: day",)),
        ("batch", body_of(), (BATCH,)),
        ("batch", body_of(model="large-1"), (b"x-ADMISSION-class:   night  ",)),
        ("large", body_of(model="large-1"), ()),
        ("interactive", body_of(model="small"), ()),
    ]
    async with ScriptedEngine() as engine, gate_before(engine.url, rules) as gate:
        for _, body, headers in requests:
            assert (await ask(gate.port, body, *headers)).status == 200
        state = await gate.settled()
        served = {name: counts["served"] for name, counts in state["classes"].items()}
        expected = Counter(name for name, _, _ in requests)
        assert (
            served
            == {"interactive": 3, "batch": 2, "large": 1, "embedding": 0}
            == {name: expected[name] for name in served}
        )


async def hand_over_until(
    engine: ScriptedEngine, held: list[Call], wanted: Callable[[Call], bool]
) -> tuple[Call, int]:
    """Serve one at a time until the wanted one reaches the engine; how many others did before it."""
    others = 0
    while True:
        serve_three(held.pop(0))
        call = await engine.call()
        if wanted(call):
            return call, others
        held.append(call)
        others += 1


def of_client(name: bytes) -> Callable[[Call], bool]:
    return lambda call: call.message.header(b"x-client") == name


async def test_a_client_that_floods_does_not_hold_up_another() -> None:
    """Forty at once from one, now and then one from another: it goes at the next turn, or the one after."""
    async with ScriptedEngine(None) as engine, gate_before(engine.url) as gate:
        flood = [await connect(gate.port, STREAM, b"X-Client: flood") for _ in range(40)]
        held = [await engine.call(), await engine.call()]
        waiting = 38
        await gate.until_state(lambda s: s["waiting"] == waiting)
        others: list[int] = []
        for _ in range(5):
            calm = await connect(gate.port, STREAM, b"X-Client: calm")
            await gate.until_state(lambda s, n=waiting + 1: s["waiting"] == n)
            call, before_it = await hand_over_until(engine, held, of_client(b"calm"))
            others.append(before_it)
            waiting -= before_it
            serve_three(call)
            held.append(await engine.call())
            waiting -= 1
            assert (await calm.response()).complete
            calm.close()
            await hand_over_until(engine, held, of_client(b"flood"))  # some time passes
            held.append(engine.calls[-1])
            waiting -= 1
        assert max(others) <= 2, others
        for call in held:
            serve_three(call)
        engine.answer_all()
        for client in flood:
            assert (await client.response()).complete
            client.close()
        counts = (await gate.settled())["classes"]["interactive"]
        assert counts["served"] == 45


async def test_a_class_of_little_weight_does_not_hold_up_one_of_much() -> None:
    def interactive(call: Call) -> bool:
        return call.message.header(b"x-admission-class") is None

    nothing_kept = POLICY.replace("weight: 10", "weight: 10, reservedSlots: 0")
    async with ScriptedEngine(None) as engine, gate_before(engine.url, nothing_kept) as gate:
        flood = [await connect(gate.port, STREAM, BATCH) for _ in range(30)]
        held = [await engine.call(), await engine.call()]
        await gate.until_state(lambda s: s["classes"]["batch"]["waiting"] == 28)
        others: list[int] = []
        for _ in range(5):
            one = await connect(gate.port, STREAM)
            await gate.until_state(lambda s: s["classes"]["interactive"]["waiting"] == 1)
            call, before_it = await hand_over_until(engine, held, interactive)
            others.append(before_it)
            held.append(call)
            answer = asyncio.ensure_future(one.response())
            while call in held:
                serve_three(held.pop(0))
                held.append(await engine.call())
            assert (await answer).complete
            one.close()
        assert max(others) <= 1, others
        for call in held:
            serve_three(call)
        engine.answer_all()
        for client in flood:
            assert (await client.response()).complete
            client.close()
        state = await gate.settled()
        assert {name: c["served"] for name, c in state["classes"].items()} == {"interactive": 5, "batch": 30}


async def test_the_engine_never_has_more_than_its_slots() -> None:
    async with ScriptedEngine(None) as engine, gate_before(engine.url) as gate:
        clients = [await connect(gate.port, STREAM, b"X-Client: %d" % n) for n in range(12)]
        inside = [await engine.call(), await engine.call()]
        served = 0
        while inside:
            waiting = max(0, 10 - served)
            state = await gate.until_state(lambda s, n=waiting: s["waiting"] == n)
            assert state["running"] == len(inside) == len(engine.calls) - served <= 2
            call = inside.pop(0)
            call.begin(token())
            call.end()
            served += 1
            if len(engine.calls) < 12:
                inside.append(await engine.call())
        for client in clients:
            assert (await client.response()).complete
            client.close()


# Overload.

SHORT = """\
engine: {slots: 4}
classes:
- {name: interactive, weight: 10, maxQueueTime: 200ms}
- {name: batch, maxQueueTime: 500ms}
classify:
  default: interactive
  client: {header: x-client}
  rules: [{header: x-admission-class, values: [batch], class: batch}]
"""


async def overload(gate: GateProcess, requests: int) -> Counter[tuple[str, str | None]]:
    """So many requests at once, of 500 tokens each; what became of them, by class and reason."""
    body = body_of("the gate is open 500", stream=True)
    clients: list[tuple[str, ClientSide]] = []
    for n in range(requests):
        name = "batch" if n % 3 == 0 else "interactive"
        headers = (b"X-Client: %d" % (n % 7), *((BATCH,) if name == "batch" else ()))
        clients.append((name, await connect(gate.port, body, *headers)))
    ends: Counter[tuple[str, str | None]] = Counter()
    for name, client in clients:
        answer = await client.response()
        client.close()
        assert answer.complete
        if answer.status == 200:
            assert answer.body.endswith(b"data: [DONE]\n\n")
            assert b'"content":" 1"' in answer.body
            ends[name, None] += 1
        else:
            assert answer.status == 429
            assert error_code(answer) == "rate_limit_exceeded"
            assert 1000 <= number(answer, b"retry-after-ms") <= 120_000
            ends[name, reason(answer)] += 1
    return ends


@pytest.mark.engine
@pytest.mark.slow
async def test_an_overload_of_a_real_engine_ends_in_answers_and_honest_refusals(tmp_path: Path) -> None:
    model = ensure_model(SMALLEST, tmp_path)
    options = EngineOptions(model=model, slots=4, ctx_tokens=8192)
    async with LlamaServer(options) as engine, gate_before(engine.url, SHORT) as gate:
        await gate.until_state(lambda s: s["engine"]["status"] == "up")
        ends = await overload(gate, 40)
        ends += await overload(gate, 40)  # this time with what was learned
        state = await gate.settled()
        total: Counter[str | None] = Counter()
        for (_, why), n in ends.items():
            total[why] += n
        assert total.total() == 80
        assert total[None] >= 8
        assert total["deadline"] >= 1
        assert set(total) <= {None, "deadline", "queue_time"}
        for name in ("interactive", "batch"):
            counts = state["classes"][name]
            assert counts["served"] == ends[name, None]
            assert counts["evicted"].get("deadline", 0) == ends[name, "deadline"]
            assert counts["rejected"].get("queue_time", 0) == ends[name, "queue_time"]
        assert len(state["recent_refusals"]) == min(100, 80 - total[None])
        assert json.loads((await gate.admin("/readyz"))[1])["ready"]  # never false because of load
        await gate.works()
