"""Which container is the engine, and what is known of where it listens.

Evidence, strongest first: the policy names the container; its command starts a known engine; it is the only one. Two
that are as likely are never told apart by a guess: the pod is left alone, and the refusal says what to write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sluicegate_core.policy import EngineType, Policy
from sluicegate_operator.injection.engines import Program, find_program, mentions_engine
from sluicegate_operator.injection.images import find_image
from sluicegate_operator.injection.listening import Listening, read_listening
from sluicegate_operator.injection.pods import COMPANIONS, Json, containers, init_containers, port_number
from sluicegate_operator.injection.start import Invocation, read_start


class RefusedError(Exception):
    """The pod is left alone; the message says why, and what to write."""


@dataclass(frozen=True, slots=True)
class Found:
    """An engine's invocation. `words`: how many of its words name the program."""

    program: Program
    words: int
    invocation: Invocation
    listening: Listening


@dataclass(frozen=True, slots=True)
class EngineContainer:
    """What is known of a container as an engine.

    Attributes:
        index: among the pod's main containers.
        container: as it is in the pod.
        found: its engine's invocations; several where a script has one in each branch. Empty: none was found.
        unreadable: why nothing, or not all, could be read.
        likely: an engine's name stands in what could not be read.
    """

    index: int
    container: dict[str, Any]
    found: tuple[Found, ...]
    unreadable: str | None
    likely: bool

    @property
    def name(self) -> str:
        return str(self.container.get("name", ""))

    @property
    def type(self) -> EngineType:
        return self.found[0].program.type if self.found else EngineType.AUTO

    @property
    def listening(self) -> Listening | None:
        """Where it listens: what all of its invocations agree on."""
        if not self.found:
            return None
        first = self.found[0].listening
        for one in self.found[1:]:
            if one.listening.refusal is not None:
                return one.listening
            if one.listening.port != first.port:
                why = f"starts engines on different ports ({first.port} and {one.listening.port})"
                return Listening(None, False, None, "", why)
        return first


def read_engine(index: int, container: dict[str, Any]) -> EngineContainer:
    """Read one container as an engine."""
    image = find_image(str(container.get("image", "")))
    start = read_start(container, image)
    unseen = image is None or bool(container.get("envFrom"))
    found = []
    for invocation in start.invocations:
        match = find_program(invocation.args)
        if match is not None:
            program, words = match
            listening = read_listening(program, words, invocation, unseen=unseen)
            found.append(Found(program, words, invocation, listening))
    texts = " ".join(str(one) for field in ("command", "args") for one in container.get(field) or ())
    return EngineContainer(
        index, container, tuple(found), start.unreadable, not found and mentions_engine(texts)
    )


def choose_engine(pod: Json, policy: Policy) -> EngineContainer:
    """The container in front of which the gate goes.

    Raises RefusedError.
    """
    read = [read_engine(index, container) for index, container in enumerate(containers(pod))]
    wanted = policy.injection.container
    if wanted is not None:
        return _named(pod, read, wanted)
    own = [one for one in read if one.name not in COMPANIONS]
    if len(own) == 1:
        return own[0]
    engines = _narrowed(own, policy)
    if len(engines) == 1:
        return engines[0]
    names = ", ".join(repr(one.name) for one in engines or own)
    why = "each looks like an engine" if engines else "none is known to be an engine"
    raise RefusedError(f"of the containers {names} {why}; name the engine's in spec.injection.container")


def _named(pod: Json, read: Sequence[EngineContainer], wanted: str) -> EngineContainer:
    for one in read:
        if one.name == wanted:
            return one
    names = ", ".join(repr(one.name) for one in read)
    if any(one.get("name") == wanted for one in init_containers(pod)):
        raise RefusedError(
            f"{wanted!r} is an init container; spec.injection.container must be one of {names}"
        )
    raise RefusedError(f"there is no container {wanted!r}; spec.injection.container must be one of {names}")


def _narrowed(read: Sequence[EngineContainer], policy: Policy) -> list[EngineContainer]:
    """Those that are as likely as any to be the engine that the policy means."""
    engines = [one for one in read if one.found]
    if not engines:
        engines = [one for one in read if one.likely]
    if len(engines) > 1 and policy.engine.type is not EngineType.AUTO:
        engines = [one for one in engines if one.type is policy.engine.type] or engines
    port = policy.engine.port
    if port is not None and len(engines) != 1:
        declared = [
            one
            for one in engines or read
            if (one.listening is not None and one.listening.port == port)
            or any(port_number(one.container, declared["containerPort"]) == port for declared in _ports(one))
        ]
        engines = declared or engines
    return engines


def _ports(one: EngineContainer) -> list[dict[str, Any]]:
    return list(one.container.get("ports") or ())
