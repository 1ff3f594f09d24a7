"""What a gate counts, after a scenario of which everything is known: each series, exactly."""

from __future__ import annotations

import asyncio
import shutil
import subprocess

import pytest
from tests.gate.gate_process import (
    Call,
    GateProcess,
    ScriptedEngine,
    Series,
    ask,
    body_of,
    connect,
    gate_before,
    serve_three,
    token,
)
from tests.gate.wire import ClientSide, request

POLICY = """\
engine: {slots: 1}
classes:
- {name: interactive, slo: {ttft: 60s}, maxQueueTime: 60s}
- {name: batch, maxQueueTime: 60s}
- {name: hasty, maxQueueTime: 10ms}
classify:
  default: interactive
  rules:
  - {header: x-admission-class, values: [batch], class: batch}
  - {header: x-admission-class, values: [hasty], class: hasty}
"""

STREAM = body_of(stream=True)
BATCH = b"X-Admission-Class: batch"
HASTY = b"X-Admission-Class: hasty"

USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}}

PROMTOOL = shutil.which("promtool")


def reports(call: Call) -> None:
    call.reply("200 OK", USAGE)


async def answered(gate: GateProcess, engine: ScriptedEngine, how: object, *headers: bytes) -> None:
    """One request, answered that way."""
    engine.answer = how  # type: ignore[assignment]
    await ask(gate.port, STREAM, *headers)
    engine.answer = None


async def one_waits(gate: GateProcess, engine: ScriptedEngine) -> None:
    """One streams; behind it one waits and is served, one leaves, and one of the hasty class is evicted."""
    first = await connect(gate.port, STREAM)
    call = await engine.call()
    call.begin(token(), token())
    second = await connect(gate.port, STREAM, BATCH)
    await gate.until_state(lambda s: s["waiting"] == 1)
    third = await connect(gate.port, STREAM, BATCH)
    await gate.until_state(lambda s: s["waiting"] == 2)
    third.close()
    await gate.until_state(lambda s: s["waiting"] == 1)
    assert (await ask(gate.port, STREAM, HASTY)).status == 429
    call.end(token())
    serve_three(await engine.call())
    for client in (first, second):
        assert (await client.response()).complete
        client.close()


async def one_leaves(gate: GateProcess, engine: ScriptedEngine) -> None:
    client = await connect(gate.port, STREAM)
    call = await engine.call()
    call.begin(token())
    assert (await client.head()).status == 200
    client.close()
    await call.gone.wait()


async def scenario(gate: GateProcess, engine: ScriptedEngine) -> None:
    for headers in ((), (), (b"X-Stainless-Retry-Count: 1",)):
        await answered(gate, engine, serve_three, *headers)
    await answered(gate, engine, reports, BATCH)
    await one_waits(gate, engine)
    await one_leaves(gate, engine)
    await answered(gate, engine, lambda call: call.reply("503 Service Unavailable", {}), BATCH)
    await answered(gate, engine, lambda call: call.reply("500 Internal Server Error", {}), BATCH)
    await answered(gate, engine, Call.cut)
    await answered(gate, engine, lambda call: (call.begin(token()), call.leave()))
    for _ in range(2):
        client = await ClientSide.connect(gate.port)
        client.send(request(b"GET", b"/v1/models", b""))
        assert (await client.response(b"GET")).status == 404
        client.close()
    client = await ClientSide.connect(gate.port)
    client.send(request(b"POST", b"/v1/chat/completions", b"{}", b"Content-Length: 9"))
    assert (await client.response()).status == 400
    client.close()
    assert (await gate.admin("/drain"))[0] == 200
    assert (await ask(gate.port, STREAM)).status == 503


#: By class: interactive, batch, hasty. The times of what was served are counted, not measured.
COUNTS = {
    "requests_offered_total": (8, 5, 1),
    "requests_retries_total": (1, 0, 0),
    "requests_admitted_total": (7, 4, 0),
    "requests_queued_total": (0, 2, 1),
    "requests_served_total": (4, 2, 0),
    "requests_served_in_slo_total": (4, 2, 0),
    "requests_waiting": (0, 0, 0),
    "requests_running": (0, 0, 0),
    "queue_delay_seconds_count": (7, 4, 0),
    "ttft_seconds_count": (6, 1, 0),
    "inter_token_seconds_count": (5, 1, 0),
    "request_duration_seconds_count": (4, 2, 0),
    "output_tokens_total": (9, 6, 0),
}

