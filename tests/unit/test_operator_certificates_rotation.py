"""Rotation over months of virtual time: whatever lags and fails, what is served verifies under what is trusted.

A world of two replicas that see a changed Secret up to two minutes late, two API servers that see a changed webhook
configuration up to ten seconds late, and a reconciler that comes by irregularly, is restarted, and is away for
minutes. Every pair of a served certificate and a bundle that are in force at the same time goes through the
verifier of the `cryptography` package, at the first and at the last instant at which both are in force.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Generic, TypeVar

import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from sluicegate_operator.certificates.authority import fingerprint
from sluicegate_operator.certificates.keeper import Served, Sightings
from sluicegate_operator.certificates.plan import MAX_AUTHORITIES, MOUNT_LAG, Lifetimes, Step, Terms, advance
from sluicegate_operator.certificates.secret import Stored, read_secret

NAME = "sluicegate-webhook.sluicegate-system.svc"
TERMS = Terms((NAME,), Lifetimes(serving=timedelta(minutes=30), authority=timedelta(minutes=100)))
START = datetime(2026, 3, 1, tzinfo=UTC)
TICK = timedelta(seconds=5)
CONFIGURATION_LAG = timedelta(seconds=10)
AWAY = timedelta(minutes=3)

Data = Mapping[str, str] | None
Bundle = tuple[x509.Certificate, ...]
T = TypeVar("T")


@dataclass
class Late(Generic[T]):
    """A reader of something that changes: sees each value up to `lag` after it was written."""

    lag: timedelta
    random: Random
    value: T
    coming: list[tuple[datetime, T]] = field(default_factory=list)

    def write(self, now: datetime, value: T) -> None:
        self.coming.append((now + self.lag * self.random.random(), value))

    def read(self, now: datetime) -> T:
        # Of what has arrived the last written counts, though an earlier one may have been late.
        for index in range(len(self.coming) - 1, -1, -1):
            if self.coming[index][0] <= now:
                self.value = self.coming[index][1]
                del self.coming[: index + 1]
                break
        return self.value


class World:
    """One cluster, in virtual time."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = START
        self.secret = Stored()
        self.configured: Bundle = ()
        self.servers: list[Late[Bundle]] = [Late(CONFIGURATION_LAG, self.random, ()) for _ in range(2)]
        self.mounts = [self.mount() for _ in range(2)]
        self.serving: list[x509.Certificate | None] = [None, None]
        self.sightings = Sightings()
        self.next_turn = START
        self.steps: list[Step | None] = []
        self.in_force: dict[tuple[x509.Certificate, Bundle], tuple[datetime, datetime]] = {}
        self.most_authorities = 0

    def mount(self) -> Late[Stored]:
        return Late(MOUNT_LAG, self.random, self.secret)

    def run(self, span: timedelta, trouble: Callable[["World"], None] = lambda _: None) -> None:
        end = self.now + span
        while self.now < end:
            trouble(self)
            if self.now >= self.next_turn:
                self.reconcile()
            for index, mount in enumerate(self.mounts):
                there = mount.read(self.now).serving
                if there is not None:  # a server keeps what it has while its files cannot be used
                    self.serving[index] = there.certificate
            self.look()
            self.now += TICK

    def reconcile(self) -> None:
        """A turn of the reconciler: what `Keeper.keep` does, with the configuration applied in the same turn."""
        serving = tuple(one for one in self.serving if one is not None)
        served = Served(serving, by_all=self.random.random() < 0.95 and len(serving) == len(self.serving))
        bundles = (self.configured,) if self.configured else ()
        seen = self.sightings.see(self.now, bundles, served)
        after, taken, _ = advance(self.now, self.secret, seen, TERMS)
        if taken:
            self.write(after.data)
            self.steps += [one.step for one in taken]
        if after.authorities != self.configured:
            self.configured = after.authorities
            for server in self.servers:
                server.write(self.now, after.authorities)
        self.most_authorities = max(self.most_authorities, len(after.authorities))
        pause = AWAY if self.random.random() < 0.02 else timedelta(seconds=self.random.randrange(5, 60))
        self.next_turn = self.now + pause
        if self.random.random() < 0.02:
            self.sightings = Sightings()

    def write(self, data: Data) -> None:
        self.secret = read_secret(None if data is None else {"data": data})
        for mount in self.mounts:
            mount.write(self.now, self.secret)

    def look(self) -> None:
        """Note every pair that is in force now."""
        for server in self.servers:
            bundle = server.read(self.now)
            for certificate in self.serving:
                if bundle and certificate is not None:
                    first, _ = self.in_force.setdefault((certificate, bundle), (self.now, self.now))
                    self.in_force[certificate, bundle] = first, self.now

    def gaps(self) -> list[str]:
        """The pairs in force that do not verify."""
        return [
            f"{fingerprint(certificate)[:8]} under {[fingerprint(one)[:8] for one in bundle]} at {when}"
            for (certificate, bundle), instants in self.in_force.items()
            for when in instants
            if not verifies(certificate, bundle, when)
        ]


