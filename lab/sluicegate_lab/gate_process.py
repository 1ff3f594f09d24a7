"""The gate of a demo: `sluicegate run` as a child process, on ports of the loopback.

It is the very sidecar that runs in a pod, started as a user would start it. Its ports are chosen here, its
policy is a file in a folder of its own, and it ends with the demo (`child.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sluicegate_lab.child import ChildProcess

READY_TIMEOUT_S = 15.0
"""The gate itself listens in half a second; a loaded machine is slower."""

POLL_S = 0.05

MAX_STATE_BYTES = 4 << 20


class GateError(Exception):
    """The gate could not be started; the message is one line."""


class GateProcess:
    """A gate in front of one engine; `async with` starts and ends it."""

    def __init__(self, upstream: str, policy_text: str) -> None:
        self._upstream = upstream
        self._policy_text = policy_text
        self._stack = contextlib.ExitStack()
        self._child: ChildProcess | None = None
        self.port = 0
        self.admin_port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        if self._child is None:
            raise RuntimeError("the gate is not running")
        return self._child.pid

    async def __aenter__(self) -> Self:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="sluicegate-")))
        policy = folder / "policy.yaml"
        policy.write_text(self._policy_text)
        self.port, self.admin_port = free_ports(2)
        arguments = [
            "run",
            f"--policy={policy}",
            f"--upstream={self._upstream}",
            f"--listen=127.0.0.1:{self.port}",
            f"--admin=127.0.0.1:{self.admin_port}",
        ]
        self._child = ChildProcess("sluicegate_sidecar", arguments, says_ready=False)
        try:
            await self._ready(self._child)
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    async def state(self) -> dict[str, Any]:
        """What `/debug/state` says; empty if it does not answer."""
        return await asyncio.to_thread(self._state)

    def _close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.stop()
        self._stack.close()

    async def _ready(self, child: ChildProcess) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not await asyncio.to_thread(self._answers):
            if child.exit_status is not None:
                raise GateError(f"the gate ended at its start: {child.last_words() or 'without a word'}")
            if time.monotonic() > deadline:
                raise GateError(f"the gate was not ready after {READY_TIMEOUT_S:.0f} s")
            await asyncio.sleep(POLL_S)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self._get("/readyz")[0] == 200
        return False

    def _state(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            status, body = self._get("/debug/state")
            found = json.loads(body) if status == 200 else None
            if isinstance(found, dict):
                return found
        return {}

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.admin_port, timeout=2)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read(MAX_STATE_BYTES)
        finally:
            connection.close()


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody listens on just now. Raises `GateError` where there are none."""
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        for _ in range(count):
            probe = stack.enter_context(socket.socket())
            try:
                probe.bind(("127.0.0.1", 0))
            except OSError as error:
                raise GateError(f"no free port on 127.0.0.1: {error.strerror}") from error
            ports.append(int(probe.getsockname()[1]))
        return ports
