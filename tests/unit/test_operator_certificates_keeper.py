"""The keeper of the certificates: turns against a store, and replicas that are asked over real connections."""

import asyncio
import base64
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from sluicegate_operator.certificates.authority import fingerprint
from sluicegate_operator.certificates.keeper import MAX_REPLICAS, Keeper, served_by
from sluicegate_operator.certificates.plan import Lifetimes, Terms, renew_at
from sluicegate_operator.certificates.secret import read_ca_bundle, read_secret
from sluicegate_operator.webhook.tls import ServingCertificate

NAME = "sluicegate-webhook.sluicegate-system.svc"
TERMS = Terms((NAME,), Lifetimes())
NOW = datetime(2026, 3, 1, tzinfo=UTC)
SETTLE = TERMS.lifetimes.settle


class ConflictError(Exception):
    """Somebody else has written in between."""


class ClusterStore:
    """What the API server holds of all this."""

    def __init__(self) -> None:
        self.secret: dict[str, Any] | None = None
        self.bundles: list[str | None] = []
        self.addresses: list[tuple[str, int]] = []
        self.writes = 0
        self.asked_for_replicas = 0

    async def read_secret(self) -> Mapping[str, Any] | None:
        there = self.secret
        await asyncio.sleep(0)  # others come in between
        return there

    async def write_secret(self, secret: Mapping[str, Any]) -> None:
        there = None if self.secret is None else self.secret["metadata"]["resourceVersion"]
        if secret["metadata"].get("resourceVersion") != there:
            raise ConflictError
        self.writes += 1
        metadata = dict(secret["metadata"]) | {"resourceVersion": str(self.writes)}
        self.secret = dict(secret) | {"metadata": metadata}

    async def ca_bundles(self) -> Sequence[str | None]:
        return self.bundles

    async def replicas(self) -> Sequence[tuple[str, int]]:
        self.asked_for_replicas += 1
        return self.addresses


class Replica:
    """One replica of the webhook, as far as its certificate goes: real files, a real port."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.certificate = ServingCertificate(directory)
        self.address = ("", 0)

    def mount(self, secret: Mapping[str, Any]) -> None:
        """Bring the Secret's content, as the kubelet does in its time."""
        self.directory.mkdir(exist_ok=True)
        for name in ("tls.crt", "tls.key"):
            (self.directory / name).write_bytes(base64.b64decode(secret["data"][name]))
        self.certificate.look()


@asynccontextmanager
async def replica(directory: Path) -> AsyncIterator[Replica]:
    one = Replica(directory)

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=one.certificate.context)
    one.address = server.sockets[0].getsockname()[:2]
    try:
        yield one
    finally:
        server.close()
        await server.wait_closed()


def keeper(store: ClusterStore) -> Keeper:
    return Keeper(store, name="sluicegate-webhook-cert", namespace="sluicegate-system", terms=TERMS)


async def test_the_first_turn_writes_the_secret_and_the_next_ones_write_nothing() -> None:
    store = ClusterStore()
    kept = await keeper(store).keep(NOW)
    assert kept.steps == ("AddAuthority", "NewServing")
    assert store.secret is not None
    assert store.secret["type"] == "kubernetes.io/tls"
    assert store.secret["metadata"]["name"] == "sluicegate-webhook-cert"
    assert store.secret["data"]["ca.crt"] == kept.ca_bundle
    store.bundles = [kept.ca_bundle]
    for minutes in range(60):
        again = await keeper(store).keep(NOW + timedelta(minutes=minutes))
        assert (again.steps, again.ca_bundle) == ((), kept.ca_bundle)
    assert store.writes == 1
    assert store.asked_for_replicas == 1, "at rest nobody is asked"


async def test_labels_and_annotations_of_others_stay_on_the_secret_and_its_type_too() -> None:
    store = ClusterStore()
    store.secret = {
        "metadata": {
            "labels": {"theirs": "x"},
            "annotations": {"theirs": "y"},
            "resourceVersion": "0",
            "uid": "u",
        },
        "type": "Opaque",
        "data": {},
    }
    await keeper(store).keep(NOW)
    metadata = store.secret["metadata"]
    assert metadata["labels"] == {"theirs": "x", "app.kubernetes.io/managed-by": "sluicegate"}
    assert metadata["annotations"] == {"theirs": "y"}
    assert store.secret["type"] == "Opaque"


