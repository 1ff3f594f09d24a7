"""The webhook's two ports: HTTPS for API servers, and HTTP for the kubelet and Prometheus.

    POST /inject/{namespace}/{policy}    an AdmissionReview in, an AdmissionReview out
    GET  /healthz /readyz /metrics       on the other port

Invariants:
- Every input is bounded: bodies, how many are read at once, how long one may take. What is beyond gets an error,
  on which the API server acts by the entry's `failurePolicy`.
- Nothing is written anywhere but to metrics and the log, so a dry run is like any other.
- No pod's content is logged: names, the outcome, and what the injection says of it.

What is answered lives in `decide`; policies in `watch`; the process in `run`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Final

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from sluicegate_operator.webhook.decide import Decision, FailedError, audit, decide
from sluicegate_operator.webhook.kube import KubeError
from sluicegate_operator.webhook.metrics import WebhookMetrics
from sluicegate_operator.webhook.review import MAX_BODY_BYTES, Review, ReviewError, allow, read_review
from sluicegate_operator.webhook.settings import GateDefaults
from sluicegate_operator.webhook.watch import Policies

log = logging.getLogger(__name__)

#: Requests answered at once; the bodies of that many fit into a small pod's memory, and a burst of pods waits its turn.
MAX_IN_FLIGHT: Final = 16

#: Requests that wait for that. Beyond, an error at once is better than one after five seconds.
MAX_WAITING: Final = 256

#: For a request, s: the API server gives up after five.
REVIEW_S: Final = 4.5

#: Of a drain token: 18 bytes of randomness, in signs that stand unquoted anywhere.
TOKEN_BYTES: Final = 18


@dataclass(slots=True)
class Lifecycle:
    """Where the process is. `stopping` is set once and stays."""

    stopping: bool = False


class Webhook:
    """The handlers. Stateless but for the table of policies, which the watches keep."""

    def __init__(
        self, policies: Policies, metrics: WebhookMetrics, defaults: GateDefaults, lifecycle: Lifecycle
    ) -> None:
        self._policies = policies
        self._metrics = metrics
        self._defaults = defaults
        self._lifecycle = lifecycle
        self._turn = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._waiting = 0

    def app(self) -> web.Application:
        """What the HTTPS port serves."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/inject/{namespace}/{policy}", self.inject)
        return app

    async def inject(self, request: web.Request) -> web.Response:
        """One question, answered within `REVIEW_S` or with an error."""
        if self._waiting >= MAX_WAITING:
            return self._error(503, "busy", "too many requests at once")
        began = perf_counter()
        self._waiting += 1
        self._metrics.in_flight += 1
        try:
            async with asyncio.timeout(REVIEW_S), self._turn:
                response = await self._answer(request)
        except TimeoutError:
            response = self._error(503, "late", f"not answered within {REVIEW_S} s")
        finally:
            self._waiting -= 1
            self._metrics.in_flight -= 1
        self._metrics.seconds.observe(perf_counter() - began)
        if self._lifecycle.stopping:
            response.force_close()  # the next one of this client is to go to another replica
        return response

    async def _answer(self, request: web.Request) -> web.Response:
        if request.content_type != "application/json":
            return self._error(415, "bad_request", "the body is to be application/json")
        try:
            review = read_review(await request.read())
        except web.HTTPRequestEntityTooLarge:
            return self._error(413, "bad_request", f"the body is longer than {MAX_BODY_BYTES} bytes")
        except ReviewError as error:
            return self._error(400, "bad_request", str(error))
        namespace, name = request.match_info["namespace"], request.match_info["policy"]
        try:
            policy = await self._policies.find(namespace, name)
        except KubeError as error:
            log.warning("policy %s/%s cannot be asked for: %s", namespace, name, error)
            return self._error(
                503, "policy_unknown", "the policy is not known yet, and the API server cannot be asked"
            )
        context = self._defaults.context(namespace, name, secrets.token_urlsafe(TOKEN_BYTES))
        try:
            decision = decide(review, policy, self._policies.within(namespace), context)
        except FailedError as error:
            return self._error(500, "failed", str(error))
        self._told(review, decision, name)
        answer = allow(review.uid, patch=decision.patch, warnings=decision.warnings, audit=audit(decision))
        return web.json_response(answer)

    def _told(self, review: Review, decision: Decision, policy: str) -> None:
        self._metrics.decided(decision.outcome, decision.policy)
        fields = {
            "outcome": decision.outcome.value,
            "namespace": review.namespace,
            "pod": review.pod_name,
            "policy": policy,
            "uid": review.uid,
            "dry_run": review.dry_run,
        }
        log.info("%s", decision.note or decision.outcome.value, extra=fields)

    def _error(self, status: int, reason: str, text: str) -> web.Response:
        """An answer that is none: the API server shows the text where the policy fails the pod for it."""
        self._metrics.errors.labels(reason).inc()
        log.warning("answered %d: %s", status, text, extra={"reason": reason})
        return web.Response(status=status, text=f"sluicegate: {text}\n")


def health_app(metrics: WebhookMetrics, not_ready: Callable[[], str]) -> web.Application:
    """What the HTTP port serves. `not_ready` says why no question should come here; empty if they may."""

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        reason = not_ready()
        return web.Response(status=503 if reason else 200, text=f"{reason or 'ok'}\n")

    async def exposition(_: web.Request) -> web.Response:
        page = generate_latest(metrics.registry)
        return web.Response(body=page, headers={"content-type": CONTENT_TYPE_LATEST})

    app = web.Application(client_max_size=1024)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", exposition)
    return app
