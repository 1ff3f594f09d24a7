"""The load in front of a proxy: requests one after another, requests by the clock, streams, large bodies.

Each client checks what it gets: another status than expected, or a connection closed that should live on, ends
the benchmark, because a cost per request means nothing when the requests fail.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from time import monotonic_ns
from typing import Final

from sluicegate_lab.bench import BenchError
from sluicegate_lab.bench.reactor import READ, WRITE, Reactor, connect
from sluicegate_lab.bench.upstream import HOST, MARK, READ_BYTES, STAMP_DIGITS

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_PREFIX: Final = b'{"model":"bench-8b","stream":%b,"max_tokens":%d,"messages":[{"role":"user","content":"'
_SUFFIX: Final = b'"}]}'
#: Prose with the escapes that prompts have: a parser must look at each byte of it.
_TEXT: Final = (
    b'Summarise the report below in \\"plain\\" words.\\nRevenue grew by 4.2 % in the third quarter, while '
    b"costs for energy and freight fell; the outlook names two risks: currency, and a supplier in dispute. "
)
_BODY_PIECE_BYTES: Final = 65_536
_STAMPED_BYTES: Final = len(MARK) + STAMP_DIGITS


def post(body_bytes: int, *, stream: bool, max_tokens: int = 256) -> bytes:
    """A chat request as an SDK sends it, whose body has exactly so many bytes."""
    prefix = _PREFIX % (b"true" if stream else b"false", max_tokens)
    room = body_bytes - len(prefix) - len(_SUFFIX)
    text = (_TEXT * (room // len(_TEXT) + 1))[:room]
    if text.endswith(b"\\"):
        text = text[:-1] + b"."
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench.local:8000\r\nAccept: application/json\r\n"
        b"Content-Type: application/json\r\nUser-Agent: OpenAI/Python 2.0.0\r\n"
        b"Authorization: Bearer sk-bench-0123456789\r\nContent-Length: %d\r\n\r\n" % body_bytes
    )
    return head + prefix + text + _SUFFIX


class Exchanges:
    """One keep-alive connection for answers with a Content-Length: one request at a time."""

    __slots__ = ("_expected", "_got", "_on_done", "_reactor", "_sock", "_unsent", "idle", "sent_ns")

    def __init__(
        self, reactor: Reactor, port: int, expected_status: bytes, on_done: Callable[[Exchanges], None]
    ) -> None:
        self._reactor = reactor
        self._expected = b"HTTP/1.1 " + expected_status
        self._on_done = on_done
        self._got = b""
        self._unsent = memoryview(b"")
        self._sock = connect(HOST, port)
        self.idle = True
        self.sent_ns = 0
        reactor.add(self._sock, self._on_ready)

    def send(self, request: bytes, sent_ns: int = 0) -> None:
        """Send a request; a large one goes in pieces, a turn of the loop each. `sent_ns` is the caller's."""
        self.idle = False
        self.sent_ns = sent_ns
        if len(request) <= _BODY_PIECE_BYTES:
            self._sock.send(request)
            return
        self._unsent = memoryview(request)
        self._reactor.modify(self._sock, READ | WRITE)

    def _on_ready(self, events: int) -> None:
        if events & WRITE and self._unsent:
            try:
                sent = self._sock.send(self._unsent[:_BODY_PIECE_BYTES])
            except BlockingIOError:
                return
            self._unsent = self._unsent[sent:]
            if not self._unsent:
                self._reactor.modify(self._sock, READ)
        if events & ~WRITE:
            self._read()

    def _read(self) -> None:
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            raise BenchError("a proxy closed a connection that should have been kept")
        if self._got:
            data = self._got + data
        end = data.find(b"\r\n\r\n")
        if end >= 0:
            length = _LENGTH.search(data, 0, end)
            if not data.startswith(self._expected) or length is None:
                raise BenchError(f"expected {self._expected.decode()}, got {data[:200]!r}")
            if len(data) >= end + 4 + int(length[1]):
                self._got = b""
                self.idle = True
                self._on_done(self)
                return
        self._got = data

    def close(self) -> None:
        self._reactor.close(self._sock)


class ClosedLoop:
    """So many connections, each with its next request as soon as it has its answer. `done` counts answers."""

    def __init__(
        self, reactor: Reactor, port: int, request: bytes, *, connections: int, expected_status: bytes
    ) -> None:
        self._reactor = reactor
        self._request = request
        self._running = True
        self.done = 0
        self._all = [Exchanges(reactor, port, expected_status, self._on_done) for _ in range(connections)]
        for connection in self._all:
            connection.send(request)

    def _on_done(self, connection: Exchanges) -> None:
        self.done += 1
        if self._running:
            connection.send(self._request)

    def stop(self) -> None:
        """Let the open requests end, then close."""
        self._running = False
        if not self._reactor.run_until(lambda: all(c.idle for c in self._all)):
            raise BenchError("a proxy left requests unanswered")
        for connection in self._all:
            connection.close()


