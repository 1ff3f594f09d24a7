"""The data path against another proxy: the same requests and the same engine, the same bytes on both sides.

The other proxy is aiohttp, server and client: none of its code is ours, and what it does with framing and
headers has been tried by many. Requests and responses are generated; each pair goes through both proxies to
the same scripted engine. What the engine saw and what the client got must be equal after normalisation, which
is spelled out in `seen_by_engine` and `seen_by_client`: what belongs to one hop, and what a proxy may add.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp
import pytest
import uvloop
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict
from tests.gate.wire import App, ClientSide, Engine, EngineSide, Message
from yarl import URL

from sluicegate_sidecar.http import Server, serve

#: Stay on one hop, or are a proxy's own to set.
HOP = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"date", b"server")
)


@dataclass(frozen=True)
class Asked:
    """A request."""

    method: bytes
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    chunks: tuple[int, ...] | None  # sizes of its chunks; None: it has a length
    cuts: tuple[int, ...]  # where it is cut into writes

    def wire(self) -> bytes:
        head = self.method + b" " + self.target + b" HTTP/1.1\r\nHost: gate.test\r\n"
        head += b"".join(name + b": " + value + b"\r\n" for name, value in self.headers)
        return head + framed(self.body, self.chunks, always=self.method == b"POST")


@dataclass(frozen=True)
class Answered:
    """A response."""

    status: int
    reason: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    framing: str  # length, chunked, close
    chunks: tuple[int, ...]
    cuts: tuple[int, ...]

    def wire(self, method: bytes) -> bytes:
        head = b"HTTP/1.1 %d %b\r\n" % (self.status, self.reason)
        head += b"".join(name + b": " + value + b"\r\n" for name, value in self.headers)
        if self.status in (204, 304):
            return head + b"\r\n"
        if method == b"HEAD":
            return head + b"Content-Length: %d\r\n\r\n" % len(self.body)
        if self.framing == "close":
            return head + b"Connection: close\r\n\r\n" + self.body
        return head + framed(self.body, self.chunks if self.framing == "chunked" else None, always=True)


def framed(body: bytes, chunks: tuple[int, ...] | None, always: bool) -> bytes:
    """The framing headers, the end of the head, and the body."""
    if chunks is None:
        length = b"Content-Length: %d\r\n" % len(body) if body or always else b""
        return length + b"\r\n" + body
    out, at = b"Transfer-Encoding: chunked\r\n\r\n", 0
    for size in (*chunks, len(body)):
        piece = body[at : at + size]
        at += len(piece)
        if piece:
            out += b"%x\r\n%b\r\n" % (len(piece), piece)
    return out + b"0\r\n\r\n"


def cut(data: bytes, cuts: tuple[int, ...]) -> Iterator[bytes]:
    """The data in pieces."""
    places = sorted({place % (len(data) + 1) for place in cuts})
    for start, end in zip([0, *places], [*places, len(data)], strict=True):
        if start < end:
            yield data[start:end]


TOKENS = st.from_regex(rb"\A[a-z][a-z0-9-]{0,12}\Z")
NAMES = st.builds(lambda prefix, token: prefix + token, st.sampled_from([b"x-", b"X-", b"ce-"]), TOKENS)
VALUES = st.from_regex(rb"\A(?:[!-~](?:[ -~]{0,30}[!-~])?)?\Z")
KNOWN = st.sampled_from(
    [
        (b"Content-Type", b"application/json"),
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"Cache-Control", b"no-cache"),
        (b"ETag", b'"abc"'),
        (b"Vary", b"accept, origin"),
        (b"Content-Encoding", b"br"),
        (b"Retry-After", b"3"),
    ]
)


def unique(headers: list[tuple[bytes, bytes]]) -> tuple[tuple[bytes, bytes], ...]:
    """Each name once: the other proxy's client drops some of those that are repeated in another case."""
    return tuple({name.lower(): (name, value) for name, value in headers}.values())


HEADERS = st.lists(st.tuples(NAMES, VALUES) | KNOWN, max_size=6).map(unique)
LONG_BODIES = st.builds(
    lambda seed, times: seed * times, st.binary(min_size=1, max_size=9), st.integers(1, 6000)
)
BODIES = st.binary(max_size=300) | LONG_BODIES
SIZES = st.lists(st.integers(1, 5000), max_size=5).map(tuple)
CUTS = st.lists(st.integers(0, 100_000), max_size=4).map(tuple)
PATHS = st.from_regex(rb"\A/(?:[A-Za-z0-9._~!$&'()*+,;=:@-]{1,9}/?){0,3}(?:%[0-9A-F]{2})?\Z")
QUERIES = st.from_regex(rb"\A(?:\?[A-Za-z0-9._~=&+-]{1,20})?\Z")
TARGETS = st.builds(bytes.__add__, PATHS, QUERIES)


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    method = draw(
        st.sampled_from([b"GET", b"POST", b"POST", b"PUT", b"DELETE", b"PATCH", b"OPTIONS", b"HEAD"])
    )
    body = draw(BODIES) if method in (b"POST", b"PUT", b"PATCH") else b""
    chunks = draw(st.none() | SIZES) if body else None
    return Asked(method, draw(TARGETS), draw(HEADERS), body, chunks, draw(CUTS))


