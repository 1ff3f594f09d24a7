"""How the gate comes to stand in front of the engine: which port it takes, and where the engine goes.

Auto: the engine moves to 127.0.0.1 on a free port, and the gate takes the port that clients use, so that nothing
else in the cluster changes and nothing reaches the engine past the gate. Where that is not certain to work, the
port's *name* moves to the gate (NamedPort): whoever goes by number still reaches the engine, and the pod works as
before. Where there is no name either, the pod is left alone. Explicit: whoever wrote the policy has moved the engine.

The burden of proof lies with the change: a plan is made only where the manifest, read again after the change, says
that the engine listens where it should.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from sluicegate_core.policy import EngineType, Policy, Takeover
from sluicegate_operator.injection.choice import EngineContainer, RefusedError, choose_engine, read_engine
from sluicegate_operator.injection.edits import changed_container
from sluicegate_operator.injection.images import find_image
from sluicegate_operator.injection.listening import can_hide, changes_to_move
from sluicegate_operator.injection.pods import Json, numbers_in, port_number, running_containers, tcp_ports
from sluicegate_operator.names import ADMIN_PORT

#: Where engines are moved: above what Ray (10002 to 19999) and SGLang (20000) take for themselves, below what
#: systems give out by themselves (from 32768 on).
FIRST_ENGINE_PORT: Final = 27000
#: Ports that are tried: a pod that names this many is no pod.
MAX_PORTS_TRIED: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one pod is gated.

    Attributes:
        takeover: the way that was taken, which may not be the one asked for.
        engine: the engine's container as it was.
        container: the same as it is to be.
        port: where the gate listens.
        engine_port: where the engine does.
        on_loopback: the engine was on the loopback interface alone, and so is the gate.
        engine_moved: the engine is no longer where probes and hooks say.
        gate_port: the port that the gate declares; None where the engine's container declares it still.
        warnings: for whoever created the pod.
    """

    takeover: Takeover
    engine: EngineContainer
    container: Mapping[str, Any]
    port: int
    engine_port: int
    on_loopback: bool = False
    engine_moved: bool = False
    gate_port: Mapping[str, Any] | None = None
    warnings: tuple[str, ...] = field(default=())

    @property
    def engine_type(self) -> EngineType:
        return self.engine.type


def plan_takeover(pod: Json, policy: Policy) -> Plan:
    """Decide how the pod is gated.

    Raises RefusedError: why it is left alone, and what to write.
    """
    engine = choose_engine(pod, policy)
    listening = engine.listening
    if listening is not None and listening.refusal is not None:
        raise RefusedError(f"container {engine.name!r} cannot be gated: {listening.refusal}")
    takeover = policy.injection.takeover
    if takeover is Takeover.EXPLICIT:
        return _explicit(pod, policy, engine)
    if takeover is Takeover.NAMED_PORT:
        return _named_port(pod, policy, engine, ())
    try:
        return _auto(pod, policy, engine)
    except RefusedError as error:
        try:
            return _named_port(pod, policy, engine, (str(error),))
        except RefusedError:
            raise error from None


# Auto.


def _auto(pod: Json, policy: Policy, engine: EngineContainer) -> Plan:
    port, warnings = _client_port(policy, engine)
    _check_free_for_gate(pod, port, engine)
    new = free_port(pod, port)
    container: Mapping[str, Any] = engine.container
    changes = []
    for found in engine.found:
        more, why_not = changes_to_move(found.program, found.words, found.invocation, new)
        if why_not is not None:
            raise RefusedError(
                f"the port of container {engine.name!r} cannot be changed: {why_not}; {_ADVICE}"
            )
        changes += more
    image = find_image(str(engine.container.get("image", "")))
    defaults = () if image is None else image.arguments
    container = changed_container(engine.container, list(dict.fromkeys(changes)), defaults)
    program = engine.found[0].program
    hides = all(can_hide(one.program, one.words, one.invocation) for one in engine.found)
    check_moved(read_engine(engine.index, dict(container)), engine, new, hides=hides)
    if not hides:
        warnings += (
            f"{program.name} cannot be moved to loopback here: it can still be reached past the gate on port {new}; "
            "keep other pods away from it by a NetworkPolicy",
        )
    listening = engine.listening
    on_loopback = hides and listening is not None and listening.on_loopback
    if on_loopback:
        warnings += (
            f"the engine listened on {listening.host if listening else ''} alone, and so does the gate: other pods "
            "reach neither",
        )
    return Plan(
        takeover=Takeover.AUTO,
        engine=engine,
        container=container,
        port=port,
        engine_port=new,
        on_loopback=on_loopback,
        engine_moved=True,
        warnings=warnings,
    )


_ADVICE: Final = (
    "start the engine on another port yourself and write spec.injection: {takeover: Explicit, upstreamPort: THAT "
    "PORT} with spec.engine.port: the port that clients use"
)