#: By outcome: class and reason of all that is not zero.
ENDS = {
    "rejected": {("interactive", "draining"): 1},
    "evicted": {("batch", "client_gone"): 1, ("hasty", "deadline"): 1},
    "failed": {
        ("interactive", "client_gone"): 1,
        ("interactive", "engine_reset_early"): 1,
        ("interactive", "engine_reset_midstream"): 1,
        ("batch", "engine_busy"): 1,
        ("batch", "engine_error"): 1,
    },
}

CLASSES = ("interactive", "batch", "hasty")


def value(series: Series, name: str, **labels: str) -> float:
    return series[f"sluicegate_{name}", tuple(sorted(labels.items()))]


def not_zero(series: Series, outcome: str) -> dict[tuple[str, str], float]:
    found = {}
    for (name, labels), count in series.items():
        if name == f"sluicegate_requests_{outcome}_total" and count:
            label = dict(labels)
            found[label["class"], label["reason"]] = count
    return found


async def test_every_count_is_exact_after_a_known_scenario() -> None:
    async with ScriptedEngine(None) as engine, gate_before(engine.url, POLICY) as gate:
        await scenario(gate, engine)
        await gate.settled()
        series = await gate.metrics()
        counted = {name: tuple(value(series, name, **{"class": c}) for c in CLASSES) for name in COUNTS}
        assert counted == COUNTS
        ends = {outcome: not_zero(series, outcome) for outcome in ENDS}
        assert ends == ENDS
        for index, name in enumerate(CLASSES):
            lost = sum(n for counts in ends.values() for (c, _), n in counts.items() if c == name)
            assert COUNTS["requests_offered_total"][index] == COUNTS["requests_served_total"][index] + lost
        assert value(series, "requests_ungated_total") == 2
        kinds = {
            labels: n for (name, labels), n in series.items() if name == "sluicegate_protocol_errors_total"
        }
        assert sum(kinds.values()) == 1
        assert value(series, "draining") == 1
        assert value(series, "engine_status", status="up") == 1
        assert value(series, "engine_slots") == 1
        assert value(series, "request_body_bytes") == 0


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
async def test_promtool_has_nothing_to_say() -> None:
    async with ScriptedEngine(None) as engine, gate_before(engine.url, POLICY) as gate:
        await answered(gate, engine, serve_three)
        await one_waits(gate, engine)
        page = await gate.metrics_text()
        done = await asyncio.to_thread(
            subprocess.run,
            [str(PROMTOOL), "check", "metrics"],
            input=page.encode(),
            capture_output=True,
            timeout=30,
            check=False,
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, b"")


async def test_counts_of_a_scrape_close_while_requests_come_and_go() -> None:
    """Any scrape, at any moment: offered = served + rejected + evicted + failed + waiting + running."""
    async with ScriptedEngine() as engine, gate_before(engine.url) as gate:

        async def client(index: int) -> None:
            headers = (b"X-Admission-Class: batch",) if index % 2 else ()
            for _ in range(15):
                one = await connect(gate.port, STREAM, *headers)
                if index % 3:
                    await one.response()
                one.close()

        clients = asyncio.gather(*(client(index) for index in range(6)))
        scrapes = 0
        while not clients.done() or scrapes < 3:
            series = await gate.metrics()
            scrapes += 1
            for name in ("interactive", "batch"):
                ends = sum(
                    count
                    for (metric, labels), count in series.items()
                    if ("class", name) in labels
                    and metric.removeprefix("sluicegate_requests_").removesuffix("_total")
                    in ("served", "rejected", "evicted", "failed", "waiting", "running")
                )
                assert value(series, "requests_offered_total", **{"class": name}) == ends
        await clients
        state = await gate.settled()
        assert sum(counts["offered"] for counts in state["classes"].values()) == 90
