"""How the gate is started: flags, each also readable from the environment (`SLUICEGATE_<FLAG>`).

Only what belongs to one process is here; what belongs to the traffic is in the policy, and changes without a
restart. A flag wins over its variable.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn
from urllib.parse import urlsplit

ENVIRONMENT_PREFIX: Final = "SLUICEGATE_"


class SettingsError(Exception):
    """A flag or variable that cannot be used; the message names it and the fix."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a port is opened.

    `host` may be an IPv6 address, without brackets; empty: every interface, by IPv4 and IPv6.
    """

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host or "*"
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one gate process.

    Attributes:
        policy: file of the AdmissionPolicy, or the directory of a mounted ConfigMap.
        upstream: the engine.
        listen: the data port.
        admin: health, metrics, state and drain. None: no admin port.
        drain_timeout_s: how long a drain waits for what is in flight, s.
        log_format: "json", "console", or "auto" (console on a terminal).
        log_level: "debug", "info", "warning" or "error".
        client_salt: keys the hash of client identities; None: random, new with each process.
        drain_token: who asks for a drain has to show it; None: whoever reaches the admin port may ask.
    """

    policy: Path
    upstream: Address
    listen: Address
    admin: Address | None
    drain_timeout_s: float
    log_format: str
    log_level: str
    client_salt: bytes | None
    drain_token: bytes | None = None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def parse_settings(arguments: Sequence[str], environment: dict[str, str] | None = None) -> Settings:
    """Read the flags of `sluicegate run`.

    Raises:
        SettingsError: naming the flag and what is allowed.
        SystemExit: after `--help`.
    """
    env = dict(os.environ) if environment is None else environment

    def default(flag: str, otherwise: str | None) -> str | None:
        return env.get(ENVIRONMENT_PREFIX + flag.upper().replace("-", "_"), otherwise)

    parser = _Parser(
        prog="sluicegate run",
        description="SLO admission control in front of one inference engine.",
        epilog="Each flag can also be set as SLUICEGATE_<FLAG>, for example SLUICEGATE_UPSTREAM.",
    )
    add = parser.add_argument
    add("--policy", default=default("policy", None), metavar="FILE", help="the AdmissionPolicy, YAML or JSON")
    add("--upstream", default=default("upstream", None), metavar="URL", help="the engine: http://HOST:PORT")
    add("--listen", default=default("listen", "127.0.0.1:8000"), metavar="ADDR", help="default: %(default)s")
    add(
        "--admin",
        default=default("admin", "127.0.0.1:9901"),
        metavar="ADDR",
        help="/healthz /readyz /metrics /debug/state /drain; 'none' for no admin port; default: %(default)s",
    )
    add(
        "--drain-timeout",
        default=default("drain-timeout", "300"),
        metavar="SECONDS",
        help="bound on waiting for what is in flight when the gate stops; default: %(default)s",
    )
    add("--log-format", default=default("log-format", "auto"), choices=["auto", "json", "console"])
    add(
        "--log-level",
        default=default("log-level", "info"),
        choices=["debug", "info", "warning", "error"],
        help="debug shows each refusal; default: %(default)s",
    )
    flags = parser.parse_args(arguments)

    for name in ("policy", "upstream"):
        if not getattr(flags, name):
            raise SettingsError(f"--{name} is required (or {ENVIRONMENT_PREFIX}{name.upper()})")
    # Secrets come from the environment alone: command lines can be read by every process of the node.
    salt = env.get(ENVIRONMENT_PREFIX + "CLIENT_SALT")
    token = env.get(ENVIRONMENT_PREFIX + "DRAIN_TOKEN")
    return Settings(
        policy=Path(flags.policy),
        upstream=_upstream(flags.upstream),
        listen=_address("--listen", flags.listen),
        admin=None if flags.admin == "none" else _address("--admin", flags.admin),
        drain_timeout_s=_seconds("--drain-timeout", flags.drain_timeout),
        log_format=flags.log_format,
        log_level=flags.log_level,
        client_salt=salt.encode() if salt else None,
        drain_token=token.encode() if token else None,
    )


def _upstream(url: str) -> Address:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise SettingsError(f"--upstream {url!r}: {error}") from error
    if parts.scheme != "http" or not parts.hostname:
        raise SettingsError(f"--upstream {url!r} is not http://HOST:PORT (the engine is reached without TLS)")
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
        raise SettingsError(f"--upstream {url!r}: give host and port only; paths pass unchanged")
    return Address(parts.hostname, port if port is not None else 80)


def _address(flag: str, text: str) -> Address:
    host, colon, port_text = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port_text.isdigit() or int(port_text) > 65535:
        raise SettingsError(f"{flag} {text!r} is not HOST:PORT, for example 127.0.0.1:8000 or [::]:8000")
    return Address(host, int(port_text))


def _seconds(flag: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= 86_400.0:
        raise SettingsError(f"{flag} {text!r} is not a number of seconds from 0 to 86400")
    return seconds
