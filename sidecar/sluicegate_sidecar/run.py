"""The gate as a process: start, reload, drain, stop.

`main` returns an exit code and prints one clear line where it cannot
start. SIGTERM and SIGINT drain: new requests are refused with 503, what is in flight ends, up to the bound; a
second signal stops at once.
"""

import asyncio
import gc
import logging
import random
import secrets
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Final

import uvloop

from sluicegate_core.controller import Controller
from sluicegate_core.effects import EngineSnapshot
from sluicegate_core.policy import Mode, Policy
from sluicegate_core.vocabulary import EngineStatus
from sluicegate_sidecar.admin import AdminError, AdminServer, start_admin
from sluicegate_sidecar.gate import Gate
from sluicegate_sidecar.http import Server, serve
from sluicegate_sidecar.logs import LogWatcher, configure
from sluicegate_sidecar.policy_file import PolicyFile, PolicyFileError
from sluicegate_sidecar.probe import EngineProbe, Observation
from sluicegate_sidecar.settings import Address, Settings, SettingsError, parse_settings
from sluicegate_sidecar.state import ReloadState

log = logging.getLogger("sluicegate")

#: How often the policy's file is looked at, s. The kubelet's own refresh takes longer than this.
POLICY_POLL_S: Final = 1.0
#: How often a drain looks whether all is done, s.
DRAIN_POLL_S: Final = 0.05
#: Allocations between two young collections: requests are freed by counting, and a collection at each 700th
#: costs 2 % of the work for nothing.
GC_THRESHOLD: Final = 20_000
#: What clients get after a drain to take the ends of their answers, s: those are written, but may not be sent.
CLOSE_GRACE_S: Final = 2.0
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130


