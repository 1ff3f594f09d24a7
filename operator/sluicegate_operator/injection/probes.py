"""Probes and hooks after a takeover: each asks what it asked before.

- HTTP, by number or by name: the port is the gate's now, and health, metrics and models pass it ungated: unchanged.
- TCP: the gate accepts from its first second on, which says nothing of the engine. The probe asks the gate's admin
  port instead whether the engine accepts connections (`/enginez`), with all its times as they were.
- exec: the command runs in the pod, so that `localhost:PORT` would be the gate. A probe that sends an inference
  request would be refused under load, and the kubelet would restart a busy engine: so these go to the engine itself,
  wherever the text names its address. What cannot be recognised goes through the gate, with a warning.
- gRPC on the engine's port: no such engine is known, and the gate speaks HTTP/1.1: refused.

Hooks of the engine's own container are treated as exec probes are: they belong to the engine. Everything else in the
pod that dials the port is a client, and goes through the gate.

Pure functions from containers to containers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from sluicegate_core.policy import Takeover
from sluicegate_operator.injection.choice import RefusedError
from sluicegate_operator.injection.engines import LOOPBACK
from sluicegate_operator.injection.pods import port_number
from sluicegate_operator.injection.takeover import Plan
from sluicegate_operator.names import ADMIN_PORT

PROBES: Final = ("startupProbe", "readinessProbe", "livenessProbe")
HOOKS: Final = ("postStart", "preStop")
#: On the gate's admin port: 200 where the engine accepts connections.
ENGINE_PATH: Final = "/enginez"

#: An address of the pod itself and what may stand between it and a port: `localhost:8000`, `nc -z 127.0.0.1 8000`,
#: `("localhost", 8000)`.
_OWN_ADDRESS: Final = r"(localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1?\])(\s*[:\s]\s*|['\"]\s*,\s*['\"]?)"


def rewrite_probes(
    container: Mapping[str, Any], plan: Plan, *, is_engine: bool
) -> tuple[dict[str, Any], list[str]]:
    """The container with probes and hooks that ask what they asked before, and warnings.

    Raises RefusedError.
    """
    changed = dict(container)
    warnings: list[str] = []
    for kind in PROBES:
        probe = container.get(kind)
        if not probe:
            continue
        if plan.takeover is Takeover.NAMED_PORT:
            changed[kind] = _by_number(probe, plan) if is_engine else probe
        else:
            changed[kind] = _probe(container, kind, plan, warnings)
    hooks = container.get("lifecycle")
    if is_engine and hooks:
        changed["lifecycle"] = dict(hooks)
        for kind in HOOKS:
            if hooks.get(kind):
                changed["lifecycle"][kind] = _exec(container, kind, hooks[kind], plan, warnings)
    return changed, warnings


def _probe(container: Mapping[str, Any], kind: str, plan: Plan, warnings: list[str]) -> Mapping[str, Any]:
    """One probe where the gate has taken the port's number."""
    probe: Mapping[str, Any] = container[kind]
    grpc = probe.get("grpc")
    if grpc and grpc.get("port") == plan.port:
        raise RefusedError(f"{kind} of container {container.get('name')!r} speaks gRPC on port {plan.port}")
    socket = probe.get("tcpSocket")
    if socket and not socket.get("host") and port_number(container, socket.get("port")) == plan.port:
        rest = {key: value for key, value in probe.items() if key != "tcpSocket"}
        return {**rest, "httpGet": {"path": ENGINE_PATH, "port": ADMIN_PORT, "scheme": "HTTP"}}
    return _exec(container, kind, probe, plan, warnings)


def _by_number(probe: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """A probe by the name that has moved asks the engine by number, as before."""
    assert plan.gate_port is not None
    changed = dict(probe)
    for how in ("httpGet", "tcpSocket"):
        handler = probe.get(how)
        if handler and handler.get("port") == plan.gate_port["name"]:
            changed[how] = {**handler, "port": plan.engine_port}
    return changed


def _exec(
    container: Mapping[str, Any], kind: str, handler: Mapping[str, Any], plan: Plan, warnings: list[str]
) -> Mapping[str, Any]:
    """A probe or hook whose command, if it has one, goes to the engine where it did."""
    command = (handler.get("exec") or {}).get("command")
    if not command or not plan.engine_moved:
        return handler
    rewritten = rewrite_command(command, plan.port, plan.engine_port)
    if any(re.search(rf"(?<!\d){plan.port}(?!\d)", word) for word in rewritten):
        warnings.append(
            f"{kind} of container {container.get('name')!r} names port {plan.port} in a way that is not understood: "
            "it goes through the gate"
        )
    return {**handler, "exec": {**handler["exec"], "command": rewritten}}


def rewrite_command(command: list[str], port: int, engine_port: int) -> list[str]:
    """A command whose calls to the pod's own `port` go to `engine_port`; all else stays."""
    own = re.compile(_OWN_ADDRESS + rf"{port}(?!\d)")
    rewritten = [own.sub(lambda found: f"{LOOPBACK}{found[2]}{engine_port}", word) for word in command]
    # `nc -z localhost 8000`: two words of a list.
    hosts = ("localhost", LOOPBACK, "0.0.0.0")  # noqa: S104
    for at in range(1, len(rewritten)):
        if rewritten[at] == str(port) and rewritten[at - 1] in hosts:
            rewritten[at - 1 : at + 1] = [LOOPBACK, str(engine_port)]
    return rewritten
