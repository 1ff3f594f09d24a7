"""A real llama.cpp server in a process of its own, started, watched and ended from here.

Run as a program (`python -m sluicegate_lab.engine --model FILE`) it is that server; imported, it gives
`LlamaServer`, a context manager, blocking or async, around such a process.

Invariants: the server listens on the loopback alone; it prints one line, `ready URL`, once it answers 200 on
`/health`; as a child it ends with its parent (`child.py`). Prompt caching is off: a replay would otherwise be
answered from the memory of the last one.

What the server serves lives in `tiny_model.py`; what is sent to it, in `load.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sluicegate_lab.child import ChildError, ChildProcess

READY_TIMEOUT_S = 60.0
"""A model of a few gigabytes loads in this time from a slow disk; the demo's own loads in half a second."""

OVERHEAD_BYTES = 256 << 20
"""What the server needs beside the model: Python, compute buffers, and the KV cache of a small model."""

EXIT_NO_ENGINE = 3
"""The program's exit status when no server could be started; the last line of stderr says why."""


class EngineError(Exception):
    """The engine could not be started; the message is one line, fit to be shown to the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How the server is started. `port` 0 takes a free one; `ctx_tokens` is shared out among the slots."""

    model: Path
    port: int = 0
    slots: int = 4
    ctx_tokens: int = 4096
    threads: int = 1
    alias: str = "countdown"

    def arguments(self) -> list[str]:
        return [
            f"--model={self.model}",
            f"--port={self.port}",
            f"--slots={self.slots}",
            f"--ctx={self.ctx_tokens}",
            f"--threads={self.threads}",
            f"--alias={self.alias}",
        ]


class LlamaServer:
    """One llama.cpp server in a child process.

    `with LlamaServer(options) as engine:` blocks until it is healthy; `async with` does the same off the
    loop. Afterwards `engine.url` is where it listens. Neither the process nor its port outlives the block.
    A second `start` after `stop` or `kill` takes the same port again, as a restarted engine would.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._child: ChildProcess | None = None
        self._port = options.port
        self._abandoned = threading.Event()

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        """`http://127.0.0.1:PORT`, without a path."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        if self._child is None:
            raise RuntimeError("the engine is not running")
        return self._child.pid

    def start(self, progress: Callable[[float], None] | None = None) -> None:
        """Starts the server and blocks until it is healthy; `progress` is called with the seconds waited.

        Raises `EngineError` with one line that says what is wrong and what to do.
        """
        if self._child is not None:
            raise RuntimeError("the engine is running already")
        check_memory(self._options.model)
        arguments = [*self._options.arguments(), f"--port={self._port}"]
        child = ChildProcess("sluicegate_lab.engine", arguments, says_ready=True)
        try:
            line = child.first_line(READY_TIMEOUT_S, progress, self._abandoned)
            word, _, url = line.strip().partition(" ")
            if word != "ready":
                raise EngineError(child.last_words() or "the engine ended without a word")
        except ChildError as error:
            child.kill()
            raise EngineError(str(error)) from error
        except BaseException:
            child.kill()
            raise
        self._port = int(url.rsplit(":", 1)[1])
        self._child = child

    def stop(self) -> None:
        """Ends the server: SIGTERM, and SIGKILL if that is not enough. Ending twice is no error."""
        child, self._child = self._child, None
        if child is not None:
            child.stop()

    def kill(self) -> None:
        """Ends the server as a crash would (SIGKILL)."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        starting = asyncio.ensure_future(asyncio.to_thread(self.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The thread cannot be cancelled: it is told, ends what it started, and is waited for.
            self._abandoned.set()
            await asyncio.wait((starting,))
            self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)


def available_memory_bytes() -> int | None:
    """What can still be allocated here: the machine's free memory or what the cgroup leaves, else None."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(fields["MemAvailable"].split()[0]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
        found.append(int(limit) - int(used))
    return min(found) if found else None


def check_memory(model: Path) -> None:
    """Raises `EngineError` if the model is missing or would not fit into memory."""
    try:
        size = model.stat().st_size
    except OSError as error:
        raise EngineError(f"no model at {model}: {error.strerror}") from error
    needed, free = size + OVERHEAD_BYTES, available_memory_bytes()
    if free is not None and free < needed:
        raise EngineError(
            f"not enough memory for the engine: it needs about {needed >> 20} MB and {free >> 20} MB are free"
        )


def platform_error(error: ImportError) -> str:
    """The line for a platform that llama.cpp's wheel does not exist for."""
    where = f"{sys.platform} {platform.machine()}, Python {platform.python_version()}"
    return (
        f"llama.cpp (the package xllamacpp) cannot be loaded on {where}: {error}. "
        "Name an engine that is already running instead: --engine-url URL"
    )


def _check_port(port: int) -> None:
    """Raises `EngineError` if the port is taken: the server itself would only say that it failed."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise EngineError(f"port {port} is not free: {error.strerror}") from error


def _serve(options: EngineOptions) -> Any:
    """Starts the server in this process and returns it once it is healthy."""
    try:
        import xllamacpp  # noqa: PLC0415 - an extra, absent on some platforms: the error is ours to word
    except ImportError as error:
        raise EngineError(platform_error(error)) from error
    _check_port(options.port)
    params: Any = xllamacpp.CommonParams()
    params.model.path = str(options.model)
    params.model_alias = {options.alias}
    params.hostnames = ["127.0.0.1"]
    params.port = options.port
    params.n_parallel = options.slots
    params.n_ctx = options.ctx_tokens
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.ui = False
    params.cache_prompt = False
    params.cache_ram_mib = 0
    for cpu in (params.cpuparams, params.cpuparams_batch):
        cpu.n_threads = options.threads
    params.verbosity = 1
    try:
        server: Any = xllamacpp.Server(params)
    except Exception as error:
        raise EngineError(f"llama.cpp could not load {options.model}: {error}") from error
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        # 503 while the model loads is an error to urllib: it has not loaded yet, whatever it says.
        with contextlib.suppress(OSError):
            urllib.request.urlopen(server.listening_address + "/health", timeout=5).close()  # noqa: S310
            return server
        if time.monotonic() > deadline:
            raise EngineError("llama.cpp started, but never became healthy")
        time.sleep(0.05)


def main(argv: list[str] | None = None) -> int:
    """The server as a program: prints `ready URL`, then serves until it is ended."""
    parser = argparse.ArgumentParser(
        prog="python -m sluicegate_lab.engine", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1; 0 takes a free one")
    parser.add_argument("--slots", type=int, default=4, help="requests served at once")
    parser.add_argument("--ctx", type=int, default=4096, help="context in tokens, shared out among the slots")
    parser.add_argument("--threads", type=int, default=1, help="threads that compute")
    parser.add_argument("--alias", default="countdown", help="the name of the model in the API")
    args = parser.parse_args(argv)
    options = EngineOptions(
        model=args.model,
        port=args.port,
        slots=args.slots,
        ctx_tokens=args.ctx,
        threads=args.threads,
        alias=args.alias,
    )
    try:
        server = _serve(options)
    except EngineError as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_NO_ENGINE
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # before anybody is told that there is something to stop
        signal.signal(number, lambda *_: stop.set())
    print(f"ready {server.listening_address}", flush=True)
    stop.wait()
    # The server's own threads hold the interpreter open; there is nothing to save.
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
