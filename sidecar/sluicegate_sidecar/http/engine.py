"""One connection to the engine: writes requests, reads responses.

How responses are read is in `response.py`.

A `BufferedProtocol`: all engine connections of a pool read into one small buffer. That is safe since what was
read is consumed within `buffer_updated`, before the loop can read from any other connection; and it bounds
what one read can bring in, and so what a slow client can make the gate hold.

Invariants:
- `exchange` is set from hand-over until the response is complete or has failed; a connection without one is
  idle (in the pool) or closing. A byte that an idle connection receives condemns it.
- A connection goes back to the pool only after a complete response, with the whole request written, keep-alive
  agreed, and nothing read behind the response.
"""

from __future__ import annotations

import asyncio
import select
from typing import TYPE_CHECKING, Final, cast

import httptools

from sluicegate_sidecar.http.interface import End
from sluicegate_sidecar.http.response import ResponseReader

if TYPE_CHECKING:
    from sluicegate_sidecar.http.exchange import Exchange
    from sluicegate_sidecar.http.pool import Pool
    from sluicegate_sidecar.http.tunnel import Tunnel

#: A request up to this size is joined and written at once: one copy is cheaper than a vectored write.
_JOIN_BYTES: Final = 16 * 1024

#: What makes an idle connection unfit: anything to read, and a peer that closed. POLLRDHUP is Linux's.
_POLL_EVENTS: Final = select.POLLIN | getattr(select, "POLLRDHUP", 0)