def verifies(served: x509.Certificate, bundle: Bundle, now: datetime) -> bool:
    verifier = PolicyBuilder().store(Store(list(bundle))).time(now).build_server_verifier(x509.DNSName(NAME))
    try:
        verifier.verify(served, [])
    except VerificationError:
        return False
    return True


SEEDS = range(3)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_instant_of_many_rotations_has_a_gap(seed: int) -> None:
    world = World(seed)
    world.run(timedelta(hours=12))
    assert world.gaps() == []
    assert world.steps.count(Step.ADD_AUTHORITY) >= 8
    assert world.steps.count(Step.NEW_SERVING) >= 20
    assert world.steps.count(Step.DROP_AUTHORITIES) >= 7
    assert world.most_authorities == 2


@pytest.mark.parametrize("seed", SEEDS)
def test_no_gap_though_replicas_come_and_go(seed: int) -> None:
    """A replica that starts may have mounted a Secret that is two minutes old."""
    world = World(seed)

    def trouble(world: World) -> None:
        if world.random.random() < 0.002:
            index = world.random.randrange(2)
            old, new = world.mounts[index], world.mount()
            new.value, new.coming = old.value, list(old.coming)
            world.mounts[index], world.serving[index] = new, None

    world.run(timedelta(hours=8), trouble)
    assert world.gaps() == []
    assert world.steps.count(Step.DROP_AUTHORITIES) >= 4


@pytest.mark.parametrize("seed", SEEDS)
def test_no_gap_though_the_secret_is_deleted_or_its_keys_are_damaged(seed: int) -> None:
    world = World(seed)
    damages: list[Callable[[Stored], Data]] = [
        lambda stored: None,
        lambda stored: stored.data | {"ca.key": ""},
        lambda stored: stored.data | {"ca.crt": ""},
        lambda stored: stored.data | {"tls.key": ""},
        lambda stored: stored.data | {"tls.crt": "damaged"},
        lambda stored: replace(stored, authorities=stored.authorities[::-1]).data,
    ]

    def trouble(world: World) -> None:
        if world.secret is not None and world.random.random() < 0.0005:
            data = world.random.choice(damages)(world.secret)
            world.write(None if data is None else {"data": data})

    world.run(timedelta(hours=10), trouble)
    assert world.gaps() == []
    assert world.most_authorities <= MAX_AUTHORITIES
    world.run(timedelta(hours=2))
    assert world.gaps() == []
    assert len(world.secret.authorities) <= 2


def test_the_world_would_show_a_gap() -> None:
    """Without the waits the same world has gaps: so it can fail."""
    world = World(0)
    world.run(timedelta(minutes=5))
    hasty, _, _ = advance(
        world.now, Stored(), world.sightings.see(world.now, (), Served((), by_all=True)), TERMS
    )
    assert hasty.authorities != world.secret.authorities
    world.write(hasty.data)
    world.run(timedelta(minutes=5))
    assert world.gaps() != []
