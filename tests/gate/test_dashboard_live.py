"""Every query of the dashboard against a real Prometheus, which scrapes a real gate in front of a real engine.

Load beyond what the engine takes runs until no query comes back empty. The operator's half of the metrics is its own
board, fed by polls of the gate, on a port of the test's process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import monotonic

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client import CollectorRegistry, generate_latest
from tests.gate.gate_process import Both, ask, body_of, engine_and_gate
from tests.prometheus_server import Panels, Prometheus

from sluicegate_operator.observability.panels import ROWS, Query
from sluicegate_operator.scaling import (
    Board,
    BoardCollector,
    Bounds,
    Demand,
    PolicyKey,
    Replica,
    ReplicaState,
    parse_report,
    scaling_app,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

#: Refusals by prediction in one class, waits in vain in the other.
POLICY = """\
engine: {slots: 2}
classes:
- {name: interactive, weight: 10, slo: {ttft: 500ms, itl: 1s}}
- {name: batch, weight: 1, maxQueueTime: 300ms}
classify:
  default: interactive
  rules:
  - {header: x-admission-class, values: [batch], class: batch}
"""
KEY = PolicyKey("serving", "llama")
LABELS = {"namespace": KEY.namespace, "policy": KEY.name}
CLIENTS = 24


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    with engine_and_gate(tmp_path_factory.mktemp("engine"), policy=POLICY) as running:
        yield running


async def client(port: int, number: int, stop: asyncio.Event) -> None:
    """Asks for one answer after the other; refused, it comes back when it is told to, and says so."""
    batch = [b"X-Admission-Class: batch"] if number % 3 == 0 else []
    retry: list[bytes] = []
    body = body_of(f"hello {number} 300", stream=True, max_tokens=300)
    while not stop.is_set():
        answer = await ask(port, body, *batch, *retry)
        retry = []
        if answer.status != 200:
            retry = [b"X-Stainless-Retry-Count: 1"]
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), float(answer.header(b"retry-after") or b"1"))


async def poller(board: Board, admin_port: int, stop: asyncio.Event) -> None:
    """Polls the gate as the operator does, each second."""
    async with aiohttp.ClientSession() as session:
        while not stop.is_set():
            async with session.get(f"http://127.0.0.1:{admin_port}/report") as response:
                report = parse_report(await response.read())
            replica = Replica(uid="a", state=ReplicaState.READY, report=report, reported_at=monotonic())
            board.post(KEY, [replica], Bounds(min_replicas=1, max_replicas=8))
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 1.0)


def operator(board: Board) -> web.Application:
    """The reconciler's ports, as far as they are the board's."""
    registry = CollectorRegistry()
    registry.register(BoardCollector(board))
    app = scaling_app(board)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), content_type="text/plain")

    app.router.add_get("/metrics", metrics)
    return app


@asynccontextmanager
async def under_load(both: Both, board: Board) -> AsyncIterator[None]:
    """Clients and the operator's polls, for as long as the block lasts."""
    stop = asyncio.Event()
    gate = both.gate
    tasks = [asyncio.create_task(client(gate.port, number, stop)) for number in range(CLIENTS)]
    tasks.append(asyncio.create_task(poller(board, gate.admin_port, stop)))
    try:
        yield
    finally:
        stop.set()
        await asyncio.gather(*tasks)


async def test_no_panel_is_empty(both: Both, tmp_path: Path) -> None:
    board = Board(monotonic)
    panels = Panels(f'namespace="{KEY.namespace}", policy="{KEY.name}"', "15s")
    async with TestServer(operator(board)) as server, aiohttp.ClientSession() as session:
        prometheus = Prometheus(
            tmp_path,
            [
                {
                    "job_name": "gates",
                    "static_configs": [target(both.gate.admin_port, **LABELS, pod="llama-0")],
                },
                {"job_name": "operator", "honor_labels": True, "static_configs": [target(server.port)]},
            ],
        )
        prometheus.start()
        try:
            async with under_load(both, board):
                await panels.until_none_is_empty(prometheus, session)
                # What the load must have caused shows as more than 0.
                for query in (panel("Refused"), panel("Refused, by reason"), panel("Pressed")):
                    values = await prometheus.ask(session, panels.rendered(query))
                    assert max(values) > 0, query
                answer, _ = board.read(KEY) or (None, None)
                assert isinstance(answer, Demand)
                assert answer.replicas > 1.0, answer
        finally:
            await asyncio.to_thread(prometheus.end)


def target(port: int | None, **labels: str) -> dict[str, object]:
    """As in `static_configs`."""
    return {"targets": [f"127.0.0.1:{port}"], "labels": labels}


def panel(title: str) -> Query:
    """The first query of a panel."""
    return next(panel.queries[0] for row in ROWS for panel in row.panels if panel.title == title)
