"""What is read from a body, for each API; and what is made of bodies that are none."""

import base64
import json
from typing import Any

import pytest

from sluicegate_sidecar.bodies import MAX_COUNTED_BYTES, MAX_LIST_BYTES
from sluicegate_sidecar.endpoints import Endpoint, endpoint_of
from sluicegate_sidecar.facts import (
    MAX_CHOICES,
    MAX_MEDIA,
    MAX_OUTPUT_TOKENS,
    MEDIA_DISCOUNT,
    MEDIA_FLOOR_BYTES,
    Facts,
    parse_facts,
)


def endpoint(path: str) -> Endpoint:
    found = endpoint_of(b"POST", path.encode())
    assert found is not None
    return found


def facts(path: str, body: Any, content_type: bytes | None = b"application/json") -> Facts:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_facts(endpoint(path), content_type, raw)


def size(*values: Any) -> int:
    return sum(len(json.dumps(value)) for value in values)


def test_chat() -> None:
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    read = facts(
        "/v1/chat/completions",
        {
            "model": "llama",
            "temperature": 0.7,
            "messages": messages,
            "tools": tools,
            "max_tokens": 100,
            "n": 3,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    )
    assert read == Facts(
        model="llama",
        prompt_bytes=size(messages, tools),
        prompt_tokens_exact=None,
        max_output_tokens=100,
        stream=True,
        choices=3,
        generates=True,
        include_usage=True,
    )


@pytest.mark.parametrize(
    ("path", "body", "prompt_bytes", "bound"),
    [
        ("/v1/completions", {"prompt": "once", "max_tokens": 7}, size("once"), 7),
        ("/completion", {"prompt": "once", "n_predict": 7}, size("once"), 7),
        ("/completions", {"prompt": "once"}, size("once"), None),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 7}, size("a", "b"), 7),
        ("/v1/responses", {"input": "x", "instructions": "y", "max_output_tokens": 7}, size("x", "y"), 7),
        ("/v1/messages", {"system": "s", "messages": [], "max_tokens": 7}, size("s", []), 7),
        ("/v1/embeddings", {"input": ["a", "b"]}, size(["a", "b"]), None),
        ("/v1/rerank", {"query": "q", "documents": ["a", "b"]}, size("q", ["a", "b"]), None),
        ("/v1/score", {"text_1": "q", "text_2": ["a", "b"]}, size("q", ["a", "b"]), None),
        ("/v1/audio/speech", {"input": "say this"}, size("say this"), None),
        ("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 7}}, size("x"), 7),
        ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 7}}, size("x"), 7),
        ("/generate", {"prompt": "x", "max_tokens": 7}, size("x"), 7),
        ("/v2/models/m/generate", {"text_input": "x", "max_tokens": 7}, size("x"), 7),
        ("/v2/models/m/generate", {"text_input": "x", "parameters": {"max_tokens": 7}}, size("x"), 7),
        ("/invocations", {"messages": ["x"], "max_tokens": 7}, size(["x"]), 7),
        ("/", {"inputs": "x", "parameters": {"max_new_tokens": 7}}, size("x"), 7),
    ],
)
def test_each_api_has_its_own_words(
    path: str, body: dict[str, Any], prompt_bytes: int, bound: int | None
) -> None:
    read = facts(path, body)
    assert read.prompt_bytes == prompt_bytes
    assert read.max_output_tokens == bound
    assert read.choices == 1
    assert read.generates is endpoint(path).generates


def test_streams_are_a_flag_or_the_path() -> None:
    assert facts("/generate", {"inputs": "x", "stream": True}).stream
    assert not facts("/generate", {"inputs": "x"}).stream
    assert facts("/generate_stream", {"inputs": "x"}).stream
    assert facts("/v2/models/m/generate_stream", {"text_input": "x"}).stream
    assert not facts("/v2/models/m/generate", {"text_input": "x", "stream": True}).stream
    assert facts("/generate_stream", b"no json").stream


def test_triton_names_tensors() -> None:
    inputs = [
        {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["once upon"]},
        {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [[64]]},
    ]
    read = facts("/v2/models/llama/infer", {"inputs": inputs})
    assert (read.model, read.max_output_tokens, read.prompt_bytes) == ("llama", 64, size(inputs))
    ids = facts("/v2/models/llama/infer", {"inputs": [{"name": "input_ids", "data": [[5, 6, 7]]}]})
    assert ids.prompt_tokens_exact == 3
    # Binary tensors follow the JSON: the length is known, the rest is not.
    binary = facts("/v2/models/llama/infer", json.dumps({"inputs": inputs}).encode() + b"\0\1\2")
    assert binary.prompt_bytes == size({"inputs": inputs}) + 3
    assert binary.max_output_tokens is None


