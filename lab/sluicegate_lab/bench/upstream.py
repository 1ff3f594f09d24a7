"""The engine stub behind every proxy of the benchmark: canned answers, and streams with timed chunks.

Each chunk carries the time at which it was handed to the kernel, so that whoever receives it knows its delay;
client and stub share a clock because they share a process. Chunks are staggered. Lateness against that schedule is
recorded, because a stub that falls behind would measure itself.

What it understands of HTTP is what the peers are known to send: a head, Content-Length, keep-alive.
"""

from __future__ import annotations

import random
import re
import socket
from time import monotonic_ns
from typing import Final

from sluicegate_lab.bench import BenchError
from sluicegate_lab.bench.reactor import Reactor

HOST: Final = "127.0.0.1"
#: What is read at once: a large body comes in pieces of this, so that it does not keep chunks from going out.
READ_BYTES: Final = 65_536
BACKLOG: Final = 1024
PHASE_SEED: Final = 7
#: Before the stamp in every chunk: 16 hexadecimal digits of the monotonic clock, ns.
MARK: Final = b'"content":" t'
STAMP_DIGITS: Final = 16

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_STREAMED = b'"stream":true'


def _whole(status: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


ANSWER: Final = _whole(
    b"200 OK",
    b'{"id":"chatcmpl-bench0123456789","object":"chat.completion","created":1764547200,"model":"bench-8b",'
    b'"choices":[{"index":0,"message":{"role":"assistant","content":"A short answer, as a classifier or a '
    b'router gives it.","refusal":null},"logprobs":null,"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":220,"completion_tokens":13,"total_tokens":233}}',
)
NOT_FOUND: Final = _whole(b"404 Not Found", b'{"error":{"message":"no such path","type":"not_found"}}')
HEALTHY: Final = _whole(b"200 OK", b'{"status":"ok"}')
STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def _chunked(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


def _event(delta: bytes, finish: bytes) -> bytes:
    return (
        b'data: {"id":"chatcmpl-bench0123456789","object":"chat.completion.chunk","created":1764547200,'
        b'"model":"bench-8b","choices":[{"index":0,"delta":{%b},"logprobs":null,"finish_reason":%b}]}\n\n'
        % (delta, finish)
    )


ROLE_CHUNK: Final = _chunked(_event(b'"role":"assistant","content":""', b"null"))
#: About 220 bytes, as OpenAI-compatible servers send them; `%` is the stamp.
CHUNK: Final = _chunked(_event(MARK + b"0" * STAMP_DIGITS + b'"', b"null")).replace(
    b"0" * STAMP_DIGITS, b"%016x"
)
STREAM_END: Final = (
    _chunked(_event(b"", b'"stop"'))
    + _chunked(
        b'data: {"id":"chatcmpl-bench0123456789","object":"chat.completion.chunk","created":1764547200,'
        b'"model":"bench-8b","choices":[],"usage":{"prompt_tokens":220,"completion_tokens":100,'
        b'"total_tokens":320}}\n\n'
    )
    + _chunked(b"data: [DONE]\n\n")
    + b"0\r\n\r\n"
)


class Upstream:
    """Listens on a free port of the loopback. `streams` are the answers that are open now."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._listener = socket.create_server((HOST, 0), backlog=BACKLOG)
        self._listener.setblocking(False)
        self._connections: set[_Connection] = set()
        self.port: int = self._listener.getsockname()[1]
        self.streams: list[_Connection] = []
        reactor.add(self._listener, self._accept)

    def _accept(self, _events: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        self._connections.add(_Connection(self, self._reactor, sock))

    def end_streams(self) -> None:
        """End every open stream as an engine does: usage, `[DONE]`, the last chunk."""
        for connection in self.streams:
            connection.send(STREAM_END)
        self.streams.clear()

    def closed(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        if connection in self.streams:
            self.streams.remove(connection)

    def close(self) -> None:
        for connection in list(self._connections):
            connection.close()
        self._reactor.close(self._listener)


class _Connection:
    """One connection from a proxy; requests come one after another."""

    __slots__ = ("_head", "_reactor", "_remaining", "_reply", "_sock", "_upstream")

    def __init__(self, upstream: Upstream, reactor: Reactor, sock: socket.socket) -> None:
        self._upstream = upstream
        self._reactor = reactor
        self._sock = sock
        self._head = b""
        self._remaining = 0
        self._reply: bytes | None = None
        reactor.add(sock, self._on_ready)

    def _on_ready(self, _events: int) -> None:
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self.close()
        elif self._remaining:
            self._remaining -= len(data)
            self._answer_if_whole()
        else:
            self._head += data
            self._take_head()

    def _take_head(self) -> None:
        head = self._head
        end = head.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(head, 0, end)
        body_bytes = int(length[1]) if length else 0
        if length is None and not head.startswith((b"GET ", b"HEAD ")):
            raise BenchError("a proxy sent the engine stub a body without a Content-Length")
        got = len(head) - end - 4
        # The stub's own requests state what they want in the first bytes of their body.
        if body_bytes and got < min(body_bytes, 128):
            return
        self._head = b""
        self._remaining = body_bytes - got
        self._reply = self._reply_to(head)
        self._answer_if_whole()

    @staticmethod
    def _reply_to(head: bytes) -> bytes:
        if head.startswith(b"POST /v1/"):
            # The first token comes at once: what holds others back until a prompt has begun is let go.
            return STREAM_HEAD + ROLE_CHUNK + CHUNK % monotonic_ns() if _STREAMED in head else ANSWER
        return HEALTHY if head.startswith(b"GET /health") else NOT_FOUND

    def _answer_if_whole(self) -> None:
        if self._remaining > 0 or self._reply is None:
            return
        reply, self._reply = self._reply, None
        self.send(reply)
        if reply.startswith(STREAM_HEAD):
            self._upstream.streams.append(self)

    def send(self, data: bytes) -> None:
        """Send all of it at once: what is sent is far smaller than the kernel's buffer."""
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        except ConnectionError:
            self.close()
            return
        if sent != len(data):
            raise BenchError("the engine stub's send buffer is full: a proxy stopped reading a stream")

    def close(self) -> None:
        self._reactor.close(self._sock)
        self._upstream.closed(self)


class ChunkClock:
    """Sends the open streams' chunks, each stream's at its own phase of the interval.

    Phases are random, as those of independent requests are, and the same in every run: now and then a few
    chunks come almost at once, and what a proxy takes for one is what the next must wait.

    Attributes:
        lateness_us: how long after its time each chunk was sent, while `recording`.
    """

    def __init__(self, upstream: Upstream, chunks_per_stream_s: float) -> None:
        self._streams = list(upstream.streams)
        if not self._streams:
            raise BenchError("no stream has reached the engine stub")
        interval_ns = round(1e9 / chunks_per_stream_s)
        rng = random.Random(PHASE_SEED)
        phases_ns = sorted(rng.randrange(interval_ns) for _ in self._streams)
        following_ns = [*phases_ns[1:], phases_ns[0] + interval_ns]
        self._gaps_ns = [after - before for before, after in zip(phases_ns, following_ns, strict=True)]
        self._next = 0
        self.due_ns = monotonic_ns()
        self.recording = False
        self.lateness_us: list[float] = []

    def fire(self, now_ns: int) -> None:
        place = self._next
        self._streams[place].send(CHUNK % monotonic_ns())
        if self.recording:
            self.lateness_us.append((now_ns - self.due_ns) / 1e3)
        self.due_ns += self._gaps_ns[place]
        self._next = (place + 1) % len(self._streams)