class EngineConnection(ResponseReader):
    """See the module. Made by the pool, and owned by it or by the exchange that it serves."""

    __slots__ = (
        "_out",
        "_out_at",
        "_paused",
        "_poll",
        "_pool",
        "_served",
        "_tunnel",
        "_view",
        "_write_paused",
        "active",
        "exchange",
        "since_s",
        "transport",
    )

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool.limits.header_count)
        self._pool = pool
        self._view = memoryview(pool.buffer)
        self.transport: asyncio.Transport | None = None
        self.exchange: Exchange | None = None
        self.active = True  # for the sweep: something came since the last one
        self.since_s = 0.0  # for the sweep: when something last came
        self._served = False  # a response was completed on this connection
        self._tunnel: Tunnel | None = None
        self._paused = False
        self._write_paused = False
        self._out: list[bytes] = []  # what is still to be written of a large request
        self._out_at = 0  # and how far its first piece is
        self._poll = select.poll()

    # ---- for the pool and the exchange ----------------------------------------------------------------

    def usable(self) -> bool:
        """False where the engine has closed, or spoken out of turn, as far as the kernel knows.

        The loop may not have had a turn to notice: some servers close after a streamed response without
        announcing it, and the next request comes within microseconds.
        """
        transport = self.transport
        return transport is not None and not transport.is_closing() and not self._poll.poll(0)

    def start(self, exchange: Exchange) -> None:
        """Send the exchange's request."""
        self.exchange = exchange
        self.active = True
        self._asked_head = exchange.method == b"HEAD"
        exchange.attach(self)
        transport = cast(asyncio.Transport, self.transport)
        head = exchange.request_head()
        size = exchange.body_bytes
        if not size:
            transport.write(head)
        elif size <= _JOIN_BYTES:
            transport.write(b"".join((head, *exchange.body_pieces())))
        else:
            self._out = [head, *exchange.body_pieces()]
            self._out_at = 0
            self._pump()

    def pause(self) -> None:
        """Read no more: the client does not keep up."""
        if self.transport is not None and not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self.transport is not None and self._paused:
            self._paused = False
            self.active = True
            self.transport.resume_reading()

    def discard(self) -> None:
        """Close at once, whatever is under way."""
        self.exchange = None
        self._out = []
        if self.transport is not None:
            self.transport.abort()

    def tunnel(self, tunnel: Tunnel) -> None:
        """From now on bytes go to the tunnel as they are."""
        self._tunnel = tunnel

    def sweep(self, now_s: float) -> None:
        """Act on a bound that has passed."""
        if self._tunnel is not None:
            return
        if self.active or self._paused:  # what is held back by the client is not the engine's fault
            self.active = False
            self.since_s = now_s
            return
        limits = self._pool.limits
        exchange = self.exchange
        if exchange is None:
            bound_s: float | None = limits.engine_idle_s
        elif self._head_bytes or self._out:
            bound_s = limits.inter_chunk_s
        else:
            bound_s = limits.first_byte_s
        if bound_s is None or now_s - self.since_s < bound_s:
            return
        if exchange is None:
            self._pool.forget(self)
            self.discard()
        else:
            exchange.engine_failed(End.ENGINE_HUNG)

    # ---- asyncio.BufferedProtocol ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The engine accepted."""
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(self._pool.limits.engine_buffer_bytes)
        self._poll.register(transport.get_extra_info("socket").fileno(), _POLL_EVENTS)
        self._pool.opened(self)

    def get_buffer(self, _sizehint: int) -> bytearray:
        """The pool's one buffer."""
        return self._pool.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes came."""
        exchange = self.exchange
        if exchange is None:
            self._pool.forget(self)
            self.discard()
            return
        self.active = True
        view = self._view[:nbytes]
        if self._tunnel is not None:
            self._tunnel.from_engine(bytes(view))
            return
        failed = False
        try:
            self._parser.feed_data(view)
        except httptools.HttpParserUpgrade as upgrade:
            self._upgrade(exchange, bytes(view[upgrade.args[0] :]))
            return
        except httptools.HttpParserError:
            failed = True
        if not self._passed and not self._pass_head(exchange, nbytes, failed):
            return
        pieces = self._body
        if self._complete:
            self._pass_end(exchange, pieces, failed)
            return
        if pieces:
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            exchange.response_piece(data)
        elif exchange.head_pending:
            exchange.response_piece(b"")
        if failed:
            exchange.engine_failed(End.ENGINE_BAD_RESPONSE)

    def eof_received(self) -> bool:
        """The engine sends no more: the end of a response without a length, else a failure."""
        if self._tunnel is not None:
            return self._tunnel.engine_eof()
        self._closed(clean=True)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        if self._tunnel is not None:
            self._tunnel.engine_lost()
        self._closed(clean=exc is None)
        self._pool.closed(self)
        self.transport = None

    def pause_writing(self) -> None:
        """The engine does not take the request as fast as it could be sent."""
        self._write_paused = True
        if self._tunnel is not None:
            self._tunnel.engine_paused()

    def resume_writing(self) -> None:
        """It does again."""
        self._write_paused = False
        self.active = True
        if self._tunnel is not None:
            self._tunnel.engine_resumed()
        elif self._out:
            self._pump()

    # ---- inside ---------------------------------------------------------------------------------------

    def _pass_head(self, exchange: Exchange, nbytes: int, failed: bool) -> bool:
        """Hand on what there is of heads; True when the final one was among it."""
        self._head_bytes += nbytes
        if self._interims:
            for status, reason, lines in self._interims:
                exchange.interim(status, reason, lines)
            self._interims = []
        if self._content or self._complete:
            self._passed = True
            exchange.response_head(self._status, self._reason, self._headers, self._lines, self._framed)
            return not exchange.ended
        if failed or self._status == 101 or self._head_bytes > self._pool.limits.header_bytes:
            exchange.engine_failed(End.ENGINE_BAD_RESPONSE)
        return False

    def _pass_end(self, exchange: Exchange, pieces: list[bytes], failed: bool) -> None:
        """The response is whole: make the connection free, then hand on the end."""
        whole = self._whole
        reuse = self._keep and not failed and not self._out and len(pieces) == whole
        del pieces[whole:]
        data = b""
        if pieces:
            data = pieces[0] if whole == 1 else b"".join(pieces)
            pieces.clear()
        self.exchange = None
        self._served = True
        self._finish(reuse)
        exchange.response_end(data)

    def _finish(self, reuse: bool) -> None:
        if reuse:
            self._reset()
            self._pool.give_back(self)
        else:
            self.discard()

    def _upgrade(self, exchange: Exchange, rest: bytes) -> None:
        if self._status != 101 or not exchange.switch(self, self._reason, self._headers, self._lines):
            exchange.engine_failed(End.ENGINE_BAD_RESPONSE)
        elif rest and self._tunnel is not None:
            self._tunnel.from_engine(rest)

    def _closed(self, clean: bool) -> None:
        """The engine closed, in whatever state."""
        self._pool.forget(self)
        exchange, self.exchange = self.exchange, None
        self._out = []
        if exchange is None or exchange.ended:
            return
        if self._until_close and clean:
            exchange.response_end(b"")
        elif self._head_bytes:
            exchange.engine_failed(End.ENGINE_RESET_MIDSTREAM)
        elif self._served:
            exchange.detach()
            self._pool.retry(exchange)
        else:
            exchange.engine_failed(End.ENGINE_RESET_EARLY)

    def _pump(self) -> None:
        """Write the next part of a large request, then let others have a turn."""
        transport = self.transport
        out = self._out
        if transport is None or not out or self._write_paused:
            return
        room = self._pool.limits.body_write_bytes
        batch: list[bytes | memoryview] = []
        taken = 0
        while taken < len(out) and room > 0:
            piece = memoryview(out[taken])[self._out_at : self._out_at + room]
            batch.append(piece)
            room -= len(piece)
            self._out_at += len(piece)
            if self._out_at == len(out[taken]):
                self._out_at = 0
                taken += 1
        del out[:taken]
        self.active = True
        transport.writelines(batch)
        if out and not self._write_paused:
            self._pool.loop.call_soon(self._pump)
