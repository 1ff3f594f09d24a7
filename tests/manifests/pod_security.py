"""The Pod Security Standard `restricted`, as its page states it: what of a pod violates it.

Written from the standard's table, control by control, and not from what the code under test does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

SAFE_SYSCTLS: Final = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
}
VOLUMES: Final = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip


def violations(pod: Mapping[str, Any]) -> list[str]:
    """One line for each."""
    return sorted(
        [*_of_pod(pod["spec"]), *(line for one in _containers(pod) for line in _of_container(pod, one))]
    )


def _containers(pod: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for field in ("initContainers", "containers", "ephemeralContainers"):
        yield from pod["spec"].get(field) or ()


def _of_pod(spec: Mapping[str, Any]) -> Iterator[str]:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield name
    for sysctl in (spec.get("securityContext") or {}).get("sysctls") or ():
        if sysctl["name"] not in SAFE_SYSCTLS:
            yield f"sysctl {sysctl['name']}"
    for volume in spec.get("volumes") or ():
        if not set(volume) - {"name"} <= VOLUMES:
            yield f"volume {volume['name']}"
    if (spec.get("securityContext") or {}).get("runAsUser") == 0:
        yield "runAsUser 0"


def _of_container(pod: Mapping[str, Any], container: Mapping[str, Any]) -> Iterator[str]:
    own = container.get("securityContext") or {}
    whole = pod["spec"].get("securityContext") or {}
    name = container["name"]
    if own.get("privileged"):
        yield f"{name}: privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield f"{name}: allowPrivilegeEscalation"
    if "ALL" not in ((own.get("capabilities") or {}).get("drop") or ()):
        yield f"{name}: capabilities are not dropped"
    if set((own.get("capabilities") or {}).get("add") or ()) - {"NET_BIND_SERVICE"}:
        yield f"{name}: capabilities are added"
    if own.get("runAsNonRoot", whole.get("runAsNonRoot")) is not True:
        yield f"{name}: runAsNonRoot"
    if own.get("runAsUser") == 0:
        yield f"{name}: runAsUser 0"
    seccomp = (own.get("seccompProfile") or whole.get("seccompProfile") or {}).get("type")
    if seccomp not in ("RuntimeDefault", "Localhost"):
        yield f"{name}: seccompProfile"
    if own.get("procMount", "Default") != "Default":
        yield f"{name}: procMount"
    for port in container.get("ports") or ():
        if port.get("hostPort"):
            yield f"{name}: hostPort"
