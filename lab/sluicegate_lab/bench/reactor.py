"""A single-threaded loop over epoll for the client and the engine stub of the benchmark.

It polls without sleeping. An event loop with millisecond timers cannot pace 12,800 chunks a second, and a
client that sleeps adds its own wake-up to every delay it measures; a loop that spins on a core of its own adds
a microsecond. The price is that the operating system sees it at 100 %, so it counts its own idle time:
`busy` is what tells whether the client limits the measurement.

Invariants: handlers are called from `turn` alone, never nested; what a handler raises ends the benchmark.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from time import monotonic_ns
from typing import Final, Protocol

from sluicegate_lab.bench import BenchError

READ: Final = select.EPOLLIN | select.EPOLLRDHUP
WRITE: Final = select.EPOLLOUT
#: Events taken at once: few enough that a schedule is looked at every 50 us or so.
EVENTS_A_TURN: Final = 16
#: Nobody waits longer than this for an event that must come, s.
PATIENCE_S: Final = 10.0


class Schedule(Protocol):
    """Something that acts at given times."""

    due_ns: int

    def fire(self, now_ns: int) -> None:
        """Act, and set `due_ns` to the next time. Called when `due_ns` has passed."""


class Reactor:
    """Sockets by readiness, schedules by the monotonic clock."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._schedules: list[Schedule] = []
        self._started_ns = self._last_ns = monotonic_ns()
        self._idle_ns = 0
        self._was_idle = False

    def add(self, sock: socket.socket, handler: Callable[[int], None], events: int = READ) -> None:
        """Call `handler` with the ready events of the socket from now on."""
        self._handlers[sock.fileno()] = handler
        self._sockets[sock.fileno()] = sock
        self._epoll.register(sock.fileno(), events)

    def modify(self, sock: socket.socket, events: int) -> None:
        self._epoll.modify(sock.fileno(), events)

    def close(self, sock: socket.socket) -> None:
        """Forget the socket and close it; once is enough, twice is no error."""
        descriptor = sock.fileno()
        if descriptor < 0:
            return
        if self._handlers.pop(descriptor, None) is not None:
            del self._sockets[descriptor]
            self._epoll.unregister(descriptor)
        sock.close()

    def schedule(self, schedule: Schedule) -> None:
        self._schedules.append(schedule)

    def unschedule(self, schedule: Schedule) -> None:
        if schedule in self._schedules:
            self._schedules.remove(schedule)

    def turn(self) -> int:
        """Serve what is ready and due; returns the time, ns."""
        now_ns = monotonic_ns()
        if self._was_idle:
            self._idle_ns += now_ns - self._last_ns
        self._last_ns = now_ns
        idle = True
        for schedule in self._schedules:
            if schedule.due_ns <= now_ns:
                schedule.fire(now_ns)
                idle = False
        handlers = self._handlers
        for descriptor, events in self._epoll.poll(0, EVENTS_A_TURN):
            idle = False
            handler = handlers.get(descriptor)  # an earlier handler of this turn may have closed it
            if handler is not None:
                handler(events)
        self._was_idle = idle
        return now_ns

    def run_for(self, seconds: float) -> None:
        """Turn for so long."""
        end_ns = monotonic_ns() + round(seconds * 1e9)
        while self.turn() < end_ns:
            pass

    def run_until(self, condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> bool:
        """Turn until the condition holds; False if it did not within the patience."""
        end_ns = monotonic_ns() + round(patience_s * 1e9)
        while not condition():
            if self.turn() > end_ns:
                return False
        return True

    def reset_busy(self) -> None:
        self._started_ns = self._last_ns = monotonic_ns()
        self._idle_ns = 0

    @property
    def busy(self) -> float:
        """Share of the time since `reset_busy` in which there was something to do, 0 to 1."""
        spent_ns = monotonic_ns() - self._started_ns
        return 1.0 - self._idle_ns / spent_ns if spent_ns > 0 else 0.0

    def stop(self) -> None:
        """Close every socket that is still here: a benchmark that was cut short leaves them behind."""
        for sock in list(self._sockets.values()):
            self.close(sock)
        self._epoll.close()


def connect(host: str, port: int) -> socket.socket:
    """A connected, non-blocking socket without Nagle's delay.

    Raises:
        BenchError: nobody accepts there any more.
    """
    try:
        sock = socket.create_connection((host, port), timeout=PATIENCE_S)
    except OSError as error:
        raise BenchError(f"cannot connect to a proxy that listened before: {error}") from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)
    return sock