def _client_port(policy: Policy, engine: EngineContainer) -> tuple[int, tuple[str, ...]]:
    """The port that clients use, which the gate takes, and warnings."""
    listening = engine.listening
    if listening is None:
        why = engine.unreadable or "its command starts no engine that is known"
        raise RefusedError(
            f"how container {engine.name!r} is told its port cannot be read ({why}); {_ADVICE}"
        )
    declared = [port["containerPort"] for port in tcp_ports(engine.container)]
    stated = policy.engine.port
    if stated is not None:
        if listening.sure and listening.port != stated:
            raise RefusedError(
                f"spec.engine.port is {stated}, but container {engine.name!r} listens on {listening.port} "
                f"({listening.source}); correct spec.engine.port, or name another container in "
                "spec.injection.container"
            )
        return stated, ()
    if listening.sure and listening.port is not None:
        if declared and listening.port not in declared:
            return listening.port, (
                f"container {engine.name!r} declares the ports {declared}, but listens on {listening.port} "
                f"({listening.source})",
            )
        return listening.port, ()
    if listening.port is not None and listening.port in declared:
        return listening.port, ()
    probed = probed_ports(engine.container)
    if len(declared) == 1 and declared[0] in probed:
        return int(declared[0]), ()
    raise RefusedError(
        f"the port of container {engine.name!r} is known only when it starts ({listening.source}); write it in "
        "spec.engine.port"
    )


def check_moved(now: EngineContainer, before: EngineContainer, port: int, *, hides: bool) -> None:
    """The manifest after the change says where the engine listens: it must be where the gate looks for it.

    Raises RefusedError.
    """
    listening = now.listening
    moved = len(now.found) == len(before.found) and listening is not None
    for one in now.found:
        at = one.listening
        moved = moved and at.port == port and (at.sure or one.program.last_wins)
        moved = moved and (not hides or at.on_loopback)
    if not moved:
        raise RefusedError(
            f"the port of container {before.name!r} cannot be changed with certainty; {_ADVICE}"
        )


# NamedPort.


def _named_port(pod: Json, policy: Policy, engine: EngineContainer, why: tuple[str, ...]) -> Plan:
    """The name of the engine's port moves to the gate; the engine stays."""
    named = [port for port in tcp_ports(engine.container) if port.get("name")]
    stated = policy.injection.upstream_port or policy.engine.port
    listening = engine.listening
    wanted = stated if stated is not None else (listening.port if listening is not None else None)
    if wanted is not None:
        named = [port for port in named if port["containerPort"] == wanted]
    if len(named) != 1:
        what = "no port" if not named else f"{len(named)} ports"
        at = f" {wanted}" if wanted is not None else ""
        raise RefusedError(
            f"container {engine.name!r} declares {what}{at} with a name, and NamedPort needs the one that Services "
            f"refer to by name; state it in spec.engine.port, or use Explicit: {_ADVICE}"
        )
    port = named[0]
    number, name = int(port["containerPort"]), str(port["name"])
    gate = free_port(pod, number)
    container = dict(engine.container)
    container["ports"] = [_nameless(one) if one is port else one for one in container["ports"]]
    by_number = (
        f"the gate took over the port's name {name!r} alone: clients that go by its number {number} reach the engine "
        "past the gate",
    )
    return Plan(
        takeover=Takeover.NAMED_PORT,
        engine=engine,
        container=container,
        port=gate,
        engine_port=number,
        gate_port={**port, "containerPort": gate},
        warnings=why + by_number,
    )


def _nameless(port: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in port.items() if key not in ("name", "hostPort", "hostIP")}


# Explicit.


def _explicit(pod: Json, policy: Policy, engine: EngineContainer) -> Plan:
    """The engine has been moved by whoever wrote the policy."""
    port, upstream = policy.engine.port, policy.injection.upstream_port
    if port is None or upstream is None or port == upstream:
        raise RefusedError(
            "Explicit needs two different ports: spec.engine.port (where clients go, and the gate listens) and "
            "spec.injection.upstreamPort (where the engine listens)"
        )
    listening = engine.listening
    if listening is not None and listening.sure and listening.port != upstream:
        raise RefusedError(
            f"spec.injection.upstreamPort is {upstream}, but container {engine.name!r} listens on {listening.port} "
            f"({listening.source}); start the engine on {upstream}"
        )
    _check_free_for_gate(pod, port, engine)
    reachable = listening is None or not listening.on_loopback
    warnings = (
        (f"the engine can be reached past the gate on port {upstream} unless it listens on 127.0.0.1 alone",)
        if reachable
        else ()
    )
    declares = any(
        one["containerPort"] == port for container in running_containers(pod) for one in tcp_ports(container)
    )
    return Plan(
        takeover=Takeover.EXPLICIT,
        engine=engine,
        container=engine.container,
        port=port,
        engine_port=upstream,
        gate_port=None if declares else {"containerPort": port},
        warnings=warnings,
    )


# Ports.


def _check_free_for_gate(pod: Json, port: int, engine: EngineContainer) -> None:
    """The port that the gate takes belongs to the engine or to nobody."""
    if port == ADMIN_PORT:
        raise RefusedError(f"port {port} is the gate's own admin port; start the engine on another")
    for container in running_containers(pod):
        if container.get("name") == engine.name:
            continue
        if any(one["containerPort"] == port for one in tcp_ports(container)):
            other = container.get("name")
            raise RefusedError(
                f"port {port} is declared by container {other!r} and not only by the engine's {engine.name!r}; "
                "state in spec.engine.port where the engine listens"
            )


def free_port(pod: Json, port: int) -> int:
    """A port that nothing in the pod's text names, recognisable by its last three digits."""
    taken = numbers_in(pod)
    first = FIRST_ENGINE_PORT + port % 1000
    for number in range(first, first + MAX_PORTS_TRIED):
        if number not in taken:
            return number
    raise RefusedError("the pod names every port that an engine could be moved to")


def probed_ports(container: Json) -> set[int]:
    """The ports that the container's probes ask over HTTP or TCP."""
    found = set()
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container.get(kind) or {}
        for how in ("httpGet", "tcpSocket"):
            number = port_number(container, (probe.get(how) or {}).get("port"))
            if number is not None:
                found.add(number)
    return found