class OpenLoop:
    """Requests by the clock, whether or not earlier ones were answered, on a pool of kept connections.

    Latency counts from the time a request was due, so that one that had to wait for a connection, or for this
    client, is not flattered.
    """

    def __init__(
        self, reactor: Reactor, port: int, request: bytes, *, per_s: float, connections: int, start_ns: int
    ) -> None:
        self._reactor = reactor
        self._request = request
        self._gap_ns = round(1e9 / per_s)
        self._waiting: deque[int] = deque()
        self._all = [Exchanges(reactor, port, b"200", self._on_done) for _ in range(connections)]
        self._free = deque(self._all)
        self.due_ns = start_ns
        self.recording = False
        self.latency_us: list[float] = []
        reactor.schedule(self)

    def fire(self, now_ns: int) -> None:
        due_ns = self.due_ns
        self.due_ns += self._gap_ns
        if self._free:
            self._free.popleft().send(self._request, due_ns)
        else:
            self._waiting.append(due_ns)

    def _on_done(self, connection: Exchanges) -> None:
        if self.recording:
            self.latency_us.append((monotonic_ns() - connection.sent_ns) / 1e3)
        if self._waiting:
            connection.send(self._request, self._waiting.popleft())
        else:
            self._free.append(connection)

    def stop(self) -> None:
        self._reactor.unschedule(self)
        if not self._reactor.run_until(lambda: not self._waiting and all(c.idle for c in self._all)):
            raise BenchError("a proxy left requests unanswered")
        for connection in self._all:
            connection.close()


class StreamReader:
    """One streamed answer. Delays of its chunks go to the list that is shared by all readers."""

    __slots__ = ("_delays_us", "_reactor", "_sock", "_tail", "ended", "started")

    def __init__(self, reactor: Reactor, port: int, request: bytes, delays_us: list[float]) -> None:
        self._reactor = reactor
        self._delays_us = delays_us
        self._tail = b""
        self.started = False
        self.ended = False
        self._sock = connect(HOST, port)
        reactor.add(self._sock, self._on_ready)
        self._sock.send(request)

    def _on_ready(self, _events: int) -> None:
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        now_ns = monotonic_ns()
        if not data:
            raise BenchError("a proxy cut a stream")
        if not self.started:
            if not data.startswith(b"HTTP/1.1 200"):
                raise BenchError(f"a stream was not let through: {data[:200]!r}")
            self.started = True
        data = self._tail + data
        position = 0
        while (found := data.find(MARK, position)) >= 0 and found + _STAMPED_BYTES <= len(data):
            stamp = data[found + len(MARK) : found + _STAMPED_BYTES]
            self._delays_us.append((now_ns - int(stamp, 16)) / 1e3)
            position = found + _STAMPED_BYTES
        if data.endswith(b"0\r\n\r\n"):
            self.ended = True
        # A stamp, or the end, may be cut in two by a read.
        self._tail = data[max(position, len(data) - _STAMPED_BYTES + 1) :]

    def close(self) -> None:
        self._reactor.close(self._sock)


class LargeBodies:
    """Large requests by the clock on a few connections; one that finds none free waits for the next. `done` counts
    answers."""

    def __init__(
        self, reactor: Reactor, port: int, request: bytes, *, per_s: float, connections: int, start_ns: int
    ) -> None:
        self._reactor = reactor
        self._request = request
        self._gap_ns = round(1e9 / per_s)
        self._all = [Exchanges(reactor, port, b"200", self._on_done) for _ in range(connections)]
        self._free = list(self._all)
        self.due_ns = start_ns
        self.done = 0
        self.waiting = 0
        reactor.schedule(self)

    def fire(self, now_ns: int) -> None:
        self.due_ns += self._gap_ns
        if self._free:
            self._free.pop().send(self._request)
        else:
            self.waiting += 1

    def _on_done(self, connection: Exchanges) -> None:
        self.done += 1
        if self.waiting:
            self.waiting -= 1
            connection.send(self._request)
        else:
            self._free.append(connection)

    def stop(self) -> None:
        """Send no more; let what is under way end."""
        self._reactor.unschedule(self)
        self.waiting = 0
        if not self._reactor.run_until(lambda: all(c.idle for c in self._all)):
            raise BenchError("a proxy left large requests unanswered")
        for connection in self._all:
            connection.close()
