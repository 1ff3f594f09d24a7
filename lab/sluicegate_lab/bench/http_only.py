"""The gate's data path with nothing behind it: every request is forwarded, or every request refused.

`bench-datapath --subject http-only` runs it, to tell what HTTP alone costs from what parsing, deciding and
counting add. Run as a program; listens on the loopback alone.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
from collections.abc import Sequence
from typing import Final

import uvloop

from sluicegate_lab.bench.peers import REFUSAL
from sluicegate_lab.bench.upstream import HOST
from sluicegate_sidecar.http import Exchange, serve

_BODY: Final = REFUSAL.encode()
_HEADERS: Final = (
    (b"content-type", b"application/json"),
    (b"retry-after", b"1"),
    (b"retry-after-ms", b"1000"),
)


class PassThrough:
    """The application that decides nothing."""

    def __init__(self, refuse: bool) -> None:
        self._refuse = refuse

    def on_request(self, exchange: Exchange) -> None:
        if self._refuse:
            exchange.refuse(429, _HEADERS, _BODY)
        else:
            exchange.forward()

    def on_protocol_error(self, kind: str) -> None:
        """Its client has its answer; nobody counts."""


async def _serve(listen_port: int, upstream_port: int, refuse: bool) -> None:
    application = PassThrough(refuse)
    await serve(application, upstream_host=HOST, upstream_port=upstream_port, host=HOST, port=listen_port)
    gc.collect()
    gc.freeze()
    await asyncio.Event().wait()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--listen-port", type=int, required=True)
    parser.add_argument("--upstream-port", type=int, required=True)
    parser.add_argument("--refuse", action="store_true")
    args = parser.parse_args(argv)
    uvloop.run(_serve(args.listen_port, args.upstream_port, args.refuse))


if __name__ == "__main__":
    main()
