"""How a response is cut into pieces changes nothing of what is read of it."""

import json
from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluicegate_sidecar.event_stream import MAX_LINE_BYTES
from sluicegate_sidecar.usage import UsageReader, reader_for

texts = st.text('ab "\\\n\r{}[]:,é\0', max_size=8)
counts = st.integers(0, 10_000)


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "delta": {"content": text}}], **more}


events = st.one_of(
    texts.map(chat),
    texts.map(lambda text: chat(text, usage={"prompt_tokens": 3, "completion_tokens": 4})),
    st.just({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),
    texts.map(lambda text: {"choices": [{"index": 1, "text": text}]}),
    texts.map(lambda text: {"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}}),
    texts.map(lambda text: {"type": "response.output_text.delta", "delta": text}),
    texts.map(lambda text: {"index": 0, "content": text, "stop": False}),
    texts.map(lambda text: {"token": {"text": text}, "generated_text": None}),
    counts.map(lambda tokens: {"text": "x", "meta_info": {"completion_tokens": tokens}}),
    counts.map(lambda tokens: {"usage": {"prompt_tokens": tokens, "completion_tokens": tokens}}),
    st.just({"error": {"code": 503}}),
    texts.map(lambda text: {"type": "response.completed", "response": {"text": text * 20_000}}),
)
names = st.sampled_from(["", "event: error\n", "event: response.completed\n", ": comment\n", "id: 1\r\n"])
ends = st.sampled_from(["\n\n", "\r\n\r\n", "\n\r\n"])
raw = st.sampled_from(
    [
        b"data: [DONE]\n\n",
        b": ping\n\n",
        b"\n",
        b"data\n",
        b"data:",
        b"\r",
        b"x" * (MAX_LINE_BYTES + 5),
        b"event:",
    ]
)
framed = st.builds(
    lambda name, event, end: f"{name}data: {json.dumps(event, separators=(',', ':'))}{end}".encode(),
    names,
    events,
    ends,
)
streams = st.lists(framed | framed | framed | raw, max_size=12)


def read(content_type: bytes, pieces: list[bytes]) -> tuple[Any, ...]:
    reader: UsageReader = reader_for(content_type)
    tokens = sum(reader.feed(piece) for piece in pieces) + reader.end()
    said = (reader.prompt_tokens, reader.completion_tokens, reader.cached_tokens)
    return tokens, *said, reader.error, reader.finished


def cut(body: bytes, at: list[int]) -> list[bytes]:
    places = sorted({0, len(body), *(place % (len(body) + 1) for place in at)})
    return [body[start:end] for start, end in pairwise(places)]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(streams, st.lists(st.integers(0, 1 << 20), max_size=30))
def test_any_cutting_of_a_stream_reads_the_same(pieces: list[bytes], at: list[int]) -> None:
    body = b"".join(pieces)
    whole = read(b"text/event-stream", [body])
    assert read(b"text/event-stream", pieces) == whole
    assert read(b"text/event-stream", cut(body, at)) == whole
    if len(body) < 3000:
        assert read(b"text/event-stream", [body[i : i + 1] for i in range(len(body))]) == whole


@settings(deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=10))
def test_no_bytes_raise(pieces: list[bytes]) -> None:
    for content_type in (b"text/event-stream", b"application/json"):
        read(content_type, pieces)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["usage", "timings", "text", "error", "details"]), events | counts | texts
    ),
    st.integers(0, 100_000),
    st.lists(st.integers(0, 1 << 20), max_size=10),
)
def test_any_cutting_of_a_document_reads_the_same(body: dict[str, Any], padding: int, at: list[int]) -> None:
    text = json.dumps({"padding": "x" * padding, **body}).encode()
    assert read(b"application/json", cut(text, at)) == read(b"application/json", [text])
