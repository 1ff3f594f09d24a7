"""Which requests are inference, and how each kind of them is read.

One table: the paths on which a supported engine does inference work. Only POST to one of them is gated;
everything else (health, metrics, models, tokenizers, count of tokens, control of a running stream) passes.
How a body is read lives in `facts.py`, how a response is read in `usage.py`; here is only what they need to
know of the path.

Invariants:
- A spelling that any engine might still serve as inference is gated. Engines differ: one decodes `%2F` in a
  path before it routes, another merges slashes, a third is started under a path prefix. So a path that is
  not in the table as it stands is looked up once more in its plainest reading, and then without its leading
  segments. Gating a request that the engine then answers with 404 costs nothing; letting one through that
  it serves would be a way round the gate.
- Kinds are few and fixed: they are a metric label.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from urllib.parse import unquote_to_bytes

#: Rounds of percent-decoding in the plainest reading: one is what engines do, two what a proxy in front of
#: an engine may add; the third makes sure that what is left is not an encoding again.
MAX_DECODE_ROUNDS: Final = 3

#: Leading segments that may be taken for a path prefix (`--root-path`, `--api-prefix`): the longest path in
#: the table has five segments, and no deployment nests prefixes deeper than the rest.
MAX_SEGMENTS: Final = 12

#: Characters kept of a model's name that came with the path.
MAX_MODEL_CHARS: Final = 256


class Kind(StrEnum):
    """What is asked of the engine; the `endpoint` label of metrics."""

    CHAT = "chat_completions"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    AUDIO = "audio"
    INFILL = "infill"
    GENERATE = "generate"  # TGI, SGLang
    TRITON_GENERATE = "triton_generate"
    TRITON_INFER = "triton_infer"


class Body(StrEnum):
    """The shape of the request's body: which reader in `facts.py` knows it."""

    CHAT = "chat"  # messages; max_tokens, max_completion_tokens, n_predict; n
    PROMPT = "prompt"  # prompt, input_prefix, input_suffix; max_tokens, n_predict; n, best_of
    RESPONSES = "responses"  # input, instructions; max_output_tokens
    INPUT = "input"  # input, messages, text: embeddings, pooling, speech
    RERANK = "rerank"  # query, documents, text_1, text_2
    GENERATE = "generate"  # inputs + parameters, text + sampling_params, prompt + max_tokens, text_input
    TENSORS = "tensors"  # the KServe v2 protocol: named inputs
    ANY = "any"  # one path for several of the above, told apart by the fields


