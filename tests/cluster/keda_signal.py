"""The second clock by itself, as one small process in a pod: pods listed, gates polled, the demand served.

For tests of the signal that need nothing of the reconciler: `python3 keda_signal.py NAMESPACE SELECTOR POLICY`.
"""

import asyncio
import ssl
import sys
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from sluicegate_operator.names import ADMIN_PORT
from sluicegate_operator.scaling import (
    Board,
    BoardCollector,
    Bounds,
    GateReport,
    PolicyKey,
    ReportError,
    parse_report,
    scaling_app,
)
from sluicegate_operator.scaling.ledger import Replica
from sluicegate_operator.scaling.pods import replica

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API = "https://kubernetes.default.svc"
PORT = 8082
POLL_EVERY_S = 2.0
BOUNDS = Bounds(min_replicas=1, max_replicas=5)


async def ask(session: aiohttp.ClientSession, pod: Mapping[str, Any]) -> tuple[GateReport, float] | None:
    """The gate's report and when it was given."""
    url = f"http://{pod['status']['podIP']}:{ADMIN_PORT}/report"
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=1)) as answer:
            return parse_report(await answer.read()), monotonic()
    except (TimeoutError, aiohttp.ClientError, ReportError, OSError):
        return None


async def poll(key: PolicyKey, selector: str, board: Board, stop: asyncio.Event) -> None:
    """All pods, each `POLL_EVERY_S`."""
    trusted = ssl.create_default_context(cafile=ACCOUNT / "ca.crt")
    last: dict[str, tuple[GateReport, float]] = {}
    async with aiohttp.ClientSession() as session:
        while not stop.is_set():
            headers = {"Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}"}
            url = f"{API}/api/v1/namespaces/{key.namespace}/pods"
            async with session.get(
                url, params={"labelSelector": selector}, headers=headers, ssl=trusted
            ) as answer:
                pods = (await answer.json())["items"]
            found: list[Replica] = []
            for pod in pods:
                uid = pod["metadata"]["uid"]
                if pod["status"].get("podIP"):
                    last[uid] = await ask(session, pod) or last.get(uid) or (None, 0.0)  # type: ignore[assignment]
                one = replica(pod, *last.get(uid, (None, 0.0)))
                if one is not None:
                    found.append(one)
            print(board.post(key, found, BOUNDS), flush=True)
            try:
                await asyncio.wait_for(stop.wait(), POLL_EVERY_S)
            except TimeoutError:
                continue


async def main(namespace: str, selector: str, policy: str) -> None:
    board = Board(monotonic)
    board.listed = True
    key = PolicyKey(namespace, policy)
    board.watch(key)
    registry = CollectorRegistry()
    registry.register(BoardCollector(board))

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), content_type="text/plain")

    app = scaling_app(board)
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", PORT).start()
    await poll(key, selector, board, asyncio.Event())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
