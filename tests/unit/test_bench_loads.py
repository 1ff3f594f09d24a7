"""The benchmark's client against its own engine stub, on real sockets and without a proxy."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sluicegate_lab.bench import BenchError
from sluicegate_lab.bench import upstream as stub
from sluicegate_lab.bench.clients import ClosedLoop, LargeBodies, OpenLoop, StreamReader, post
from sluicegate_lab.bench.reactor import Reactor
from sluicegate_lab.bench.upstream import ChunkClock, Upstream


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    reactor = Reactor()
    yield reactor
    reactor.stop()


@pytest.fixture
def upstream(reactor: Reactor) -> Iterator[Upstream]:
    upstream = Upstream(reactor)
    yield upstream
    upstream.close()


@contextmanager
def answering(reactor: Reactor, answer: bytes, *, close: bool = False) -> Iterator[int]:
    """A server that gives one answer to whatever it reads; yields its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    opened: list[socket.socket] = []

    def read(_events: int) -> None:
        if opened[-1].recv(65_536):
            opened[-1].sendall(answer)
            if close:
                reactor.close(opened[-1])

    def accept(_events: int) -> None:
        sock, _ = listener.accept()
        opened.append(sock)
        reactor.add(sock, read)

    reactor.add(listener, accept)
    yield listener.getsockname()[1]
    for sock in [*opened, listener]:
        reactor.close(sock)


@pytest.mark.parametrize("size", [300, 1024, 32_768, 1_000_000])
@pytest.mark.parametrize("stream", [True, False])
def test_a_request_has_exactly_the_bytes_it_is_to_have_and_is_json(size: int, stream: bool) -> None:
    import json

    head, _, body = post(size, stream=stream, max_tokens=77).partition(b"\r\n\r\n")
    assert len(body) == size
    assert b"Content-Length: %d" % size in head
    document = json.loads(body)
    assert document["stream"] is stream
    assert document["max_tokens"] == 77


def test_a_closed_loop_counts_answers_and_stops_with_none_open(reactor: Reactor, upstream: Upstream) -> None:
    load = ClosedLoop(reactor, upstream.port, post(1024, stream=False), connections=4, expected_status=b"200")
    assert reactor.run_until(lambda: load.done >= 200)
    load.stop()
    done = load.done
    reactor.turn()
    assert load.done == done


def test_another_status_than_expected_ends_the_measurement(reactor: Reactor, upstream: Upstream) -> None:
    load = ClosedLoop(reactor, upstream.port, post(1024, stream=False), connections=1, expected_status=b"429")
    with pytest.raises(BenchError, match=r"expected HTTP/1\.1 429, got b'HTTP/1\.1 200"):
        reactor.run_until(lambda: load.done > 0)


def test_a_connection_that_is_not_kept_ends_the_measurement(reactor: Reactor) -> None:
    with answering(reactor, b"HTTP/1.1 429 Busy\r\ncontent-length: 0\r\n\r\n", close=True) as port:
        load = ClosedLoop(reactor, port, post(1024, stream=False), connections=1, expected_status=b"429")
        with pytest.raises(BenchError, match="should have been kept"):
            reactor.run_until(lambda: load.done > 1)


def test_an_open_loop_sends_by_the_clock_and_waits_for_a_connection(
    reactor: Reactor, upstream: Upstream
) -> None:
    # Due long ago: forty requests at once for two connections, every one counted from when it was due.
    load = OpenLoop(reactor, upstream.port, post(1024, stream=False), per_s=1e9, connections=2, start_ns=0)
    load.recording = True
    assert reactor.run_until(lambda: len(load.latency_us) >= 40)
    load.stop()
    assert min(load.latency_us) > 1e6


def test_large_bodies_arrive_whole(reactor: Reactor, upstream: Upstream) -> None:
    load = LargeBodies(
        reactor, upstream.port, post(1_000_000, stream=False), per_s=1e9, connections=2, start_ns=0
    )
    assert reactor.run_until(lambda: load.done >= 3)
    assert load.waiting > 0  # many more were due than there are connections
    load.stop()


def test_streams_carry_the_time_they_were_sent_and_end_as_an_engine_ends_them(
    reactor: Reactor, upstream: Upstream
) -> None:
    delays_us: list[float] = []
    request = post(1024, stream=True)
    readers = [StreamReader(reactor, upstream.port, request, delays_us) for _ in range(8)]
    assert reactor.run_until(lambda: all(reader.started for reader in readers))
    assert reactor.run_until(lambda: len(delays_us) == len(readers))  # each first token comes at once
    delays_us.clear()
    clock = ChunkClock(upstream, chunks_per_stream_s=1000.0)
    clock.recording = True
    reactor.schedule(clock)
    assert reactor.run_until(lambda: len(clock.lateness_us) >= 80)
    reactor.unschedule(clock)
    upstream.end_streams()
    assert reactor.run_until(lambda: all(reader.ended for reader in readers))
    assert len(delays_us) == len(clock.lateness_us)
    assert min(delays_us) > 0.0
    assert upstream.streams == []
    for reader in readers:
        reader.close()


@pytest.mark.parametrize("piece_bytes", [1, 7, 100])
def test_stamps_are_found_however_the_reads_cut_them(reactor: Reactor, piece_bytes: int) -> None:
    chunks = 5
    whole = (
        stub.STREAM_HEAD + stub.ROLE_CHUNK + b"".join(stub.CHUNK % i for i in range(chunks)) + stub.STREAM_END
    )
    listener = socket.create_server(("127.0.0.1", 0))
    delays_us: list[float] = []
    reader = StreamReader(reactor, listener.getsockname()[1], post(1024, stream=True), delays_us)
    engine, _ = listener.accept()
    engine.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    engine.sendall(whole[:20])  # the status must come in one piece: a client of a benchmark may ask for that
    assert reactor.run_until(lambda: reader.started)
    for start in range(20, len(whole), piece_bytes):
        engine.sendall(whole[start : start + piece_bytes])
        reactor.turn()
    assert reactor.run_until(lambda: reader.ended)
    assert len(delays_us) == chunks
    reader.close()
    engine.close()
    listener.close()


def test_a_stream_that_is_refused_ends_the_measurement(reactor: Reactor) -> None:
    with answering(reactor, b"HTTP/1.1 429 Busy\r\ncontent-length: 0\r\n\r\n") as port:
        StreamReader(reactor, port, post(1024, stream=True), [])
        with pytest.raises(BenchError, match="not let through"):
            reactor.run_until(lambda: False)


def test_the_stub_is_an_engine_for_those_who_probe_it(reactor: Reactor, upstream: Upstream) -> None:
    answers = {}
    for path in (b"/health", b"/metrics"):
        with socket.create_connection(("127.0.0.1", upstream.port)) as probe:
            probe.sendall(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path)
            probe.setblocking(False)
            reactor.add(
                probe, lambda _events, path=path, probe=probe: answers.update({path: probe.recv(4096)})
            )
            assert reactor.run_until(lambda path=path: path in answers)
            reactor.close(probe)
    assert answers[b"/health"].startswith(b"HTTP/1.1 200 ")
    assert answers[b"/metrics"].startswith(b"HTTP/1.1 404 ")


def test_the_reactor_gives_up_on_what_does_not_come(reactor: Reactor) -> None:
    assert not reactor.run_until(lambda: False, patience_s=0.0)
    reactor.reset_busy()
    reactor.turn()
    assert 0.0 <= reactor.busy <= 1.0