RESPONSES = st.builds(
    Answered,
    st.sampled_from([200, 200, 201, 204, 206, 304, 400, 404, 422, 429, 500, 503, 599]),
    st.sampled_from([b"OK", b"Not Quite", b"A-b c"]),
    HEADERS,
    BODIES,
    st.sampled_from(["length", "chunked", "close"]),
    SIZES,
    CUTS,
)


class AiohttpProxy:
    """The other proxy."""

    def __init__(self, engine_port: int) -> None:
        self._origin = f"http://127.0.0.1:{engine_port}"
        self.port = 0

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            auto_decompress=False,
            skip_auto_headers=["User-Agent", "Accept", "Accept-Encoding", "Content-Type"],
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._runner = web.ServerRunner(web.Server(self._handle, auto_decompress=False), access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        headers = passing(request.raw_headers, also=b"content-length")
        async with self._session.request(
            request.method,
            URL(self._origin + request.raw_path, encoded=True),
            headers=headers,
            data=body or None,
            allow_redirects=False,
        ) as answer:
            response = web.StreamResponse(status=answer.status, reason=answer.reason)
            response.headers.clear()
            response.headers.extend(passing(answer.raw_headers, also=b""))
            if "Content-Type" not in response.headers:
                response.headers["X-No-Type"] = "1"
            await response.prepare(request)
            if request.method != "HEAD" and answer.status not in (204, 304):
                async for piece in answer.content.iter_any():
                    await response.write(piece)
            await response.write_eof()
            return response


def passing(raw: tuple[tuple[bytes, bytes], ...], also: bytes) -> CIMultiDict[str]:
    """Header lines that a proxy passes on."""
    kept: CIMultiDict[str] = CIMultiDict()
    for name, value in raw:
        if name.lower() not in HOP and name.lower() != also:
            kept.add(name.decode("ascii"), value.decode("ascii"))
    return kept


class Bench:
    """The engine and both proxies, on a loop of their own."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self.engine = Engine(self._script)
        self.asked: Asked | None = None
        self.answer: Answered | None = None
        self.gate: Server
        self.other: AiohttpProxy

    async def _script(self, side: EngineSide) -> None:
        while True:
            message = await side.request()
            assert self.answer is not None
            method = message.start.partition(b" ")[0]
            for piece in cut(self.answer.wire(method), self.answer.cuts):
                side.send(piece)
                await asyncio.get_running_loop().run_in_executor(None, int)  # the piece goes out by itself
            if self.answer.framing == "close" and method != b"HEAD" and self.answer.status not in (204, 304):
                return

    async def start(self) -> None:
        await self.engine.listen()
        self.gate = await serve(App(), upstream_host="127.0.0.1", upstream_port=self.engine.port)
        self.other = AiohttpProxy(self.engine.port)
        await self.other.start()

    async def close(self) -> None:
        await self.other.close()
        await self.gate.close()
        await self.engine.close()

    async def through(self, port: int, asked: Asked) -> tuple[Message, Message]:
        """What the engine saw and what the client got through the proxy on that port."""
        self.engine.seen.clear()
        client = await ClientSide.connect(port)
        for piece in cut(asked.wire(), asked.cuts):
            client.send(piece)
            await client.writer.drain()
        got = await client.response(asked.method)
        client.close()
        assert len(self.engine.seen) == 1
        return self.engine.seen[0], got


def fields(message: Message) -> list[tuple[bytes, bytes]]:
    """Header lines that concern both hops; of each name in order."""
    kept = [(name.lower(), value) for name, value in message.headers if name.lower() not in HOP]
    return sorted(kept, key=lambda field: field[0])


def seen_by_engine(message: Message) -> object:
    """A body without a length and one of length 0 are the same; so is the framing of any other."""
    kept = [
        field for field in fields(message) if field[0] not in (b"content-length", b"content-type", b"host")
    ]
    octets = (b"content-type", b"application/octet-stream")
    types = [field for field in fields(message) if field[0] == b"content-type" and field != octets]
    return message.start, kept, types, message.body


def seen_by_client(message: Message) -> object:
    """aiohttp adds a content type where there is none: it is marked, and both are dropped then."""
    kept = fields(message)
    if (b"x-no-type", b"1") in kept:
        kept = [field for field in kept if field[0] not in (b"x-no-type", b"content-type")]
    return message.start, kept, message.body, message.complete


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench()
    made.runner.run(made.start())
    yield made
    made.runner.run(made.close())
    made.runner.close()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(asked=requests(), answer=RESPONSES)
def test_both_proxies_pass_the_same(bench: Bench, asked: Asked, answer: Answered) -> None:
    async def compare() -> None:
        bench.answer = answer
        engine_saw, client_got = await bench.through(bench.gate.port, asked)
        engine_saw_other, client_got_other = await bench.through(bench.other.port, asked)
        assert seen_by_engine(engine_saw) == seen_by_engine(engine_saw_other)
        assert seen_by_client(client_got) == seen_by_client(client_got_other)
        # Neither is trusted to be right alone: what was asked and answered is known.
        assert engine_saw.body == asked.body
        assert client_got.status == answer.status
        if asked.method != b"HEAD" and answer.status not in (204, 304):
            assert (client_got.body, client_got.complete) == (answer.body, True)

    bench.runner.run(compare())
