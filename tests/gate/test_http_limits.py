"""Every limit that a client can hit: its answer, its name, and that others are served meanwhile."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from tests.gate.wire import App, gate, request, turn, until

from sluicegate_sidecar.http import End, Limits

FAST = 0.05


@pytest.mark.parametrize(
    ("data", "status", "kind"),
    [
        (b"GET / HTTP/1.1\r\nHost: g\r\nX: " + b"y" * 3000 + b"\r\n\r\n", 431, "header_bytes"),
        (b"GET / HTTP/1.1\r\nHost: g\r\nX: " + b"y" * 3000, 431, "header_bytes"),
        (b"GET / HTTP/1.1\r\nHost: g\r\n" + b"X: y\r\n" * 10 + b"\r\n", 431, "header_count"),
        (b"GET /" + b"y" * 1000 + b" HTTP/1.1\r\nHost: g\r\n\r\n", 414, "target_bytes"),
        (b"POST / HTTP/1.1\r\nHost: g\r\nContent-Length: 1001\r\n\r\n", 413, "body_bytes"),
        (b"POST / HTTP/1.1\r\nHost: g\r\nContent-Length: 99999999999999999999\r\n\r\n", 400, "bad_request"),
        (b"POST / HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n", 413, "body_bytes"),
        (
            b"POST / HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 1001,
            413,
            "body_bytes",
        ),
        (
            b"POST / HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
            413,
            "body_bytes",
        ),
    ],
)
async def test_sizes(data, status, kind):
    limits = Limits(header_bytes=2000, header_count=10, target_bytes=1000, body_bytes=1000)
    async with gate(limits=limits) as g:
        client = await g.client()
        client.send(data)
        message = await client.response()
        assert (message.status, message.header(b"connection")) == (status, b"close")
        assert json.loads(message.body)["error"]["code"] == kind
        assert g.app.kinds == [kind]
        assert await client.rest() == b""
        await g.works()


@pytest.mark.parametrize("size", [1000, 999])
async def test_sizes_at_the_limit_pass(size):
    async with gate(limits=Limits(body_bytes=1000, header_count=2)) as g:
        client = await g.client()
        assert (await client.ask(body=b"x" * size)).status == 200
        client.send(b"POST / HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % size)
        client.send(b"x" * size + b"\r\n0\r\n\r\n")
        assert (await client.response()).status == 200


async def test_a_body_too_large_is_answered_while_it_is_still_being_sent():
    async with gate(limits=Limits(body_bytes=1000)) as g:
        client = await g.client()
        client.send(request(body=b"x" * 5_000_000))
        assert (await client.response()).status == 413
        assert await client.rest() == b""


async def test_all_bodies_together():
    app = App(lambda exchange: None)
    async with gate(app=app, limits=Limits(body_bytes_total=2500)) as g:
        clients = [await g.client() for _ in range(3)]
        for client in clients[:2]:
            client.send(request(body=b"x" * 1000))
        await until(lambda: len(app.requests) == 2)
        clients[2].send(request(body=b"x" * 1000))
        assert (await clients[2].response()).status == 503
        assert app.kinds == ["body_bytes_total"]
        for listener in app.requests:
            listener.exchange.refuse(429)
        await g.idle()
        app.decide = lambda exchange: exchange.forward()
        await g.works()


async def test_connections():
    async with gate(limits=Limits(connections=2)) as g:
        first, second = await g.client(), await g.client()
        await until(lambda: g.server.open_connections == 2)
        third = await g.client()
        assert (await third.response()).status == 503
        assert g.app.kinds == ["connections"]
        assert (await first.ask()).status == 200
        second.close()
        await until(lambda: g.server.open_connections == 1)
        await g.works()


async def test_an_idle_connection_is_closed_silently():
    async with gate(limits=Limits(idle_s=FAST)) as g:
        fresh, used = await g.client(), await g.client()
        assert (await used.ask()).status == 200
        assert await fresh.rest() == b""
        assert await used.rest() == b""
        assert g.app.kinds == []


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (b"GET / HTTP/1.1\r\nHost:", "header_s"),
        (b"G", "header_s"),
        (b"POST / HTTP/1.1\r\nHost: g\r\nContent-Length: 9\r\n\r\n", "body_s"),
        (b"POST / HTTP/1.1\r\nHost: g\r\nContent-Length: 9\r\n\r\nabc", "body_s"),
        (b"POST / HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nab", "body_s"),
    ],
)
async def test_a_request_that_does_not_go_on(sent, kind):
    async with gate(limits=Limits(header_s=FAST, body_idle_s=FAST)) as g:
        client = await g.client()
        client.send(sent)
        message = await client.response()
        assert (message.status, g.app.kinds) == (408, [kind])
        assert await client.rest() == b""


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\nHost: g\r\nX: ", request(body=b"x" * 100_000)[:-99_000]]
)
async def test_a_request_that_drips(sent):
    """Each byte comes well in time, but the whole never ends."""
    async with gate(limits=Limits(header_s=2 * FAST, body_s=2 * FAST, body_idle_s=1000)) as g:
        client = await g.client()
        client.send(sent)
        await until(lambda: drip(client) or g.app.kinds)
        assert (await client.response()).status == 408


def drip(client) -> None:
    client.send(b"x")


async def test_what_drips_costs_no_more_than_it_sends():
    app = App(lambda exchange: exchange.refuse(200, (), b""))
    async with gate(app=app) as g:
        client = await g.client()
        client.send(b"POST / HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n")
        client.send(b"1\r\nx\r\n" * 40_000)
        await until(lambda: g.server.body_bytes == 40_000)
        connection = next(iter(g.server._clients))
        assert len(connection._incoming._pieces) < 10
        client.send(b"0\r\n\r\n")
        assert (await client.response()).status == 200
        assert app.bodies == [b"x" * 40_000]


async def test_a_client_that_does_not_close_after_an_error_is_closed():
    async with gate(limits=Limits(linger_s=FAST)) as g:
        client = await g.client()
        client.send(b"nonsense\r\n\r\n")
        assert (await client.response()).status == 400
        await until(lambda: g.server.open_connections == 0)


async def test_ends_of_refused_requests_are_not_reported():
    """A request that was never whole has no exchange, and so no end."""
    async with gate(limits=Limits(body_bytes=10)) as g:
        client = await g.client()
        client.send(request(body=b"x" * 11))
        assert (await client.response()).status == 413
        assert (g.app.requests, g.app.ends) == ([], [])
        await g.works()
        assert g.app.ends == [End.COMPLETE]


async def test_many_requests_in_one_read_leave_others_their_turn():
    """What one connection sends at once is worked off in turns: another's request is answered between them."""
    done: list[bytes] = []
    app = App(lambda exchange: (done.append(exchange.path), exchange.refuse(429)))
    async with gate(app=app) as g:
        greedy, other = await g.client(), await g.client()
        greedy.send(request(b"POST", b"/many", b"") * 5000)
        await until(lambda: done)
        other.send(request(b"POST", b"/other"))
        assert (await other.response()).status == 429
        for _ in range(5000):
            assert (await greedy.response()).status == 429
        assert done.index(b"/other") < 2000
        assert len(done) == 5001


