"""Reading an event stream on the side: tokens as they come, and what the engine reports at its end.

An event counts as one token where it carries content: not a first event with only a role, not a closing one.
Engines may put several tokens into one event; the usage that they report at the end is the truth, the count
is what is known until then.

The common case is cheap. The events of one stream differ only in the text between two quotes, so the first
content event that was decoded whole becomes a template: a piece with the same bytes before and after, and no
quote in between, is such an event again, and no decoder is asked. (So a text that is no valid JSON string may
count where the decoder would have refused it; engines write none.)

Invariants:
- How the bytes are cut into pieces changes nothing but when a token is counted.
- Memory is bounded: of a line longer than its maximum only the edges are kept.
- Nothing is raised on any bytes whatever.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from sluicegate_sidecar.reported import EDGE_BYTES, MAX_ERROR_CHARS, Message, UsageReader, count, decoded

#: The longest line of an event stream that is collected. Longer ones (the closing event of a response of
#: some 10,000 tokens repeats all its text) are skipped, and usage is looked for at their end.
MAX_LINE_BYTES: Final = 65_536
#: Data lines of one event: no API uses more than one.
MAX_DATA_LINES: Final = 16
#: Templates tried in one stream, before all further events are decoded: a model that thinks, speaks and
#: calls tools needs one for each, and some first events cannot serve as one.
MAX_TEMPLATES: Final = 8
#: Never the beginning of a piece: what `startswith` is asked while there is no template.
_NO_TEMPLATE: Final = b"\0\0"
#: Stands for any text when a template is tested.
_SOME_TEXT: Final = b"~"
#: `"key":` of the strings whose text is output.
_TEXT_KEYS: Final = tuple(
    re.compile(rb'(?<!\\)"' + key + rb'": ?"')
    for key in (
        b"content",
        b"text",
        b"delta",
        b"reasoning_content",
        b"reasoning",
        b"thinking",
        b"text_output",
    )
)
#: Where OpenAI's chunks carry output: text, thought, calls, refusals, sound.
_DELTA_TEXT: Final = (
    "content",
    "reasoning_content",
    "reasoning",
    "tool_calls",
    "refusal",
    "function_call",
    "audio",
)
#: Where Anthropic's do.
_BLOCK_TEXT: Final = ("text", "thinking", "partial_json", "signature")
_LAST_EVENTS: Final = frozenset({b"response.completed", b"response.incomplete", b"response.failed"})


class _Event(Message, gc=False):
    """Where an event says in addition what it brings. None where absent; the values are of any type."""

    choices: Any = None  # OpenAI's chat and completions
    delta: Any = None  # OpenAI's responses, Anthropic's messages
    message: Any = None  # Anthropic's first event
    response: Any = None  # the last event of OpenAI's responses
    content: Any = None  # llama.cpp
    token: Any = None  # TGI, as the next
    generated_text: Any = None
    text_output: Any = None  # Triton


_decode_event: Final = msgspec.json.Decoder(_Event).decode


class EventStreamReader(UsageReader):
    """Reads `text/event-stream`. Lines end in LF or CR LF."""

    __slots__ = (
        "_between", "_data", "_data_bytes", "_event", "_head", "_prefix", "_prefix_bytes", "_rest", "_suffix", "_tail",
        "_templates", "_told",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self._between = True  # between two events: nothing of the next one has come
        self._rest = b""  # the line that has not ended yet
        self._data: list[bytes] = []  # data lines of the event that has not ended yet
        self._data_bytes = 0
        self._event = b""  # its name
        self._head = b""  # the beginning of a line that is too long
        self._tail: bytes | None = None  # its end so far; None while no such line is being skipped
        self._prefix = _NO_TEMPLATE
        self._prefix_bytes = 0
        self._suffix = b""
        self._templates = 0
        self._told = 0  # output tokens as the last event of SGLang's counted them

    def feed(self, data: bytes) -> int:
        if self._between and data.startswith(self._prefix):
            start = self._prefix_bytes
            end = data.find(b'"', start)
            if end > start and (data[end:] == self._suffix or self._quotes(data)):
                return 1
        return self._read(data)

    def _quotes(self, data: bytes) -> bool:
        """Tell whether `data` fits the template with a text that has escaped quotes in it, and only those."""
        text = data[self._prefix_bytes : -len(self._suffix)]
        if not text or b"\\\\" in text or text.endswith(b"\\") or not data.endswith(self._suffix):
            return False
        return text.count(b'"') == text.count(b'\\"')

    def end(self) -> int:
        if self._tail is not None:
            self._long_line(self._head, self._tail)
        elif self._rest:
            self._line(self._rest)
        self._rest, self._head, self._tail, self._between = b"", b"", None, True
        return self._dispatch()

    def _read(self, data: bytes) -> int:
        """Take a piece line by line."""
        alone = self._between
        tokens = events = 0
        lines = data.split(b"\n")
        last = lines.pop()
        for line in lines:
            if self._tail is not None:
                self._long_line(self._head, (self._tail + line)[-EDGE_BYTES:])
                self._head, self._tail = b"", None
                continue
            if self._rest:
                line, self._rest = self._rest + line, b""  # noqa: PLW2901
            if line in (b"", b"\r"):
                tokens += self._dispatch()
                events += 1
            elif len(line) > MAX_LINE_BYTES:
                self._long_line(line[:EDGE_BYTES], line[-EDGE_BYTES:])
            else:
                self._line(line)
        self._keep(last)
        self._between = not (self._rest or self._data or self._event) and self._tail is None
        if tokens == 1 and events == 1 and alone and self._between and self._templates < MAX_TEMPLATES:
            self._learn(data)
        return tokens

    def _keep(self, part: bytes) -> None:
        """Keep the part of a line whose end has not come."""
        if self._tail is not None:
            self._tail = (self._tail + part)[-EDGE_BYTES:]
        elif len(self._rest) + len(part) <= MAX_LINE_BYTES:
            self._rest += part
        else:
            line = self._rest + part
            self._rest, self._head, self._tail = b"", line[:EDGE_BYTES], line[-EDGE_BYTES:]

    def _line(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            size = len(line)
            if len(self._data) < MAX_DATA_LINES and self._data_bytes + size <= MAX_LINE_BYTES:
                self._data.append(line[5:])
                self._data_bytes += size
        elif line.startswith(b"event:"):
            self._event = line[6 : 6 + MAX_ERROR_CHARS].strip()

    def _long_line(self, head: bytes, tail: bytes) -> None:
        if self._event in _LAST_EVENTS:
            self.finished = True
        self._take_edges(head, tail)

    def _dispatch(self) -> int:
        """Take the event whose blank line has come; return its output tokens."""
        name, lines = self._event, self._data
        self._event = b""
        if not lines:
            return 0
        self._data, self._data_bytes = [], 0
        text = lines[0].strip() if len(lines) == 1 else b"\n".join(lines).strip()
        if text == b"[DONE]":
            self.finished = True
            return 0
        message: _Event | None = decoded(text, _decode_event)
        if message is None:
            return 0
        self._take_message(message)
        if name == b"error" and self.error is None:
            self._take_error(message)
        kind = message.type
        if isinstance(kind, str) and message.choices is None:
            return self._typed(kind, message)
        meta = message.meta_info
        if isinstance(meta, dict):
            told = count(meta.get("completion_tokens")) or self._told
            tokens, self._told = max(told - self._told, 0), told
            return tokens
        if message.generated_text is not None:
            self.finished = True
        return _content_tokens(message)

    def _typed(self, kind: str, message: _Event) -> int:
        """Take an event that names its type: OpenAI's responses, Anthropic's messages."""
        if kind == "message_start":
            inner = message.message
            if isinstance(inner, dict):
                self._take_usage(inner.get("usage"))
        elif kind == "message_stop":
            self.finished = True
        elif kind == "error":
            if self.error is None:
                self._take_error(message)
        elif kind.encode() in _LAST_EVENTS:
            self.finished = True
            if isinstance(message.response, dict):
                self._take_message(msgspec.convert(message.response, Message))
            if kind == "response.failed" and self.error is None:
                self.error = "error"
        elif kind == "content_block_delta":
            delta = message.delta
            return 1 if isinstance(delta, dict) and any(delta.get(key) for key in _BLOCK_TEXT) else 0
        elif kind.endswith(".delta"):
            return 1 if message.delta else 0
        return 0

    def _learn(self, event: bytes) -> None:
        """Make a template of a piece that was one content event, if it can serve as one."""
        self._templates += 1
        for key in _TEXT_KEYS:
            found = key.search(event)
            if found is None:
                continue
            start = found.end()
            end = event.find(b'"', start)
            if end <= start or b"\\" in event[start:end]:
                continue
            if _only_text_varies(event[:start], event[end:]):
                self._prefix, self._prefix_bytes, self._suffix = event[:start], start, event[end:]
                return


def _content_tokens(message: _Event) -> int:
    """Return the output tokens of an event that names no type: one for each choice that has content."""
    choices = message.choices
    if isinstance(choices, list):
        tokens = 0
        for choice in choices:
            if not isinstance(choice, dict):
                continue
            delta = choice.get("delta")
            said = choice.get("text") if not isinstance(delta, dict) else any(map(delta.get, _DELTA_TEXT))
            tokens += 1 if said else 0
        return tokens
    token = message.token
    said = token.get("text") if isinstance(token, dict) else message.content or message.text_output
    return 1 if said and isinstance(said, str) else 0


def _only_text_varies(before: bytes, after: bytes) -> bool:
    """Tell whether `before + text + after` is one token if there is text, none if not, and says nothing else."""
    for text, tokens in ((_SOME_TEXT, 1), (b"", 0)):
        trial = EventStreamReader()
        trial._templates = MAX_TEMPLATES
        if trial.feed(before + text + after) != tokens or not trial._between:
            return False
        said = (trial.prompt_tokens, trial.completion_tokens, trial.cached_tokens, trial.error)
        if trial.finished or said != (None, None, None, None):
            return False
    return True
