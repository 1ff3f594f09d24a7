"""RFC 9110 and 9112, sentence by sentence, over raw sockets."""

from __future__ import annotations

import asyncio

import pytest
from tests.gate.wire import App, EngineSide, answers, gate, request, response, until

from sluicegate_sidecar.http import End, Limits

CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def says(*parts: bytes, close: bool = False):
    """An engine that answers each request with these bytes."""

    async def script(side: EngineSide) -> None:
        while True:
            await side.request()
            for part in parts:
                side.send(part)
            if close:
                return

    return script


# ---- requests -----------------------------------------------------------------------------------------


async def test_hop_by_hop_headers_stop_and_others_pass_in_order():
    async with gate() as g:
        client = await g.client()
        client.send(
            b"POST /a?b=c HTTP/1.1\r\nHost: gate:80\r\nAccept: */*\r\nConnection: keep-alive, X-Mine\r\n"
            b"Keep-Alive: timeout=5\r\nX-Mine: 1\r\nTE: trailers\r\nTrailer: X-T\r\nProxy-Connection: keep-alive\r\n"
            b"Proxy-Authorization: Basic x\r\nX-Two: 1\r\nX-Two: 2\r\nX-Empty:\r\nContent-Length: 2\r\n\r\nhi"
        )
        assert (await client.response()).status == 200
        seen = g.engine.seen[0]
        assert seen.start == b"POST /a?b=c HTTP/1.1"
        assert [(name.lower(), value) for name, value in seen.headers] == [
            (b"host", b"gate:80"),
            (b"accept", b"*/*"),
            (b"x-two", b"1"),
            (b"x-two", b"2"),
            (b"x-empty", b""),
            (b"content-length", b"2"),
        ]


async def test_the_application_sees_the_request_as_it_is():
    async with gate() as g:
        client = await g.client()
        client.send(request(b"PUT", b"/p%20q?x=1", b"body", b"X-Class:  batch \t", b"x-class: other"))
        await client.response()
        exchange = g.app.requests[0].exchange
        assert (exchange.method, exchange.target, exchange.path) == (b"PUT", b"/p%20q?x=1", b"/p%20q")
        assert exchange.header(b"x-class") == b"batch"
        assert exchange.header(b"absent") is None
        assert exchange.peer_host == "127.0.0.1"
        assert exchange.body_bytes == 4
        assert exchange.body == b""  # let go with the first byte of the response


@pytest.mark.parametrize(
    ("method", "headers", "body", "length"),
    [
        (b"GET", (), b"", None),
        (b"GET", (b"Content-Length: 0",), b"", b"0"),
        (b"GET", (b"Content-Length: 2",), b"hi", b"2"),
        (b"DELETE", (), b"", None),
        (b"PATCH", (), b"", b"0"),
        (b"OPTIONS", (), b"", None),
        (b"PUT", (b"Transfer-Encoding: chunked",), b"2\r\nhi\r\n0\r\n\r\n", b"2"),
        (b"PUT", (b"Transfer-Encoding: Chunked",), b"0\r\n\r\n", b"0"),
    ],
)
async def test_the_length_that_the_engine_gets(method, headers, body, length):
    async with gate() as g:
        client = await g.client()
        lines = b"".join(line + b"\r\n" for line in (b"Host: g", *headers))
        client.send(method + b" / HTTP/1.1\r\n" + lines + b"\r\n" + body)
        assert (await client.response()).status == 200
        assert g.engine.seen[0].header(b"content-length") == length
        assert g.engine.seen[0].header(b"transfer-encoding") is None


async def test_a_chunked_request_with_extensions_and_trailers():
    async with gate() as g:
        client = await g.client()
        client.send(b"POST / HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\nTrailer: X-T\r\n\r\n")
        client.send(b'5;a;b=c;d="e"\r\nhello\r\n000A\r\n, it is me\r\n0;last\r\nX-T: secret\r\nX-U:\r\n\r\n')
        message = await client.response()
        assert message.body == b"echo:hello, it is me"
        assert g.engine.seen[0].header(b"x-t") is None
        assert (await client.ask()).status == 200


async def test_a_chunked_request_in_single_bytes():
    async with gate() as g:
        client = await g.client()
        data = b"POST / HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n"
        data += b"3;x\r\nabc\r\n1\r\nd\r\n0\r\nT: 1\r\n\r\n"
        for at in range(len(data)):
            client.send(data[at : at + 1])
            await g.turn_of_the_gate()
        assert (await client.response()).body == b"echo:abcd"


