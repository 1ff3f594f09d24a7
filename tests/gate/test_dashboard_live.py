"""Every query of the dashboard against a real Prometheus, which scrapes a real gate in front of a real engine.

Load beyond what the engine takes runs until no query comes back empty. The operator's half of the metrics is its own
board, fed by polls of the gate, on a port of the test's process.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client import CollectorRegistry, generate_latest
from tests.gate.gate_process import Both, ask, body_of, engine_and_gate, until

from sluicegate_operator.observability.panels import ROWS, Panel, Query
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
MATCHERS = f'namespace="{KEY.namespace}", policy="{KEY.name}"'
CLIENTS = 24
WINDOW = "15s"


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


class Prometheus:
    """A real one on a port of its own."""

    def __init__(self, folder: Path, gate_port: int, operator_port: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        targets = {
            "gates": (gate_port, {**LABELS, "pod": "llama-0"}, False),
            "operator": (operator_port, {}, True),
        }
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "scrape_configs": [
                {
                    "job_name": job,
                    "honor_labels": honor,
                    "static_configs": [{"targets": [f"127.0.0.1:{port}"], "labels": labels}],
                }
                for job, (port, labels, honor) in targets.items()
            ],
        }
        self._config = folder / "prometheus.yaml"
        self._config.write_text(yaml.safe_dump(config))
        self._log = folder / "prometheus.log"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        program = shutil.which("prometheus")
        assert program, "prometheus is needed: scripts/system-packages prometheus"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    f"--config.file={self._config}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                stdout=log,
                stderr=log,
            )

    def end(self) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(30)

    async def ready(self, session: aiohttp.ClientSession) -> None:
        async def answers() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, self._log.read_text()
            try:
                async with session.get(f"http://127.0.0.1:{self.port}/-/ready") as response:
                    return response.status == 200
            except aiohttp.ClientConnectionError:
                return False

        await until(answers, self._log.read_text)

    async def ask(self, session: aiohttp.ClientSession, query: str) -> list[dict[str, Any]]:
        url = f"http://127.0.0.1:{self.port}/api/v1/query"
        async with session.get(url, params={"query": query}) as response:
            document = await response.json()
        assert document["status"] == "success", (query, document)
        result: list[dict[str, Any]] = document["data"]["result"]
        return result


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


def says_something(series: list[dict[str, Any]]) -> bool:
    """At least one of them is a number: 0 divided by 0 is none."""
    return any(math.isfinite(float(one["value"][1])) for one in series)


async def test_no_panel_is_empty(both: Both, tmp_path: Path) -> None:
    board = Board(monotonic)
    queries: dict[tuple[str, str, int], Query] = {
        (row.title, panel.title, number): query
        for row in ROWS
        for panel in row.panels
        for number, query in enumerate(panel.queries)
    }
    async with TestServer(operator(board)) as server, aiohttp.ClientSession() as session:
        assert server.port is not None
        prometheus = Prometheus(tmp_path, both.gate.admin_port, server.port)
        prometheus.start()
        try:
            await prometheus.ready(session)
            async with under_load(both, board):
                empty = dict(queries)

                async def all_say_something() -> bool:
                    for key, query in list(empty.items()):
                        if says_something(await prometheus.ask(session, query.rendered(MATCHERS, WINDOW))):
                            del empty[key]
                    return not empty

                for _ in range(4):  # each waits for a while
                    with suppress(AssertionError):
                        await until(all_say_something)
                        break
                assert not empty, [(*key, query.rendered(MATCHERS, WINDOW)) for key, query in empty.items()]
                # What the load must have caused shows as more than 0.
                for panel in (_panel("Refused"), _panel("Refused, by reason"), _panel("Pressed")):
                    expr = panel.queries[0].rendered(MATCHERS, WINDOW)
                    assert any(float(one["value"][1]) > 0 for one in await prometheus.ask(session, expr)), (
                        expr
                    )
                answer, _ = board.read(KEY) or (None, None)
                assert isinstance(answer, Demand)
                assert answer.replicas > 1.0, answer
        finally:
            await asyncio.to_thread(prometheus.end)


def _panel(title: str) -> Panel:
    return next(panel for row in ROWS for panel in row.panels if panel.title == title)
