"""How the webhook is started: flags, each also readable from the environment (`SLUICEGATE_<FLAG>`).

What the installation says of every gate is checked here, at the start: a quantity that the API server refuses would
otherwise refuse every pod that is injected.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from sluicegate_operator.injection import InjectionContext
from sluicegate_operator.injection.context import DEFAULT_LIMITS, DEFAULT_REQUESTS, GATE_USER

ENVIRONMENT_PREFIX: Final = "SLUICEGATE_"

#: Stands for "the platform sets the user", as OpenShift does.
PLATFORM: Final = "platform"

MAX_SHUTDOWN_DELAY_S: Final = 120.0

#: Each is a watch of its own.
MAX_NAMESPACES: Final = 50

PULL_POLICIES: Final = ("Always", "IfNotPresent", "Never")

_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([EPTGMk]i?|Ki|[num])?")
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_RESOURCE = re.compile(r"[a-z0-9]([a-z0-9./-]{0,251}[a-z0-9])?")


class SettingsError(Exception):
    """A flag or variable that cannot be used; the message names it and the fix."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a port is opened. `host` None: on every interface."""

    host: str | None
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GateDefaults:
    """What every gate gets unless its policy says otherwise; see `InjectionContext`."""

    image: str
    image_pull_policy: str | None = None
    requests: tuple[tuple[str, str], ...] = DEFAULT_REQUESTS
    limits: tuple[tuple[str, str], ...] = DEFAULT_LIMITS
    extra_args: tuple[str, ...] = ()
    run_as_user: int | None = GATE_USER

    def context(self, namespace: str, policy: str, drain_token: str) -> InjectionContext:
        """For the injection of one pod."""
        return InjectionContext(
            namespace=namespace,
            policy_name=policy,
            image=self.image,
            drain_token=drain_token,
            image_pull_policy=self.image_pull_policy,
            requests=self.requests,
            limits=self.limits,
            extra_args=self.extra_args,
            run_as_user=self.run_as_user,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one webhook process.

    Attributes:
        listen: HTTPS, for API servers.
        admin: health and metrics, without TLS.
        certificates: directory with tls.crt and tls.key.
        kubeconfig: None: KUBECONFIG, else as a pod within the cluster.
        namespaces: whose policies are looked at; empty: all.
        gate: what every gate gets.
        shutdown_delay_s: how long to go on answering after SIGTERM, s: until everybody knows.
        log_format: "json", "console", or "auto" (console on a terminal).
        log_level: "debug", "info", "warning" or "error".
    """

    listen: Address
    admin: Address
    certificates: Path
    kubeconfig: Path | None
    namespaces: tuple[str, ...]
    gate: GateDefaults
    shutdown_delay_s: float
    log_format: str
    log_level: str


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Settings:
    """Read the flags of `python -m sluicegate_operator webhook`.

    Raises:
        SettingsError: naming the flag and what is allowed.
        SystemExit: after `--help`.
    """
    flags = _parser(os.environ if environment is None else environment).parse_args(arguments)
    if not flags.gate_image:
        raise SettingsError(f"--gate-image is required (or {ENVIRONMENT_PREFIX}GATE_IMAGE)")
    gate = GateDefaults(
        image=flags.gate_image,
        image_pull_policy=flags.gate_image_pull_policy or None,
        requests=_resources("--gate-requests", flags.gate_requests),
        limits=_resources("--gate-limits", flags.gate_limits),
        extra_args=tuple(flags.gate_arg),
        run_as_user=_user(flags.gate_user),
    )
    return Settings(
        listen=_address("--listen", flags.listen),
        admin=_address("--admin", flags.admin),
        certificates=Path(flags.certificates),
        kubeconfig=Path(flags.kubeconfig) if flags.kubeconfig else None,
        namespaces=_namespaces(flags.namespace),
        gate=gate,
        shutdown_delay_s=_seconds("--shutdown-delay", flags.shutdown_delay, MAX_SHUTDOWN_DELAY_S),
        log_format=flags.log_format,
        log_level=flags.log_level,
    )


def _parser(env: Mapping[str, str]) -> argparse.ArgumentParser:
    def default(flag: str, otherwise: str) -> str:
        return env.get(ENVIRONMENT_PREFIX + flag.upper().replace("-", "_"), otherwise)

    parser = _Parser(
        prog="sluicegate_operator webhook",
        description="Puts a gate into the pods that AdmissionPolicies select, as the API server creates them.",
        epilog="Each flag can also be set as SLUICEGATE_<FLAG>, for example SLUICEGATE_GATE_IMAGE.",
    )
    add = parser.add_argument
    add("--listen", default=default("listen", ":8443"), metavar="ADDR", help="HTTPS; default: %(default)s")
    add("--admin", default=default("admin", ":8080"), metavar="ADDR",
        help="/healthz /readyz /metrics; default: %(default)s")  # fmt: skip
    add("--certificates", default=default("certificates", "/etc/sluicegate/certificates"), metavar="DIR",
        help="with tls.crt and tls.key, read again when they change; default: %(default)s")  # fmt: skip
    add(
        "--kubeconfig",
        default=default("kubeconfig", ""),
        metavar="FILE",
        help="default: as a pod in the cluster",
    )
    add("--namespace", default=default("namespace", ""), metavar="NAME,...",
        help=f"look at policies of these namespaces only, {MAX_NAMESPACES} at most; default: all")  # fmt: skip
    add("--gate-image", default=default("gate-image", ""), metavar="IMAGE", help="of every gate; required")
    add("--gate-image-pull-policy", default=default("gate-image-pull-policy", ""), choices=["", *PULL_POLICIES],
        help="default: Kubernetes' own, by the image's tag")  # fmt: skip
    add("--gate-requests", default=default("gate-requests", _written(DEFAULT_REQUESTS)), metavar="R=Q,...",
        help="resources a gate requests; default: %(default)s")  # fmt: skip
    add("--gate-limits", default=default("gate-limits", _written(DEFAULT_LIMITS)), metavar="R=Q,...",
        help="bounds on a gate's resources; default: %(default)s")  # fmt: skip
    add("--gate-arg", action="append", default=[], metavar="ARG",
        help="a flag for every gate, as --gate-arg=--log-level=debug; may be repeated")  # fmt: skip
    add("--gate-user", default=default("gate-user", str(GATE_USER)), metavar="UID",
        help=f"user of every gate, or '{PLATFORM}' where that sets one; default: %(default)s")  # fmt: skip
    add("--shutdown-delay", default=default("shutdown-delay", "10"), metavar="SECONDS",
        help="go on answering for so long when told to stop; default: %(default)s")  # fmt: skip
    add("--log-format", default=default("log-format", "auto"), choices=["auto", "json", "console"])
    add("--log-level", default=default("log-level", "info"), choices=["debug", "info", "warning", "error"])
    return parser


def _namespaces(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(filter(None, (name.strip() for name in text.split(",")))))
    for name in names:
        if not _NAMESPACE.fullmatch(name):
            raise SettingsError(f"--namespace {name!r} is not the name of a namespace")
    if len(names) > MAX_NAMESPACES:
        raise SettingsError(
            f"--namespace has {len(names)} names, over {MAX_NAMESPACES}; leave it out to watch all"
        )
    return names


def _written(resources: tuple[tuple[str, str], ...]) -> str:
    return ",".join(f"{name}={quantity}" for name, quantity in resources)


def _resources(flag: str, text: str) -> tuple[tuple[str, str], ...]:
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, quantity = part.partition("=")
        if not _RESOURCE.fullmatch(name) or not _QUANTITY.fullmatch(quantity) or name in found:
            raise SettingsError(
                f"{flag} {part!r} is not RESOURCE=QUANTITY, for example cpu=100m or memory=96Mi"
            )
        found[name] = quantity
    return tuple(found.items())


def _user(text: str) -> int | None:
    if text == PLATFORM:
        return None
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise SettingsError(f"--gate-user {text!r} is not a user's number above 0, nor {PLATFORM!r}")
    return int(text)


def _address(flag: str, text: str) -> Address:
    host, colon, port_text = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port_text.isdecimal() or int(port_text) > 65_535:
        raise SettingsError(f"{flag} {text!r} is not HOST:PORT, for example :8443 or 127.0.0.1:8443")
    return Address(host or None, int(port_text))


def _seconds(flag: str, text: str, most: float) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= most:
        raise SettingsError(f"{flag} {text!r} is not a number of seconds from 0 to {most:.0f}")
    return seconds
