"""When to issue which certificate, so that at every instant what is served verifies under what is trusted.

A change has three steps, each taken only when the one before has been seen in force for `Lifetimes.settle`:

    1. AddAuthority     the new authority joins the bundle; the serving certificate stays.
    2. NewServing       once every entry of the webhook configuration trusts the new authority, it signs a new
                        serving certificate.
    3. DropAuthorities  once every replica of the webhook serves the new certificate, the others leave the bundle.

A serving certificate that ends before its authority does is renewed by step 2 alone. Where nothing that is served
could be verified anyway (the first start, expiry, a new name), there is nothing to protect and step 2 does not wait.

Assumptions: an API server acts on a changed configuration, and a kubelet refreshes a mounted Secret, within
`settle`; clocks are right to within `authority.BACKDATED`. Both certificates are renewed when a third of their
lifetime is left, so a reconciler that is down for less than that leaves no gap.

Pure: `plan` says what is due, `carry_out` does it but for writing it down. Who reads and writes: `keeper`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from cryptography import x509

from sluicegate_operator.certificates.authority import (
    BACKDATED,
    canonical,
    fingerprint,
    is_own_authority,
    issue_authority,
    issue_serving,
    issued_by,
    names_of,
)
from sluicegate_operator.certificates.secret import Stored

#: How old the content of a mounted Secret may be: the kubelet's sync period of a minute, its jitter and its cache.
MOUNT_LAG: Final = timedelta(minutes=2)

#: Authorities in a bundle. A rotation has two; one that is interrupted and begun again adds others.
MAX_AUTHORITIES: Final = 4

#: Bounds of the settings. A serving certificate of more than 398 days is refused by verifiers that follow the
#: rules of the public web; ours are not among them, but nothing is won beyond.
MAX_AUTHORITY: Final = timedelta(days=3650)
MAX_SERVING: Final = timedelta(days=398)
MIN_SETTLE: Final = timedelta(seconds=5)
MAX_SETTLE: Final = timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """For how long certificates are issued, and how long a step is watched before the next.

    An authority lives three times as long as what it signs, or more; a third of a serving certificate's life
    leaves room for all steps of a rotation twice over.
    """

    authority: timedelta = timedelta(days=1825)
    serving: timedelta = timedelta(days=90)
    settle: timedelta = MOUNT_LAG + timedelta(seconds=30)

    def __post_init__(self) -> None:
        if not MIN_SETTLE <= self.settle <= MAX_SETTLE:
            raise ValueError(f"certificates settle for {MIN_SETTLE} to {MAX_SETTLE}, not {self.settle}")
        least = 6 * (self.settle + MOUNT_LAG)
        if not least <= self.serving <= MAX_SERVING:
            raise ValueError(
                f"a serving certificate lives from {least} (for settling of {self.settle}) to {MAX_SERVING}, "
                f"not {self.serving}"
            )
        if not 3 * self.serving <= self.authority <= MAX_AUTHORITY:
            raise ValueError(
                f"an authority lives from three times as long as a serving certificate ({3 * self.serving}) to "
                f"{MAX_AUTHORITY}, not {self.authority}"
            )


@dataclass(frozen=True, slots=True)
class Terms:
    """What is issued: for which names (DNS names or addresses of the webhook), and for how long."""

    names: tuple[str, ...]
    lifetimes: Lifetimes


class Step(StrEnum):
    """One change of the Secret."""

    ADD_AUTHORITY = "AddAuthority"
    NEW_SERVING = "NewServing"
    DROP_AUTHORITIES = "DropAuthorities"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is in force outside of the Secret.

    Attributes:
        bundles: for each entry of the webhook configuration, the authorities that it trusts; empty if there is no
            entry, so that nobody verifies anything.
        bundles_since: since when that has been seen unchanged.
        served: the certificates of those replicas of the webhook that answered.
        served_by_all: whether all of them did.
        served_since: since when both have been seen unchanged.
    """

    bundles: tuple[tuple[x509.Certificate, ...], ...]
    bundles_since: datetime
    served: tuple[x509.Certificate, ...]
    served_by_all: bool
    served_since: datetime


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now, why, and when to look again at the latest. `step` None: nothing."""

    step: Step | None
    reason: str
    look_at: datetime


def renew_at(certificate: x509.Certificate) -> datetime:
    """When a third of the lifetime is left for which the certificate was issued."""
    ends, issued = certificate.not_valid_after_utc, certificate.not_valid_before_utc + BACKDATED
    return ends - max(ends - issued, timedelta()) / 3


def plan(now: datetime, stored: Stored, seen: Seen, terms: Terms) -> Plan:
    """The next step, if one is due."""
    newest = stored.authority
    if newest is None:
        return Plan(Step.ADD_AUTHORITY, "there is no authority that can sign", now)
    if not _valid(newest.certificate, now):
        return Plan(Step.ADD_AUTHORITY, "the authority is not valid now", now)
    if now >= renew_at(newest.certificate):
        return Plan(Step.ADD_AUTHORITY, "a third of the authority's lifetime is left", now)
    look_at = renew_at(newest.certificate)

    due = _serving_due(now, stored, terms.names)
    if due:
        if not _served_verifies(now, stored, seen, terms.names):
            return Plan(Step.NEW_SERVING, f"{due}; nothing that is served verifies", now)
        trusted = all(newest.certificate in bundle for bundle in seen.bundles)
        if trusted and now >= seen.bundles_since + terms.lifetimes.settle:
            return Plan(Step.NEW_SERVING, due, now)
        return Plan(None, f"{due}; waits until all trust the new authority", now + terms.lifetimes.settle)
    assert stored.serving is not None, "one that is missing is due"
    look_at = min(look_at, renew_at(stored.serving.certificate))

    if len(stored.authorities) > 1:
        if not any(_valid(one, now) for one in stored.authorities[:-1]):
            return Plan(Step.DROP_AUTHORITIES, "the others have expired", now)
        everywhere = seen.served_by_all and set(seen.served) == {stored.serving.certificate}
        if everywhere and now >= seen.served_since + terms.lifetimes.settle:
            return Plan(Step.DROP_AUTHORITIES, "all replicas serve under the new authority", now)
        return Plan(
            None,
            "waits until all replicas serve under the new authority",
            min(look_at, now + terms.lifetimes.settle),
        )
    return Plan(None, "nothing is due", look_at)


def carry_out(step: Step, now: datetime, stored: Stored, seen: Seen, terms: Terms) -> Stored:
    """The Secret's content after the step."""
    match step:
        case Step.ADD_AUTHORITY:
            added = issue_authority(now, terms.lifetimes.authority)
            authorities = (*_kept(now, stored, seen), added.certificate)
            return replace(stored, authorities=authorities, authority=added, problems=())
        case Step.NEW_SERVING:
            assert stored.authority is not None, "an authority comes first"
            serving = issue_serving(stored.authority, terms.names, now, terms.lifetimes.serving)
            return replace(stored, serving=serving, problems=())
        case Step.DROP_AUTHORITIES:
            return replace(stored, authorities=stored.authorities[-1:], problems=())


