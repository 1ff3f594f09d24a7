"""Child processes that never outlive their parent: the engine and the gate of a demo are such.

As a module it gives `ChildProcess`; as a program (`python -m sluicegate_lab.child MODULE ARGUMENT...`) it is
what such a child runs: the module's own `__main__`, in a process that ends as soon as its standard input
closes. Only the parent holds the other end, so it closes however the parent ends, SIGKILL included.

Invariants: a child is ended by its own process id and by nothing else; it has a session of its own, so that a
terminal's Ctrl-C reaches the parent alone, which then decides the order; its stderr goes to a file without a
name, bounded in what is read back.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

STOP_TIMEOUT_S = 5.0
"""What a child is given to end by itself before it is killed."""

LOG_TAIL_BYTES = 4096

POLL_S = 0.2
"""How often a wait looks whether it was abandoned."""


class ChildError(Exception):
    """A child did not come up; the message is one line, fit to be shown to the user."""


class ChildProcess:
    """One running child. Made means started; `stop` or `kill` end it and release everything it held.

    `says_ready`: it prints one line once it is ready and then nothing more, and `first_line` waits for that.
    Otherwise its standard output goes where its stderr goes, since nobody would read a pipe.
    """

    def __init__(self, module: str, arguments: Sequence[str], *, says_ready: bool) -> None:
        self._module = module
        self._log: Any = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sluicegate_lab.child", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if says_ready else self._log,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def first_line(
        self,
        timeout_s: float,
        progress: Callable[[float], None] | None = None,
        abandoned: threading.Event | None = None,
    ) -> str:
        """Blocks for the first line of its standard output; empty if it ended instead.

        Raises `ChildError` after `timeout_s`, or as soon as `abandoned` is set by another thread.
        """
        started = time.monotonic()
        output: Any = self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while (waited_s := time.monotonic() - started) < timeout_s:
                if selector.select(POLL_S):
                    return str(output.readline())
                if abandoned is not None and abandoned.is_set():
                    raise ChildError(f"{self._module} was not waited for")
                if progress is not None:
                    progress(waited_s)
        raise ChildError(f"{self._module} was not ready after {timeout_s:.0f} s")

    def last_words(self) -> str:
        """The last line it wrote to stderr; empty if there is none."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - LOG_TAIL_BYTES))
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "")

    def stop(self) -> None:
        """Ends it with SIGTERM, and with SIGKILL after `STOP_TIMEOUT_S`. Ending twice is no error."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._release()

    def kill(self) -> None:
        """Ends it with SIGKILL."""
        self._process.kill()
        self._release()

    def _release(self) -> None:
        self._process.wait()
        streams: tuple[Any, ...] = (self._process.stdin, self._process.stdout, self._log)
        for stream in streams:
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _end_with_parent() -> None:
    """Ends this process when its standard input closes."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main() -> None:
    """Runs the module named first, with the arguments that follow, as `python -m MODULE` would."""
    module, *arguments = sys.argv[1:]
    _end_with_parent()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
