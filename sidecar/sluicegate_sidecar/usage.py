"""Reading a response on the side: tokens as they come, the engine's own count at the end, errors inside.

The response passes to the client unchanged; a reader is shown each piece of its body and keeps what it says
of usage. `reader_for` chooses by the response's content type:

- `EventStreamReader` for server-sent events. An event counts as one token where it carries content: not a
  first event with only a role, not a closing one. Engines may put several tokens into one event; the usage
  they report at the end is the truth, the count is what is known until then.
- `JsonReader` for everything else. It counts nothing; usage is known at the end.

Both understand the usage of OpenAI's chat, completions, responses and embeddings, Anthropic's messages,
llama.cpp (`timings`, `tokens_predicted`), TGI (`details`), SGLang (`meta_info`).

Invariants:
- How the bytes are cut into pieces changes nothing but when a token is counted.
- Memory is bounded: a line or a body longer than its named maximum keeps only its edges.
- Nothing is raised on any bytes whatever; what is not understood counts as nothing.
- No text of a prompt, an answer or an error message is kept past the event that it came in, save for the
  template below, which goes with the reader.

The common case is cheap. The events of one stream differ only in the text between two quotes, so the first
content event that was decoded whole becomes a template: a piece with the same bytes before and after, and
no quote in between, is such an event again, and no decoder is asked. (So a text that is no
valid JSON string may count where the decoder would have refused it; engines write none.)
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

#: The longest line of an event stream that is collected. Longer ones (the closing event of a response of
#: some 10,000 tokens repeats all its text) are skipped, and usage is looked for at their end.
MAX_LINE_BYTES: Final = 65_536
#: Data lines of one event: no API uses more than one.
MAX_DATA_LINES: Final = 16
#: The longest JSON body that is kept whole and decoded; of longer ones the edges are searched.
MAX_WHOLE_BYTES: Final = 65_536
#: How much is kept of either edge: a usage object has some 300 bytes, llama.cpp's timings 250, and at most
#: a short list of transfer parameters comes after them.
EDGE_BYTES: Final = 8_192
#: Templates tried in one stream, before all further events are decoded: a model that thinks, speaks and
#: calls tools needs one for each, and some first events cannot serve as one.
MAX_TEMPLATES: Final = 8
#: Pieces of a JSON body that are kept apart before they are joined.
MAX_PIECES: Final = 64
#: Closing braces tried for the end of a usage object: it holds at most a few objects of details.
MAX_NESTED_ENDS: Final = 8
#: Token counts above this are not believed.
MAX_TOKENS: Final = 1 << 40
#: Characters kept of an error's code or type.
MAX_ERROR_CHARS: Final = 64

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
_FRAGMENTS: Final = re.compile(rb'(?<!\\)"(usage|timings|meta_info|details)"\s*:\s*(?=\{)')
_PLAIN_COUNTS: Final = re.compile(
    rb'(?<!\\)"(tokens_predicted|tokens_evaluated|generated_tokens)"\s*:\s*(\d{1,12})\b'
)

_decode: Final = msgspec.json.Decoder().decode


class UsageReader:
    """What is common to both readers.

    Attributes:
        prompt_tokens: tokens of the prompt, cached ones included, as the engine counted; None if unknown.
        completion_tokens: tokens generated, all choices together; None if unknown.
        cached_tokens: those of the prompt that came from the prefix cache; None if unknown.
        error: code or type of an error that the body carried, never its message; None if there was none.
        finished: the end that the format itself marks was seen (`[DONE]`, `message_stop`,
            `response.completed`, `"stop": true`). A format without such a mark leaves it False.
    """

    __slots__ = ("cached_tokens", "completion_tokens", "error", "finished", "prompt_tokens")

    def __init__(self) -> None:
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.error: str | None = None
        self.finished = False

    def feed(self, data: bytes) -> int:
        """Take the next piece of the body; return the output tokens that it completed."""
        raise NotImplementedError

    def end(self) -> int:
        """Take note that the body is over; return the output tokens that only this completed."""
        raise NotImplementedError

    # --- Usage, wherever it stands ---

    def _take_usage(self, usage: Any) -> None:
        """Read a usage object of OpenAI's or Anthropic's shape."""
        if not isinstance(usage, dict):
            return
        prompt = _count(usage.get("prompt_tokens"))
        output = _count(usage.get("completion_tokens"))
        cached: int | None = None
        if prompt is None:
            prompt = _count(usage.get("input_tokens"))
            # Anthropic's input_tokens are those that no cache served.
            cached = _count(usage.get("cache_read_input_tokens"))
            if prompt is not None:
                prompt += (cached or 0) + (_count(usage.get("cache_creation_input_tokens")) or 0)
        if output is None:
            output = _count(usage.get("output_tokens"))
        if prompt is None and output is None:
            prompt = _count(usage.get("total_tokens"))  # rerank
        for key in ("prompt_tokens_details", "input_tokens_details"):
            details = usage.get(key)
            if isinstance(details, dict):
                cached = _count(details.get("cached_tokens"))
        # A later report of Anthropic's repeats the prompt as zero.
        if prompt is not None and (prompt or self.prompt_tokens is None):
            self.prompt_tokens = prompt
        if output is not None:
            self.completion_tokens = output
        if cached is not None and (cached or self.cached_tokens is None):
            self.cached_tokens = cached

    def _take_timings(self, timings: Any) -> None:
        """Read llama.cpp's timings, which come without being asked for; usage goes before them."""
        if not isinstance(timings, dict):
            return
        prompt, cached = _count(timings.get("prompt_n")), _count(timings.get("cache_n"))
        if self.prompt_tokens is None and prompt is not None:
            self.prompt_tokens = prompt + (cached or 0)
        if self.completion_tokens is None:
            self.completion_tokens = _count(timings.get("predicted_n"))
        if self.cached_tokens is None:
            self.cached_tokens = cached

    def _take_counts(self, prompt: Any, output: Any, cached: Any = None) -> None:
        self.prompt_tokens = _or(_count(prompt), self.prompt_tokens)
        self.completion_tokens = _or(_count(output), self.completion_tokens)
        self.cached_tokens = _or(_count(cached), self.cached_tokens)

    def _take_error(self, error: Any) -> None:
        if isinstance(error, dict):
            error = error.get("code") or error.get("type")
        # A bare string is a message, and a message may quote the prompt.
        known = isinstance(error, int) or (isinstance(error, str) and error.replace("_", "").isalnum())
        self.error = str(error)[:MAX_ERROR_CHARS] if known else "error"

    def _take_message(self, message: dict[str, Any]) -> None:
        """Read what a whole body and an event have in common."""
        if message.get("usage") is not None:
            self._take_usage(message["usage"])
        if "tokens_predicted" in message:
            self._take_counts(message.get("tokens_evaluated"), message.get("tokens_predicted"))
            self.finished = self.finished or message.get("stop") is True
        details = message.get("details")
        if isinstance(details, dict):
            prefill = details.get("prefill")
            prompt = len(prefill) if isinstance(prefill, list) and prefill else details.get("input_length")
            self._take_counts(prompt, details.get("generated_tokens"))
            self.finished = True
        meta = message.get("meta_info")
        if isinstance(meta, dict):
            self._take_counts(
                meta.get("prompt_tokens"), meta.get("completion_tokens"), meta.get("cached_tokens")
            )
        if "timings" in message:
            self._take_timings(message["timings"])
        if message.get("error") is not None:
            self._take_error(message["error"])
        elif message.get("object") == "error":
            self._take_error(message)

    def _take_edges(self, head: bytes, tail: bytes) -> None:
        """Look for usage in what was kept of a text too long to be decoded."""
        for edge in (head, tail):
            for count in _PLAIN_COUNTS.finditer(edge):
                if count[1] == b"tokens_evaluated":
                    self.prompt_tokens = int(count[2])
                else:
                    self.completion_tokens = int(count[2])
            for fragment in _FRAGMENTS.finditer(edge):
                value = _object_at(edge, fragment.end())
                if value is not None:
                    self._take_message({fragment[1].decode(): value})


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
        message = _decoded(text)
        if not isinstance(message, dict):
            return 0
        self._take_message(message)
        if name == b"error" and self.error is None:
            self._take_error(message)
        kind = message.get("type")
        if isinstance(kind, str) and "choices" not in message:
            return self._typed(kind, message)
        meta = message.get("meta_info")
        if isinstance(meta, dict):
            told = _count(meta.get("completion_tokens")) or self._told
            tokens, self._told = max(told - self._told, 0), told
            return tokens
        if message.get("generated_text") is not None:
            self.finished = True
        return _content_tokens(message)

    def _typed(self, kind: str, message: dict[str, Any]) -> int:
        """Take an event that names its type: OpenAI's responses, Anthropic's messages."""
        if kind == "message_start":
            inner = message.get("message")
            if isinstance(inner, dict):
                self._take_usage(inner.get("usage"))
        elif kind == "message_stop":
            self.finished = True
        elif kind == "error":
            if self.error is None:
                self._take_error(message)
        elif kind.encode() in _LAST_EVENTS:
            self.finished = True
            inner = message.get("response")
            if isinstance(inner, dict):
                self._take_message(inner)
            if kind == "response.failed" and self.error is None:
                self.error = "error"
        elif kind == "content_block_delta":
            delta = message.get("delta")
            return 1 if isinstance(delta, dict) and any(delta.get(key) for key in _BLOCK_TEXT) else 0
        elif kind.endswith(".delta"):
            return 1 if message.get("delta") else 0
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
        document = _decoded(body)
        if isinstance(document, dict):
            self._take_message(document)
        elif isinstance(document, list):
            self._take_batch(document)
        return 0

    def _take_batch(self, documents: list[Any]) -> None:
        """Add up the answers to a list of prompts (SGLang, llama.cpp)."""
        for document in documents:
            if isinstance(document, dict):
                one = UsageReader()
                one._take_message(document)
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


