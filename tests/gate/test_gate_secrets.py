"""Nothing that a client says in confidence comes out of a gate: not in its logs, nor its state, nor its metrics.

Each secret is recognisable and is sent in every place where it may stand, through every way a request can end, at
the level of logs that says most.
"""

from __future__ import annotations

import json

from tests.gate.gate_process import (
    Call,
    GateProcess,
    ScriptedEngine,
    ask,
    connect,
    event,
    gate_before,
    serve_three,
    token,
)
from tests.gate.wire import ClientSide, Message, request

PROMPT, SYSTEM, TOOL = "prompt-7f3a61", "system-9b2e48", "tool-51c0de"
KEY, API_KEY, CLIENT, COOKIE = "sk-key-4411aa", "api-key-8822bb", "tenant-jane-33cc", "cookie-55dd"
QUERY, ANSWER, ENGINE_SAYS = "query-66ee", "answer-77ff", "engine-says-88aa"
SECRETS = (PROMPT, SYSTEM, TOOL, KEY, API_KEY, CLIENT, COOKIE, QUERY, ANSWER, ENGINE_SAYS)

POLICY = """\
engine: {slots: 1}
classes:
- {name: interactive, maxQueueTime: 60s}
- {name: hasty, maxQueueTime: 10ms}
classify:
  default: interactive
  client: {header: x-client}
  rules: [{header: x-admission-class, values: [hasty], class: hasty}]
"""

BODY = json.dumps(
    {
        "model": "scripted",
        "stream": True,
        "user": CLIENT,
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PROMPT}],
        "tools": [{"type": "function", "function": {"name": TOOL, "parameters": {}}}],
    }
).encode()

#: With the client's header, and with the key alone to tell clients apart.
BY_HEADER = (
    f"Authorization: Bearer {KEY}".encode(),
    f"X-API-Key: {API_KEY}".encode(),
    f"X-Client: {CLIENT}".encode(),
    f"Cookie: session={COOKIE}".encode(),
)
BY_KEY = BY_HEADER[:1]
BY_API_KEY = BY_HEADER[1:2]
HASTY = b"X-Admission-Class: hasty"


def echoes(call: Call) -> None:
    """An engine that says all it knows in its errors."""
    call.reply("500 " + ENGINE_SAYS, {"error": {"message": f"{PROMPT} {KEY}", "code": ENGINE_SAYS}})


def echoes_in_a_stream(call: Call) -> None:
    call.stream(token(ANSWER), event({"error": {"message": PROMPT, "type": ENGINE_SAYS + " " + PROMPT}}))


async def spoken(gate: GateProcess, data: bytes) -> Message:
    """The answer to raw bytes."""
    client = await ClientSide.connect(gate.port)
    client.send(data)
    answer = await client.response()
    client.close()
    return answer


async def every_way_to_end(gate: GateProcess, engine: ScriptedEngine) -> None:
    ends = (
        serve_three,
        echoes,
        echoes_in_a_stream,
        Call.cut,
        lambda call: call.raw(PROMPT.encode() + b"\r\n\r\n"),
    )
    for engine.answer in ends:
        for headers in (BY_HEADER, BY_KEY, BY_API_KEY):
            await ask(gate.port, BODY, *headers)
    engine.answer = None
    # Waiting, evicted, gone, cut in mid-stream.
    first = await connect(gate.port, BODY, *BY_HEADER)
    call = await engine.call()
    call.begin(token(ANSWER))
    waits = await connect(gate.port, BODY, *BY_KEY)
    await gate.until_state(lambda s: s["waiting"] == 1)
    refused = await ask(gate.port, BODY, *BY_HEADER, HASTY)
    assert refused.status == 429
    assert not any(secret.encode() in refused.body for secret in SECRETS)
    waits.close()
    await gate.until_state(lambda s: not s["waiting"])
    first.close()
    await call.gone.wait()
    # What the data path itself refuses, and what is not gated.
    engine.answer = serve_three
    path = f"/v1/chat/completions?key={QUERY}".encode()
    assert (await spoken(gate, request(b"POST", path, BODY, *BY_HEADER))).status == 200
    assert (
        await spoken(gate, request(b"GET", f"/v1/models?key={QUERY}".encode(), b"", *BY_HEADER))
    ).status == 404
    for broken in (
        request(b"POST", path, BODY, *BY_HEADER, b"Content-Length: 1"),
        request(b"POST", path, BODY, *BY_HEADER, f"Broken {KEY}".encode()),
        f"POST {QUERY} {KEY} HTTP/1.1\r\n\r\n".encode(),
        request(b"POST", b"/v1/" + QUERY.encode() * 2000, BODY, *BY_HEADER),
        request(b"POST", path, BODY, *BY_HEADER, *(f"X-{n}: {KEY}".encode() for n in range(200))),
    ):
        assert (await spoken(gate, broken)).status >= 400
    # No JSON, and JSON of the wrong types.
    for body in (PROMPT.encode(), json.dumps({"messages": PROMPT, "max_tokens": PROMPT, "n": KEY}).encode()):
        await ask(gate.port, body, *BY_HEADER)


async def test_no_prompt_no_key_and_no_client_comes_out() -> None:
    async with ScriptedEngine() as engine, gate_before(engine.url, POLICY, "--log-level=debug") as gate:
        await every_way_to_end(gate, engine)
        outputs = {
            "state": json.dumps(await gate.state()),
            "metrics": await gate.metrics_text(),
        }
        await gate.settled()
    outputs |= {"log": gate.log.text, "stdout": gate.out.text}
    told = {(where, secret) for where, text in outputs.items() for secret in SECRETS if secret in text}
    assert told == set()
    # The run is seen in all of them: by class, reason and the client's hash.
    assert "engine_reset_early" in outputs["log"]
    assert "deadline" in outputs["state"]
    assert "deadline" in outputs["metrics"]
    refusals = json.loads(outputs["state"])["recent_refusals"]
    assert len(refusals[0]["client"]) == 16


async def test_a_client_is_hashed_anew_by_each_process() -> None:
    """Unless a salt is given, so that two gates of one model can be compared."""
    hashes = []
    for _ in range(2):
        async with ScriptedEngine(None) as engine, gate_before(engine.url, POLICY) as gate:
            client = await connect(gate.port, BODY, *BY_HEADER)
            call = await engine.call()
            state = await gate.state()
            hashes.append(state["classes"]["interactive"]["clients"]["busiest"][0]["client"])
            serve_three(call)
            await client.response()
            client.close()
    assert hashes[0] != hashes[1]
