"""Every limit of the data path, in one place: name, unit, default, and why.

A limit that is hit has an answer of its own (named beside it) and is reported to the application by the
field's name, so that a metric can count it. `None` means: no limit. Times are checked by one coarse sweep
(see `server.py`), so a timeout acts between its value and its value plus two times `Limits.sweep_s`.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB

#: A sweep each second costs nothing even with thousands of connections, and no default below needs finer.
SWEEP_MAX_S = 1.0
#: Finer than this, sweeping itself would show in a profile.
SWEEP_MIN_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a client, an engine, or all of them together may take.

    Attributes:
        connections: client connections open at once. Above: 503 and close. A file descriptor each, and a few
            KiB; engine connections never outnumber them, since a client connection has one exchange at a time.
        header_count: header lines of a request or of an engine's response. Above: 431, or a bad response.
        header_bytes: bytes of a head, start line included. Above: 431, or a bad response. Large enough for
            long tokens and traces in headers, small enough to keep per connection.
        target_bytes: length of a request's target. Above: 414. As common servers allow.
        body_bytes: body of one request. Above: 413 and close. Prompts are text; audio and images are not.
        body_bytes_total: bytes of request bodies and of pipelined requests held at once, over all
            connections. Above: 503 and close. It bounds the gate's memory, whatever clients do.
        chunk_line_bytes: one line of a chunked body: size and extensions. Above: 400. Sizes need 16 digits;
            extensions have no use here, and long ones are an attack.
        trailer_bytes: trailers of a chunked request, all lines. Above: 400. They are dropped.
        leading_crlf: empty lines tolerated before a request. Above: 400. The RFC asks for at least one.
        pipelined_bytes: bytes read ahead on one connection while its request is served; then reading pauses.
        keepalive_requests: requests on one connection; then it is closed, politely. Lets a balancer in front
            spread clients anew now and then.
        engine_idle_connections: idle connections kept to the engine. More are closed at once. As many
            requests as a large engine batches.

        idle_s: a client connection without a request. Then it is closed, silently.
        header_s: from the first byte of a request to the end of its head. Then 408 and close.
        body_idle_s: no byte of an announced body for so long. Then 408 and close.
        body_s: from the end of the head to the end of the body, however steadily it drips. Then 408.
        stall_s: a client that takes nothing of the response offered to it. Then it counts as gone.
        linger_s: after an error the gate stops writing, and reads on to let the answer arrive, so long.
        connect_s: to connect to the engine. Then `End.ENGINE_REFUSED`. It sits on the same host.
        first_byte_s: from hand-over to the first byte of a response. Then `End.ENGINE_HUNG`. None: some
            engines queue, and answer only when a slot is free.
        inter_chunk_s: between two pieces of a response. Then `End.ENGINE_HUNG`. Longer than the longest
            prefill, since engines may send the head before it.
        engine_idle_s: an idle connection to the engine. Then it is closed: just before the 5 s after which
            the common engines' servers close it themselves.
        tunnel_idle_s: an upgraded connection without traffic either way. Then it is closed.

        half_close: False: a client that closes its sending side while its request is pending has left. True:
            it is answered still. See `client.py` for why False is the default.
        client_buffer_bytes: unsent bytes for one client above which the engine is held back. None at all:
            what a slow reader has not taken belongs into the kernel's buffers and into the engine, not here.
        engine_buffer_bytes: unsent bytes of a request above which its body is held back.
        engine_read_bytes: most bytes taken from an engine connection at once; one buffer for all.
        body_write_bytes: most bytes of a body written to the engine at once, and most read from a client
            before others have a turn: a body of megabytes must not delay other streams' tokens.
    """

    connections: int = 4096
    header_count: int = 100
    header_bytes: int = 64 * KIB
    target_bytes: int = 8 * KIB
    body_bytes: int = 64 * MIB
    body_bytes_total: int = 512 * MIB
    chunk_line_bytes: int = 256
    trailer_bytes: int = 8 * KIB
    leading_crlf: int = 8
    pipelined_bytes: int = 64 * KIB
    keepalive_requests: int | None = 100_000
    engine_idle_connections: int = 256

    idle_s: float = 75.0
    header_s: float = 10.0
    body_idle_s: float = 30.0
    body_s: float = 300.0
    stall_s: float = 120.0
    linger_s: float = 2.0
    connect_s: float = 5.0
    first_byte_s: float | None = None
    inter_chunk_s: float | None = 300.0
    engine_idle_s: float = 4.0
    tunnel_idle_s: float = 300.0

    half_close: bool = False
    client_buffer_bytes: int = 0
    engine_buffer_bytes: int = 64 * KIB
    engine_read_bytes: int = 16 * KIB
    body_write_bytes: int = 128 * KIB

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"limit {name} is {value}: it must not be negative")

    @property
    def sweep_s(self) -> float:
        """How often deadlines are checked: four times in the shortest of them."""
        times = (
            self.idle_s,
            self.header_s,
            self.body_idle_s,
            self.body_s,
            self.stall_s,
            self.linger_s,
            self.first_byte_s,
            self.inter_chunk_s,
            self.engine_idle_s,
            self.tunnel_idle_s,
        )
        shortest = min(time_s for time_s in times if time_s is not None)
        return min(max(shortest / 4, SWEEP_MIN_S), SWEEP_MAX_S)
