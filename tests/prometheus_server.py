"""A real Prometheus for a test: started on a port of its own, asked over its HTTP API."""

from __future__ import annotations

import asyncio
import math
import shutil
import socket
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from sluicegate_operator.observability.panels import ROWS, Query

Key = tuple[str, str, int]

#: Of every target, s.
SCRAPE_EVERY_S = 1
#: Until every panel has something to say: what is learned takes tens of seconds.
PATIENCE_S = 90.0


class Prometheus:
    """One process; `start` and `end` block."""

    def __init__(self, folder: Path, scrape_configs: Iterable[Mapping[str, Any]]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        every = f"{SCRAPE_EVERY_S}s"
        config = {
            "global": {"scrape_interval": every, "scrape_timeout": every},
            "scrape_configs": [dict(one) for one in scrape_configs],
        }
        self._config = folder / "prometheus.yaml"
        self._config.write_text(yaml.safe_dump(config))
        self._log = folder / "prometheus.log"
        self._data = folder / "data"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        program = shutil.which("prometheus")
        assert program, "prometheus is needed: scripts/system-packages prometheus"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    f"--config.file={self._config}",
                    f"--storage.tsdb.path={self._data}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                stdout=log,
                stderr=log,
            )

    def end(self) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(30)

    @property
    def log(self) -> str:
        return self._log.read_text()

    async def is_ready(self, session: aiohttp.ClientSession) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log
        try:
            async with session.get(f"http://127.0.0.1:{self.port}/-/ready") as response:
                return response.status == 200
        except aiohttp.ClientConnectionError:
            return False

    async def ask(self, session: aiohttp.ClientSession, query: str) -> list[float]:
        """The values of the series that a query selects now."""
        url = f"http://127.0.0.1:{self.port}/api/v1/query"
        async with session.get(url, params={"query": query}) as response:
            document = await response.json()
        assert document["status"] == "success", (query, document)
        return [float(one["value"][1]) for one in document["data"]["result"]]


class Panels:
    """The queries of the dashboard that have come back empty so far.

    One says something if at least one of its series is a number: 0 divided by 0 is none.
    """

    def __init__(self, matchers: str, window: str) -> None:
        self._matchers, self._window = matchers, window
        self.empty: dict[Key, Query] = {
            (row.title, panel.title, number): query
            for row in ROWS
            for panel in row.panels
            for number, query in enumerate(panel.queries)
        }

    def rendered(self, query: Query) -> str:
        return query.rendered(self._matchers, self._window)

    async def look(self, prometheus: Prometheus, session: aiohttp.ClientSession) -> bool:
        """Ask those again; True when none is left."""
        for key, query in list(self.empty.items()):
            if any(map(math.isfinite, await prometheus.ask(session, self.rendered(query)))):
                del self.empty[key]
        return not self.empty

    async def until_none_is_empty(self, prometheus: Prometheus, session: aiohttp.ClientSession) -> None:
        """Look again after each scrape; AssertionError with those left after `PATIENCE_S`."""
        loop, never = asyncio.get_running_loop(), asyncio.Event()
        give_up_at_s = loop.time() + PATIENCE_S
        while not (await prometheus.is_ready(session) and await self.look(prometheus, session)):
            assert loop.time() < give_up_at_s, f"empty:\n{self}"
            with suppress(TimeoutError):
                await asyncio.wait_for(never.wait(), SCRAPE_EVERY_S)

    def __str__(self) -> str:
        return "\n".join(f"{key}: {self.rendered(query)}" for key, query in self.empty.items())