class Streaming(StrEnum):
    """How a request says that it wants a stream."""

    FLAG = "flag"  # a boolean `stream` in the body
    ALWAYS = "always"  # implied by the path
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One kind of inference request.

    Attributes:
        kind: label for metrics and logs.
        body: how its prompt and its bound on the output are found.
        generates: True where the engine decodes output tokens one by one; embeddings, rerank and audio are
            one pass over the input.
        streaming: how a stream is asked for.
        model: the model that the path names (Triton), else empty: the body names it.
    """

    kind: Kind
    body: Body
    generates: bool = True
    streaming: Streaming = Streaming.FLAG
    model: str = ""


_CHAT: Final = Endpoint(Kind.CHAT, Body.CHAT)
_COMPLETIONS: Final = Endpoint(Kind.COMPLETIONS, Body.PROMPT)
_RESPONSES: Final = Endpoint(Kind.RESPONSES, Body.RESPONSES)
_MESSAGES: Final = Endpoint(Kind.MESSAGES, Body.CHAT)
_EMBEDDINGS: Final = Endpoint(Kind.EMBEDDINGS, Body.INPUT, generates=False, streaming=Streaming.NEVER)
_RERANK: Final = Endpoint(Kind.RERANK, Body.RERANK, generates=False, streaming=Streaming.NEVER)
_AUDIO: Final = Endpoint(Kind.AUDIO, Body.INPUT, generates=False)
_INFILL: Final = Endpoint(Kind.INFILL, Body.PROMPT)
_GENERATE: Final = Endpoint(Kind.GENERATE, Body.GENERATE)
_GENERATE_STREAM: Final = Endpoint(Kind.GENERATE, Body.GENERATE, streaming=Streaming.ALWAYS)
_ANY: Final = Endpoint(Kind.GENERATE, Body.ANY)

_TRITON: Final = {
    b"infer": (Kind.TRITON_INFER, Body.TENSORS, Streaming.NEVER),
    b"generate": (Kind.TRITON_GENERATE, Body.GENERATE, Streaming.NEVER),
    b"generate_stream": (Kind.TRITON_GENERATE, Body.GENERATE, Streaming.ALWAYS),
}

#: Path -> endpoint. Each path is served as inference by at least one supported engine.
ENDPOINTS: Final[dict[bytes, Endpoint]] = {
    # OpenAI's API, and the same without /v1 (llama.cpp).
    b"/v1/chat/completions": _CHAT,
    b"/chat/completions": _CHAT,
    b"/v1/completions": _COMPLETIONS,
    b"/completions": _COMPLETIONS,
    b"/v1/responses": _RESPONSES,
    b"/responses": _RESPONSES,
    b"/v1/embeddings": _EMBEDDINGS,
    b"/embeddings": _EMBEDDINGS,
    b"/v1/audio/transcriptions": _AUDIO,
    b"/v1/audio/translations": _AUDIO,
    b"/v1/audio/speech": _AUDIO,
    # Anthropic's API (vLLM, llama.cpp).
    b"/v1/messages": _MESSAGES,
    # Rerank: Jina's and Cohere's spelling (vLLM), llama.cpp's.
    b"/v1/rerank": _RERANK,
    b"/v2/rerank": _RERANK,
    b"/rerank": _RERANK,
    b"/v1/reranking": _RERANK,
    b"/reranking": _RERANK,
    # vLLM's own.
    b"/v1/score": _RERANK,
    b"/score": _RERANK,
    b"/pooling": _EMBEDDINGS,
    b"/classify": _EMBEDDINGS,
    b"/inference/v1/generate": _GENERATE,
    # llama.cpp's own.
    b"/completion": _COMPLETIONS,
    b"/infill": _INFILL,
    b"/embedding": _EMBEDDINGS,
    # TGI, SGLang, and the contract of a hosting service that both they and vLLM speak.
    b"/generate": _GENERATE,
    b"/generate_stream": _GENERATE_STREAM,
    b"/vertex_generate": _GENERATE,
    b"/encode": _EMBEDDINGS,
    b"/invocations": _ANY,
    b"/": _ANY,
    # Ollama's API, as SGLang and older llama.cpp servers speak it.
    b"/api/chat": _CHAT,
    b"/api/generate": _COMPLETIONS,
}

_TRITON_PATH: Final = re.compile(
    rb"/v2/models/([^/]+)(?:/versions/[^/]+)?/(infer|generate|generate_stream)\Z", re.IGNORECASE
)
_AUDIO_PATH: Final = b"/v1/audio/"
_PARAMETERS: Final = re.compile(rb";[^/]*")
_SLASHES: Final = re.compile(rb"[/\\]+")


def endpoint_of(method: bytes, path: bytes) -> Endpoint | None:
    """Return how a request is gated; None where it passes ungated.

    Args:
        method: as received.
        path: the request target as received, with or without its query, in origin or absolute form.
    """
    if method != b"POST" and method.upper() != b"POST":
        return None
    return ENDPOINTS.get(path) or _find(plain_path(path))


def plain_path(target: bytes) -> bytes:
    """Return the plainest reading of a request target: what the laxest of servers would route on.

    Without scheme and authority, query and fragment, path parameters, percent-encoding, doubled slashes,
    backslashes, dot segments, a trailing slash, and anything from a NUL on.
    """
    if not target.startswith(b"/"):
        scheme, separator, rest = target.partition(b"://")
        target = b"/" + rest.partition(b"/")[2] if separator else b"/" + scheme
    path = target.partition(b"?")[0].partition(b"#")[0]
    for _ in range(MAX_DECODE_ROUNDS):
        if b"%" not in path:
            break
        path = unquote_to_bytes(path)
    # Once more, for what was hidden by an encoding.
    path = path.partition(b"\0")[0].partition(b"?")[0].partition(b"#")[0]
    path = _SLASHES.sub(b"/", _PARAMETERS.sub(b"", path))
    if b"/." in path:
        path = _without_dots(path)
    return path.strip(b" \t\r\n").rstrip(b"/") or b"/"


def _without_dots(path: bytes) -> bytes:
    kept: list[bytes] = []
    for segment in path.split(b"/"):
        if segment == b"..":
            if kept:
                kept.pop()
        elif segment not in (b".", b""):
            kept.append(segment)
    return b"/" + b"/".join(kept)


def _find(path: bytes) -> Endpoint | None:
    """Look up a plain path in any case, as it is and then without its leading segments."""
    start = 0
    for _ in range(MAX_SEGMENTS):
        rest = path[start:]
        lower = rest.lower()
        found = ENDPOINTS.get(lower)
        if found is not None:
            return found
        if lower.startswith(_AUDIO_PATH):
            return _AUDIO
        triton = _TRITON_PATH.match(rest)
        if triton is not None:
            model = triton.group(1)[:MAX_MODEL_CHARS].decode("utf-8", "replace")
            kind, body, streaming = _TRITON[triton.group(2).lower()]
            return Endpoint(kind, body, streaming=streaming, model=model)
        start = path.find(b"/", start + 1)
        if start < 0:
            return None
    return None
