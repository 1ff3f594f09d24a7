"""What is read of responses, in the words of each engine; the llama.cpp ones are as a real server sent them."""

import json
from typing import Any

import pytest

from sluicegate_sidecar.event_stream import MAX_LINE_BYTES, EventStreamReader
from sluicegate_sidecar.reported import EDGE_BYTES
from sluicegate_sidecar.usage import MAX_WHOLE_BYTES, JsonReader, UsageReader, reader_for

TAIL = '"created":1796102857,"id":"chatcmpl-lbsQG4Oh","model":"tiny","object":"chat.completion.chunk"'
ROLE = (
    f'{{"choices":[{{"finish_reason":null,"index":0,"delta":{{"role":"assistant","content":null}}}}],{TAIL}}}'
)
TIMINGS = '"timings":{"cache_n":2,"prompt_n":1,"prompt_ms":5.5,"predicted_n":3,"predicted_ms":8.9}'
CLOSING = f'{{"choices":[{{"finish_reason":"stop","index":0,"delta":{{}}}}],{TAIL}}}'
CLOSING_TIMED = f'{{"choices":[{{"finish_reason":"stop","index":0,"delta":{{}}}}],{TAIL},{TIMINGS}}}'
USAGE = (
    f'{{"choices":[],{TAIL},"usage":{{"completion_tokens":3,"prompt_tokens":5,"total_tokens":8,'
    f'"prompt_tokens_details":{{"cached_tokens":4}}}},{TIMINGS}}}'
)


def word(text: str) -> str:
    return (
        f'{{"choices":[{{"finish_reason":null,"index":0,"delta":{{"content":{json.dumps(text)}}}}}],{TAIL}}}'
    )


def sse(*events: str, end: str = "\n\n") -> bytes:
    return "".join(f"data: {event}{end}" for event in events).encode()


def stream(*pieces: bytes) -> tuple[UsageReader, list[int]]:
    reader = reader_for(b"text/event-stream; charset=utf-8")
    counts = [reader.feed(piece) for piece in pieces]
    counts.append(reader.end())
    return reader, counts


def document(body: Any) -> UsageReader:
    reader = reader_for(b"application/json")
    assert reader.feed(body if isinstance(body, bytes) else json.dumps(body).encode()) == 0
    assert reader.end() == 0
    return reader


def told(reader: UsageReader) -> tuple[int | None, int | None, int | None]:
    return reader.prompt_tokens, reader.completion_tokens, reader.cached_tokens


@pytest.mark.parametrize(
    ("content_type", "kind"),
    [
        (b"text/event-stream", EventStreamReader),
        (b"Text/Event-Stream;charset=utf-8", EventStreamReader),
        (b"application/json", JsonReader),
        (b"text/plain", JsonReader),
        (None, JsonReader),
    ],
)
def test_the_content_type_chooses(content_type: bytes | None, kind: type[UsageReader]) -> None:
    assert type(reader_for(content_type)) is kind


# --- Event streams ---


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
def test_llama_cpp_chat_without_usage(end: str) -> None:
    first = sse(ROLE, word(" 2"), end=end)  # the server writes these two at once
    reader, counts = stream(
        first, sse(word(" 1"), end=end), sse(CLOSING_TIMED, end=end), sse("[DONE]", end=end)
    )
    assert counts == [1, 1, 0, 0, 0]
    assert told(reader) == (3, 3, 2)
    assert reader.finished
    assert reader.error is None


def test_usage_is_believed_before_timings() -> None:
    reader, counts = stream(sse(ROLE), sse(word("a")), sse(CLOSING, USAGE), sse("[DONE]"))
    assert counts == [0, 1, 0, 0, 0]
    assert told(reader) == (5, 3, 4)