def advance(now: datetime, stored: Stored, seen: Seen, terms: Terms) -> tuple[Stored, list[Plan], Plan]:
    """All steps that can be taken at once: what the Secret is to say, the steps taken, and the plan that remains."""
    taken: list[Plan] = []
    for _ in Step:
        due = plan(now, stored, seen, terms)
        if due.step is None:
            return stored, taken, due
        stored = carry_out(due.step, now, stored, seen, terms)
        taken.append(due)
    return stored, taken, plan(now, stored, seen, terms)


def needs_served(now: datetime, stored: Stored, terms: Terms) -> bool:
    """Whether the plan depends on what the replicas serve, so that they have to be asked."""
    newest = stored.authority
    if newest is None or len(stored.authorities) > 1:
        return True
    return now >= renew_at(newest.certificate) or bool(_serving_due(now, stored, terms.names))


def _serving_due(now: datetime, stored: Stored, names: Sequence[str]) -> str:
    """Why a new serving certificate is needed; empty if it is not."""
    assert stored.authority is not None
    if stored.serving is None:
        return "there is no serving certificate"
    certificate = stored.serving.certificate
    if not canonical(names) <= names_of(certificate):
        return "the serving certificate lacks a name"
    if not issued_by(certificate, stored.authority.certificate):
        return "the serving certificate is of another authority"
    if not _valid(certificate, now):
        return "the serving certificate is not valid now"
    if now >= renew_at(certificate):
        return "a third of the serving certificate's lifetime is left"
    return ""


def _served_verifies(now: datetime, stored: Stored, seen: Seen, names: Sequence[str]) -> bool:
    """Whether some replica serves, as far as is known, what somebody can verify.

    Replicas that did not answer are taken to serve what the Secret says.
    """
    served: list[x509.Certificate] = list(seen.served)
    if not seen.served_by_all and stored.serving is not None:
        served.append(stored.serving.certificate)
    trusted = [one for one in _trusted(seen) if _valid(one, now)]
    wanted = canonical(names)
    return any(
        _valid(certificate, now)
        and wanted <= names_of(certificate)
        and any(issued_by(certificate, one) for one in trusted)
        for certificate in served
    )


def _kept(now: datetime, stored: Stored, seen: Seen) -> tuple[x509.Certificate, ...]:
    """The authorities that stay beside a new one: those of the Secret, and, where it lost them, those that are
    trusted still and may have signed what is served. Where they are too many, those that signed nothing go first.
    """
    known = [one for one in stored.authorities if _valid(one, now)]
    lost = [one for one in _trusted(seen) if one not in known and is_own_authority(one) and _valid(one, now)]
    served = [*seen.served, *([stored.serving.certificate] if stored.serving else [])]
    kept = sorted([*lost, *known], key=lambda one: any(issued_by(certificate, one) for certificate in served))
    return tuple(kept[-(MAX_AUTHORITIES - 1) :])


def _trusted(seen: Seen) -> list[x509.Certificate]:
    """The authorities that some entry of the webhook configuration trusts, each once."""
    return list(dict.fromkeys(one for bundle in seen.bundles for one in bundle))


def _valid(certificate: x509.Certificate, now: datetime) -> bool:
    return certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc


def describe(stored: Stored) -> dict[str, str]:
    """What is there, for a log: fingerprints and dates, no keys."""
    shown = {
        "authorities": ", ".join(fingerprint(one)[:16] for one in stored.authorities),
        "authority_ends": stored.authority.certificate.not_valid_after_utc.isoformat()
        if stored.authority
        else "",
    }
    if stored.serving is not None:
        shown["serving"] = fingerprint(stored.serving.certificate)[:16]
        shown["serving_ends"] = stored.serving.certificate.not_valid_after_utc.isoformat()
    return shown
