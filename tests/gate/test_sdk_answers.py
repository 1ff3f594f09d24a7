"""The openai SDK against a real engine, alone and through the gate: same bytes, same objects, same exceptions.

The engine is llama.cpp with a model that counts down, at temperature 0: one request at a time is answered alike
each time, but for ids, times and speeds, which are taken out on both sides before the comparison.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from tests.gate.gate_process import NOT_COMPARED, Both, engine_and_gate, normal

pytestmark = pytest.mark.engine

TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    with engine_and_gate(tmp_path_factory.mktemp("model")) as running:
        yield running


def headers_of(response: Any) -> dict[str, str]:
    """What must be alike."""
    return {name: value for name, value in response.headers.items() if name not in NOT_COMPARED}


class Outcome(NamedTuple):
    """What a caller of the SDK sees of one call: how it ended, and the bytes behind it."""

    status: int
    headers: dict[str, str]
    body: bytes
    error: str | None = None
    fields: tuple[object, ...] = ()


def outcome_of(error: openai.APIStatusError) -> Outcome:
    fields = (error.code, error.type, error.param, error.message, normal(str(error.body).encode()))
    response = error.response
    return Outcome(
        response.status_code, headers_of(response), normal(response.content), type(error).__name__, fields
    )


def client(url: str) -> OpenAI:
    """Without certificates, which take longer to load than an answer."""
    http = openai.DefaultHttpxClient(verify=False)
    return OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=TIMEOUT_S, http_client=http)


def async_client(url: str) -> AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(verify=False)
    return AsyncOpenAI(
        base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=TIMEOUT_S, http_client=http
    )


Call = Callable[[Any], Any]


def outcome(url: str, call: Call) -> Outcome:
    """One call with the raw response."""
    with client(url) as sdk:
        try:
            raw = call(sdk)
        except openai.APIStatusError as error:
            return outcome_of(error)
        response = raw.http_response
        if not response.is_stream_consumed:
            response.read()
        return Outcome(response.status_code, headers_of(response), normal(response.content))


async def outcome_async(url: str, call: Call) -> Outcome:
    """The same with the asynchronous client."""
    async with async_client(url) as sdk:
        try:
            raw = await call(sdk)
        except openai.APIStatusError as error:
            return outcome_of(error)
        response = raw.http_response
        if not response.is_stream_consumed:
            await response.aread()
        return Outcome(response.status_code, headers_of(response), normal(response.content))


def chat(prompt: str = "the gate is open 7", **more: Any) -> Call:
    fields = {"model": "countdown", "temperature": 0, "seed": 1, **more}
    messages = [{"role": "user", "content": prompt}]
    return lambda sdk: sdk.chat.completions.with_raw_response.create(messages=messages, **fields)


TOOL = {
    "type": "function",
    "function": {
        "name": "open_gate",
        "description": "opens the gate",
        "parameters": {"type": "object", "properties": {"width": {"type": "integer"}}, "required": ["width"]},
    },
}
CALLED = [
    {"role": "user", "content": "open it"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "open_gate", "arguments": '{"width":3}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "the gate is open 6"},
]

ANSWERS: dict[str, tuple[Call, bytes]] = {
    "chat": (chat(), b"6 5 4 3 2 1"),
    "chat of many tokens": (chat("a 400", max_tokens=500), b"399 398"),
    "chat cut by max_tokens": (chat(max_tokens=3), b'"finish_reason":"length"'),
    "chat in unicode": (chat("Grüße, 你好 🙂! 4"), b"choices"),
    "chat of two choices": (chat(n=2), b'"index":1'),
    "chat with logprobs": (chat(logprobs=True, top_logprobs=2), b"top_logprobs"),
    "stream": (chat(stream=True), b"data: [DONE]"),
    "stream with usage": (
        chat(stream=True, stream_options={"include_usage": True}),
        b'"completion_tokens":7',
    ),
    "stream of many tokens": (chat("a 400", stream=True, max_tokens=500), b"399"),
    "stream of two choices": (chat(stream=True, n=2), b'"index":1'),
    "json mode": (chat("an object", response_format={"type": "json_object"}, max_tokens=64), b'"{}"'),
    "json mode, streamed": (
        chat("an object", response_format={"type": "json_object"}, max_tokens=64, stream=True),
        b"[DONE]",
    ),
    "json schema": (
        chat(
            "an object",
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "empty", "schema": {"type": "object", "properties": {}}},
            },
            max_tokens=64,
        ),
        b"choices",
    ),
    "tools": (chat(tools=[TOOL], max_tokens=64), b"choices"),
    "tools, streamed": (chat(tools=[TOOL], max_tokens=64, stream=True), b"[DONE]"),
    "a tool's answer": (
        lambda sdk: sdk.chat.completions.with_raw_response.create(
            model="countdown", messages=CALLED, tools=[TOOL], temperature=0, max_tokens=64
        ),
        b"5 4 3 2 1",
    ),
    "completions": (
        lambda sdk: sdk.completions.with_raw_response.create(model="m", prompt="a 5", temperature=0),
        b"4 3 2 1",
    ),
    "completions, streamed": (
        lambda sdk: sdk.completions.with_raw_response.create(
            model="m", prompt="a 5", temperature=0, stream=True
        ),
        b"[DONE]",
    ),
    "completions of a list": (
        lambda sdk: sdk.completions.with_raw_response.create(model="m", prompt=["a 3", "a 4"], temperature=0),
        b"3 2 1",
    ),
    "responses": (
        lambda sdk: sdk.responses.with_raw_response.create(model="countdown", input="a 5", temperature=0),
        b"4 3 2 1",
    ),
    "responses, streamed": (
        lambda sdk: sdk.responses.with_raw_response.create(
            model="countdown", input="a 5", temperature=0, stream=True
        ),
        b"response.completed",
    ),
    "models": (lambda sdk: sdk.models.with_raw_response.list(), b"countdown"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_same_bytes(both: Both, name: str) -> None:
    call, expected = ANSWERS[name]
    alone, gated = (outcome(url, call) for url in both.urls)
    assert alone.status == 200
    assert expected in alone.body
    assert gated == alone


@pytest.mark.parametrize("name", ["chat", "stream", "tools, streamed", "json mode", "responses, streamed"])
async def test_the_same_bytes_asynchronously(both: Both, name: str) -> None:
    call, expected = ANSWERS[name]
    alone, gated = [await outcome_async(url, call) for url in both.urls]
    assert alone.status == 200
    assert expected in alone.body
    assert gated == alone


LONG = "water " * 1500

ERRORS: dict[str, tuple[Call, type[openai.APIStatusError], int]] = {
    "no messages": (
        lambda sdk: sdk.chat.completions.with_raw_response.create(
            model="m", messages=[], extra_body={"messages": None}
        ),
        openai.BadRequestError,
        400,
    ),
    "a role that is none": (
        lambda sdk: sdk.chat.completions.with_raw_response.create(
            model="m", messages=[{"role": 7, "content": "a"}]
        ),
        openai.APIStatusError,
        0,
    ),
    "a field of the wrong type": (chat(max_tokens="many"), openai.APIStatusError, 0),
    "an unknown response format": (
        chat(response_format={"type": "song"}),
        openai.BadRequestError,
        400,
    ),
    "context overflow": (chat(LONG), openai.BadRequestError, 400),
    "context overflow of a stream": (chat(LONG, stream=True), openai.BadRequestError, 400),
    "embeddings that it does not serve": (
        lambda sdk: sdk.embeddings.with_raw_response.create(model="m", input="a"),
        openai.InternalServerError,
        501,
    ),
    "a model that is not there": (
        lambda sdk: sdk.models.with_raw_response.retrieve("nobody"),
        openai.NotFoundError,
        404,
    ),
    "a path that is not there": (
        lambda sdk: sdk.images.with_raw_response.generate(prompt="a gate"),
        openai.NotFoundError,
        404,
    ),
}


@pytest.mark.parametrize("name", ERRORS)
async def test_the_same_exceptions(both: Both, name: str) -> None:
    call, kind, status = ERRORS[name]
    alone, gated = (outcome(url, call) for url in both.urls)
    assert alone.error is not None
    assert issubclass(getattr(openai, alone.error), kind)
    assert status in (0, alone.status)
    assert gated == alone
    alone, gated = [await outcome_async(url, call) for url in both.urls]
    assert gated == alone


def test_context_overflow_keeps_the_engines_words(both: Both) -> None:
    """What clients look for, to shorten their prompt."""
    with client(both.gate.url) as sdk, pytest.raises(openai.BadRequestError) as caught:
        chat(LONG)(sdk)
    assert caught.value.type == "exceed_context_size_error"


def test_a_stream_gives_the_same_objects(both: Both) -> None:
    def pieces(url: str) -> list[bytes]:
        messages = [{"role": "user", "content": "a 20"}]
        with client(url) as sdk:
            stream = sdk.chat.completions.create(model="m", messages=messages, stream=True, temperature=0)  # type: ignore[arg-type]
            return [normal(chunk.model_dump_json().encode()) for chunk in stream]

    alone, gated = (pieces(url) for url in both.urls)
    assert len(alone) > 20
    assert gated == alone


def test_the_streaming_helper_gives_the_same_events(both: Both) -> None:
    def events(url: str) -> list[str]:
        messages = [{"role": "user", "content": "a 9"}]
        with (
            client(url) as sdk,
            sdk.chat.completions.stream(model="m", messages=messages, temperature=0) as stream,  # type: ignore[arg-type]
        ):
            kinds = [one.type for one in stream]
            return [*kinds, str(stream.get_final_completion().choices[0].message.content)]

    alone, gated = (events(url) for url in both.urls)
    assert alone[-1].split() == [str(n) for n in range(8, 0, -1)]
    assert gated == alone


def test_a_stream_that_the_caller_leaves_frees_its_slot(both: Both) -> None:
    """More often than there are slots, one after the other."""
    for _ in range(5):
        with client(both.gate.url) as sdk:
            messages = [{"role": "user", "content": "a 900"}]
            stream = sdk.chat.completions.create(model="m", messages=messages, stream=True)  # type: ignore[arg-type]
            next(iter(stream))
            stream.close()
    assert outcome(both.gate.url, chat()).status == 200


async def test_many_at_once_get_each_its_own_answer(both: Both) -> None:
    """Sixteen on two slots: most of them wait in the gate."""

    async def one(sdk: AsyncOpenAI, length: int) -> str:
        answer = await sdk.chat.completions.create(
            model="m", messages=[{"role": "user", "content": f"a {length}"}], temperature=0
        )
        return str(answer.choices[0].message.content)

    async with async_client(both.gate.url) as sdk:
        answers = await asyncio.gather(*(one(sdk, length) for length in range(20, 36)))
    for length, answer in zip(range(20, 36), answers, strict=True):
        assert answer.split() == [str(n) for n in range(length - 1, 0, -1)]


def test_the_gate_tells_its_verdict_and_keeps_the_request_id(both: Both) -> None:
    with client(both.gate.url) as sdk:
        raw = sdk.chat.completions.with_raw_response.create(
            model="m",
            messages=[{"role": "user", "content": "a 3"}],
            extra_headers={"x-request-id": "mine-7"},
        )
        assert raw.headers["x-sluicegate-reason"] == "admitted"
        assert raw.headers["x-request-id"] == "mine-7"
        assert raw.parse()._request_id == "mine-7"
        other = sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "a 3"}])
        assert other._request_id
