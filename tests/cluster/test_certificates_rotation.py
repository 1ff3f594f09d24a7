"""Certificates that are about to end, under a real API server that asks the webhook all the while.

Two replicas behind one port, the keeper's turns, and the mounted Secret that reaches one replica early and the other
late. The policy says Fail, so that a single handshake that does not verify refuses a pod.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.admission import (
    HOST,
    Created,
    Hook,
    Namespace,
    namespace,
    place,
    pod,
    splitter,
    start_hook,
    until,
)

from sluicegate_core.policy import FailurePolicy, Selector
from sluicegate_operator.certificates.authority import Pair, issue_authority, issue_serving, issued_by
from sluicegate_operator.certificates.keeper import Keeper, served_by
from sluicegate_operator.certificates.plan import Lifetimes, Terms
from sluicegate_operator.certificates.secret import Stored, read_secret
from sluicegate_operator.certificates.store import ApiStore
from sluicegate_operator.kube.resources import SECRETS
from sluicegate_operator.webhook_configuration import Entry, Target

SECRET = "sluicegate-webhook-cert"
LIFETIMES = Lifetimes(
    settle=timedelta(seconds=5), serving=timedelta(minutes=15), authority=timedelta(minutes=45)
)
TERMS = Terms((HOST,), LIFETIMES)
SELECTOR = Selector(match_labels=(("app", "llama"),))

#: Turns of the test until a mounted Secret has reached the one replica and the other.
LAGS = (5, 60)
MAX_TURNS = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside(ApiStore):
    """The store, with replicas that are processes beside the test and no pods."""

    hooks: tuple[Hook, ...]

    async def replicas(self) -> Sequence[tuple[str, int]]:
        return [(HOST, hook.port) for hook in self.hooks]


class Installation:
    """The operator's part of all this: its Secret, its keeper, its configuration, and the kubelet's part."""

    def __init__(
        self, there: Namespace, hooks: Sequence[Hook], port: int, failure_policy: FailurePolicy
    ) -> None:
        self.there = there
        self.hooks = tuple(hooks)
        self.steps: list[str] = []
        self.authorities = 0
        self._port = port
        self._entry = Entry(
            namespace=there.name, name="llama", selector=SELECTOR, failure_policy=failure_policy
        )
        self._store = Beside(
            api=there.api, namespace=there.name, secret=SECRET, configuration=f"{there.name}-webhook", pods="",
            port=0, hooks=self.hooks,
        )  # fmt: skip
        self._keeper = Keeper(self._store, name=SECRET, namespace=there.name, terms=TERMS)
        self._version = ""
        self._mounts: dict[int, list[tuple[Hook, dict[str, Any]]]] = {}

    async def secret(self) -> dict[str, Any]:
        found = await self.there.api.get(SECRETS, self.there.name, SECRET)
        assert found is not None
        return found

    async def configure(self, ca_bundle: str) -> None:
        target = Target(
            namespace="sluicegate-system",
            service="unused",
            url=f"https://{HOST}:{self._port}",
            ca_bundle=ca_bundle,
        )
        await self.there.configure([self._entry], target)

    async def turn(self, number: int) -> None:
        """What the reconciler does in a turn, and what the kubelets do in theirs."""
        kept = await self._keeper.keep(datetime.now(UTC))
        self.steps += kept.steps
        if kept.steps:
            await self.configure(kept.ca_bundle)
        secret = await self.secret()
        self.authorities = len(read_secret(secret).authorities)
        version = secret["metadata"]["resourceVersion"]
        if version != self._version:
            self._version = version
            for hook, lag in zip(self.hooks, LAGS, strict=True):
                self._mounts.setdefault(number + lag, []).append((hook, secret))
        for hook, content in self._mounts.pop(number, []):
            mount(hook, content)


def mount(hook: Hook, secret: dict[str, Any]) -> None:
    """Bring a Secret's content to a replica."""
    serving = read_secret(secret).serving
    if serving is not None:
        place(hook.directory, serving.certificate_pem, serving.key_pem)