def test_a_stream_of_words_counts_each_of_them() -> None:
    words = ["Hello", ",", " world", '"', '\\"', "\\", "\n", " ", "é", "{", "a]}b", "data: x", '"content":"']
    reader, counts = stream(sse(ROLE), *(sse(word(text)) for text in words), sse(CLOSING), sse("[DONE]"))
    assert counts == [0] + [1] * len(words) + [0, 0, 0]
    assert reader.finished


def test_empty_content_is_no_token() -> None:
    _, counts = stream(sse(word("a")), sse(word("b")), sse(word("")), sse(word("c")))
    assert counts == [1, 1, 0, 1, 0]


def test_a_template_does_not_hide_what_comes_with_the_text() -> None:
    with_usage = word("c")[:-1] + ',"usage":{"prompt_tokens":5,"completion_tokens":3}}'
    failing = word("d")[:-1] + ',"error":{"code":503}}'
    reader, counts = stream(sse(word("a")), sse(word("b")), sse(with_usage), sse(failing))
    assert counts == [1, 1, 1, 1, 0]
    assert told(reader) == (5, 3, None)
    assert reader.error == "503"


def test_usage_in_every_chunk_follows_the_last() -> None:
    events = [
        word("a")[:-1] + f',"usage":{{"prompt_tokens":5,"completion_tokens":{tokens}}}}}'
        for tokens in (1, 2, 3)
    ]
    reader, counts = stream(*(sse(event) for event in events))
    assert counts == [1, 1, 1, 0]
    assert told(reader) == (5, 3, None)


def test_a_null_usage_in_every_chunk_is_nothing() -> None:
    event = word("a")[:-1] + ',"usage":null}'
    reader, counts = stream(sse(event), sse(event))
    assert counts == [1, 1, 0]
    assert told(reader) == (None, None, None)


@pytest.mark.parametrize(
    ("delta", "tokens"),
    [
        ({"role": "assistant"}, 0),
        ({"role": "assistant", "content": ""}, 0),
        ({"role": "assistant", "content": "x"}, 1),
        ({"reasoning_content": "thinking"}, 1),
        ({"reasoning": "thinking"}, 1),
        ({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}, 1),
        ({"tool_calls": []}, 0),
        ({"refusal": "no"}, 1),
        ({}, 0),
    ],
)
def test_what_carries_output(delta: dict[str, Any], tokens: int) -> None:
    event = json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    _, counts = stream(sse(event), sse(event), sse(event))
    assert counts == [tokens] * 3 + [0]


def test_choices_count_each() -> None:
    both = json.dumps({"choices": [{"index": 0, "delta": {"content": "a"}}, {"index": 1, "text": "b"}]})
    one, two = (json.dumps({"choices": [{"index": index, "delta": {"content": "a"}}]}) for index in (0, 1))
    _, counts = stream(sse(both), *(sse(event) for event in [one, two] * 10))
    assert counts == [2] + [1] * 20 + [0]


def test_completions() -> None:
    events = [
        '{"choices":[{"text":" 1","index":0,"logprobs":null,"finish_reason":null}],"object":"text_completion"}',
        '{"choices":[{"text":"","index":0,"logprobs":null,"finish_reason":null}],"object":"text_completion"}',
        '{"choices":[{"text":"","index":0,"finish_reason":"stop"}],'
        '"usage":{"completion_tokens":2,"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}}',
    ]
    reader, counts = stream(*(sse(event) for event in events), sse("[DONE]"))
    assert counts == [1, 0, 0, 0, 0]
    assert told(reader) == (3, 2, 2)


def test_llama_cpp_completion_ends_without_done() -> None:
    events = [
        '{"index":0,"content":" 1","tokens":[1212],"stop":false,"tokens_predicted":1,"tokens_evaluated":3}',
        '{"index":0,"content":"","tokens":[2],"stop":false,"tokens_predicted":2,"tokens_evaluated":3}',
        '{"index":0,"content":"","tokens":[],"id_slot":1,"stop":true,"tokens_predicted":2,"tokens_evaluated":3,'
        '"generation_settings":{"stop":[]},"prompt":"<s> hi 2","timings":{"cache_n":2,"prompt_n":1,"predicted_n":2}}',
    ]
    reader, counts = stream(*(sse(event) for event in events[:2]))
    assert not reader.finished
    reader, counts = stream(*(sse(event) for event in events))
    assert counts == [1, 0, 0, 0]
    assert told(reader) == (3, 2, 2)
    assert reader.finished


