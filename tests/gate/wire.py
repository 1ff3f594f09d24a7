"""What the data path's tests stand on: a raw client, a scripted engine, and a gate between them.

Everything is on real sockets and speaks bytes. Nothing here shares code with the data path: responses are
read by a reader of its own, so that the two cannot be wrong together.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from sluicegate_sidecar.http import End, Exchange, Headers, Limits, LocalReply, Server, serve

#: A test that waits this long for one event has failed.
PATIENCE_S = 10.0

#: Room in the kernel for what a test does not read, where there must be little of it.
SMALL_BUFFER_BYTES = 16 * 1024

Script = Callable[["EngineSide"], Awaitable[None]]


async def turn() -> None:
    """One turn of the loop."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    loop.call_soon(future.set_result, None)
    await future


async def until(condition: Callable[[], object]) -> None:
    """Turn the loop until the condition holds; AssertionError when it does not for `PATIENCE_S`."""
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + PATIENCE_S
    while not condition():
        assert loop.time() < give_up_s, "the condition never held"
        await turn()


def open_fds() -> int:
    """Sockets of this process. Other descriptors are not counted: the loop opens some of its own, late."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


@dataclass
class Message:
    """A request or response as read from the wire."""

    start: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""
    complete: bool = True  # False: the connection ended in its middle
    chunks: list[bytes] = field(default_factory=list)

    @property
    def status(self) -> int:
        return int(self.start.split(b" ")[1])

    def header(self, name: bytes) -> bytes | None:
        """The only value of that header."""
        values = [value for key, value in self.headers if key.lower() == name]
        assert len(values) <= 1, f"{name!r} more than once"
        return values[0] if values else None


class Side:
    """One end of a raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def line(self) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(b"\n"), PATIENCE_S)

    async def exactly(self, count: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(count), PATIENCE_S)

    async def rest(self) -> bytes:
        """All that comes until the other side closes; a reset ends it as well."""
        data = b""
        with suppress(ConnectionError):
            while piece := await asyncio.wait_for(self.reader.read(65536), PATIENCE_S):
                data += piece
        return data

    async def head(self) -> Message:
        block = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        start, *lines = block[:-4].split(b"\r\n")
        headers = []
        for line in lines:
            name, _, value = line.partition(b":")
            headers.append((name, value.strip()))
        return Message(start, headers)

    async def chunked(self, message: Message) -> None:
        """Read a chunked body."""
        while True:
            line = await self.line()
            size = int(line.partition(b";")[0].strip(), 16)
            if not size:
                break
            message.chunks.append(await self.exactly(size))
            assert await self.exactly(2) == b"\r\n"
        while await self.line() != b"\r\n":
            pass
        message.body = b"".join(message.chunks)

    def close(self) -> None:
        self.writer.close()

    def shut(self) -> None:
        """Close the sending half this instant: the FIN is on its way before the loop turns."""
        with self.writer.get_extra_info("socket").dup() as sock:
            sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Close with a reset."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class ClientSide(Side):
    """A client of the gate."""

    @classmethod
    async def connect(cls, port: int) -> ClientSide:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    @classmethod
    async def connect_small(cls, port: int) -> ClientSide:
        """The same, with little room in the kernel for what is not read."""
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        return cls(*await asyncio.open_connection(sock=sock))

    async def response(self, method: bytes = b"POST") -> Message:
        """Read one response (not 1xx) to its end, however that is marked."""
        message = await self.head()
        while message.status < 200:
            message = await self.head()
        if method == b"HEAD" or message.status in (204, 304):
            return message
        length = message.header(b"content-length")
        coding = message.header(b"transfer-encoding")
        assert length is None or coding is None
        try:
            if coding is not None:
                assert coding == b"chunked"
                await self.chunked(message)
            elif length is not None:
                message.body = await self.exactly(int(length))
            else:
                assert message.header(b"connection") == b"close"
                while piece := await asyncio.wait_for(self.reader.read(65536), PATIENCE_S):
                    message.body += piece
        except asyncio.IncompleteReadError as error:
            message.complete = False
            message.body = b"".join(message.chunks) + error.partial
        except ConnectionError:
            message.complete = False
        return message

    async def ask(self, method: bytes = b"POST", path: bytes = b"/v1/x", body: bytes = b"hello") -> Message:
        """One request and its response."""
        self.send(request(method, path, body))
        return await self.response(method)


class EngineSide(Side):
    """The engine's end of a connection with the gate."""

    engine: Engine

    async def request(self) -> Message:
        """Read one request."""
        message = await self.head()
        self.engine.seen.append(message)
        length = message.header(b"content-length")
        if message.header(b"transfer-encoding") is not None:
            await self.chunked(message)
        elif length is not None:
            message.body = await self.exactly(int(length))
        return message


