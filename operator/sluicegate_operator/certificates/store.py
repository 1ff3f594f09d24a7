"""The keeper's `Store` on the API server: one Secret, one webhook configuration, the webhook's pods.

What is asked of the API server: get, create and update of that Secret, get of that configuration, list of pods in the
operator's own namespace. Nothing of it is cached: a turn of the keeper is rare, and acts on what is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluicegate_operator.kube.client import Api
from sluicegate_operator.kube.resources import PODS, SECRETS, WEBHOOKS
from sluicegate_operator.webhook_configuration import ca_bundles

_ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiStore:
    """A `keeper.Store`.

    Attributes:
        api: the API server; its errors pass through.
        namespace: the operator's own.
        secret: the Secret's name.
        configuration: the webhook configuration's name.
        pods: labels of the webhook's pods, as a query.
        port: where they serve.
    """

    api: Api
    namespace: str
    secret: str
    configuration: str
    pods: str
    port: int

    async def read_secret(self) -> Mapping[str, Any] | None:
        """The Secret, or None if there is none."""
        return await self.api.get(SECRETS, self.namespace, self.secret)

    async def write_secret(self, secret: Mapping[str, Any]) -> None:
        """Create it, or replace the very one that was read; a conflict raises."""
        if "resourceVersion" in secret["metadata"]:
            await self.api.replace(SECRETS, secret)
        else:
            await self.api.create(SECRETS, secret)

    async def ca_bundles(self) -> Sequence[str | None]:
        """The `caBundle` of each entry of the webhook configuration; empty without one."""
        return ca_bundles(await self.api.get(WEBHOOKS, None, self.configuration))

    async def replicas(self) -> Sequence[tuple[str, int]]:
        """The webhook's pods that run or may still serve; those without an address have not begun."""
        found: list[tuple[str, int]] = []
        async for pod in self.api.list(PODS, self.namespace, labels=self.pods):
            status = pod.get("status") or {}
            address = status.get("podIP")
            if address and status.get("phase") not in _ENDED:
                found.append((address, self.port))
        return found
