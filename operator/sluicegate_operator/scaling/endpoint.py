"""The demand as JSON over HTTP: what KEDA's `metrics-api` trigger asks.

    GET /scaling/{namespace}/{policy}
    200 {"demand": 2.4, "replicas": 3, "reason": "Measured", ...}
    503 {"error": "1 of 1 ready gates do not answer", "reason": "GatesSilent"}   nothing is known: hold what runs
    404 there is no such policy
    401 a token is required and was not given

A 503 makes KEDA report the metric as failed; an HPA then takes no replica away. So that is the answer to everything
that is not known, right after a restart above all. Who may ask is the NetworkPolicy's question first; a bearer token
is checked where one is set. It only reads, and what it tells is no secret of any client.
"""

import hmac
import re
from typing import Final

from aiohttp import web

from sluicegate_operator.scaling.board import Board, PolicyKey
from sluicegate_operator.scaling.demand import Demand, Unknown

#: A name of Kubernetes (RFC 1123 subdomain); what is none is not looked up.
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
#: Requests have no bodies.
MAX_BODY_BYTES: Final = 1024


def scaling_app(board: Board, *, token: str | None = None) -> web.Application:
    """The application.

    Args:
        board: read at each request.
        token: required as `Authorization: Bearer TOKEN`; None: nobody has to show one.
    """
    app = web.Application(client_max_size=MAX_BODY_BYTES)

    async def answer(request: web.Request) -> web.Response:
        if token is not None and not _shows(request, token):
            return _error(401, "a bearer token is required", None)
        namespace, policy = request.match_info["namespace"], request.match_info["policy"]
        if not _NAME.fullmatch(namespace) or not _NAME.fullmatch(policy):
            return _error(404, "no such policy", None)
        found = board.read(PolicyKey(namespace, policy))
        if found is None:
            return _error(404, f"no AdmissionPolicy {policy} in namespace {namespace}", None)
        told, age_s = found
        if isinstance(told, Unknown):
            return _error(503, told.message, told.why.value)
        return web.json_response(document(told, age_s))

    app.router.add_get("/scaling/{namespace}/{policy}", answer)
    return app


def document(told: Demand, age_s: float) -> dict[str, object]:
    """The answer's body; docs/autoscaling.md says what each field means."""
    return {
        "demand": round(told.replicas, 3),
        "replicas": told.wanted,
        "ready": told.fleet.ready,
        "starting": told.fleet.starting,
        "work_per_s": round(told.work_per_s, 3),
        "capacity_per_s": None if told.capacity_per_s is None else round(told.capacity_per_s, 3),
        "reason": told.why.value,
        "message": told.message,
        "age_s": round(age_s, 3),
    }


def _shows(request: web.Request, token: str) -> bool:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())


def _error(status: int, message: str, reason: str | None) -> web.Response:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return web.json_response({"error": message, "reason": reason}, status=status, headers=headers)
