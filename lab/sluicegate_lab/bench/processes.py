"""A proxy as a process on its own core: start it, read its CPU time and memory, end it by its id.

CPU time is `/proc/PID/task/*/schedstat`: nanoseconds on a core, of all threads, in user and kernel mode. Linux
alone has it. A process started here ends with the benchmark, however the benchmark ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from sluicegate_lab.bench import BenchError
from sluicegate_lab.bench.reactor import Reactor
from sluicegate_lab.bench.upstream import HOST

START_TIMEOUT_S: Final = 15.0
STOP_TIMEOUT_S: Final = 5.0
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def cores() -> tuple[int, int]:
    """The core of client and engine stub, and the core of the proxies: the same one if there is but one."""
    available = sorted(os.sched_getaffinity(0))
    return available[0], available[1 % len(available)]


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def accepts(port: int) -> bool:
    """Does anybody accept connections there?"""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((HOST, port)) == 0


class Proxy:
    """One proxy process with its children, pinned to a core."""

    def __init__(
        self, name: str, command: Sequence[str], *, port: int, core: int, last_port: int | None = None
    ) -> None:
        """Start `command`, which will listen on `port` of the loopback, and on `last_port` once its start is
        over."""
        self.name = name
        self.port = port
        self._last_port = port if last_port is None else last_port
        self._log: Any = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed by stop, with the process

        def in_child() -> None:
            os.sched_setaffinity(0, {core})
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

        self.spawned_ns = time.monotonic_ns()
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            preexec_fn=in_child,  # noqa: PLW1509 - the benchmark has one thread
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_listening(self, reactor: Reactor) -> float:
        """Serve the stub until the proxy accepts; returns seconds from the start of the process."""
        self._wait_accepting(self.port, reactor)
        return (time.monotonic_ns() - self.spawned_ns) / 1e9

    def wait_started(self, reactor: Reactor) -> None:
        """Serve the stub until the start is over: what runs beside the first requests is none of their cost."""
        self._wait_accepting(self._last_port, reactor)

    def _wait_accepting(self, port: int, reactor: Reactor) -> None:
        while not accepts(port):
            reactor.turn()
            if self._process.poll() is not None:
                raise BenchError(f"{self.name} ended at once: {self._last_words()}")
            if time.monotonic_ns() - self.spawned_ns > START_TIMEOUT_S * 1e9:
                raise BenchError(
                    f"{self.name} does not listen after {START_TIMEOUT_S:.0f} s: {self._last_words()}"
                )

    def _pids(self) -> list[int]:
        found = [self.pid]
        for pid in found:
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    found.extend(int(child) for child in (task / "children").read_text().split())
        return found

    def cpu_ns(self) -> tuple[int, int]:
        """Time of all threads of the process and its children, ns: on a core, and waiting for one."""
        ran_ns = waited_ns = 0
        for pid in self._pids():
            for schedstat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError):  # a thread that ended meanwhile
                    ran, waited, _ = schedstat.read_text().split()
                    ran_ns += int(ran)
                    waited_ns += int(waited)
        return ran_ns, waited_ns

    def memory_mb(self) -> Mapping[str, float]:
        """Resident (`rss`) and proportional (`pss`) memory of the process and its children, MB of 10^6 bytes."""
        sums = {"rss": 0.0, "pss": 0.0}
        for pid in self._pids():
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                key = line.partition(":")[0].lower()
                if key in sums:
                    sums[key] += int(line.split()[1]) * 1024 / 1e6
        return sums

    def obituary(self) -> str | None:
        """One line on a process that has ended without being told to; None while it runs."""
        status = self._process.poll()
        return None if status is None else f"{self.name} had ended with status {status}: {self._last_words()}"

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "without a word"

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for what does not end by itself. Twice is no error."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
