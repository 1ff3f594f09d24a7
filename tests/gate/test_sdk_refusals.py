"""The openai SDK and the gate's refusals: what it raises, whether it tries again, and when.

The SDK honours `retry-after-ms` to the millisecond and `x-should-retry` to the letter; so a refusal that tells the
truth turns into an answer without a line in the caller's code. The engine is scripted: it is full when told so.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from tests.gate.gate_process import (
    Call,
    GateProcess,
    ScriptedEngine,
    body_of,
    closes,
    connect,
    event,
    gate_before,
    serve_three,
    token,
)

POLICY = """\
engine: {slots: 1}
classes:
- {name: interactive, maxQueueTime: 50ms}
- {name: instant, slo: {ttft: 1ms}}
classify:
  default: interactive
  rules: [{header: x-admission-class, values: [instant], class: instant}]
"""

STREAM = body_of(stream=True)
MESSAGES: Any = [{"role": "user", "content": "hello 3"}]
TIMEOUT_S = 30.0


@dataclass
class Wire:
    """What the SDK sends and gets, in time."""

    requests: list[tuple[float, dict[str, str]]] = field(default_factory=list)
    responses: list[tuple[float, int, dict[str, str]]] = field(default_factory=list)

    def on_request(self, request: Any) -> None:
        self.requests.append((monotonic(), dict(request.headers)))

    def on_response(self, response: Any) -> None:
        self.responses.append((monotonic(), response.status_code, dict(response.headers)))

    async def on_request_async(self, request: Any) -> None:
        self.on_request(request)

    async def on_response_async(self, response: Any) -> None:
        self.on_response(response)

    @property
    def statuses(self) -> list[int]:
        return [status for _, status, _ in self.responses]


@contextmanager
def client(url: str, retries: int, timeout_s: float = TIMEOUT_S) -> Iterator[tuple[OpenAI, Wire]]:
    wire = Wire()
    hooks: Any = {"request": [wire.on_request], "response": [wire.on_response]}
    http = openai.DefaultHttpxClient(verify=False, event_hooks=hooks)
    with OpenAI(
        base_url=f"{url}/v1", api_key="k", max_retries=retries, timeout=timeout_s, http_client=http
    ) as sdk:
        yield sdk, wire


def create(sdk: OpenAI, **more: Any) -> Any:
    return sdk.chat.completions.create(model="m", messages=MESSAGES, **more)


async def fill(gate: GateProcess, engine: ScriptedEngine) -> tuple[Any, Call]:
    """Take the only slot, after one request has told the gate how long a request has it."""
    engine.answer = serve_three
    await gate.works()
    engine.answer = None
    holder = await connect(gate.port, STREAM)
    call = await engine.call()
    call.begin(token())
    return holder, call


async def empty(holder: Any, call: Call) -> None:
    call.end()
    assert (await holder.response()).complete
    holder.close()


async def assert_one_retry_was_worth_it(gate: GateProcess, wire: Wire) -> None:
    """Refused once, came back no sooner than it was told, was known as one that came back, and served."""
    assert wire.statuses == [429, 200]
    refused_at, _, headers = wire.responses[0]
    came_back_at, sent = wire.requests[1]
    assert came_back_at - refused_at >= float(headers["retry-after-ms"]) / 1000
    assert sent["x-stainless-retry-count"] == "1"
    counts = (await gate.settled())["classes"]["interactive"]
    assert counts["evicted"] == {"deadline": 1}
    assert (counts["offered"], counts["retries"], counts["served"]) == (4, 1, 3)


async def test_a_refusal_is_tried_again_when_it_says_so_and_succeeds() -> None:
    async with ScriptedEngine(None) as engine, gate_before(engine.url, POLICY) as gate:
        held = await fill(gate, engine)
        with client(gate.url, retries=2) as (sdk, wire):
            answer = asyncio.create_task(asyncio.to_thread(create, sdk))
            await gate.until_state(lambda s: s["classes"]["interactive"]["evicted"])
            await empty(*held)
            engine.answer = lambda call: call.reply(
                "200 OK", {"choices": [{"index": 0, "message": {"role": "assistant", "content": "2 1"}}]}
            )
            assert (await answer).choices[0].message.content == "2 1"
        await assert_one_retry_was_worth_it(gate, wire)


async def test_an_asynchronous_stream_is_tried_again_as_well() -> None:
    wire = Wire()
    hooks: Any = {"request": [wire.on_request_async], "response": [wire.on_response_async]}
    http = openai.DefaultAsyncHttpxClient(verify=False, event_hooks=hooks)
    async with (
        ScriptedEngine(None) as engine,
        gate_before(engine.url, POLICY) as gate,
        AsyncOpenAI(
            base_url=f"{gate.url}/v1", api_key="k", max_retries=2, timeout=TIMEOUT_S, http_client=http
        ) as sdk,
    ):
        held = await fill(gate, engine)
        creating = asyncio.create_task(sdk.chat.completions.create(model="m", messages=MESSAGES, stream=True))
        await gate.until_state(lambda s: s["classes"]["interactive"]["evicted"])
        await empty(*held)
        engine.answer = serve_three
        pieces = [chunk.choices[0].delta.content async for chunk in await creating]
        assert pieces == [" 2", " 1"]
        await assert_one_retry_was_worth_it(gate, wire)


async def test_without_retries_a_refusal_is_a_rate_limit_error() -> None:
    async with ScriptedEngine(None) as engine, gate_before(engine.url, POLICY) as gate:
        held = await fill(gate, engine)
        for more in ({}, {"stream": True}):
            with client(gate.url, retries=0) as (sdk, wire), pytest.raises(openai.RateLimitError) as caught:
                await asyncio.to_thread(create, sdk, **more)
            error, headers = caught.value, caught.value.response.headers
            assert (error.status_code, error.code, error.type) == (
                429,
                "rate_limit_exceeded",
                "rate_limit_error",
            )
            assert error.param is None
            assert error.body["message"].startswith("The engine is busy")  # type: ignore[index,call-overload]
            assert headers["x-sluicegate-reason"] == "deadline"
            assert error.request_id == headers["x-request-id"]
            assert 1000 <= int(headers["retry-after-ms"]) <= 120_000
            assert int(headers["retry-after"]) == -(-int(headers["retry-after-ms"]) // 1000)
            assert "x-should-retry" not in headers
            assert wire.statuses == [429]
        await empty(*held)


async def test_an_engine_that_is_down_is_an_internal_server_error() -> None:
    async with ScriptedEngine() as engine:
        engine.health = 503
        async with gate_before(engine.url, POLICY) as gate:
            await gate.until_state(lambda s: s["engine"]["status"] == "loading")
            with (
                client(gate.url, retries=0) as (sdk, wire),
                pytest.raises(openai.InternalServerError) as caught,
            ):
                await asyncio.to_thread(create, sdk)
            error = caught.value
            assert (error.status_code, error.code) == (503, "server_is_overloaded")
            assert error.type == "service_unavailable_error"
            assert error.response.headers["x-sluicegate-reason"] == "engine_down"
            assert wire.statuses == [503]


async def test_what_no_retry_can_help_is_not_tried_again() -> None:
    """A prompt that even an idle engine is too slow for: `x-should-retry: false` wins over the status."""
    async with ScriptedEngine(None) as engine, gate_before(engine.url, POLICY) as gate:
        learned = False
        while not learned:  # what a prompt costs: some milliseconds, since the test looks before it answers
            streams = await connect(gate.port, STREAM)
            call = await engine.call()
            await gate.until_state(lambda s: s["engine"]["prefilling"] == 1)
            await gate.state()
            serve_three(call)
            assert (await streams.response()).complete
            streams.close()
            learned = (await gate.state())["learned"]["times"]["service"]["learned"]
            assert len(engine.calls) < 100
        engine.answer = serve_three
        await gate.works()  # the one that an idle engine is tried with, whatever is predicted
        instant, long_prompt = {"x-admission-class": "instant"}, "word " * 10_000
        with client(gate.url, retries=5) as (sdk, wire), pytest.raises(openai.RateLimitError) as caught:
            await asyncio.to_thread(
                sdk.chat.completions.create,
                model="m",
                messages=[{"role": "user", "content": long_prompt}],
                extra_headers=instant,
            )
        assert wire.statuses == [429]
        headers = caught.value.response.headers
        assert headers["x-should-retry"] == "false"
        assert headers["x-sluicegate-reason"] == "slo_unreachable"
        assert int(headers["retry-after-ms"]) <= 120_000
        counts = (await gate.settled())["classes"]["instant"]
        assert (counts["rejected"], counts["offered"]) == ({"slo_unreachable": 1}, 1)


async def test_a_caller_whose_time_is_over_is_dropped_from_the_line() -> None:
    patient = POLICY.replace("50ms", "60s")
    async with ScriptedEngine(None) as engine, gate_before(engine.url, patient) as gate:
        held = await fill(gate, engine)
        with client(gate.url, retries=0, timeout_s=0.2) as (sdk, _), pytest.raises(openai.APITimeoutError):
            await asyncio.to_thread(create, sdk)
        state = await gate.until_state(lambda s: not s["waiting"])
        assert state["classes"]["interactive"]["evicted"] == {"client_gone": 1}
        await empty(*held)
        assert len(engine.calls) == 2


# Answers that only a scripted engine gives: the same through the gate as from itself.


def raised(url: str, **more: Any) -> tuple[str, object, object]:
    with client(url, retries=0) as (sdk, _):
        try:
            for _chunk in create(sdk, stream=True, **more):
                pass
        except openai.OpenAIError as error:
            return type(error).__name__, str(error), getattr(error, "body", None)
        except Exception as error:  # noqa: BLE001 - the SDK lets those of its transport through
            return type(error).__name__, None, None
    return "nothing", None, None


def full_after_200(call: Call) -> None:
    call.stream(event({"error": {"message": "full", "type": "ServiceUnavailable", "code": 503}}))


def dies(call: Call) -> None:
    call.begin(token(), token())
    call.leave()


@pytest.mark.parametrize("answer", [full_after_200, dies])
async def test_errors_within_a_stream_raise_the_same(answer: Any) -> None:
    async with ScriptedEngine(answer) as engine, gate_before(engine.url, POLICY) as gate:
        alone = await asyncio.to_thread(raised, engine.url)
        gated = await asyncio.to_thread(raised, gate.url)
        assert alone[0] != "nothing"
        assert gated == alone
        counts = (await gate.settled())["classes"]["interactive"]
        assert closes(counts)
        assert counts["served"] == 0


def delta(index: int, **function: str) -> bytes:
    call: dict[str, object] = {"index": index, "function": function}
    if "name" in function:
        call |= {"id": f"call_{index}", "type": "function"}
    choice = {"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return event(chunk)


async def test_tool_calls_arrive_piece_by_piece() -> None:
    arguments = ['{"wid', 'th": 3', "}"]

    def calls_tools(call: Call) -> None:
        call.begin()
        for index, name in enumerate(("open_gate", "close_gate")):
            call.send(delta(index, name=name, arguments=""))
            call.send(*(delta(index, arguments=piece) for piece in arguments))
        call.end()

    def collected(url: str) -> list[str]:
        with client(url, retries=0) as (sdk, _):
            return [chunk.model_dump_json() for chunk in create(sdk, stream=True)]

    async with ScriptedEngine(calls_tools) as engine, gate_before(engine.url, POLICY) as gate:
        alone = await asyncio.to_thread(collected, engine.url)
        gated = await asyncio.to_thread(collected, gate.url)
        assert gated == alone
        pieces = [json.loads(chunk)["choices"][0]["delta"]["tool_calls"][0] for chunk in gated]
        assert "".join(p["function"]["arguments"] for p in pieces if p["index"] == 1) == '{"width": 3}'
        # Arguments are output: a token for each piece of them.
        assert (await gate.count("output_tokens_total", **{"class": "interactive"})) >= 6