def request(
    method: bytes = b"POST",
    path: bytes = b"/v1/x",
    body: bytes = b"hello",
    *headers: bytes,
    host: bytes = b"gate",
) -> bytes:
    """The bytes of a request."""
    lines = [b"%b %b HTTP/1.1" % (method, path), b"Host: " + host, *headers]
    if body or method == b"POST":
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def response(body: bytes = b"world", status: bytes = b"200 OK", *headers: bytes) -> bytes:
    """The bytes of a response with a length."""
    lines = [b"HTTP/1.1 " + status, *headers, b"Content-Length: %d" % len(body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


class Listener:
    """Notes what it is told."""

    def __init__(self, app: App, exchange: Exchange) -> None:
        self.app = app
        self.exchange = exchange
        self.status = 0
        self.headers: Headers = ()
        self.body = b""
        self.pieces = 0
        self.ends: list[End] = []

    def on_response_head(self, status: int, headers: Headers) -> None:
        self.status = status
        self.headers = headers

    def on_response_body(self, data: bytes) -> None:
        self.pieces += 1
        if self.app.keeps_bodies:
            self.body += data

    def on_end(self, end: End) -> None:
        self.ends.append(end)
        self.app.ends.append(end)

    def failure_reply(self, end: End) -> LocalReply:
        return LocalReply(599, ((b"x-end", end.value.encode()),), b"failed")


class App:
    """Passes everything on, or does what it is told to."""

    def __init__(self, decide: Callable[[Exchange], None] | None = None, keeps_bodies: bool = True) -> None:
        self.decide = decide or (lambda exchange: exchange.forward())
        self.keeps_bodies = keeps_bodies
        self.requests: list[Listener] = []
        self.bodies: list[bytes] = []
        self.ends: list[End] = []
        self.kinds: list[str] = []

    def on_request(self, exchange: Exchange) -> None:
        listener = Listener(self, exchange)
        exchange.listener = listener
        self.requests.append(listener)
        self.bodies.append(exchange.body)
        self.decide(exchange)

    def on_protocol_error(self, kind: str) -> None:
        self.kinds.append(kind)


async def answers(side: EngineSide) -> None:
    """The plain engine: answers each request with its body, until the gate closes."""
    while True:
        message = await side.request()
        side.send(response(b"echo:" + message.body))


class Engine:
    """A scripted engine: `script` is run for each connection."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.connections = 0
        self.seen: list[Message] = []
        self.port = 0
        self.sides: list[EngineSide] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        side = EngineSide(reader, writer)
        side.engine = self
        self.sides.append(side)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                await self.script(side)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for side in self.sides:
            side.writer.transport.abort()


class Gate:
    """A gate between a scripted engine and raw clients."""

    def __init__(self, app: App, engine: Engine, server: Server) -> None:
        self.app = app
        self.engine = engine
        self.server = server
        self._clients: list[ClientSide] = []

    async def client(self) -> ClientSide:
        client = await ClientSide.connect(self.server.port)
        self._clients.append(client)
        return client

    def forget(self, client: ClientSide) -> None:
        """This client was closed by the test."""
        self._clients.remove(client)

    async def works(self) -> None:
        """The next request on a new connection works."""
        client = await self.client()
        message = await client.ask()
        assert (message.status, message.complete) == (200, True)
        client.close()

    async def turn_of_the_gate(self) -> None:
        """Let the gate read what was sent so far: the loop polls the sockets between two turns."""
        await turn()
        await turn()

    async def idle(self) -> None:
        """Nothing is in flight, and no byte of a request is held."""
        await until(lambda: self.server.exchanges == 0 and self.server.body_bytes == 0)
        assert all(len(listener.ends) == 1 for listener in self.app.requests)

    def close_clients(self) -> None:
        for client in self._clients:
            client.writer.transport.abort()


@asynccontextmanager
async def gate(
    script: Script = answers, app: App | None = None, limits: Limits | None = None
) -> AsyncIterator[Gate]:
    """A gate; when it is left, nothing may be in flight, nothing held, and no descriptor leaked."""
    before = open_fds()
    app = app or App()
    engine = Engine(script)
    await engine.listen()
    server = await serve(app, upstream_host="127.0.0.1", upstream_port=engine.port, limits=limits)
    running = Gate(app, engine, server)
    try:
        yield running
        running.close_clients()
        await running.idle()
    finally:
        running.close_clients()
        await server.close()
        await engine.close()
    await until(lambda: open_fds() <= before)
    assert server.open_connections == 0
    assert server.pool.open_connections == 0
    assert (server.exchanges, server.body_bytes) == (0, 0)
