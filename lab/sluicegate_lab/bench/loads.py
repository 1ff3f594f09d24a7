"""One window of one kind of load through one proxy, or straight to the engine stub, and what it measured.

Each load warms up before its window and ends what it began: the next window starts from a quiet proxy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic_ns
from typing import Final, NamedTuple

from sluicegate_lab.bench import BenchError
from sluicegate_lab.bench.clients import ClosedLoop, LargeBodies, OpenLoop, StreamReader, post
from sluicegate_lab.bench.processes import Proxy
from sluicegate_lab.bench.reactor import Reactor
from sluicegate_lab.bench.upstream import ChunkClock, Upstream

WARM_UP_S: Final = 0.4
CONNECTIONS: Final = 16
STREAMS: Final = 256
CHUNKS_PER_STREAM_S: Final = 50.0
REQUESTS_PER_S: Final = 200.0
LARGE_BODIES_PER_S: Final = 20.0
#: Enough that one that is late does not keep the next from being sent on time.
LARGE_BODY_CONNECTIONS: Final = 16
SMALL_BODY_BYTES: Final = 1024
LARGE_BODY_BYTES: Final = 1_000_000
#: Streams are longer than any window: their maximum must not end them.
STREAM_MAX_TOKENS: Final = 4096


@dataclass(frozen=True, slots=True)
class Target:
    """Where a load goes. `proxy` is None straight to the engine stub: nobody's CPU time is read then."""

    name: str
    port: int
    proxy: Proxy | None = None

    def cpu_ns(self) -> tuple[int, int]:
        """Time of the proxy's threads on a core, and waiting for one, ns."""
        return self.proxy.cpu_ns() if self.proxy is not None else (0, 0)


class Conditions(NamedTuple):
    """What else went on in a window, as shares of it, 0 to 1.

    Attributes:
        client_busy, proxy_busy: how busy client and proxy were.
        proxy_waited: how long the proxy's threads waited for a core that something else had.
    """

    client_busy: float
    proxy_busy: float
    proxy_waited: float


class Sample(NamedTuple):
    """What a window measured, by name: the first is what it is about."""

    values: dict[str, float]
    conditions: Conditions


def quantile(values: list[float], q: float) -> float:
    """The q-th quantile by the nearest rank. Raises `BenchError` where there is nothing to rank."""
    if not values:
        raise BenchError("a window measured nothing")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