async def test_expect_continue_is_answered_by_the_gate():
    async with gate() as g:
        client = await g.client()
        client.send(b"POST / HTTP/1.1\r\nHost: g\r\nExpect: 100-Continue\r\nContent-Length: 2\r\n\r\n")
        assert (await client.head()).start == b"HTTP/1.1 100 Continue"
        client.send(b"hi")
        assert (await client.response()).body == b"echo:hi"
        assert g.engine.seen[0].header(b"expect") is None


async def test_expect_continue_is_not_answered_when_the_body_is_already_here():
    async with gate() as g:
        client = await g.client()
        client.send(request(b"POST", b"/", b"hi", b"Expect: 100-continue"))
        assert (await client.head()).status == 200


async def test_expect_continue_with_a_body_too_large_is_refused_before_it_is_sent():
    async with gate(limits=Limits(body_bytes=10)) as g:
        client = await g.client()
        client.send(b"POST / HTTP/1.1\r\nHost: g\r\nExpect: 100-continue\r\nContent-Length: 11\r\n\r\n")
        assert (await client.head()).status == 413


async def test_expect_in_http10_means_nothing():
    async with gate() as g:
        client = await g.client()
        client.send(b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nhi")
        assert (await client.head()).status == 200


@pytest.mark.parametrize(
    ("target", "path", "origin", "host"),
    [
        (b"http://other:81/a?b", b"/a", b"/a?b", b"other:81"),
        (b"HTTP://other", b"/", b"/", b"other"),
        (b"http://other?q", b"/", b"/?q", b"other"),
        (b"https://[::1]:8/x", b"/x", b"/x", b"[::1]:8"),
    ],
)
async def test_absolute_targets_become_origin_targets(target, path, origin, host):
    async with gate() as g:
        client = await g.client()
        client.send(b"GET " + target + b" HTTP/1.1\r\nHost: gate\r\n\r\n")
        assert (await client.response()).status == 200
        exchange = g.app.requests[0].exchange
        assert (exchange.target, exchange.path, exchange.header(b"host")) == (target, path, host)
        assert g.engine.seen[0].start == b"GET " + origin + b" HTTP/1.1"
        assert g.engine.seen[0].header(b"host") == host


async def test_options_star_passes():
    async with gate() as g:
        client = await g.client()
        client.send(b"OPTIONS * HTTP/1.1\r\nHost: g\r\n\r\n")
        assert (await client.response()).status == 200
        assert g.engine.seen[0].start == b"OPTIONS * HTTP/1.1"


async def test_empty_lines_before_a_request_are_skipped():
    async with gate() as g:
        client = await g.client()
        for lead in (b"\r\n", b"\r\n\r\n", b""):
            client.send(lead + request())
            assert (await client.response()).status == 200
        client.send(b"\r")
        await g.turn_of_the_gate()
        client.send(b"\n" + request())
        assert (await client.response()).status == 200


async def test_pipelined_requests_are_answered_in_order_one_at_a_time():
    busy = most = 0

    async def script(side: EngineSide) -> None:
        nonlocal busy, most
        while True:
            message = await side.request()
            busy += 1
            most = max(most, busy)
            await g.turn_of_the_gate()
            busy -= 1
            side.send(response(message.body))

    async with gate(script) as g:
        client = await g.client()
        bodies = [b"%d" % number for number in range(50)]
        client.send(b"".join(request(body=body) for body in bodies))
        assert [(await client.response()).body for _ in bodies] == bodies
        assert most == 1


async def test_pipelined_refusals_do_not_grow_the_stack():
    app = App(lambda exchange: exchange.refuse(429, (), exchange.body))
    async with gate(app=app) as g:
        client = await g.client()
        count = 3000
        client.send(request(body=b"x") * count)
        for _ in range(count):
            assert (await client.response()).status == 429


async def test_reading_pauses_when_too_much_is_pipelined():
    app = App(lambda exchange: None)
    async with gate(app=app, limits=Limits(pipelined_bytes=1000)) as g:
        client = await g.client()
        client.send(request() + b"x" * 8_000_000)
        await until(lambda: app.requests)
        for _ in range(200):
            await g.turn_of_the_gate()
        assert 0 < g.server.body_bytes < 1_000_000
        client.reset()
        await until(lambda: g.server.exchanges == 0 or app.requests[0].exchange.forward() is None)


# ---- HTTP/1.0 and connections -------------------------------------------------------------------------


async def test_http10_gets_a_length_and_a_closed_connection():
    async with gate() as g:
        client = await g.client()
        client.send(b"POST / HTTP/1.0\r\nContent-Length: 2\r\n\r\nhi")
        message = await client.response()
        assert message.start == b"HTTP/1.1 200 OK"
        assert (message.body, message.header(b"connection")) == (b"echo:hi", b"close")
        assert await client.rest() == b""
        assert g.engine.seen[0].start == b"POST / HTTP/1.1"


async def test_http10_keep_alive():
    async with gate() as g:
        client = await g.client()
        for _ in range(2):
            client.send(b"POST / HTTP/1.0\r\nConnection: Keep-Alive\r\nContent-Length: 2\r\n\r\nhi")
            message = await client.response()
            assert (message.body, message.header(b"connection")) == (b"echo:hi", b"keep-alive")


async def test_http10_gets_a_stream_until_the_end_of_the_connection():
    async with gate(says(CHUNKED_HEAD, b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")) as g:
        client = await g.client()
        client.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        message = await client.response()
        assert (message.body, message.header(b"connection")) == (b"abcde", b"close")
        assert message.header(b"transfer-encoding") is None


@pytest.mark.parametrize("value", [b"close", b"Close", b"keep-alive, close", b"x, close "])
async def test_close_is_honoured(value):
    async with gate() as g:
        client = await g.client()
        client.send(request(b"POST", b"/", b"hi", b"Connection: " + value))
        assert (await client.response()).header(b"connection") == b"close"
        assert await client.rest() == b""


async def test_close_in_the_second_connection_header_is_honoured():
    async with gate() as g:
        client = await g.client()
        client.send(request(b"POST", b"/", b"hi", b"Connection: keep-alive", b"Connection: close"))
        assert (await client.response()).header(b"connection") == b"close"
        assert await client.rest() == b""


async def test_a_connection_serves_only_so_many_requests():
    async with gate(limits=Limits(keepalive_requests=3)) as g:
        client = await g.client()
        said = [(await client.ask()).header(b"connection") for _ in range(3)]
        assert said == [None, None, b"close"]
        assert await client.rest() == b""


# ---- responses ----------------------------------------------------------------------------------------


async def test_headers_of_the_response_pass_unchanged_save_hop_by_hop_ones():
    headers = (
        b"Server: uvicorn",
        b"X-Odd:  a  b",
        b"Set-Cookie: a",
        b"Set-Cookie: b",
        b"Keep-Alive: timeout=5",
    )
    async with gate(
        says(response(b"x", b"200 Fine", *headers, b"Connection: keep-alive, X-Hop", b"X-Hop: 1"))
    ) as g:
        client = await g.client()
        message = await client.ask()
        assert message.start == b"HTTP/1.1 200 Fine"
        assert message.headers == [
            (b"Server", b"uvicorn"),
            (b"X-Odd", b"a  b"),
            (b"Set-Cookie", b"a"),
            (b"Set-Cookie", b"b"),
            (b"Content-Length", b"1"),
        ]
        listener = g.app.requests[0]
        assert listener.status == 200
        assert (b"server", b"uvicorn") in listener.headers


@pytest.mark.parametrize(
    "status", [b"200 OK", b"201 Created", b"404 Not Found", b"429", b"500 ", b"599 x", b"799 y"]
)
async def test_any_status_passes(status):
    async with gate(says(response(b"{}", status))) as g:
        client = await g.client()
        message = await client.ask()
        assert message.start.rstrip() == b"HTTP/1.1 " + status.rstrip()
        assert message.body == b"{}"


async def test_chunks_trailers_and_extensions_of_the_engine():
    async with gate(says(CHUNKED_HEAD, b"3;x=y\r\nabc\r\n02\r\nde\r\n0\r\nX-T: 1\r\n\r\n")) as g:
        client = await g.client()
        for _ in range(2):
            assert (await client.ask()).body == b"abcde"
        assert g.engine.connections == 1


async def test_one_piece_read_is_one_chunk_written():
    async with gate(says(CHUNKED_HEAD + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")) as g:
        client = await g.client()
        assert (await client.ask()).chunks == [b"abcde"]


async def test_a_response_until_the_end_of_the_connection_becomes_chunked():
    async with gate(says(b"HTTP/1.1 200 OK\r\n\r\nab", b"cd", close=True)) as g:
        client = await g.client()
        message = await client.ask()
        assert (message.body, message.header(b"transfer-encoding")) == (b"abcd", b"chunked")
        assert (await client.ask()).body == b"abcd"
        assert g.app.ends == [End.COMPLETE] * 2


async def test_an_empty_response_until_the_end_of_the_connection():
    async with gate(says(b"HTTP/1.1 200 OK\r\n\r\n", close=True)) as g:
        client = await g.client()
        message = await client.ask()
        assert (message.status, message.body) == (200, b"")


async def test_empty_chunked_and_empty_lengths():
    async with gate(says(CHUNKED_HEAD + b"0\r\n\r\n")) as g:
        client = await g.client()
        assert (await client.ask()).body == b""
        assert (await client.ask()).chunks == []
    async with gate(says(response(b""))) as g:
        client = await g.client()
        assert (await client.ask()).header(b"content-length") == b"0"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\n",
    ],
)
async def test_head_has_no_content(answer):
    async with gate(says(answer)) as g:
        client = await g.client()
        for _ in range(3):
            client.send(b"HEAD / HTTP/1.1\r\nHost: g\r\n\r\n")
            message = await client.response(b"HEAD")
            assert message.header(b"content-length") == (b"5" if b"Length" in answer else None)
        client.send(b"HEAD / HTTP/1.1\r\nHost: g\r\nConnection: close\r\n\r\n")
        await client.head()
        assert await client.rest() == b""
        assert g.engine.connections == 1


async def test_head_answered_with_content_anyway():
    async with gate(says(response(b"wrong"))) as g:
        client = await g.client()
        for _ in range(3):
            client.send(b"HEAD / HTTP/1.1\r\nHost: g\r\nConnection: keep-alive\r\n\r\n")
            assert (await client.response(b"HEAD")).header(b"content-length") == b"5"
        client.send(b"HEAD / HTTP/1.1\r\nHost: g\r\nConnection: close\r\n\r\n")
        await client.head()
        assert await client.rest() == b""
        assert g.engine.connections == 4


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
@pytest.mark.parametrize("more", [b"", b"Content-Length: 5\r\n"])
async def test_statuses_without_content(status, more):
    async with gate(says(b"HTTP/1.1 " + status + b"\r\nETag: x\r\n" + more + b"\r\n")) as g:
        client = await g.client()
        for _ in range(3):
            message = await client.ask()
            assert message.start == b"HTTP/1.1 " + status
            assert message.header(b"etag") == b"x"
            assert message.header(b"transfer-encoding") is None
            assert message.header(b"content-length") == (b"5" if more and status[:3] == b"304" else None)
        assert g.engine.connections == 1


async def test_204_with_content_anyway():
    async with gate(says(b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\nwrong")) as g:
        client = await g.client()
        for _ in range(3):
            assert (await client.ask()).status == 204


async def test_the_engines_100_is_dropped_and_its_103_passes():
    answer = (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\nConnection: x\r\n\r\n"
        + response()
    )
    async with gate(says(answer)) as g:
        client = await g.client()
        client.send(request())
        hints = await client.head()
        assert (hints.start, hints.headers) == (b"HTTP/1.1 103 Early Hints", [(b"Link", b"</a>")])
        assert (await client.response()).body == b"world"
        client.send(b"GET / HTTP/1.0\r\n\r\n")
        assert (await client.head()).status == 200
        assert [listener.status for listener in g.app.requests] == [200, 200]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhiEXTRA",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhiHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhiHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n\r\nevil",
    ],
)
async def test_connections_that_cannot_be_used_again_are_not(answer):
    async with gate(says(answer)) as g:
        client = await g.client()
        for number in range(3):
            assert (await client.ask()).body == b"hi"
            assert g.engine.connections == number + 1


async def test_an_engine_that_speaks_out_of_turn_is_not_asked_again_on_that_connection():
    speak = asyncio.Event()

    async def script(side: EngineSide) -> None:
        await side.request()
        side.send(response(b"one"))
        await speak.wait()
        side.send(response(b"evil"))
        await side.rest()

    async with gate(script) as g:
        client = await g.client()
        assert (await client.ask()).body == b"one"
        assert g.server.pool.idle_connections == 1
        speak.set()
        await until(lambda: g.server.pool.idle_connections == 0)
        assert (await client.ask()).body == b"one"
        assert g.engine.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 099 Odd\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX : y\r\n\r\n",
        b"HTTP/1.1 200 OK\nX: y\n\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nhi!",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 101 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 3000,
    ],
)
async def test_what_is_no_answer_is_a_bad_response(answer):
    async with gate(says(answer)) as g:
        client = await g.client()
        message = await client.ask()
        assert (message.status, message.header(b"x-end")) == (599, b"engine_bad_response")
        assert g.app.ends == [End.ENGINE_BAD_RESPONSE]
        assert (await client.ask()).status == 599  # the client's connection lives on


async def test_a_bad_chunk_in_mid_stream_cuts_the_response():
    async with gate(says(CHUNKED_HEAD + b"2\r\nhi\r\n", b"zz\r\n")) as g:
        client = await g.client()
        message = await client.ask()
        assert (message.status, message.complete, message.body) == (200, False, b"hi")
        await until(lambda: g.app.ends == [End.ENGINE_BAD_RESPONSE])


async def test_response_headers_of_the_application_replace_the_engines():
    app = App(
        lambda exchange: exchange.forward(((b"Host", b"inner"), (b"x-new", b"1")), ((b"Server", b"gate"),))
    )
    async with gate(says(response(b"", b"200 OK", b"server: engine")), app=app) as g:
        client = await g.client()
        message = await client.ask()
        assert message.header(b"server") == b"gate"
        assert g.engine.seen[0].header(b"host") == b"inner"
        assert g.engine.seen[0].header(b"x-new") == b"1"


async def test_local_replies_are_well_formed():
    replies = iter([(200, b"body"), (204, b""), (304, b""), (418, b"")])

    def decide(exchange):
        status, body = next(replies)
        exchange.refuse(status, ((b"x-a", b"b"),), body)

    async with gate(app=App(decide)) as g:
        client = await g.client()
        message = await client.ask(b"HEAD", body=b"")
        assert (message.header(b"content-length"), message.header(b"x-a")) == (b"4", b"b")
        assert (message.header(b"date") or b"").endswith(b" GMT")
        assert (await client.ask()).start == b"HTTP/1.1 204 No Content"
        assert (await client.ask()).header(b"content-length") is None
        assert (await client.ask()).start.startswith(b"HTTP/1.1 418 ")


async def test_half_closed_clients_are_answered_where_the_setting_says_so():
    async with gate(limits=Limits(half_close=True)) as g:
        client = await g.client()
        client.send(request(body=b"1") + request(body=b"2"))
        client.writer.write_eof()
        assert (await client.response()).body == b"echo:1"
        last = await client.response()
        assert last.body == b"echo:2"
        assert await client.rest() == b""
        assert g.app.ends == [End.COMPLETE] * 2


async def test_half_closed_clients_have_left_by_default():
    asked = asyncio.Event()

    async def script(side: EngineSide) -> None:
        await side.request()
        asked.set()
        assert await side.rest() == b""

    async with gate(script) as g:
        client = await g.client()
        client.send(request())
        await asked.wait()
        client.writer.write_eof()
        await until(lambda: g.app.ends == [End.CLIENT_GONE])
        assert await client.rest() == b""


async def test_a_local_reply_reaches_a_client_that_has_half_closed():
    async with gate(app=App(lambda exchange: exchange.refuse(429, (), b"busy"))) as g:
        client = await g.client()
        client.send(request())
        client.writer.write_eof()
        assert (await client.response()).body == b"busy"
        assert await client.rest() == b""


async def test_drain_closes_idle_connections_and_lets_others_finish():
    app = App(lambda exchange: None)
    async with gate(answers, app) as g:
        idle, busy = await g.client(), await g.client()
        busy.send(request())
        await until(lambda: app.requests and g.server.open_connections == 2)
        g.server.drain()
        assert await idle.rest() == b""
        app.requests[0].exchange.forward()
        message = await busy.response()
        assert (message.status, message.header(b"connection")) == (200, b"close")
        assert await busy.rest() == b""


async def test_closing_waits_for_what_is_in_flight_and_then_cuts_it():
    app = App(lambda exchange: None)
    async with gate(app=app) as g:
        quick, slow = await g.client(), await g.client()
        quick.send(request())
        slow.send(request())
        await until(lambda: len(app.requests) == 2)
        closing = asyncio.ensure_future(g.server.close(grace_s=0.3))
        app.requests[0].exchange.forward()
        await closing
        assert sorted(app.ends) == sorted([End.COMPLETE, End.ABORTED])
        bodies = sorted([(await side.response()).status for side in (quick, slow)])
        assert bodies == [200, 599]
