"""The data path: HTTP/1.1 between clients and one engine, with an application that decides in between.

`await serve(app, upstream_host=..., upstream_port=..., host=..., port=...)` listens; `app` (an `Application`) gets each
request as an `Exchange` and forwards it, refuses it, or lets it wait. Bytes and sockets only: what a request
is, and whether it may pass, is decided elsewhere.

interface.py   what the application and the data path say to each other
limits.py      every limit: name, unit, default, reason
client.py      one client connection; reader.py: its reading half; request.py, chunked.py: what a request says;
               errors.py: what it may not
exchange.py    one request and its response; inbound.py: the request alone
engine.py      one engine connection; response.py: its reading half; pool.py: all of them; tunnel.py: after an
               upgrade
server.py      the listener, the counters, the sweep

It runs on uvloop and on asyncio's own loops, one thread, callbacks only: no task per request or per piece.

Not done, on purpose: no `Via` and no `X-Forwarded-For` are added (the gate is part of the pod, and what it
wants to say to the engine is the application's to add); trailers are dropped; only `h2c` and TLS upgrades are
ignored, others pass.
"""

from sluicegate_sidecar.http.exchange import Exchange
from sluicegate_sidecar.http.interface import Application, End, ExchangeListener, Headers, LocalReply
from sluicegate_sidecar.http.limits import Limits
from sluicegate_sidecar.http.pool import Pool
from sluicegate_sidecar.http.server import Server, serve

__all__ = [
    "Application",
    "End",
    "Exchange",
    "ExchangeListener",
    "Headers",
    "Limits",
    "LocalReply",
    "Pool",
    "Server",
    "serve",
]
