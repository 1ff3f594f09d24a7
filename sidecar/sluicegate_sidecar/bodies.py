"""The shapes of requests' bodies: which fields of each API hold the prompt, the bound, the choices.

One struct a shape, named by `endpoints.Body`. Only the fields named here are decoded, and prompts stay raw:
a decoder pass over a long prompt finds its end and builds nothing.

Invariants:
- Nothing is raised on any bytes: what is no JSON object is None, a field of a wrong type is left out.
- Memory does not grow with what a body holds beside the named fields.

What is made of the fields lives in `facts.py`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from sluicegate_sidecar.endpoints import Body

#: Token ids are counted in this much of a prompt, some 50,000 of them; what follows is taken to be like it.
MAX_COUNTED_BYTES: Final = 262_144
#: A list of prompts is counted exactly up to this size; above, by its quotes.
MAX_LIST_BYTES: Final = 65_536
#: The list of named tensors is read up to this size; above, only its length is known.
MAX_TENSOR_LIST_BYTES: Final = 65_536
_NOTHING: Final = Raw(b"")
_DIGITS: Final = b"0123456789"
_PROMPT_IDS: Final = frozenset({"input_ids", "INPUT_ID", "INPUT_IDS"})
_BOUND_TENSORS: Final = frozenset({"max_tokens", "request_output_len", "max_new_tokens", "output_len"})

Number = int | float | None


def _list_facts(raw: Raw) -> tuple[int | None, int]:
    """Return (token ids, prompts) of a prompt that may be text, ids, or a list of either."""
    value = bytes(raw)
    if value[:1] != b"[":
        return None, 1
    inner = value[1:17].lstrip(b" \t\r\n")
    first = inner.lstrip(b"[ \t\r\n")[:1]
    if first and first in _DIGITS and b'"' not in value:
        return _ids_and_lists(value, nested=inner[:1] == b"[")
    if len(value) <= MAX_LIST_BYTES:
        return None, max(len(_decoded(_LIST, value) or ()), 1)
    # Two quotes make a string, save for escaped ones; one after an escaped backslash may be either and counts.
    quotes = value.count(b'"') - value.count(b'\\"') + value.count(b'\\\\"')
    return None, max(quotes // 2, 1)


def _ids_and_lists(value: bytes, *, nested: bool) -> tuple[int, int]:
    """Count the numbers of a list, or of a list of lists, by their separators."""
    commas = value.count(b",", 0, MAX_COUNTED_BYTES)
    lists = value.count(b"[", 0, MAX_COUNTED_BYTES) if nested else 2
    if len(value) > MAX_COUNTED_BYTES:
        commas = commas * len(value) // MAX_COUNTED_BYTES
        lists = lists * len(value) // MAX_COUNTED_BYTES if nested else 2
    return commas + 1, max(lists - 1, 1)


class _StreamOptions(Struct, gc=False):
    include_usage: bool | None = None


class Fields(Struct, gc=False):
    """Fields of every body, and what is asked of it; a body overrides what it has."""

    model: str = ""
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    def text_bytes(self) -> int:
        return 0

    def bounds(self) -> tuple[Number, ...]:
        return ()

    def sequences(self) -> int:
        return 1

    def prompt_list(self) -> tuple[int | None, int]:
        return None, 1


class _Chat(Fields, gc=False):
    messages: Raw = _NOTHING
    system: Raw = _NOTHING
    tools: Raw = _NOTHING
    functions: Raw = _NOTHING
    documents: Raw = _NOTHING
    max_tokens: Number = None
    max_completion_tokens: Number = None
    n_predict: Number = None
    n: int | None = None

    def text_bytes(self) -> int:
        return (
            len(self.messages)
            + len(self.system)
            + len(self.tools)
            + len(self.functions)
            + len(self.documents)
        )

    def bounds(self) -> tuple[Number, ...]:
        return self.max_tokens, self.max_completion_tokens, self.n_predict

    def sequences(self) -> int:
        return self.n or 1


class _Prompt(Fields, gc=False):
    prompt: Raw = _NOTHING
    suffix: Raw = _NOTHING
    input_prefix: Raw = _NOTHING
    input_suffix: Raw = _NOTHING
    input_extra: Raw = _NOTHING
    max_tokens: Number = None
    n_predict: Number = None
    n: int | None = None
    n_cmpl: int | None = None
    best_of: int | None = None

    def text_bytes(self) -> int:
        around = len(self.suffix) + len(self.input_prefix) + len(self.input_suffix) + len(self.input_extra)
        return len(self.prompt) + around

    def bounds(self) -> tuple[Number, ...]:
        return self.max_tokens, self.n_predict

    def sequences(self) -> int:
        return max(self.n or 1, self.n_cmpl or 1, self.best_of or 1)

    def prompt_list(self) -> tuple[int | None, int]:
        return _list_facts(self.prompt)


class _Responses(Fields, gc=False):
    input: Raw = _NOTHING
    instructions: Raw = _NOTHING
    tools: Raw = _NOTHING
    max_output_tokens: Number = None

    def text_bytes(self) -> int:
        return len(self.input) + len(self.instructions) + len(self.tools)

    def bounds(self) -> tuple[Number, ...]:
        return (self.max_output_tokens,)


class _Input(Fields, gc=False):
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


class _Rerank(Fields, gc=False):
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
    max_new_tokens: Number = None
    max_tokens: Number = None
    n: int | None = None
    best_of: int | None = None


class _Generate(Fields, gc=False):
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
    max_tokens: Number = None
    max_new_tokens: Number = None
    n: int | None = None

    def text_bytes(self) -> int:
        media = len(self.image_data) + len(self.audio_data) + len(self.video_data)
        ids = len(self.input_ids) + len(self.token_ids)
        return len(self.inputs) + len(self.text) + len(self.prompt) + len(self.text_input) + ids + media

    def bounds(self) -> tuple[Number, ...]:
        bounds: tuple[Number, ...] = (self.max_tokens, self.max_new_tokens)
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
    max_completion_tokens: Number = None
    best_of: int | None = None

    def text_bytes(self) -> int:
        chat = len(self.messages) + len(self.tools)
        return super().text_bytes() + chat + len(self.input) + len(self.query) + len(self.documents)

    def bounds(self) -> tuple[Number, ...]:
        return (*super().bounds(), self.max_completion_tokens)

    def sequences(self) -> int:
        return max(super().sequences(), self.best_of or 1)


class _Tensor(Struct, gc=False):
    name: str = ""
    data: Raw = _NOTHING


class _Tensors(Fields, gc=False):
    inputs: Raw = _NOTHING

    def text_bytes(self) -> int:
        return len(self.inputs)

    def bounds(self) -> tuple[Number, ...]:
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


_LIST: Final = msgspec.json.Decoder(list[Raw])
_TENSOR_LIST: Final = msgspec.json.Decoder(list[_Tensor])


class BodyReader:
    """Decodes one shape of body: at once where every field is of its type, else field by field."""

    __slots__ = ("_decode", "_fields", "_raw", "_shape")

    def __init__(self, shape: type[Fields]) -> None:
        fields = msgspec.structs.fields(shape)
        self._shape = shape
        self._decode = msgspec.json.Decoder(shape).decode
        # Numbers and booleans written as strings are taken, as some engines do.
        self._fields = [
            (field.name, None if field.type is Raw else msgspec.json.Decoder(field.type, strict=False))
            for field in fields
        ]
        # A struct of raw fields, not a mapping: a body full of unknown keys must not fill the memory.
        self._raw = msgspec.json.Decoder(
            msgspec.defstruct(f"{shape.__name__}Fields", [(field.name, Raw, _NOTHING) for field in fields])
        )

    def read(self, body: bytes) -> Fields | None:
        """Return the body's fields, those of a wrong type left out; None where it is no JSON object."""
        try:
            return self._decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return self._read_leniently(body)

    def _read_leniently(self, body: bytes) -> Fields | None:
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


READERS: Final[dict[Body, BodyReader]] = {
    Body.CHAT: BodyReader(_Chat),
    Body.PROMPT: BodyReader(_Prompt),
    Body.RESPONSES: BodyReader(_Responses),
    Body.INPUT: BodyReader(_Input),
    Body.RERANK: BodyReader(_Rerank),
    Body.GENERATE: BodyReader(_Generate),
    Body.TENSORS: BodyReader(_Tensors),
    Body.ANY: BodyReader(_Any),
}