MESSAGE_START = (
    b"event: message_start\n"
    b'data: {"type":"message_start","message":{"id":"m","role":"assistant","content":[],'
    b'"usage":{"cache_read_input_tokens":2,"input_tokens":1,"output_tokens":0}}}\n\n'
    b"event: content_block_start\n"
    b'data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}\n\n'
)
MESSAGE_DELTA = (
    b"event: content_block_delta\n"
    b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":" 1"}}\n\n'
)
MESSAGE_STOP = (
    b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},'
    b'"usage":{"input_tokens":0,"output_tokens":2}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)


def test_messages_count_the_cached_prompt_too() -> None:
    reader, counts = stream(MESSAGE_START, MESSAGE_DELTA, MESSAGE_DELTA, b": ping\n\n", MESSAGE_STOP)
    assert counts == [0, 1, 1, 0, 0, 0]
    assert told(reader) == (3, 2, 2)
    assert reader.finished


@pytest.mark.parametrize("key", ["thinking", "partial_json"])
def test_messages_that_think_or_call(key: str) -> None:
    delta = {"type": "content_block_delta", "index": 0, "delta": {"type": f"{key}_delta", key: "x"}}
    _, counts = stream(*[sse(json.dumps(delta))] * 3)
    assert counts == [1, 1, 1, 0]


def responses(last: str, **fields: Any) -> bytes:
    events = [
        {"type": "response.created", "response": {"id": "r", "status": "in_progress"}},
        {"type": "response.content_part.added", "part": {"type": "output_text", "text": ""}},
        {"type": "response.output_text.delta", "sequence_number": 4, "delta": " 1"},
        {"type": "response.reasoning_text.delta", "sequence_number": 5, "delta": " so"},
        {"type": "response.output_text.done", "text": " 1"},
        {"type": last, "response": {"id": "r", **fields}},
    ]
    return b"".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n".encode() for e in events)


def test_responses() -> None:
    usage = {"input_tokens": 3, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 1}}
    reader, counts = stream(responses("response.completed", usage=usage))
    assert counts == [2, 0]
    assert told(reader) == (3, 2, 1)
    assert reader.finished
    assert reader.error is None


def test_a_failed_response_is_an_error() -> None:
    reader, _ = stream(responses("response.failed", error={"code": "server_error", "message": "secret"}))
    assert reader.error == "server_error"
    reader, _ = stream(responses("response.failed"))
    assert reader.error == "error"


def test_tgi() -> None:
    token = '{"index":1,"token":{"id":311,"text":" to","special":false},"generated_text":null,"details":null}'
    last = (
        '{"index":2,"token":{"id":2,"text":"","special":true},"generated_text":" to",'
        '"details":{"finish_reason":"eos_token","generated_tokens":2,"input_length":9}}'
    )
    reader = reader_for(b"text/event-stream")
    assert [reader.feed(f"data:{event}\n\n".encode()) for event in (token, last)] == [1, 0]
    assert told(reader) == (9, 2, None)
    assert reader.finished


def test_sglang_tells_the_exact_count() -> None:
    def event(text: str, tokens: int) -> bytes:
        meta = {"prompt_tokens": 9, "completion_tokens": tokens, "cached_tokens": 4}
        return sse(json.dumps({"text": text, "meta_info": meta}))

    reader, counts = stream(event("a", 1), event("abc", 3), event("abc", 3), sse("[DONE]"))
    assert counts == [1, 2, 0, 0, 0]
    assert told(reader) == (9, 3, 4)