async def test_many_chunks_in_one_read_leave_others_their_turn():
    done: list[bytes] = []
    app = App(lambda exchange: (done.append(exchange.path), exchange.refuse(429)))
    async with gate(app=app) as g:
        greedy, other = await g.client(), await g.client()
        greedy.send(b"POST /many HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n")
        greedy.send(b"1\r\nx\r\n" * 40_000 + b"0\r\n\r\n")
        await until(lambda: g.server.body_bytes)
        other.send(request(b"POST", b"/other"))
        assert (await other.response()).status == 429
        assert (await greedy.response()).status == 429
        assert done == [b"/other", b"/many"]
        assert app.bodies[1] == b"x" * 40_000


async def test_a_large_body_is_read_in_turns():
    """However much the kernel has ready, one turn of the loop takes one read of it."""
    app = App(lambda exchange: exchange.refuse(429))
    async with gate(app=app) as g:
        client = await g.client()
        client.send(request(body=b"x" * 30_000_000))
        seen = [0]
        while not app.requests:
            await turn()
            seen.append(g.server.body_bytes)
        steps = [after - before for before, after in pairwise(seen)]
        assert max(steps) <= 512 * 1024
        assert (await client.response()).status == 429


async def test_a_large_body_is_written_in_turns():
    """However much the kernel would take, one turn of the loop writes one part of it."""
    app = App(lambda exchange: None)
    async with gate(app=app) as g:
        client = await g.client()
        client.send(request(body=b"x" * 10_000_000))
        await until(lambda: app.requests)
        app.requests[0].exchange.forward()
        await until(lambda: g.server.pool.open_connections)
        connection = next(iter(g.server.pool._open))
        await until(lambda: connection._out)
        left = []
        while connection._out:
            left.append(sum(map(len, connection._out)) - connection._out_at)
            await turn()
        steps = [before - after for before, after in pairwise(left)]
        assert max(steps) <= 2 * g.server.limits.body_write_bytes
        assert len([step for step in steps if step]) > 10
        assert (await client.response()).body == b"echo:" + b"x" * 10_000_000
