"""Every way of spelling an inference path is gated, and nothing else is."""

import pytest

from sluicegate_sidecar.endpoints import ENDPOINTS, Body, Kind, Streaming, endpoint_of, plain_path

GATED = {
    b"/v1/chat/completions": Kind.CHAT,
    b"/v1/completions": Kind.COMPLETIONS,
    b"/v1/responses": Kind.RESPONSES,
    b"/v1/embeddings": Kind.EMBEDDINGS,
    b"/v1/messages": Kind.MESSAGES,
    b"/v1/rerank": Kind.RERANK,
    b"/v2/rerank": Kind.RERANK,
    b"/rerank": Kind.RERANK,
    b"/v1/audio/transcriptions": Kind.AUDIO,
    b"/v1/audio/translations": Kind.AUDIO,
    b"/v1/audio/speech": Kind.AUDIO,
    b"/v1/audio/something-new": Kind.AUDIO,
    b"/completion": Kind.COMPLETIONS,
    b"/completions": Kind.COMPLETIONS,
    b"/chat/completions": Kind.CHAT,
    b"/infill": Kind.INFILL,
    b"/generate": Kind.GENERATE,
    b"/generate_stream": Kind.GENERATE,
    b"/v2/models/llama/infer": Kind.TRITON_INFER,
    b"/v2/models/llama/generate": Kind.TRITON_GENERATE,
    b"/v2/models/llama/versions/3/generate_stream": Kind.TRITON_GENERATE,
}


@pytest.mark.parametrize(("path", "kind"), GATED.items())
def test_inference_is_gated(path: bytes, kind: Kind) -> None:
    endpoint = endpoint_of(b"POST", path)
    assert endpoint is not None
    assert endpoint.kind is kind


@pytest.mark.parametrize("path", GATED)
@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE", b"PATCH"])
def test_only_post_is_gated(path: bytes, method: bytes) -> None:
    assert endpoint_of(method, path) is None


@pytest.mark.parametrize(
    "path",
    [
        b"/health",
        b"/metrics",
        b"/v1/models",
        b"/props",
        b"/tokenize",
        b"/detokenize",
        b"/apply-template",
        b"/v1/load_lora_adapter",
        b"/v1/chat/completions/input_tokens",
        b"/v1/chat/completions/control",
        b"/v1/messages/count_tokens",
        b"/v1/responses/resp_1/cancel",
        b"/v1/responses/input_tokens",
        b"/v2/models/llama/ready",
        b"/v2/repository/models/llama/load",
        b"/v1/chat/completions/../models",
        b"/v1/chat",
        b"*",
    ],
)
def test_everything_else_passes(path: bytes) -> None:
    assert endpoint_of(b"POST", path) is None


@pytest.mark.parametrize(
    "target",
    [
        # The first four are served by a llama.cpp server as they stand.
        b"/v1/chat%2Fcompletions",
        b"/v1/cha%74/completions",
        b"/v1/chat/completions?stream=1",
        b"/v1/chat/completions#fragment",
        b"/v1//chat/completions",
        b"//v1/chat/completions",
        b"/v1/chat/completions/",
        b"/v1/chat/completions//",
        b"/v1/./chat/completions",
        b"/v1/x/../chat/completions",
        b"/../v1/chat/completions",
        b"/V1/Chat/Completions",
        b"/v1/chat/completions;jsessionid=1",
        b"/v1;a=b/chat/completions",
        b"/v1\\chat\\completions",
        b"/v1/chat%252Fcompletions",
        b"/v1/chat/completions%00",
        b"/v1/chat/completions%20",
        b"/v1/chat/completions%3Fx",
        b"/v1/%2e%2e/v1/chat/completions",
        b"http://engine/v1/chat/completions",
        b"https://engine:8000/v1/chat/completions?x",
        b"/llm/v1/chat/completions",
        b"/a/b/c/v1/chat/completions/",
    ],
)
def test_no_spelling_goes_round_the_gate(target: bytes) -> None:
    endpoint = endpoint_of(b"POST", target)
    assert endpoint is not None
    assert endpoint.kind is Kind.CHAT


def test_a_method_in_small_letters_is_gated() -> None:
    assert endpoint_of(b"post", b"/v1/completions") is not None


def test_triton_names_its_model_in_the_path() -> None:
    endpoint = endpoint_of(b"POST", b"/v2/models/My-Llama/versions/1/generate")
    assert endpoint is not None
    assert endpoint.model == "My-Llama"
    assert endpoint.streaming is Streaming.NEVER
    stream = endpoint_of(b"POST", b"/prefix/v2/models/m/generate_stream?x=1")
    assert stream is not None
    assert stream.streaming is Streaming.ALWAYS
    infer = endpoint_of(b"POST", b"/v2/models/m/infer")
    assert infer is not None
    assert infer.body is Body.TENSORS


def test_what_generates_nothing_says_so() -> None:
    silent = {path for path, endpoint in ENDPOINTS.items() if not endpoint.generates}
    for path in silent:
        assert ENDPOINTS[path].kind in {Kind.EMBEDDINGS, Kind.RERANK, Kind.AUDIO}
    assert b"/v1/embeddings" in silent
    assert b"/v1/chat/completions" not in silent


def test_a_long_path_is_looked_at_only_so_far() -> None:
    assert endpoint_of(b"POST", b"/a" * 20_000 + b"/v1/chat/completions") is None
    assert endpoint_of(b"POST", b"/.." * 20_000 + b"/v1/chat/completions") is not None


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"", b"/"),
        (b"/", b"/"),
        (b"http://host", b"/"),
        (b"host:443", b"/host:443"),
        (b"/a/b/../c/./d/", b"/a/c/d"),
        (b"/a%", b"/a%"),
    ],
)
def test_the_plain_reading(target: bytes, path: bytes) -> None:
    assert plain_path(target) == path