def test_triton() -> None:
    _, counts = stream(
        *(sse(json.dumps({"model_name": "m", "text_output": text})) for text in ("a", "b", ""))
    )
    assert counts == [1, 1, 0, 0]


# --- Errors and ends ---


@pytest.mark.parametrize(
    ("event", "error"),
    [
        ('{"error":{"message":"queue full","type":"ServiceUnavailable","code":503}}', "503"),
        ('{"error":{"message":"queue full","type":"overloaded_error"}}', "overloaded_error"),
        ('{"type":"error","error":{"type":"overloaded_error","message":"m"}}', "overloaded_error"),
        ('{"object":"error","message":"m","code":400}', "400"),
        ('{"error":"your prompt: tell me"}', "error"),
        ('{"error":{"code":"a code with words of the prompt"}}', "error"),
        ('{"error":{}}', "error"),
        ('{"error":null}', None),
        ('{"type":"error"}', "error"),
    ],
)
def test_an_error_inside_a_stream(event: str, error: str | None) -> None:
    reader, counts = stream(sse(event), sse("[DONE]"))
    assert reader.error == error
    assert counts == [0, 0, 0]


def test_an_error_by_the_name_of_its_event() -> None:
    reader, _ = stream(b'event: error\ndata: {"message":"m"}\n\n')
    assert reader.error == "error"


def test_a_cut_stream_has_not_finished() -> None:
    reader, _ = stream(sse(ROLE), sse(word("a")), sse(word("b"))[:-9])
    assert not reader.finished


def test_an_event_that_only_the_end_completes_counts() -> None:
    reader, counts = stream(sse(word("a"), "[DONE]").rstrip())
    assert counts == [1, 0]
    assert reader.finished
    reader, counts = stream(sse(word("a")).rstrip())
    assert counts == [0, 1]


@pytest.mark.parametrize(
    "noise",
    [
        b": keep-alive\n\n",
        b"\n\n\n",
        b"id: 7\nretry: 100\n\n",
        b"data: [1,2]\n\n",
        b"data: nonsense\n\n",
        b"data:\n\n",
        b"event: ping\n\n",
        b"\xff\xff\n\n",
        b'data: {"choices":[7,{"delta":"x"},{"text":null}]}\n\n',
        b'data: {"choices":7,"usage":7,"timings":7,"meta_info":7,"details":7}\n\n',
        b'data: {"usage":{"prompt_tokens":-1,"completion_tokens":1.5,"total_tokens":true}}\n\n',
        b"data: " + b"[" * 60_000 + b"\n\n",
    ],
)
def test_noise_is_nothing(noise: bytes) -> None:
    reader, counts = stream(sse(word("a")), noise, sse(word("b")))
    assert counts == [1, 0, 1, 0]
    assert told(reader) == (None, None, None)
    assert reader.error is None


def test_data_over_several_lines_is_one_event() -> None:
    _, counts = stream(b'data: {"choices":\ndata: [{"delta":{"content":"a"}}]}\n\n')
    assert counts == [1, 0]


# --- Bounds ---


def held_bytes(reader: UsageReader) -> int:
    """Return the bytes that a reader holds, in all its parts."""
    held = 0
    for kind in type(reader).__mro__:
        for name in getattr(kind, "__slots__", ()):
            value = getattr(reader, name)
            parts = value if isinstance(value, list) else [value]
            held += sum(len(part) for part in parts if isinstance(part, bytes))
    return held


def test_a_long_last_event_is_not_collected_and_its_usage_found() -> None:
    text = "word " * 50_000
    fields = {"output": [{"text": text}], "usage": {"input_tokens": 3, "output_tokens": 50_000}}
    body = responses("response.completed", **fields)
    reader = reader_for(b"text/event-stream")
    most = 0
    for start in range(0, len(body), 4096):
        reader.feed(body[start : start + 4096])
        most = max(most, held_bytes(reader))
    assert told(reader) == (3, 50_000, None)
    assert reader.finished
    assert most <= MAX_LINE_BYTES + 2 * EDGE_BYTES
    assert reader.feed(sse(word("a"))) == 1


