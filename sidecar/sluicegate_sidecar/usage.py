"""Reading a response on the side: its tokens as they come, the engine's own count, errors inside.

The response passes to the client unchanged; a reader is shown each piece of its body. `reader_for` chooses
by content type: `event_stream.EventStreamReader` for server-sent events, `JsonReader` for everything else,
which counts nothing and knows the usage at the end. What they understand of each engine's words lives in
`reported.py`.

Invariants:
- Memory is bounded: of a body longer than its maximum only the edges are kept. Usage stands near the end
  (OpenAI's, Anthropic's, SGLang's; llama.cpp's timings) or near the beginning (llama.cpp's embeddings).
- Nothing is raised on any bytes whatever.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw

from sluicegate_sidecar.event_stream import EventStreamReader
from sluicegate_sidecar.reported import EDGE_BYTES, Message, UsageReader, decoded

__all__ = ["EventStreamReader", "JsonReader", "UsageReader", "reader_for"]

#: The longest JSON body that is kept whole and decoded; of longer ones the edges are searched.
MAX_WHOLE_BYTES: Final = 65_536
#: Pieces of a JSON body that are kept apart before they are joined.
MAX_PIECES: Final = 64

_decode_message: Final = msgspec.json.Decoder(Message).decode
_decode_list: Final = msgspec.json.Decoder(list[Raw]).decode


class JsonReader(UsageReader):
    """Reads a body that is one JSON document, or is not understood."""

    __slots__ = ("_pieces", "_size", "_tail")

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[bytes] = []  # the whole body, or its head once it is too long
        self._size = 0
        self._tail: bytes | None = None  # None while the body is kept whole

    def feed(self, data: bytes) -> int:
        self._size += len(data)
        if self._tail is not None:
            self._tail = (self._tail + data)[-EDGE_BYTES:]
            return 0
        self._pieces.append(data)
        if self._size > MAX_WHOLE_BYTES:
            whole = b"".join(self._pieces)
            self._pieces, self._tail = [whole[:EDGE_BYTES]], whole[-EDGE_BYTES:]
        elif len(self._pieces) >= MAX_PIECES:
            self._pieces = [b"".join(self._pieces)]
        return 0

    def end(self) -> int:
        body, tail = b"".join(self._pieces), self._tail
        self._pieces, self._tail = [], None
        if tail is not None:
            self._take_edges(body, tail)
            return 0
        message = decoded(body, _decode_message)
        if message is not None:
            self._take_message(message)
        else:
            self._take_batch(body)
        return 0

    def _take_batch(self, body: bytes) -> None:
        """Add up the answers to a list of prompts (SGLang, llama.cpp)."""
        for answer in decoded(body, _decode_list) or ():
            message = decoded(answer, _decode_message)
            if message is not None:
                one = UsageReader()
                one._take_message(message)
                self.prompt_tokens = _sum(self.prompt_tokens, one.prompt_tokens)
                self.completion_tokens = _sum(self.completion_tokens, one.completion_tokens)
                self.cached_tokens = _sum(self.cached_tokens, one.cached_tokens)
                self.error = self.error or one.error
                self.finished = self.finished or one.finished


def reader_for(content_type: bytes | None) -> UsageReader:
    """Return the reader for a response of this content type."""
    if content_type is not None and content_type[:17].lower() == b"text/event-stream":
        return EventStreamReader()
    return JsonReader()


def _sum(value: int | None, other: int | None) -> int | None:
    return other if value is None else value + (other or 0)
