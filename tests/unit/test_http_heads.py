"""Heads as bytes: what is written, what is refused, what each limit's name says."""

from __future__ import annotations

import dataclasses
import json

import pytest

from sluicegate_sidecar.http import End, Limits, heads
from sluicegate_sidecar.http.errors import KINDS, problem


@pytest.mark.parametrize(
    ("values", "tokens"),
    [
        ([], set()),
        ([b"close"], {b"close"}),
        ([b"Keep-Alive, X-A", b" x-b ,,\tClose"], {b"keep-alive", b"x-a", b"x-b", b"close"}),
        ([b"", b","], set()),
    ],
)
def test_connection_tokens(values, tokens):
    assert heads.connection_tokens(values) == tokens


def test_lines():
    assert heads.lines(()) == b""
    assert heads.lines([(b"a", b"1"), (b"B", b"")]) == b"a: 1\r\nB: \r\n"


@pytest.mark.parametrize("bad", [b"\r", b"\n", b"\0", b"\r\n", b"x\r\nx: y"])
@pytest.mark.parametrize("where", [0, 1])
def test_lines_refuse_what_would_break_a_head(bad, where):
    header = (bad, b"v") if where == 0 else (b"n", bad)
    with pytest.raises(ValueError, match="line break"):
        heads.lines([(b"a", b"1"), header])


@pytest.mark.parametrize(
    ("status", "method", "expected"),
    [
        (200, b"GET", b"HTTP/1.1 200 OK\r\na: b\r\nd: e\r\ncontent-length: 2\r\n\r\nhi"),
        (200, b"HEAD", b"HTTP/1.1 200 OK\r\na: b\r\nd: e\r\ncontent-length: 2\r\n\r\n"),
        (204, b"GET", b"HTTP/1.1 204 No Content\r\na: b\r\nd: e\r\n\r\n"),
        (304, b"GET", b"HTTP/1.1 304 Not Modified\r\na: b\r\nd: e\r\n\r\n"),
        (599, b"GET", b"HTTP/1.1 599 \r\na: b\r\nd: e\r\ncontent-length: 2\r\n\r\nhi"),
    ],
)
def test_local_replies(status, method, expected):
    assert heads.local(status, b"a: b\r\n", b"d: e\r\n", b"hi", method) == expected


@pytest.mark.parametrize("end", [end for end in End if end.startswith("engine_") or end is End.ABORTED])
def test_every_failure_has_a_reply_that_openai_clients_can_read(end):
    reply = heads.failure_reply(end)
    assert 500 <= reply.status <= 599
    error = json.loads(reply.body)["error"]
    assert error["code"] == end.value
    assert error["type"] == "server_error"
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_problem_has_a_status_and_words(kind):
    found = problem(kind)
    assert found.kind == kind
    assert 400 <= found.status < 600
    assert found.message == str(found)


def test_every_limit_is_documented_and_none_is_negative():
    for field in dataclasses.fields(Limits):
        assert f"\n        {field.name}: " in (Limits.__doc__ or ""), field.name
        if field.type != "bool":
            with pytest.raises(ValueError, match=field.name):
                Limits(**{field.name: -1})


def test_the_sweep_follows_the_shortest_time():
    assert Limits().sweep_s == 0.5
    assert Limits(linger_s=100).sweep_s == 1.0
    assert Limits(header_s=0.4).sweep_s == pytest.approx(0.1)
    assert Limits(first_byte_s=0.2).sweep_s == pytest.approx(0.05)
    assert Limits(inter_chunk_s=0.0).sweep_s == 0.01
