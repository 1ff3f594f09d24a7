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

Which path has which shape lives in `endpoints.py`, which shape has which fields in `bodies.py`.
"""

from __future__ import annotations

from math import inf
from typing import Final

from msgspec import Struct

from sluicegate_sidecar.bodies import READERS, Number
from sluicegate_sidecar.endpoints import MAX_MODEL_CHARS, Endpoint, Streaming

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

#: Where a multipart body's short fields are sought: clients put them before or after the recording.
MULTIPART_EDGE_BYTES: Final = 4096

#: The content type of nearly every request, as its clients spell it.
_JSON: Final = b"application/json"
#: Looking a member up on its class costs 0.1 us on Python 3.11.
_BY_FLAG: Final = Streaming.FLAG
_ALWAYS: Final = Streaming.ALWAYS

_BASE64: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=-_\\"
_MEDIA_KEYS: Final = (
    b'"url"', b'"data"', b'"image_url"', b'"file_data"', b'"image"', b'"images"',
    b'"image_data"', b'"audio_data"', b'"video_data"', b'"multimodal_data"',
)  # fmt: skip


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
    if content_type is not None and content_type != _JSON and content_type[:10].lower() == b"multipart/":
        return _multipart_facts(endpoint, body)
    read = READERS[endpoint.body].read(body)
    if read is None:
        return _unread(endpoint, body)

    prompt_bytes = read.text_bytes()
    if prompt_bytes > MEDIA_STRIDE_BYTES:
        prompt_bytes = _without_media(prompt_bytes, body)
    ids, prompts = read.prompt_list()
    options = read.stream_options
    streaming = endpoint.streaming
    generates = endpoint.generates
    # By position: names cost as much again as the struct itself.
    return Facts(
        endpoint.model or read.model[:MAX_MODEL_CHARS],
        prompt_bytes or len(body),
        ids,
        _bound(read.bounds()),
        read.stream is True if streaming is _BY_FLAG else streaming is _ALWAYS,
        _choices(read.sequences(), prompts) if generates else 1,
        generates,
        options is not None and options.include_usage is True,
    )


def _unread(endpoint: Endpoint, body: bytes) -> Facts:
    return Facts(
        model=endpoint.model,
        prompt_bytes=len(body),
        prompt_tokens_exact=None,
        max_output_tokens=None,
        stream=endpoint.streaming is _ALWAYS,
        choices=1,
        generates=endpoint.generates,
        include_usage=False,
    )


def _bound(bounds: tuple[Number, ...]) -> int | None:
    """Return the largest usable bound; a negative one means "no bound" to every engine."""
    largest: Number = None
    for bound in bounds:
        if bound is not None and 0 <= bound < inf and (largest is None or bound > largest):
            largest = bound
    if largest is None:
        return None
    return int(largest) if largest < MAX_OUTPUT_TOKENS else MAX_OUTPUT_TOKENS


def _choices(sequences: int, prompts: int) -> int:
    """Return how many sequences are generated: at least one, at most `MAX_CHOICES`."""
    choices = sequences * prompts if sequences > 0 else prompts
    return choices if choices < MAX_CHOICES else MAX_CHOICES


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
