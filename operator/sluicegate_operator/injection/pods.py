"""Small questions about a Pod as the API server sends it: containers, ports, quality of service.

A Pod here is plain JSON. Fields may be absent; a field of a wrong type cannot be, for the API server has decoded it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

Json = Mapping[str, Any]

#: Containers that meshes and serving platforms put into pods: never an engine.
COMPANIONS: Final = frozenset(
    {
        "istio-proxy",
        "linkerd-proxy",
        "queue-proxy",
        "vault-agent",
        "cloud-sql-proxy",
        "consul-dataplane",
        "daprd",
    }
)
_NUMBER: Final = re.compile(r"(?<![\w.])\d{2,5}(?![\w.])")


def containers(pod: Json) -> list[dict[str, Any]]:
    """The main containers."""
    return list(pod.get("spec", {}).get("containers") or ())


def init_containers(pod: Json) -> list[dict[str, Any]]:
    """Those that run before, native sidecars among them."""
    return list(pod.get("spec", {}).get("initContainers") or ())


def running_containers(pod: Json) -> list[dict[str, Any]]:
    """Those that run beside the engine: main containers and native sidecars."""
    return containers(pod) + [one for one in init_containers(pod) if one.get("restartPolicy") == "Always"]


def tcp_ports(container: Json) -> list[dict[str, Any]]:
    """The TCP ports that a container declares."""
    return [port for port in container.get("ports") or () if port.get("protocol", "TCP") == "TCP"]


def port_number(container: Json, port: object) -> int | None:
    """A port given by number or by a name that the container declares; None where it has no such port."""
    if isinstance(port, int):
        return port
    if not isinstance(port, str):
        return None
    for one in container.get("ports") or ():
        if one.get("name") == port:
            return int(one["containerPort"])
    return int(port) if port.isdigit() else None


def numbers_in(pod: Json) -> set[int]:
    """Every number in the pod that could be a port: what a new port must not be."""
    found: set[int] = set()
    for container in containers(pod) + init_containers(pod):
        for text in _texts(container):
            found.update(int(number) for number in _NUMBER.findall(text))
    return found


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, (str, int)) and not isinstance(value, bool):
        yield str(value)


def all_limit(pod: Json, resource: str) -> bool:
    """Whether every container limits the resource."""
    every = containers(pod) + init_containers(pod)
    return all(resource in ((one.get("resources") or {}).get("limits") or {}) for one in every)


def is_guaranteed(pod: Json) -> bool:
    """Whether its quality of service is Guaranteed: CPU and memory limited, and requested in full, everywhere."""
    for container in containers(pod) + init_containers(pod):
        resources = container.get("resources") or {}
        limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
        for name in ("cpu", "memory"):
            if name not in limits or requests.get(name, limits[name]) != limits[name]:
                return False
    return bool(containers(pod))


def uses_windows(pod: Json) -> bool:
    """Whether it runs on Windows."""
    spec = pod.get("spec", {})
    selector = spec.get("nodeSelector") or {}
    return "windows" in ((spec.get("os") or {}).get("name"), selector.get("kubernetes.io/os"))


def has_istio(pod: Json) -> bool:
    """Whether Istio's proxy is in the pod already."""
    return any(one.get("name") == "istio-proxy" for one in containers(pod) + init_containers(pod))
