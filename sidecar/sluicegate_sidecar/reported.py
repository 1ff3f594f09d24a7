"""What engines report of a finished request, in whatever words: usage, timings, errors.

`UsageReader` is what the readers of `usage.py` and `event_stream.py` have in common: where the numbers end
up, and how each engine's objects are read into them.

Invariants:
- Nothing is raised on any decoded JSON whatever: what has not the expected type was not reported.
- No text of a prompt, an answer or an error message is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec import Struct

#: How much is kept of either edge: a usage object has some 300 bytes, llama.cpp's timings 250, and at most
#: a short list of transfer parameters comes after them.
EDGE_BYTES: Final = 8_192
#: Closing braces tried for the end of a usage object: it holds at most a few objects of details.
MAX_NESTED_ENDS: Final = 8
#: Token counts above this are not believed.
MAX_TOKENS: Final = 1 << 40
#: Characters kept of an error's code or type.
MAX_ERROR_CHARS: Final = 64

_FRAGMENTS: Final = re.compile(rb'(?<!\\)"(usage|timings|meta_info|details)"\s*:\s*(?=\{)')
_PLAIN_COUNTS: Final = re.compile(
    rb'(?<!\\)"(tokens_predicted|tokens_evaluated|generated_tokens)"\s*:\s*(\d{1,12})\b'
)


class Message(Struct, gc=False):
    """What a whole body and an event have in common: every place in which an engine reports something.

    Nothing else is decoded, so that an answer's text, or an embedding's numbers, are passed over and not built.
    None where absent; the values are of any type.
    """

    usage: Any = None
    timings: Any = None  # llama.cpp
    details: Any = None  # TGI
    meta_info: Any = None  # SGLang
    tokens_predicted: Any = None  # llama.cpp's own API, as the next two
    tokens_evaluated: Any = None
    stop: Any = None
    error: Any = None
    object: Any = None
    code: Any = None  # of a message that is an error itself, as its type
    type: Any = None


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
        prompt = count(usage.get("prompt_tokens"))
        output = count(usage.get("completion_tokens"))
        cached: int | None = None
        if prompt is None:
            prompt = count(usage.get("input_tokens"))
            # Anthropic's input_tokens are those that no cache served.
            cached = count(usage.get("cache_read_input_tokens"))
            if prompt is not None:
                prompt += (cached or 0) + (count(usage.get("cache_creation_input_tokens")) or 0)
        if output is None:
            output = count(usage.get("output_tokens"))
        if prompt is None and output is None:
            prompt = count(usage.get("total_tokens"))  # rerank
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
        if isinstance(details, dict):
            cached = count(details.get("cached_tokens"))
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
        prompt, cached = count(timings.get("prompt_n")), count(timings.get("cache_n"))
        if self.prompt_tokens is None and prompt is not None:
            self.prompt_tokens = prompt + (cached or 0)
        if self.completion_tokens is None:
            self.completion_tokens = count(timings.get("predicted_n"))
        if self.cached_tokens is None:
            self.cached_tokens = cached

    def _take_counts(self, prompt: Any, output: Any, cached: Any = None) -> None:
        self.prompt_tokens = either(count(prompt), self.prompt_tokens)
        self.completion_tokens = either(count(output), self.completion_tokens)
        self.cached_tokens = either(count(cached), self.cached_tokens)

    def _take_error(self, error: Any) -> None:
        if isinstance(error, dict):
            error = error.get("code") or error.get("type")
        elif isinstance(error, Message):
            error = error.code or error.type
        # A bare string is a message, and a message may quote the prompt.
        known = isinstance(error, int) or (isinstance(error, str) and error.replace("_", "").isalnum())
        self.error = str(error)[:MAX_ERROR_CHARS] if known else "error"

    def _take_message(self, message: Message) -> None:
        """Read what a whole body and an event have in common."""
        if message.usage is not None:
            self._take_usage(message.usage)
        if message.tokens_predicted is not None:
            self._take_counts(message.tokens_evaluated, message.tokens_predicted)
            self.finished = self.finished or message.stop is True
        details = message.details
        if isinstance(details, dict):
            prefill = details.get("prefill")
            prompt = len(prefill) if isinstance(prefill, list) and prefill else details.get("input_length")
            self._take_counts(prompt, details.get("generated_tokens"))
            self.finished = True
        meta = message.meta_info
        if isinstance(meta, dict):
            self._take_counts(
                meta.get("prompt_tokens"), meta.get("completion_tokens"), meta.get("cached_tokens")
            )
        if message.timings is not None:
            self._take_timings(message.timings)
        if message.error is not None:
            self._take_error(message.error)
        elif message.object == "error":
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
                    self._take_message(Message(**{fragment[1].decode(): value}))


_decode: Final = msgspec.json.Decoder().decode


def decoded(text: bytes, decode: Callable[[bytes], Any] = _decode) -> Any:
    """Return what the decoder makes of the text; None where it cannot, whatever is in it."""
    try:
        return decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= MAX_TOKENS else None


def either(value: int | None, other: int | None) -> int | None:
    return other if value is None else value


def _object_at(text: bytes, start: int) -> Any:
    """Decode the JSON object that begins at `start` and ends somewhere in `text`; None if it does not."""
    end = start
    for _ in range(MAX_NESTED_ENDS):
        end = text.find(b"}", end) + 1
        if not end:
            return None
        value = decoded(text[start:end])
        if value is not None:
            return value
    return None
