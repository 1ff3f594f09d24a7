"""Requests on whose meaning two readers could differ: refused with 400, and the connection ends there.

Each row is sent with a well-formed request behind it, which must never be served: that is what smuggling is.
"""

from __future__ import annotations

import json

import pytest
from tests.gate.wire import gate, request

HEAD = b"POST /v1/x HTTP/1.1\r\nHost: gate\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BEHIND = b"GET /smuggled HTTP/1.1\r\nHost: gate\r\n\r\n"

#: name -> (bytes, status)
REFUSED: dict[str, tuple[bytes, int]] = {
    # Two lengths.
    "length and chunks": (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "chunks and length": (HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", 400),
    "two lengths": (HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!", 400),
    "the same length twice": (HEAD + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello", 400),
    "a list of lengths": (HEAD + b"Content-Length: 5, 5\r\n\r\nhello", 400),
    "length with plus": (HEAD + b"Content-Length: +5\r\n\r\nhello", 400),
    "length with minus": (HEAD + b"Content-Length: -5\r\n\r\nhello", 400),
    "length in hex": (HEAD + b"Content-Length: 0x5\r\n\r\nhello", 400),
    "length with a blank inside": (HEAD + b"Content-Length: 1 2\r\n\r\nhello", 400),
    "length with underscore": (HEAD + b"Content-Length: 1_0\r\n\r\nhello", 400),
    "length with a vertical tab": (HEAD + b"Content-Length: \x0b5\r\n\r\nhello", 400),
    "length of nothing": (HEAD + b"Content-Length:\r\n\r\nhello", 400),
    "length above 64 bits": (HEAD + b"Content-Length: 18446744073709551617\r\n\r\nh", 400),
    # Transfer codings.
    "coding unknown": (HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
    "coding identity": (HEAD + b"Transfer-Encoding: identity\r\n\r\n0\r\n\r\n", 400),
    "coding gzip, chunked": (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
    "coding chunked, identity": (HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", 400),
    "coding twice": (
        HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "coding with a parameter": (HEAD + b"Transfer-Encoding: chunked;q=1\r\n\r\n0\r\n\r\n", 400),
    "coding with a vertical tab": (HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n", 400),
    "coding in quotes": (HEAD + b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n', 400),
    "coding empty": (HEAD + b"Transfer-Encoding:\r\n\r\n0\r\n\r\n", 400),
    "coding in HTTP/1.0": (
        b"POST / HTTP/1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    # Header lines.
    "space before colon": (HEAD + b"Content-Length : 5\r\n\r\nhello", 400),
    "tab before colon": (HEAD + b"Content-Length\t: 5\r\n\r\nhello", 400),
    "folded line": (HEAD + b"X: a\r\n b\r\n\r\n", 400),
    "folded coding": (HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n", 400),
    "folded first line": (b"POST / HTTP/1.1\r\n Host: gate\r\n\r\n", 400),
    "bare LF after a header": (HEAD + b"X: a\nContent-Length: 5\r\n\r\nhello", 400),
    "bare LF everywhere": (b"POST / HTTP/1.1\nHost: gate\n\n", 400),
    "bare LF at the end of the head": (HEAD + b"X: a\r\n\n", 400),
    "bare CR in a value": (HEAD + b"X: a\rContent-Length: 5\r\n\r\n", 400),
    "bare CR at the end of a value": (HEAD + b"X: a\r\r\n\r\n", 400),
    "bare CR after the start line": (b"POST / HTTP/1.1\rHost: gate\r\n\r\n", 400),
    "NUL in a value": (HEAD + b"X: a\0b\r\n\r\n", 400),
    "control byte in a value": (HEAD + b"X: a\x01b\r\n\r\n", 400),
    "DEL in a value": (HEAD + b"X: a\x7f\r\n\r\n", 400),
    "NUL in a name": (HEAD + b"X\0: a\r\n\r\n", 400),
    "no name": (HEAD + b": a\r\n\r\n", 400),
    "no colon": (HEAD + b"Xabc\r\n\r\n", 400),
    "bracket in a name": (HEAD + b"X(: a\r\n\r\n", 400),
    "byte above 127 in a name": (HEAD + b"X\xe9: a\r\n\r\n", 400),
    # Chunks.
    "chunk size in 0x": (CHUNKED + b"0x5\r\nhello\r\n0\r\n\r\n", 400),
    "chunk size with plus": (CHUNKED + b"+5\r\nhello\r\n0\r\n\r\n", 400),
    "chunk size with minus": (CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n", 400),
    "chunk size with a blank before": (CHUNKED + b" 5\r\nhello\r\n0\r\n\r\n", 400),
    "chunk size with a blank behind": (CHUNKED + b"5 \r\nhello\r\n0\r\n\r\n", 400),
    "chunk size of nothing": (CHUNKED + b"\r\nhello\r\n0\r\n\r\n", 400),
    "chunk size not hex": (CHUNKED + b"5g\r\nhello\r\n0\r\n\r\n", 400),
    "chunk size with underscore": (CHUNKED + b"0_5\r\nhello\r\n0\r\n\r\n", 400),
    "chunk size above 64 bits": (CHUNKED + b"10000000000000005\r\nhello\r\n0\r\n\r\n", 400),
    "chunk size of many zeros": (CHUNKED + b"0" * 17 + b"5\r\nhello\r\n0\r\n\r\n", 400),
    "chunk size ends in LF": (CHUNKED + b"5\nhello\r\n0\r\n\r\n", 400),
    "chunk data ends in LF": (CHUNKED + b"5\r\nhello\n0\r\n\r\n", 400),
    "chunk data ends in nothing": (CHUNKED + b"5\r\nhello0\r\n\r\n", 400),
    "chunk data longer than said": (CHUNKED + b"4\r\nhello\r\n0\r\n\r\n", 400),
    "chunk extension ends in LF": (CHUNKED + b"5;a\nhello\r\n0\r\n\r\n", 400),
    "chunk extension with CR": (CHUNKED + b"5;a=\rb\r\nhello\r\n0\r\n\r\n", 400),
    "chunk extension with a control byte": (CHUNKED + b"5;a=\x01\r\nhello\r\n0\r\n\r\n", 400),
    "chunk extension too long": (CHUNKED + b"5;" + b"a" * 300 + b"\r\nhello\r\n0\r\n\r\n", 400),
    "last chunk ends in LF": (CHUNKED + b"5\r\nhello\r\n0\r\n\n", 400),
    "trailer with a blank before the colon": (CHUNKED + b"0\r\nX : a\r\n\r\n", 400),
    "trailer folded": (CHUNKED + b"0\r\nX: a\r\n b\r\n\r\n", 400),
    "trailer with a length": (CHUNKED + b"0\r\nContent-Length: 7\r\n\r\n", 400),
    "trailer with a coding": (CHUNKED + b"0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    "trailers too long": (CHUNKED + b"0\r\n" + b"X: a\r\n" * 2000 + b"\r\n", 400),
    # Hosts.
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    "the same host twice": (b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
    "host with a path": (b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", 400),
    "host with a user": (b"GET / HTTP/1.1\r\nHost: u@a\r\n\r\n", 400),
    "host with a blank": (b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
    "two hosts in HTTP/1.0": (b"GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    # Start lines.
    "method in lower case": (b"get / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "method unknown": (b"SMUGGLE / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "method CONNECT": (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 405),
    "two spaces before the target": (b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "two spaces behind the target": (b"GET /  HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "tab as a separator": (b"GET\t/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "space behind the version": (b"GET / HTTP/1.1 \r\nHost: a\r\n\r\n", 400),
    "target with a control byte": (b"GET /\x01 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "target with NUL": (b"GET /\0 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "target above 127": (b"GET /\xc3\xa9 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "target with a fragment": (b"GET /a#b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "target without a slash": (b"GET a HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "target star for GET": (b"GET * HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "target of another scheme": (b"GET ftp://a/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "target with a user": (b"GET http://u@a/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "target without an authority": (b"GET http:///x HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "version 2.0": (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
    "version 0.9": (b"GET / HTTP/0.9\r\nHost: a\r\n\r\n", 505),
    "version 1.2": (b"GET / HTTP/1.2\r\nHost: a\r\n\r\n", 400),
    "another protocol": (b"GET / RTSP/1.0\r\nHost: a\r\n\r\n", 400),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "TLS hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "LF before the request": (b"\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "CR before the request": (b"\rGET / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "many lines before the request": (b"\r\n" * 9 + b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "blank before the request": (b" GET / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "body without a length": (b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\nhello", 200),
    # Others that readers take in different ways.
    "two content types": (HEAD + b"Content-Type: a/b\r\nContent-Type: c/d\r\n\r\n", 400),
    "expectation unknown": (HEAD + b"Expect: 200-ok\r\nContent-Length: 5\r\n\r\nhello", 417),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_it_is_refused_and_nothing_behind_it_is_served(name):
    data, status = REFUSED[name]
    async with gate() as g:
        client = await g.client()
        client.send(data + BEHIND)
        message = await client.response()
        assert message.status == status
        assert message.header(b"connection") == b"close"
        assert await client.rest() == b""
        if status != 200:
            error = json.loads(message.body)["error"]
            assert error["type"] in ("invalid_request_error", "server_error")
            assert g.app.kinds == [error["code"]]
            assert not g.app.requests
        assert all(listener.exchange.path != b"/smuggled" for listener in g.app.requests)


@pytest.mark.parametrize("name", REFUSED)
async def test_it_is_refused_byte_by_byte_too(name):
    """However the bytes are cut into reads, the verdict is the same."""
    data, status = REFUSED[name]
    async with gate() as g:
        client = await g.client()
        for at in range(len(data)) if len(data) < 400 else ():
            client.send(data[at : at + 1])
            await g.turn_of_the_gate()
        client.send(data[len(data) if len(data) < 400 else 0 :] + BEHIND)
        message = await client.response()
        assert (message.status, message.header(b"connection")) == (status, b"close")
        assert await client.rest() == b""
        assert all(listener.exchange.path != b"/smuggled" for listener in g.app.requests)


async def test_a_good_request_before_a_bad_one_is_answered_first():
    async with gate() as g:
        client = await g.client()
        client.send(request() + REFUSED["two lengths"][0] + BEHIND)
        first = await client.response()
        second = await client.response()
        assert (first.status, first.body, second.status) == (200, b"echo:hello", 400)
        assert await client.rest() == b""
        assert len(g.app.requests) == 1


async def test_a_listed_header_is_dropped_but_never_the_host():
    async with gate() as g:
        client = await g.client()
        client.send(request(b"POST", b"/", b"", b"Connection: X-Secret, Host, Content-Type", b"X-Secret: 1"))
        await client.response()
        head = g.engine.seen[0]
        assert head.header(b"host") == b"gate"
        assert head.header(b"x-secret") is None


@pytest.mark.parametrize("asked", [b"h2c", b"H2C", b"websocket, h2c", b"TLS/1.0", b"HTTP/2.0"])
async def test_upgrades_that_would_carry_requests_past_the_gate_are_ignored(asked):
    async with gate() as g:
        client = await g.client()
        client.send(
            request(
                b"POST",
                b"/",
                b"hello",
                b"Connection: Upgrade, HTTP2-Settings",
                b"Upgrade: " + asked,
                b"HTTP2-Settings: AAA",
            )
        )
        message = await client.response()
        assert (message.status, message.body) == (200, b"echo:hello")
        head = g.engine.seen[0]
        assert head.header(b"upgrade") is None
        assert head.header(b"connection") is None
        assert head.header(b"http2-settings") is None
        assert (await client.ask()).status == 200