class Loads:
    """The loads, over one reactor and one engine stub."""

    def __init__(self, reactor: Reactor, upstream: Upstream, window_s: float) -> None:
        self._reactor = reactor
        self._upstream = upstream
        self._window_s = window_s

    def _window(self, target: Target) -> tuple[int, Conditions]:
        """Let a window pass; returns the CPU time that the proxy spent in it, ns."""
        reactor = self._reactor
        reactor.reset_busy()
        ran_ns, waited_ns = target.cpu_ns()
        began_ns = monotonic_ns()
        reactor.run_for(self._window_s)
        client_busy = reactor.busy
        ran_until_ns, waited_until_ns = target.cpu_ns()
        took_ns = monotonic_ns() - began_ns
        ran_ns, waited_ns = ran_until_ns - ran_ns, waited_until_ns - waited_ns
        return ran_ns, Conditions(client_busy, ran_ns / took_ns, waited_ns / took_ns)

    def requests(self, target: Target) -> Sample:
        """CPU a request: 1 KB POSTs with a small JSON answer, 16 kept connections, as fast as they go."""
        return self._closed(target, b"200")

    def refusals(self, target: Target) -> Sample:
        """CPU a refusal: the same requests, each answered 429 after its body was read."""
        return self._closed(target, b"429")

    def _closed(self, target: Target, status: bytes) -> Sample:
        request = post(SMALL_BODY_BYTES, stream=False)
        load = ClosedLoop(
            self._reactor, target.port, request, connections=CONNECTIONS, expected_status=status
        )
        self._reactor.run_for(WARM_UP_S)
        before = load.done
        cpu_ns, conditions = self._window(target)
        done = load.done - before
        load.stop()
        if not done:
            raise BenchError(f"{target.name} answered nothing")
        values = {"cpu_us": cpu_ns / done / 1e3, "requests_per_s": done / self._window_s}
        return Sample(values, conditions)

    def streams(self, target: Target) -> Sample:
        """CPU and delay a chunk: 256 staggered streams of 50 chunks a second."""
        return self._streams(target, None)

    def streams_and_bodies(self, target: Target) -> Sample:
        """The same while twenty requests of 1 MB a second come in beside them."""
        return self._streams(target, post(LARGE_BODY_BYTES, stream=False))

    def _streams(self, target: Target, large: bytes | None) -> Sample:
        reactor, upstream = self._reactor, self._upstream
        request = post(SMALL_BODY_BYTES, stream=True, max_tokens=STREAM_MAX_TOKENS)
        delays_us: list[float] = []
        readers = self._open_streams(target, request, delays_us)
        clock = ChunkClock(upstream, CHUNKS_PER_STREAM_S)
        reactor.schedule(clock)
        bodies = None
        if large is not None:
            bodies = LargeBodies(
                reactor,
                target.port,
                large,
                per_s=LARGE_BODIES_PER_S,
                connections=LARGE_BODY_CONNECTIONS,
                start_ns=monotonic_ns(),
            )
        reactor.run_for(WARM_UP_S)
        delays_us.clear()
        clock.recording = True
        cpu_ns, conditions = self._window(target)
        measured_us = list(delays_us)
        reactor.unschedule(clock)
        if bodies is not None:
            bodies.stop()
        self._end_streams(target, readers)
        values = {
            "cpu_us": cpu_ns / max(1, len(measured_us)) / 1e3,
            "delay_p50_us": quantile(measured_us, 0.5),
            "delay_p99_us": quantile(measured_us, 0.99),
            "late_p50_us": quantile(clock.lateness_us, 0.5),
        }
        return Sample(values, conditions)

    def _open_streams(self, target: Target, request: bytes, delays_us: list[float]) -> list[StreamReader]:
        readers: list[StreamReader] = []
        for _ in range(STREAMS):
            readers.append(StreamReader(self._reactor, target.port, request, delays_us))
            self._reactor.turn()
        if not self._reactor.run_until(lambda: all(reader.started for reader in readers)):
            raise BenchError(
                f"{target.name} let only {len(self._upstream.streams)} of {STREAMS} streams through at once"
            )
        return readers

    def _end_streams(self, target: Target, readers: list[StreamReader]) -> None:
        self._upstream.end_streams()
        if not self._reactor.run_until(lambda: all(reader.ended for reader in readers)):
            raise BenchError(f"{target.name} did not end its streams")
        for reader in readers:
            reader.close()

    def latency(self, target: Target) -> Sample:
        """Latency at 200 requests of 1 KB a second, by the clock."""
        load = OpenLoop(
            self._reactor,
            target.port,
            post(SMALL_BODY_BYTES, stream=False),
            per_s=REQUESTS_PER_S,
            connections=CONNECTIONS,
            start_ns=monotonic_ns(),
        )
        self._reactor.run_for(WARM_UP_S)
        load.recording = True
        _, conditions = self._window(target)
        load.recording = False
        load.stop()
        values = {"p50_us": quantile(load.latency_us, 0.5), "p99_us": quantile(load.latency_us, 0.99)}
        return Sample(values, conditions)

    def serve_streams(self, target: Target, *, count: int, length_s: float) -> None:
        """Serve short streams one after another, so that a gate has seen how long one takes."""
        request = post(SMALL_BODY_BYTES, stream=True)
        for _ in range(count):
            reader = StreamReader(self._reactor, target.port, request, [])
            self._wait(lambda reader=reader: reader.started, target)  # type: ignore[misc]
            clock = ChunkClock(self._upstream, CHUNKS_PER_STREAM_S)
            self._reactor.schedule(clock)
            self._reactor.run_for(length_s)
            self._reactor.unschedule(clock)
            self._end_streams(target, [reader])

    def hold_stream(self, target: Target) -> Callable[[], None]:
        """Open a stream that says nothing more; returns what ends it."""
        reader = StreamReader(self._reactor, target.port, post(SMALL_BODY_BYTES, stream=True), [])
        self._wait(lambda: reader.started, target)
        return lambda: self._end_streams(target, [reader])

    def _wait(self, condition: Callable[[], bool], target: Target) -> None:
        if not self._reactor.run_until(condition):
            raise BenchError(f"{target.name} did not pass a stream on")