def ago(lifetime: timedelta, left: timedelta) -> datetime:
    """When what lives that long was issued, if its renewal is due in `left`."""
    return datetime.now(UTC) - lifetime * 2 / 3 + left


@asynccontextmanager
async def installed(
    kubeconfig: Path, directory: Path, authority: Pair, serving: Pair, failure_policy: FailurePolicy
) -> AsyncIterator[Installation]:
    """Two replicas that serve, an API server that trusts them, and the Secret that all of it is from."""
    stored = Stored((authority.certificate,), authority, serving)
    async with AsyncExitStack() as stack:
        there = await stack.enter_async_context(namespace(kubeconfig))
        await there.create_policy("llama")
        await there.api.create(
            SECRETS,
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": SECRET, "namespace": there.name},
                "type": "kubernetes.io/tls",
                "data": stored.data,
            },
        )
        hooks = []
        for name in ("a", "b"):
            place(directory / name, serving.certificate_pem, serving.key_pem)
            hook = await start_hook(kubeconfig, directory / name, there.name)
            stack.push_async_callback(hook.stop)
            hooks.append(hook)
        port = await stack.enter_async_context(splitter(hooks))
        installation = Installation(there, hooks, port, failure_policy)
        await installation.configure(stored.data["ca.crt"])
        yield installation


@pytest.mark.slow
async def test_certificates_near_their_end_are_replaced_without_a_failed_admission(
    kubeconfig: Path, tmp_path: Path
) -> None:
    soon = timedelta(seconds=6)
    authority = issue_authority(ago(LIFETIMES.authority, soon), LIFETIMES.authority)
    serving = issue_serving(authority, TERMS.names, ago(LIFETIMES.serving, soon), LIFETIMES.serving)
    async with installed(kubeconfig, tmp_path, authority, serving, FailurePolicy.FAIL) as installation:
        there = installation.there

        async def gated() -> Created | None:
            created = await there.create_pod(pod(), dry_run=True)
            return created if created.gates else None

        await until(gated, "pods are gated")
        pods = 0
        for number in range(MAX_TURNS):
            await installation.turn(number)
            created = await asyncio.gather(*(there.create_pod(pod(), dry_run=True) for _ in range(2)))
            assert [(one.status, len(one.gates)) for one in created] == [(201, 1)] * 2, created
            pods += len(created)
            if "DropAuthorities" in installation.steps and number % 100 == 0:
                break
        assert installation.steps == ["AddAuthority", "NewServing", "DropAuthorities"]
        assert installation.authorities == 1
        assert pods > 200

        stored = read_secret(await installation.secret())
        assert stored.authorities[0] != authority.certificate
        served = await served_by([(HOST, hook.port) for hook in installation.hooks])
        assert served.by_all
        assert all(issued_by(one, stored.authorities[0]) for one in served.certificates)


@pytest.mark.slow
async def test_certificates_that_have_ended_are_replaced_and_pods_are_gated_again(
    kubeconfig: Path, tmp_path: Path
) -> None:
    """The reconciler was away until all had ended: pods have started without gates, and then get them again."""
    long_ago = datetime.now(UTC) - 2 * LIFETIMES.authority
    authority = issue_authority(long_ago, LIFETIMES.authority)
    serving = issue_serving(authority, TERMS.names, long_ago, LIFETIMES.serving)
    async with installed(kubeconfig, tmp_path, authority, serving, FailurePolicy.IGNORE) as installation:
        there = installation.there
        for _ in range(20):
            created = await there.create_pod(pod(), dry_run=True)
            assert created.status == 201
            assert created.gates == []
        turns = count()

        async def gated() -> Created | None:
            await installation.turn(next(turns))
            created = await there.create_pod(pod(), dry_run=True)
            assert created.status == 201
            return created if created.gates else None

        await until(gated, "pods are gated again")
        assert installation.steps[:2] == ["AddAuthority", "NewServing"]
