"""What a request's body says of the work it asks for: model, prompt size, bound on the output, stream.

Only the few fields that matter are decoded; prompts stay raw, and their length in bytes is the size of the
prompt. That length is the one in JSON: quotes, roles and escapes count (a client that escapes all non-ASCII
characters shows up to three times the bytes). Bytes become tokens in the core, with a correction learned
per model from what the engine reports.

Media are not text. An image or a recording inside a JSON body is one long base64 string under a media key;
it costs the engine far fewer tokens than its bytes would suggest, so it counts for `MEDIA_FLOOR_BYTES` and
one byte in `MEDIA_DISCOUNT`. It is found by looking at the body each few kilobytes, not by reading it all.
A multipart body is a recording and is counted in the same way.

Invariants:
- Never refuses and never raises. A body that is no JSON, or has a field of the wrong type, yields what is
  known of it, with the body's length as the prompt's size: the engine answers such requests with its own
  error, as if no gate were there.
- What cannot be trusted errs to the larger side: of several bounds on the output the largest counts; text
  under a key that is not a media key is never discounted.
- Costs stay linear in the body, whatever is in it: one decoder pass that skips raw values, and a bounded
  number of looks.

Which path has which shape lives in `endpoints.py`.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from sluicegate_sidecar.endpoints import MAX_MODEL_CHARS, Body, Endpoint, Streaming

#: A bound on the output above this is cut to it: no context window is longer, and sums stay small integers.
MAX_OUTPUT_TOKENS: Final = 10_000_000

#: Sequences that one request can be counted for (n, best_of, prompts in a list); engines allow far fewer.
MAX_CHOICES: Final = 1024

#: Distance between two looks for media in a body. A shorter string is counted as text, which for an image
#: of 8 KB is about right (2,000 tokens).
MEDIA_STRIDE_BYTES: Final = 8192
#: Bytes that must all be base64 for a look to count: prose shows a space or a quote within a few words.
MEDIA_WINDOW_BYTES: Final = 32
#: Media found in one body; further ones are counted as text.
MAX_MEDIA: Final = 256
#: What a medium counts for at least, in bytes of text: some 256 tokens, as a small image costs.
MEDIA_FLOOR_BYTES: Final = 1024
#: And one byte in this many of its own: a photo of 1 MB then counts for some 4,000 tokens, a minute of
#: speech at 128 kbit/s for 3,700: the order of what vision and speech encoders make of them.
MEDIA_DISCOUNT: Final = 64
#: Characters before a string in which its key is sought.
_KEY_REACH: Final = 64

#: Token ids are counted in this much of a prompt, some 50,000 of them; what follows is taken to be like it.
MAX_COUNTED_BYTES: Final = 262_144
#: The list of named tensors is read up to this size; above, only its length is known.
MAX_TENSOR_LIST_BYTES: Final = 65536
#: Where a multipart body's short fields are sought: clients put them before or after the recording.
MULTIPART_EDGE_BYTES: Final = 4096

_NOTHING: Final = Raw(b"")
_BASE64: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=-_\\"
_MEDIA_KEYS: Final = (
    b'"url"', b'"data"', b'"image_url"', b'"file_data"', b'"image"', b'"images"',
    b'"image_data"', b'"audio_data"', b'"video_data"', b'"multimodal_data"',
)  # fmt: skip
_DIGITS: Final = b"0123456789"
_PROMPT_IDS: Final = frozenset({"input_ids", "INPUT_ID", "INPUT_IDS"})
_BOUND_TENSORS: Final = frozenset({"max_tokens", "request_output_len", "max_new_tokens", "output_len"})

_Number = int | float | None


class Facts(Struct, frozen=True, gc=False):
    """What is known of a request's work before it is done.

    Attributes:
        model: the model asked for; empty where none was named.
        prompt_bytes: size of the prompt-like text, in bytes of JSON; media discounted.
        prompt_tokens_exact: tokens of the prompt where it came as token ids, else None.
            Extrapolated where the ids are longer than `MAX_COUNTED_BYTES`.
        max_output_tokens: the request's own bound on each sequence's output; None where it has none.
        stream: the response is asked for as a stream.
        choices: sequences to be generated (n or best_of, times the prompts in a list), at least 1.
        generates: the engine decodes output tokens for it.
        include_usage: a stream was asked to end with its usage (`stream_options.include_usage`).
    """

    model: str
    prompt_bytes: int
    prompt_tokens_exact: int | None
    max_output_tokens: int | None
    stream: bool
    choices: int
    generates: bool
    include_usage: bool


def parse_facts(endpoint: Endpoint, content_type: bytes | None, body: bytes) -> Facts:
    """Read the facts of a request.

    Args:
        endpoint: what `endpoint_of` said of its path.
        content_type: the request's header; a JSON body is assumed unless it says multipart.
        body: the whole body.
    """
    if content_type is not None and content_type[:10].lower() == b"multipart/":
        return _multipart_facts(endpoint, body)
    read = _READERS[endpoint.body].read(body)
    if read is None:
        return _unread(endpoint, body)

    prompt_bytes = read.text_bytes()
    if prompt_bytes > MEDIA_STRIDE_BYTES:
        prompt_bytes = _without_media(prompt_bytes, body)
    ids, prompts = read.prompt_list()
    options = read.stream_options
    streaming = endpoint.streaming
    return Facts(
        endpoint.model or read.model[:MAX_MODEL_CHARS],
        prompt_bytes or len(body),
        ids,
        _bound(read.bounds()),
        read.stream is True if streaming is Streaming.FLAG else streaming is Streaming.ALWAYS,
        min(max(read.sequences(), 1) * prompts, MAX_CHOICES) if endpoint.generates else 1,
        endpoint.generates,
        options is not None and options.include_usage is True,
    )


def _unread(endpoint: Endpoint, body: bytes) -> Facts:
    return Facts(
        model=endpoint.model,
        prompt_bytes=len(body),
        prompt_tokens_exact=None,
        max_output_tokens=None,
        stream=endpoint.streaming is Streaming.ALWAYS,
        choices=1,
        generates=endpoint.generates,
        include_usage=False,
    )


def _bound(bounds: tuple[_Number, ...]) -> int | None:
    """Return the largest usable bound; a negative one means "no bound" to every engine."""
    largest: int | None = None
    for bound in bounds:
        if bound is None or bound < 0 or (type(bound) is float and not math.isfinite(bound)):
            continue
        tokens = int(min(bound, MAX_OUTPUT_TOKENS))
        if largest is None or tokens > largest:
            largest = tokens
    return largest


# --- Media ------------------------------------------------------------------------------------------------


def _without_media(prompt_bytes: int, body: bytes) -> int:
    """Return the size of the prompt with media counted as media."""
    end = len(body) - MEDIA_WINDOW_BYTES
    at = MEDIA_STRIDE_BYTES // 2
    found = media_bytes = 0
    while at < end:
        if body[at : at + MEDIA_WINDOW_BYTES].translate(None, _BASE64):
            at += MEDIA_STRIDE_BYTES
            continue
        first = body.rfind(b'"', 0, at)
        last = body.find(b'"', at)
        if last < 0:
            break
        if _is_media(body[max(0, first - _KEY_REACH) : first]):
            media_bytes += last - first
            found += 1
            if found == MAX_MEDIA:
                break
        at = max(at + MEDIA_STRIDE_BYTES, last)
    if not found:
        return prompt_bytes
    text_bytes = max(prompt_bytes - media_bytes, 0)
    return text_bytes + found * MEDIA_FLOOR_BYTES + media_bytes // MEDIA_DISCOUNT


def _is_media(before: bytes) -> bool:
    """Tell whether the string that follows `before` is the value of a media key.

    Inside a JSON string every quote has a backslash before it, so text can spell such a key but not be it.
    """
    key = before.rstrip(b" \t\r\n[")
    return key.endswith(b":") and key[:-1].rstrip(b" \t\r\n").endswith(_MEDIA_KEYS)


def _multipart_facts(endpoint: Endpoint, body: bytes) -> Facts:
    edges = body[:MULTIPART_EDGE_BYTES] + body[max(MULTIPART_EDGE_BYTES, len(body) - MULTIPART_EDGE_BYTES) :]
    return Facts(
        model=_multipart_field(edges, b"model") or endpoint.model,
        prompt_bytes=MEDIA_FLOOR_BYTES + len(body) // MEDIA_DISCOUNT,
        prompt_tokens_exact=None,
        max_output_tokens=None,
        stream=_multipart_field(edges, b"stream").lower() in ("true", "1"),
        choices=1,
        generates=endpoint.generates,
        include_usage=False,
    )


def _multipart_field(edges: bytes, name: bytes) -> str:
    at = edges.find(b'name="' + name + b'"')
    start = edges.find(b"\r\n\r\n", at) if at >= 0 else -1
    end = edges.find(b"\r\n", start + 4) if start >= 0 else -1
    if end < 0 or end - start > MAX_MODEL_CHARS:
        return ""
    return edges[start + 4 : end].decode("utf-8", "replace")


# --- Bodies -----------------------------------------------------------------------------------------------


def _list_facts(raw: Raw) -> tuple[int | None, int]:
    """Return (token ids, prompts) of a prompt that may be text, ids, or a list of either.

    Separators are counted, not elements decoded: between two strings of a JSON list stands `","` or `", "`,
    and neither can stand inside a string.
    """
    value = bytes(raw)
    if value[:1] != b"[":
        return None, 1
    inner = value[1:17].lstrip(b" \t\r\n")
    nested = inner[:1] == b"["
    first = inner.lstrip(b"[ \t\r\n")[:1]
    if first and first in _DIGITS and b'"' not in value:
        size = len(value)
        commas = value.count(b",", 0, MAX_COUNTED_BYTES)
        lists = value.count(b"[", 0, MAX_COUNTED_BYTES) if nested else 2
        if size > MAX_COUNTED_BYTES:
            commas = commas * size // MAX_COUNTED_BYTES
            lists = lists * size // MAX_COUNTED_BYTES if nested else 2
        return commas + 1, max(lists - 1, 1)
    return None, value.count(b'","') + value.count(b'", "') + 1


class _StreamOptions(Struct, gc=False):
    include_usage: bool | None = None


class _Common(Struct, gc=False):
    """Fields of every body, and what is asked of it; a body overrides what it has."""

    model: str = ""
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    def text_bytes(self) -> int:
        return 0

    def bounds(self) -> tuple[_Number, ...]:
        return ()

    def sequences(self) -> int:
        return 1

    def prompt_list(self) -> tuple[int | None, int]:
        return None, 1


class _Chat(_Common, gc=False):
    messages: Raw = _NOTHING
    system: Raw = _NOTHING
    tools: Raw = _NOTHING
    functions: Raw = _NOTHING
    documents: Raw = _NOTHING
    max_tokens: _Number = None
    max_completion_tokens: _Number = None
    n_predict: _Number = None
    n: int | None = None

    def text_bytes(self) -> int:
        return (
            len(self.messages)
            + len(self.system)
            + len(self.tools)
            + len(self.functions)
            + len(self.documents)
        )

    def bounds(self) -> tuple[_Number, ...]:
        return self.max_tokens, self.max_completion_tokens, self.n_predict

    def sequences(self) -> int:
        return self.n or 1


class _Prompt(_Common, gc=False):
    prompt: Raw = _NOTHING
    suffix: Raw = _NOTHING
    input_prefix: Raw = _NOTHING
    input_suffix: Raw = _NOTHING
    input_extra: Raw = _NOTHING
    max_tokens: _Number = None
    n_predict: _Number = None
    n: int | None = None
    n_cmpl: int | None = None
    best_of: int | None = None

    def text_bytes(self) -> int:
        around = len(self.suffix) + len(self.input_prefix) + len(self.input_suffix) + len(self.input_extra)
        return len(self.prompt) + around

    def bounds(self) -> tuple[_Number, ...]:
        return self.max_tokens, self.n_predict

    def sequences(self) -> int:
        return max(self.n or 1, self.n_cmpl or 1, self.best_of or 1)

    def prompt_list(self) -> tuple[int | None, int]:
        return _list_facts(self.prompt)


class _Responses(_Common, gc=False):
    input: Raw = _NOTHING
    instructions: Raw = _NOTHING
    tools: Raw = _NOTHING
    max_output_tokens: _Number = None

    def text_bytes(self) -> int:
        return len(self.input) + len(self.instructions) + len(self.tools)

    def bounds(self) -> tuple[_Number, ...]:
        return (self.max_output_tokens,)


class _Input(_Common, gc=False):
    input: Raw = _NOTHING
    content: Raw = _NOTHING
    text: Raw = _NOTHING
    messages: Raw = _NOTHING
    instructions: Raw = _NOTHING

    def text_bytes(self) -> int:
        return (
            len(self.input) + len(self.content) + len(self.text) + len(self.messages) + len(self.instructions)
        )

    def prompt_list(self) -> tuple[int | None, int]:
        return _list_facts(self.input)


class _Rerank(_Common, gc=False):
    query: Raw = _NOTHING
    documents: Raw = _NOTHING
    texts: Raw = _NOTHING
    text_1: Raw = _NOTHING
    text_2: Raw = _NOTHING
    queries: Raw = _NOTHING
    items: Raw = _NOTHING

    def text_bytes(self) -> int:
        pairs = len(self.text_1) + len(self.text_2) + len(self.queries) + len(self.items)
        return len(self.query) + len(self.documents) + len(self.texts) + pairs


class _Parameters(Struct, gc=False):
    max_new_tokens: _Number = None
    max_tokens: _Number = None
    n: int | None = None
    best_of: int | None = None


class _Generate(_Common, gc=False):
    inputs: Raw = _NOTHING
    text: Raw = _NOTHING
    prompt: Raw = _NOTHING
    text_input: Raw = _NOTHING
    input_ids: Raw = _NOTHING
    token_ids: Raw = _NOTHING
    image_data: Raw = _NOTHING
    audio_data: Raw = _NOTHING
    video_data: Raw = _NOTHING
    parameters: _Parameters | None = None
    sampling_params: _Parameters | None = None
    max_tokens: _Number = None
    max_new_tokens: _Number = None
    n: int | None = None

    def text_bytes(self) -> int:
        media = len(self.image_data) + len(self.audio_data) + len(self.video_data)
        ids = len(self.input_ids) + len(self.token_ids)
        return len(self.inputs) + len(self.text) + len(self.prompt) + len(self.text_input) + ids + media

    def bounds(self) -> tuple[_Number, ...]:
        bounds: tuple[_Number, ...] = (self.max_tokens, self.max_new_tokens)
        for nested in (self.parameters, self.sampling_params):
            if nested is not None:
                bounds += (nested.max_new_tokens, nested.max_tokens)
        return bounds

    def sequences(self) -> int:
        largest = self.n or 1
        for nested in (self.parameters, self.sampling_params):
            if nested is not None:
                largest = max(largest, nested.n or 1, nested.best_of or 1)
        return largest

    def prompt_list(self) -> tuple[int | None, int]:
        for raw in (self.input_ids, self.token_ids, self.text, self.prompt):
            if len(raw):
                return _list_facts(raw)
        return None, 1


class _Any(_Generate, gc=False):
    """A path that several APIs share: the fields tell which it is."""

    messages: Raw = _NOTHING
    tools: Raw = _NOTHING
    input: Raw = _NOTHING
    query: Raw = _NOTHING
    documents: Raw = _NOTHING
    max_completion_tokens: _Number = None
    best_of: int | None = None

    def text_bytes(self) -> int:
        chat = len(self.messages) + len(self.tools)
        return super().text_bytes() + chat + len(self.input) + len(self.query) + len(self.documents)

    def bounds(self) -> tuple[_Number, ...]:
        return (*super().bounds(), self.max_completion_tokens)

    def sequences(self) -> int:
        return max(super().sequences(), self.best_of or 1)


class _Tensor(Struct, gc=False):
    name: str = ""
    data: Raw = _NOTHING


class _Tensors(_Common, gc=False):
    inputs: Raw = _NOTHING

    def text_bytes(self) -> int:
        return len(self.inputs)

    def bounds(self) -> tuple[_Number, ...]:
        bound = None
        for tensor in self._tensors():
            if tensor.name in _BOUND_TENSORS:
                digits = bytes(tensor.data).strip(b"[] \t\r\n")
                bound = int(digits) if digits.isdigit() and len(digits) < 10 else None
        return (bound,)

    def prompt_list(self) -> tuple[int | None, int]:
        for tensor in self._tensors():
            if tensor.name in _PROMPT_IDS:
                return _list_facts(tensor.data)
        return None, 1

    def _tensors(self) -> list[_Tensor]:
        if not 0 < len(self.inputs) <= MAX_TENSOR_LIST_BYTES:
            return []
        return _decoded(_TENSOR_LIST, self.inputs) or []


# --- Decoding ---------------------------------------------------------------------------------------------


def _decoded(decoder: Any, data: bytes | Raw) -> Any:
    """Return what `data` decodes to; None where it does not, whatever is in it."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