# --- Bounds and choices ---


@pytest.mark.parametrize(
    ("value", "bound"),
    [
        ("12", 12),
        ("0", 0),
        ("-1", None),
        ("null", None),
        ("12.0", 12),
        ("1e3", 1000),
        ("1e300", MAX_OUTPUT_TOKENS),
        ("99999999999999999999999999", MAX_OUTPUT_TOKENS),
        ("-99999999999999999999999999", None),
        ('"64"', 64),
        ('"many"', None),
        ("[1]", None),
        ("{}", None),
        ("true", None),
    ],
)
def test_a_bound_is_a_number_or_none(value: str, bound: int | None) -> None:
    body = b'{"model":"m","max_tokens":%s,"messages":["hello"],"stream":true}' % value.encode()
    read = facts("/v1/chat/completions", body)
    assert read.max_output_tokens == bound
    assert read.stream
    assert read.model == "m"
    assert read.prompt_bytes == len('["hello"]')


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"1e400"])
def test_a_number_that_json_lacks_makes_the_body_unknown_at_worst(value: bytes) -> None:
    read = facts("/v1/chat/completions", b'{"max_tokens":%s,"messages":["hello"]}' % value)
    assert read.max_output_tokens is None
    assert read.prompt_bytes >= len('["hello"]')


def test_of_several_bounds_the_largest_counts() -> None:
    body = {"messages": [], "max_tokens": 1, "max_completion_tokens": 500, "n_predict": -1}
    assert facts("/v1/chat/completions", body).max_output_tokens == 500


def test_choices() -> None:
    path = "/v1/completions"
    assert facts(path, {"prompt": "x", "n": 2, "best_of": 5}).choices == 5
    assert facts(path, {"prompt": ["x", "y", "z"], "n": 2}).choices == 6
    assert facts(path, b'{"prompt":["x","y"]}').choices == 2
    assert facts(path, {"prompt": ['a","b', 'c\\", "d']}).choices == 2
    assert facts(path, {"prompt": [","]}).choices == 1
    assert facts(path, {"prompt": ["x" * MAX_LIST_BYTES, 'say "y"']}).choices == 2
    assert (
        facts(path, json.dumps({"prompt": ["x" * MAX_LIST_BYTES, "y", "\\\\"]}, indent=1).encode()).choices
        == 3
    )
    assert facts(path, {"prompt": []}).choices == 1
    assert facts(path, {"prompt": [[1, 2], [3]], "n": 2}).choices == 4
    assert facts(path, {"prompt": "x", "n": 10**9}).choices == MAX_CHOICES
    assert facts(path, {"prompt": "x", "n": -3}).choices == 1
    assert facts(path, {"prompt": "x", "n": 0}).choices == 1
    assert facts("/generate", {"inputs": "x", "parameters": {"best_of": 4}}).choices == 4
    assert facts("/generate", {"text": ["x", "y"], "sampling_params": {"n": 4}}).choices == 8
    assert facts("/v1/embeddings", {"input": ["x", "y"]}).choices == 1


def test_token_ids_are_counted_exactly() -> None:
    path = "/v1/completions"
    assert facts(path, {"prompt": [1, 2, 3]}).prompt_tokens_exact == 3
    assert facts(path, {"prompt": [7]}).prompt_tokens_exact == 1
    assert facts(path, b'{"prompt":[ [1,2] , [3] ]}').prompt_tokens_exact == 3
    assert facts(path, {"prompt": "1, 2, 3"}).prompt_tokens_exact is None
    assert facts(path, {"prompt": ["1", "2"]}).prompt_tokens_exact is None
    assert facts(path, {"prompt": [1, "a long text, with, commas"]}).prompt_tokens_exact is None
    assert facts(path, {"prompt": []}).prompt_tokens_exact is None
    assert facts("/generate", {"input_ids": [1, 2, 3, 4]}).prompt_tokens_exact == 4
    assert facts("/v1/embeddings", {"input": [[1, 2], [3, 4]]}).prompt_tokens_exact == 4