class Process:
    """One running gate: owns the server, the probe, the admin port and the policy's file."""

    def __init__(self, settings: Settings, policy_file: PolicyFile, policy: Policy) -> None:
        """Call on the event loop."""
        self.settings = settings
        self.policy_file = policy_file
        self.watcher = LogWatcher()
        self.gate = Gate(
            policy,
            Controller(policy, now=monotonic(), rng=random.Random(secrets.randbits(64))),
            watcher=self.watcher,
            client_salt=settings.client_salt or secrets.token_bytes(16),
        )
        self.reload = ReloadState(
            generation=1,
            content_hash=policy_file.content_hash,
            last_error=None,
            problems=(),
            loaded_at=monotonic(),
            mode=policy.mode,
        )
        self._leaving = False
        self._settled_at = 0.0  # until then a gate that leaves still admits
        self.server: Server | None = None
        self.admin: AdminServer | None = None
        self._probing: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self) -> None:
        """Serve until told to stop, then drain.

        Raises:
            OSError: a port cannot be opened.
        """
        settings, gate = self.settings, self.gate
        self._catch_signals()
        upstream = settings.upstream
        self.server = await serve(
            gate, upstream_host=upstream.host, upstream_port=upstream.port,
            host=settings.listen.host, port=settings.listen.port,
        )  # fmt: skip
        listening = str(Address(settings.listen.host, self.server.port))
        log.info("listening on %s, engine at %s", listening, upstream, extra={"address": listening})
        print(f"sluicegate: listening on http://{listening}", flush=True)

        self._probing = self._probe_engine()
        watching = asyncio.create_task(self._watch_policy())
        try:
            if settings.admin is not None:
                self.admin = await start_admin(self, settings.admin)
                log.info("admin port on %s:%d", settings.admin.host, self.admin.port)
            # What is alive now stays: the collector need not look at it again at each full collection.
            gc.collect()
            gc.freeze()
            gc.set_threshold(GC_THRESHOLD, 20, 100)
            await self._stopping.wait()
            await self.drain(settings.drain_timeout_s)
        finally:
            watching.cancel()
            self._probing.cancel()
            await asyncio.gather(watching, self._probing, return_exceptions=True)
            await self.server.close(0.0 if gate.in_flight else CLOSE_GRACE_S)
            if self.admin is not None:
                await self.admin.close()
            self.watcher.summarise()

    @property
    def leaving(self) -> bool:
        """A drain has begun: no new request should be sent here."""
        return self._leaving or self.gate.controller.draining

    async def drain(self, timeout_s: float, settle_s: float = 0.0) -> bool:
        """Say that the gate is leaving, refuse what comes, wait for what is in flight; True when nothing was left.

        Whoever still waits in the line when the time is over is evicted with an honest 503.

        Args:
            timeout_s: bound on all of it.
            settle_s: how long requests are still admitted: those that route to the gate learn late that it is
                leaving. Each of their connections closes with its response, so that the next request finds a way
                elsewhere.
        """
        gate, server = self.gate, self.server
        until = monotonic() + timeout_s
        if not self._leaving:
            self._leaving = True
            log.info("draining: %d in flight, %.0f s at most", gate.in_flight, timeout_s)
            if server is not None:
                server.leave()
            self._settled_at = monotonic() + min(settle_s, timeout_s)
        if (left_s := self._settled_at - monotonic()) > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), left_s)
        gate.drain()
        if server is not None:
            server.drain()
        while gate.in_flight and monotonic() < until and not self._stop_now.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop_now.wait(), DRAIN_POLL_S)
        left = gate.in_flight
        gate.give_up_line()
        if left:
            log.warning("drained: no longer waiting for %d requests in flight", left)
        else:
            log.info("drained: nothing in flight")
        return not left

    # Signals.

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        if self._stopping.is_set():
            self._stop_now.set()
        self._stopping.set()

    # What comes in from beside the traffic.

    def _probe_engine(self) -> asyncio.Task[None]:
        """Start to watch the engine, as the policy in force describes it."""
        upstream = self.settings.upstream
        probe = EngineProbe(upstream.host, upstream.port, self.gate.controller.policy.engine, self._observed)
        self.gate.on_engine_refused = probe.doubt
        return asyncio.create_task(probe.run())

    def _observed(self, seen: Observation) -> None:
        """The probe has looked at the engine."""
        gate = self.gate
        if seen.status is not gate.controller.engine.status:
            level = logging.WARNING if seen.status is EngineStatus.DOWN else logging.INFO
            log.log(level, "engine is %s", seen.status.value, extra={"engine": seen.engine.value})
            gate.engine_status(seen.status)
        if seen.fresh:
            reading = seen.reading
            gate.engine_snapshot(
                EngineSnapshot(
                    slots=reading.slots,
                    running=reading.running,
                    waiting=reading.waiting,
                    kv_capacity_tokens=reading.kv_capacity_tokens,
                    kv_used=reading.kv_used_fraction,
                )
            )

    async def _watch_policy(self) -> None:
        """Take up a changed policy; a bad one is refused, and the last good one stays in force."""
        while True:
            await asyncio.sleep(POLICY_POLL_S)
            news = self.policy_file.poll()
            if news is None:
                continue
            if isinstance(news, PolicyFileError):
                self.reload.last_error = str(news)
                self.reload.problems = tuple(str(problem) for problem in news.problems)
                log.error("policy refused, the last good one stays in force: %s", news)
                continue
            engine = self.gate.controller.policy.engine
            self.gate.reconfigure(news)
            if news.engine != engine and self._probing is not None:
                self._probing.cancel()
                self._probing = self._probe_engine()
            self.reload = ReloadState(
                generation=self.gate.generation,
                content_hash=self.policy_file.content_hash,
                last_error=None,
                problems=(),
                loaded_at=monotonic(),
                mode=news.mode,
            )
            log.info("policy generation %d is in force, mode %s", self.gate.generation, news.mode.value)


def main(arguments: Sequence[str] | None = None) -> int:
    """`sluicegate run`: 0 after a clean stop, 2 where it cannot start, 1 where it failed."""
    try:
        settings = parse_settings(sys.argv[1:] if arguments is None else arguments)
    except SettingsError as error:
        return _refuse(str(error))
    configure(settings.log_format, settings.log_level)
    policy_file = PolicyFile(settings.policy)
    try:
        policy = policy_file.load()
    except PolicyFileError as error:
        if not policy_file.awaited():
            return _refuse(str(error))
        # A pod must not wait for its policy: until there is one, everything passes.
        policy = Policy(mode=Mode.OFF)
        log.warning("no policy in %s yet: everything passes until there is one", settings.policy)

    async def start() -> None:
        await Process(settings, policy_file, policy).run()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(start())
    except AdminError as error:
        return _refuse(error.strerror or str(error))
    except OSError as error:
        return _refuse(f"cannot listen on {settings.listen}: {error.strerror or error}")
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _refuse(message: str) -> int:
    print(f"sluicegate: {message}", file=sys.stderr)
    return EXIT_USAGE