def test_a_line_without_end_is_not_collected() -> None:
    reader = reader_for(b"text/event-stream")
    for _ in range(100):
        reader.feed(b"data: " + b"x" * 10_000)
        assert held_bytes(reader) <= MAX_LINE_BYTES + 2 * EDGE_BYTES
    assert reader.feed(b"\n\n" + sse(word("a"))) == 1


def test_an_event_without_end_is_not_collected() -> None:
    reader = reader_for(b"text/event-stream")
    for _ in range(500):
        reader.feed(b"data: " + b"x" * 1000 + b"\n")
    assert held_bytes(reader) <= 2 * MAX_LINE_BYTES


# --- Documents ---


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}, (5, 7, None)),
        ({"usage": {"input_tokens": 5, "output_tokens": 7, "cache_read_input_tokens": 10}}, (15, 7, 10)),
        ({"object": "list", "data": [], "usage": {"prompt_tokens": 5, "total_tokens": 5}}, (5, None, None)),
        ({"results": [], "usage": {"total_tokens": 5}}, (5, None, None)),
        ({"content": "x", "tokens_predicted": 7, "tokens_evaluated": 5}, (5, 7, None)),
        ({"generated_text": "x", "details": {"generated_tokens": 7, "prefill": [{}, {}]}}, (2, 7, None)),
        ({"text": "x", "meta_info": {"prompt_tokens": 5, "completion_tokens": 7}}, (5, 7, None)),
        ([{"meta_info": {"prompt_tokens": 5, "completion_tokens": 7}}] * 2, (10, 14, None)),
        ([{"tokens_predicted": 1, "tokens_evaluated": 2}, 7, {"other": 1}], (2, 1, None)),
        ({"timings": {"cache_n": 4, "prompt_n": 1, "predicted_n": 7}}, (5, 7, 4)),
        (b"not json", (None, None, None)),
        (b"", (None, None, None)),
    ],
)
def test_documents(body: Any, expected: tuple[int | None, int | None, int | None]) -> None:
    assert told(document(body)) == expected


def test_an_error_document() -> None:
    assert document({"error": {"code": 400, "type": "exceed_context_size_error"}}).error == "400"


@pytest.mark.parametrize("usage_first", [False, True])
@pytest.mark.parametrize("piece_bytes", [1000, 65_536, 10_000_000])
def test_a_long_document_is_searched_at_its_edges(usage_first: bool, piece_bytes: int) -> None:
    usage = {
        "usage": {"prompt_tokens": 5, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}
    }
    data = {"data": [{"embedding": [0.25] * 100_000, "text": '"usage": {"prompt_tokens": 99}'}]}
    body = json.dumps(usage | data if usage_first else data | usage).encode()
    reader = reader_for(b"application/json")
    for start in range(0, len(body), piece_bytes):
        reader.feed(body[start : start + piece_bytes])
    assert held_bytes(reader) <= 2 * EDGE_BYTES
    reader.end()
    assert told(reader) == (5, 7, 4)


def test_a_long_llama_cpp_document() -> None:
    body = {
        "content": "x" * MAX_WHOLE_BYTES,
        "tokens_predicted": 7,
        "tokens_evaluated": 5,
        "prompt": "y" * 99_999,
    }
    assert told(document(body | {"timings": {"cache_n": 4, "prompt_n": 1, "predicted_n": 7}})) == (5, 7, 4)


def test_many_small_pieces_are_joined() -> None:
    reader = reader_for(b"application/json")
    for byte in b'{"usage":{"prompt_tokens":5}}' + b" " * 10_000:
        reader.feed(bytes([byte]))
    reader.end()
    assert reader.prompt_tokens == 5