# --- Parts ------------------------------------------------------------------------------------------------


def _decoded(text: bytes) -> Any:
    try:
        return _decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= MAX_TOKENS else None


def _or(value: int | None, other: int | None) -> int | None:
    return other if value is None else value


def _sum(value: int | None, other: int | None) -> int | None:
    return other if value is None else value + (other or 0)


def _content_tokens(message: dict[str, Any]) -> int:
    """Return the output tokens of an event that names no type: one for each choice that has content."""
    choices = message.get("choices")
    if isinstance(choices, list):
        tokens = 0
        for choice in choices:
            if not isinstance(choice, dict):
                continue
            delta = choice.get("delta")
            said = choice.get("text") if not isinstance(delta, dict) else any(map(delta.get, _DELTA_TEXT))
            tokens += 1 if said else 0
        return tokens
    token = message.get("token")  # TGI
    said = (
        token.get("text") if isinstance(token, dict) else message.get("content") or message.get("text_output")
    )
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


def _object_at(text: bytes, start: int) -> Any:
    """Decode the JSON object that begins at `start` and ends somewhere in `text`; None if it does not."""
    end = start
    for _ in range(MAX_NESTED_ENDS):
        end = text.find(b"}", end) + 1
        if not end:
            return None
        value = _decoded(text[start:end])
        if value is not None:
            return value
    return None