async def test_of_two_writers_one_fails_and_the_secret_is_whole() -> None:
    store = ClusterStore()
    first, second = keeper(store), keeper(store)
    outcomes = await asyncio.gather(first.keep(NOW), second.keep(NOW), return_exceptions=True)
    assert sorted(isinstance(one, ConflictError) for one in outcomes) == [False, True]
    assert read_secret(store.secret).problems == ()
    assert (await second.keep(NOW)).steps == ()


async def almost_due(one: Keeper, store: ClusterStore) -> datetime:
    """Bring all to where a new authority is due, with a serving certificate that is young; returns when that is."""
    store.bundles = [(await one.keep(NOW)).ca_bundle]
    due = renew_at(read_secret(store.secret).authorities[-1])
    assert (await one.keep(due - timedelta(days=1))).steps == ("NewServing",)
    return due


async def test_a_whole_rotation_waits_for_what_is_trusted_and_for_what_is_served(tmp_path: Path) -> None:
    store = ClusterStore()
    one = keeper(store)
    async with replica(tmp_path / "a") as a, replica(tmp_path / "b") as b:
        now = await almost_due(one, store)
        assert store.secret is not None
        store.addresses = [a.address, b.address]
        for each in (a, b):
            each.mount(store.secret)
        store.bundles *= 2
        kept = await one.keep(now)
        assert kept.steps == ("AddAuthority",)
        assert store.bundles != [kept.ca_bundle] * 2, "the configuration follows"
        assert len(read_ca_bundle(kept.ca_bundle)) == 2
        signed_by_old = read_secret(store.secret).serving

        now += SETTLE * 2
        assert (await one.keep(now)).steps == (), "not yet trusted by all"
        store.bundles = [kept.ca_bundle] * 2
        assert (await one.keep(now)).steps == (), "trusted just now"
        now += SETTLE
        assert (await one.keep(now)).steps == ("NewServing",)
        assert read_secret(store.secret).serving != signed_by_old

        a.mount(store.secret)
        now += SETTLE * 2
        assert (await one.keep(now)).steps == (), "one replica serves the old one"
        b.mount(store.secret)
        assert (await one.keep(now)).steps == (), "served just now"
        now += SETTLE
        kept = await one.keep(now)
        assert kept.steps == ("DropAuthorities",)
        assert len(read_ca_bundle(kept.ca_bundle)) == 1
        store.bundles = [kept.ca_bundle] * 2
        assert (await one.keep(now)).steps == ()


async def test_a_restart_waits_again_and_loses_nothing(tmp_path: Path) -> None:
    store = ClusterStore()
    async with replica(tmp_path / "a") as a:
        now = await almost_due(keeper(store), store)
        assert store.secret is not None
        a.mount(store.secret)
        store.addresses = [a.address]
        store.bundles = [(await keeper(store).keep(now)).ca_bundle]
        now += SETTLE
        restarted = keeper(store)
        assert (await restarted.keep(now)).steps == ()
        assert (await restarted.keep(now + SETTLE)).steps == ("NewServing",)


async def test_what_replicas_serve_is_known_only_if_all_answer(tmp_path: Path) -> None:
    store = ClusterStore()
    await keeper(store).keep(NOW)
    assert store.secret is not None
    serving = read_secret(store.secret).serving
    assert serving is not None
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        async with replica(tmp_path / "a") as a, replica(tmp_path / "b") as b:
            a.mount(store.secret)
            known = await served_by([a.address])
            assert [fingerprint(one) for one in known.certificates] == [fingerprint(serving.certificate)]
            assert known.by_all
            for other in (b.address, nobody.getsockname()):  # has no certificate yet; is not there
                known = await served_by([a.address, other])
                assert len(known.certificates) == 1
                assert not known.by_all
            assert not (await served_by([a.address] * (MAX_REPLICAS + 1))).by_all
    assert (await served_by([])).by_all


async def test_no_key_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    store = ClusterStore()
    await keeper(store).keep(NOW)
    assert store.secret is not None
    store.secret["data"]["tls.key"] = store.secret["data"]["ca.key"]
    await keeper(store).keep(NOW)
    told = " ".join(str(record.__dict__) for record in caplog.records)
    assert "tls.key does not belong to its certificate" in told
    assert "PRIVATE" not in told
    keys = [
        base64.b64decode(store.secret["data"][name]).decode().splitlines()[1]
        for name in ("ca.key", "tls.key")
    ]
    assert not any(key in told for key in keys)


def test_the_context_refuses_old_protocols() -> None:
    assert ServingCertificate(Path("/nonexistent")).context.minimum_version is ssl.TLSVersion.TLSv1_2
