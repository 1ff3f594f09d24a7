"""The webhook as a process: start, follow policies and certificate, stop without a failed admission.

SIGTERM or SIGINT: /readyz says no at once, so that the Service sends nothing new; what still comes is answered for
the shutdown delay, each answer closing its connection; then the ports close, and what is in flight ends. A second
signal skips the delay.

`main` returns an exit code and prints one clear line where it cannot start. Replicas know nothing of each other.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from aiohttp import web

from sluicegate_operator.logs import configure
from sluicegate_operator.webhook.kube import KubeError, PolicyApi
from sluicegate_operator.webhook.metrics import WebhookMetrics
from sluicegate_operator.webhook.server import Lifecycle, Webhook, health_app
from sluicegate_operator.webhook.settings import Address, Settings, SettingsError, parse_settings
from sluicegate_operator.webhook.tls import LOOK_EVERY_S, ServingCertificate
from sluicegate_operator.webhook.watch import Policies, PolicyWatch

log = logging.getLogger("sluicegate_operator.webhook")

#: For what is in flight when the ports close, s: as long as an API server waits.
FINISH_S: Final = 5.0
#: Idle connections are kept for longer than API servers keep theirs, which close after 90 s: who closes is the one
#: who would send next, so that no request meets a closing connection.
KEEP_ALIVE_S: Final = 120.0

EXIT_USAGE: Final = 2
EXIT_FAILED: Final = 1


class Process:
    """One running webhook. `run` is its life.

    Attributes:
        port, admin_port: where it listens, once `listening` is set; given by the system where 0 was asked for.
        certificate: what it serves with.
    """

    def __init__(self, settings: Settings, apis: Sequence[PolicyApi]) -> None:
        """Call on the event loop."""
        self.port = self.admin_port = 0
        self.listening = asyncio.Event()
        self._settings = settings
        self._apis = tuple(apis)
        self.certificate = ServingCertificate(settings.certificates)
        self._policies = Policies([PolicyWatch(api, _jitter()) for api in apis])
        self._metrics = WebhookMetrics(self._policies, self.certificate)
        self._lifecycle = Lifecycle()
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self) -> None:
        """Serve until told to stop.

        Raises:
            OSError: a port cannot be opened.
        """
        settings = self._settings
        webhook = Webhook(self._policies, self._metrics, settings.gate, self._lifecycle)
        admin = await _started(health_app(self._metrics, self.not_ready))
        hooks = await _started(webhook.app())
        self.certificate.look()
        tasks = [asyncio.create_task(one.run()) for one in self._policies.watches]
        tasks.append(asyncio.create_task(self._follow_certificate()))
        for task in tasks:
            task.add_done_callback(self._ended)
        try:
            self.admin_port = await _listen(admin, settings.admin)
            self.port = await _listen(hooks, settings.listen, self.certificate)
            log.info("listening", extra={"port": self.port, "admin_port": self.admin_port})
            self.listening.set()
            await self._stop.wait()
            await self._linger()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await hooks.cleanup()
            await admin.cleanup()
            for api in self._apis:
                await api.close()
        failed = [task for task in tasks if not task.cancelled() and task.exception() is not None]
        if failed:
            raise RuntimeError("a part of the webhook has ended") from failed[0].exception()

    def stop(self) -> None:
        """Begin to stop; a second call skips the delay."""
        if self._stop.is_set():
            self._stop_now.set()
        self._lifecycle.stopping = True
        self._stop.set()

    def not_ready(self) -> str:
        """Why no question should be sent here; empty if they may."""
        if self._lifecycle.stopping:
            return "stopping"
        if self.certificate.loaded is None:
            return "no certificate yet"
        if not self._policies.synced:
            return "policies are not known yet"
        return ""

    async def _linger(self) -> None:
        delay_s = self._settings.shutdown_delay_s
        log.info("stopping: answers for another %.0f s", delay_s)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop_now.wait(), delay_s)

    async def _follow_certificate(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.certificate.look()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task that runs for ever has ended: by cancellation when all ends, else by an error of ours."""
        if not task.cancelled():
            log.error("a part of the webhook has failed", exc_info=task.exception())
            self.stop()


def _jitter() -> random.Random:
    return random.Random(secrets.randbits(64))  # noqa: S311  # spreads retries; no secret


async def _started(app: web.Application) -> web.AppRunner:
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=KEEP_ALIVE_S, shutdown_timeout=FINISH_S)
    await runner.setup()
    return runner


async def _listen(
    runner: web.AppRunner, address: Address, certificate: ServingCertificate | None = None
) -> int:
    site = web.TCPSite(
        runner, address.host, address.port, ssl_context=None if certificate is None else certificate.context
    )
    await site.start()
    port: int = runner.addresses[0][1]
    return port


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m sluicegate_operator webhook`: 0 after a clean stop, 2 where it cannot start, 1 where it failed."""
    try:
        settings = parse_settings(sys.argv[1:] if arguments is None else arguments)
    except SettingsError as error:
        return _refuse(str(error))
    configure(settings.log_format, settings.log_level)
    try:
        apis = [PolicyApi(settings.kubeconfig, namespace) for namespace in settings.namespaces or (None,)]
    except KubeError as error:
        return _refuse(str(error))

    async def start() -> None:
        process = Process(settings, apis)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, process.stop)
        await process.run()

    try:
        asyncio.run(start())
    except OSError as error:
        return _refuse(f"cannot listen: {error.strerror or error}")
    except RuntimeError:
        return EXIT_FAILED  # told when it happened
    return 0


def _refuse(message: str) -> int:
    print(f"sluicegate_operator webhook: {message}", file=sys.stderr)
    return EXIT_USAGE