def test_very_many_token_ids_are_extrapolated() -> None:
    ids = [12345] * (MAX_COUNTED_BYTES // 4)
    counted = facts("/v1/completions", {"prompt": ids}).prompt_tokens_exact
    assert counted is not None
    assert abs(counted - len(ids)) < 0.01 * len(ids)


# --- Bodies that are none ---


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b'{"messages": [}',
        b"\xff\xfe",
        b"\x1f\x8b\x08 gzip",
        b"messages=form",
        b'{"a":' * 50_000,
        b'{"messages":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v2/models/m/infer", "/", "/v1/embeddings"])
def test_what_is_no_request_is_known_by_its_length(path: str, body: bytes) -> None:
    read = facts(path, body)
    assert read.prompt_bytes == len(body)
    assert read.max_output_tokens is None
    assert not read.stream
    assert read.choices == 1


def test_a_field_of_the_wrong_type_hides_no_other() -> None:
    body = {
        "model": 7,
        "messages": {"not": "a list"},
        "max_tokens": 50,
        "stream": "true",
        "stream_options": [],
        "n": "2",
    }
    read = facts("/v1/chat/completions", body)
    assert read.model == ""
    assert read.prompt_bytes == size({"not": "a list"})
    assert read.max_output_tokens == 50
    assert read.stream
    assert read.choices == 2
    assert not read.include_usage


def test_a_request_without_any_known_prompt_counts_by_its_length() -> None:
    body = b'{"some_new_field": "a very long prompt"}'
    assert facts("/v1/chat/completions", body).prompt_bytes == len(body)


def test_a_long_model_name_is_cut() -> None:
    assert len(facts("/v1/chat/completions", {"model": "m" * 5000}).model) == 256


# --- Media ---

IMAGE = base64.b64encode(bytes(range(256)) * 1500).decode()  # 512 KB
AS_MEDIUM = MEDIA_FLOOR_BYTES + len(IMAGE) // MEDIA_DISCOUNT


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}},
        {"type": "input_image", "image_url": f"data:image/png;base64,{IMAGE}"},
        {"type": "input_audio", "input_audio": {"data": IMAGE, "format": "wav"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}},
    ],
)
def test_a_medium_is_not_text(part: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
    read = facts("/v1/chat/completions", {"messages": messages})
    assert AS_MEDIUM <= read.prompt_bytes <= AS_MEDIUM + 300


def test_sglang_sends_its_media_beside_the_text() -> None:
    read = facts("/generate", {"text": "What is this?", "image_data": IMAGE})
    assert AS_MEDIUM <= read.prompt_bytes <= AS_MEDIUM + 100


def test_two_media_are_two() -> None:
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}}
    read = facts("/v1/chat/completions", {"messages": [{"role": "user", "content": [part, part]}]})
    assert 2 * AS_MEDIUM <= read.prompt_bytes <= 2 * AS_MEDIUM + 400


@pytest.mark.parametrize(
    "text",
    [
        IMAGE,
        f"data:image/png;base64,{IMAGE}",
        f'{{"image_url": {{"url": "{IMAGE}"}}}}',
        f'"url":"{IMAGE}"',
    ],
)
def test_text_cannot_pose_as_a_medium(text: str) -> None:
    messages = [{"role": "user", "content": text}]
    assert facts("/v1/chat/completions", {"messages": messages}).prompt_bytes == size(messages)


def test_media_beyond_the_bound_are_text() -> None:
    medium = "A" * 16_384
    part = {"type": "image_url", "image_url": {"url": medium}}
    messages = [{"role": "user", "content": [part] * (MAX_MEDIA + 10)}]
    read = facts("/v1/chat/completions", {"messages": messages})
    assert read.prompt_bytes > 10 * len(medium)


def test_an_unterminated_medium_ends_the_search() -> None:
    body = b'{"messages":["x"],"max_tokens":"x","image_url":"' + IMAGE.encode()
    assert facts("/v1/chat/completions", body).prompt_bytes == len(body)


# --- Multipart ---


def multipart(**fields: str) -> bytes:
    parts = [
        f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    sound = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + b"\0" * 100_000
    return b"".join(parts) + sound + b"\r\n--b--\r\n"


def test_a_recording_is_gated_by_its_size() -> None:
    body = multipart(model="whisper", stream="true")
    read = facts("/v1/audio/transcriptions", body, b"multipart/form-data; boundary=b")
    assert read.prompt_bytes == MEDIA_FLOOR_BYTES + len(body) // MEDIA_DISCOUNT
    assert read.model == "whisper"
    assert read.stream
    assert not read.generates


@pytest.mark.parametrize("body", [b"", b'name="model"', b'name="model"\r\n\r\nno end', b"\r\n" * 9000])
def test_multipart_that_is_none(body: bytes) -> None:
    read = facts("/v1/audio/transcriptions", body, b"Multipart/Form-Data; boundary=b")
    assert read.model == ""
    assert not read.stream
