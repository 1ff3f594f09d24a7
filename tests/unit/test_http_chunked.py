"""The second reading of chunked bodies, against a naive one, however the bytes are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluicegate_sidecar.http import Limits
from sluicegate_sidecar.http.chunked import ChunkedBody
from sluicegate_sidecar.http.errors import Problem

EXTENSIONS = st.sampled_from([b"", b";", b";a", b";a=b", b';a="b;c"', b"; x = y"])
TRAILERS = st.lists(st.sampled_from([b"A: b\r\n", b"x-y:\r\n", b"Z:  \t1\r\n"]), max_size=3).map(b"".join)


def decode(data: bytes, cuts: list[int], limits: Limits | None = None) -> tuple[bytes, int, bool]:
    """Content, bytes used, done."""
    body = ChunkedBody(limits or Limits())
    pieces: list[bytes] = []
    used = 0
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    for begin, end in pairwise(places):
        start = begin
        while start < end and not body.done:  # a call takes only so many lines
            taken = body.feed(data[start:end], pieces)
            assert taken > 0
            start += taken
            used += taken
    return b"".join(pieces), used, body.done


@st.composite
def written(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A content, and one way to write it."""
    chunks = draw(st.lists(st.binary(min_size=1, max_size=200), max_size=6))
    extension, zeros = draw(EXTENSIONS), b"0" * draw(st.integers(0, 3))
    data = b"".join(zeros + b"%X%b\r\n%b\r\n" % (len(chunk), extension, chunk) for chunk in chunks)
    return b"".join(chunks), data + b"0" + extension + b"\r\n" + draw(TRAILERS) + b"\r\n"


@given(message=written(), behind=st.binary(max_size=50), cuts=st.lists(st.integers(0, 2000), max_size=12))
def test_it_reads_what_was_written_and_nothing_behind_it(message, behind, cuts):
    content, data = message
    assert decode(data + behind, cuts) == (content, len(data), True)


@given(cuts=st.lists(st.integers(0, 100), max_size=12), keep=st.integers(0, 22))
def test_it_is_not_done_before_the_end(cuts, keep):
    data = b"5;x\r\nhello\r\n0\r\nT: u\r\n\r\n"
    assert len(data) == 23
    content, used, done = decode(data[:keep], cuts)
    assert (used, done) == (keep, False)
    assert b"hello".startswith(content)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"5\nhello\r\n", "bad_chunk"),
        (b"\n", "bad_chunk"),
        (b"5\r\nhelloX\r\n", "bad_chunk"),
        (b"5\r\nhello\n\r\n", "bad_chunk"),
        (b"g\r\n", "bad_chunk"),
        (b"5 \r\n", "bad_chunk"),
        (b"5;\x00\r\n", "bad_chunk"),
        (b"5;\x80\r\n", "bad_chunk"),
        (b"5;a\rb\r\n", "bad_chunk"),
        (b"0" * 17 + b"\r\n", "bad_chunk"),
        (b"5;" + b"a" * 300, "bad_chunk"),
        (b"0\r\nA\r\n\r\n", "bad_chunk"),
        (b"0\r\n A: b\r\n\r\n", "bad_chunk"),
        (b"0\r\nA : b\r\n\r\n", "bad_chunk"),
        (b"0\r\nA: \x00\r\n\r\n", "bad_chunk"),
        (b"0\r\n" + b"A: b\r\n" * 30, "bad_chunk"),
        (b"0\r\nA: " + b"b" * 300, "bad_chunk"),
        (b"65\r\n", "body_bytes"),
        (b"60\r\n" + b"x" * 96 + b"\r\n5\r\n", "body_bytes"),
        (b"ffffffffffffffff\r\n", "body_bytes"),
    ],
)
@pytest.mark.parametrize("cuts", [[], list(range(500))])
def test_it_refuses(data, kind, cuts):
    limits = Limits(body_bytes=100, chunk_line_bytes=200, trailer_bytes=150)
    with pytest.raises(Problem) as found:
        decode(data, cuts, limits)
    assert found.value.kind == kind