_TENSOR_LIST: Final = msgspec.json.Decoder(list[_Tensor])


class _Reader:
    """Decodes one shape of body: at once where every field is of its type, else field by field."""

    __slots__ = ("_fields", "_raw", "_shape", "_strict")

    def __init__(self, shape: type[_Common]) -> None:
        fields = msgspec.structs.fields(shape)
        self._shape = shape
        self._strict = msgspec.json.Decoder(shape)
        # Numbers and booleans written as strings are taken, as some engines do.
        self._fields = [
            (field.name, None if field.type is Raw else msgspec.json.Decoder(field.type, strict=False))
            for field in fields
        ]
        # A struct of raw fields, not a mapping: a body full of unknown keys must not fill the memory.
        self._raw = msgspec.json.Decoder(
            msgspec.defstruct(f"{shape.__name__}Fields", [(field.name, Raw, _NOTHING) for field in fields])
        )

    def read(self, body: bytes) -> _Common | None:
        """Return the body's fields, those of a wrong type left out; None where it is no JSON object."""
        try:
            return self._strict.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return self._read_leniently(body)

    def _read_leniently(self, body: bytes) -> _Common | None:
        raw = _decoded(self._raw, body)
        if raw is None:
            return None
        shape = self._shape()
        for name, decoder in self._fields:
            value = getattr(raw, name)
            if not len(value):
                continue
            if decoder is not None:
                value = _decoded(decoder, value)
                if value is None:
                    continue
            setattr(shape, name, value)
        return shape


_READERS: Final[dict[Body, _Reader]] = {
    Body.CHAT: _Reader(_Chat),
    Body.PROMPT: _Reader(_Prompt),
    Body.RESPONSES: _Reader(_Responses),
    Body.INPUT: _Reader(_Input),
    Body.RERANK: _Reader(_Rerank),
    Body.GENERATE: _Reader(_Generate),
    Body.TENSORS: _Reader(_Tensors),
    Body.ANY: _Reader(_Any),
}
