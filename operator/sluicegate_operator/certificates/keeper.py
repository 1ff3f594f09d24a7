"""Keeps the webhook's certificates: reads what is in force, takes the steps that are due, writes the Secret.

`Keeper.keep` is called by the reconciler, at each turn and when `Kept.look_at` has come; it is idempotent, and
writes only when a step is due. What it returns as `ca_bundle` goes into the webhook configuration in the same turn.

Invariants: the Secret is written with the resource version that was read, so that of two writers one fails and
looks again; replicas are asked only while the plan depends on what they serve. Where the times of sightings live:
in this process, so that a restart waits a little longer, never less.

What is due lives in `plan`; how the API server is spoken to, behind `Store`.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple, Protocol

from cryptography import x509

from sluicegate_operator.certificates.plan import Seen, Terms, advance, describe, needs_served
from sluicegate_operator.certificates.secret import SECRET_TYPE, Stored, read_ca_bundle, read_secret

log = logging.getLogger(__name__)

#: For a handshake with one replica, s. It is in the same cluster; one that takes longer counts as unknown.
HANDSHAKE_S: Final = 3.0

#: Replicas asked. The webhook has two; with more than this not all are known.
MAX_REPLICAS: Final = 32


class Store(Protocol):
    """What is asked of the API server. Errors of the connection are the caller's to raise and to handle."""

    async def read_secret(self) -> Mapping[str, Any] | None:
        """The Secret, or None if there is none."""

    async def write_secret(self, secret: Mapping[str, Any]) -> None:
        """Create it, or replace the one of `metadata.resourceVersion`; a conflict raises."""

    async def ca_bundles(self) -> Sequence[str | None]:
        """The `caBundle` of each entry of the webhook configuration."""

    async def replicas(self) -> Sequence[tuple[str, int]]:
        """Address and port of every replica of the webhook that has not ended, ready or not."""


@dataclass(frozen=True, slots=True)
class Kept:
    """After a turn: what the webhook's entries are to trust (base64 of PEM), what was done, when to come again."""

    ca_bundle: str
    look_at: datetime
    waits: str  # why nothing more is done now
    steps: tuple[str, ...]
    serving_ends: datetime | None


class Served(NamedTuple):
    """What replicas serve with: the certificates of those that answered, and whether all did."""

    certificates: tuple[x509.Certificate, ...]
    by_all: bool


class Keeper:
    """The certificates of one webhook. Owned by the reconciler's task; turns do not overlap."""

    def __init__(self, store: Store, *, name: str, namespace: str, terms: Terms) -> None:
        """
        Args:
            store: the API server.
            name: the Secret's.
            namespace: the Secret's.
            terms: what is issued; API servers call the webhook by `SERVICE.NAMESPACE.svc`.
        """
        self._store = store
        self._name = name
        self._namespace = namespace
        self._terms = terms
        self._sightings = Sightings()

    async def keep(self, now: datetime) -> Kept:
        """One turn."""
        secret = await self._store.read_secret()
        stored = read_secret(secret)
        for problem in stored.problems:
            log.warning("the Secret %s/%s: %s", self._namespace, self._name, problem)
        bundles = tuple(read_ca_bundle(one) for one in await self._store.ca_bundles())
        served = Served((), by_all=False)
        if needs_served(now, stored, self._terms):
            served = await served_by(await self._store.replicas())
        seen = self._sightings.see(now, bundles, served)
        after, taken, rest = advance(now, stored, seen, self._terms)
        if taken:
            await self._store.write_secret(self._manifest(secret, after))
            for step in taken:
                log.info("certificates: %s: %s", step.step, step.reason, extra=describe(after))
        return Kept(
            ca_bundle=base64.b64encode(after.bundle).decode("ascii"),
            look_at=rest.look_at,
            waits=rest.reason,
            steps=tuple(step.step for step in taken if step.step is not None),
            serving_ends=after.serving.certificate.not_valid_after_utc if after.serving else None,
        )

    def _manifest(self, old: Mapping[str, Any] | None, after: Stored) -> dict[str, Any]:
        """The Secret to write. What others put on it as labels and annotations stays."""
        metadata: dict[str, Any] = {"name": self._name, "namespace": self._namespace}
        kept = (old or {}).get("metadata", {})
        for field in ("labels", "annotations", "ownerReferences", "resourceVersion", "uid"):
            if field in kept:
                metadata[field] = kept[field]
        metadata["labels"] = {**metadata.get("labels", {}), "app.kubernetes.io/managed-by": "sluicegate"}
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": metadata,
            "type": (old or {}).get("type", SECRET_TYPE),  # cannot be changed once it is there
            "data": after.data,
        }


class Sightings:
    """Since when what is in force has been seen as it is now. A restart begins anew."""

    def __init__(self) -> None:
        self._bundles: tuple[tuple[x509.Certificate, ...], ...] | None = None
        self._served: tuple[frozenset[x509.Certificate], bool] | None = None
        self._bundles_since: datetime | None = None
        self._served_since: datetime | None = None

    def see(
        self,
        now: datetime,
        bundles: tuple[tuple[x509.Certificate, ...], ...],
        served: Served,
    ) -> Seen:
        """Note what is in force now."""
        trusted = tuple(sorted(set(bundles), key=lambda one: [c.serial_number for c in one]))
        if self._bundles_since is None or trusted != self._bundles:
            self._bundles, self._bundles_since = trusted, now
        together = frozenset(served.certificates), served.by_all
        if self._served_since is None or together != self._served:
            self._served, self._served_since = together, now
        return Seen(
            bundles=bundles,
            bundles_since=self._bundles_since,
            served=served.certificates,
            served_by_all=served.by_all,
            served_since=self._served_since,
        )


async def served_by(replicas: Sequence[tuple[str, int]]) -> Served:
    """What the replicas serve with: the first MAX_REPLICAS are asked, all at once."""
    asked = replicas[:MAX_REPLICAS]
    answers = await asyncio.gather(*(_peer_certificate(host, port) for host, port in asked))
    served = tuple(one for one in answers if one is not None)
    return Served(served, by_all=len(served) == len(replicas))


async def _peer_certificate(host: str, port: int) -> x509.Certificate | None:
    """The certificate that the server presents, unverified: it is compared, not trusted."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
    except (OSError, TimeoutError):
        return None
    try:
        tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
        presented = tls.getpeercert(binary_form=True)
        return None if presented is None else x509.load_der_x509_certificate(presented)
    finally:
        writer.transport.abort()  # nothing is to be said
