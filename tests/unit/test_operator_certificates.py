"""Certificates: what is issued, how the Secret is read, and which step is due when."""

import base64
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from sluicegate_operator.certificates.authority import (
    BACKDATED,
    Pair,
    canonical,
    issue_authority,
    issue_serving,
    issued_by,
    names_of,
    pem,
)
from sluicegate_operator.certificates.plan import (
    MAX_AUTHORITIES,
    Lifetimes,
    Seen,
    Step,
    Terms,
    advance,
    carry_out,
    needs_served,
    plan,
    renew_at,
)
from sluicegate_operator.certificates.secret import MAX_CERTIFICATES, Stored, read_bundle, read_secret

NAME = "sluicegate-webhook.sluicegate-system.svc"
NAMES = (NAME,)
NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
LIFETIMES = Lifetimes()
TERMS = Terms(NAMES, LIFETIMES)
LONG_AGO = NOW - timedelta(days=400)


def verifies(served: x509.Certificate, bundle: tuple[x509.Certificate, ...], now: datetime) -> bool:
    """What a verifier by the book says: a server of that name, under those authorities, at that time."""
    verifier = PolicyBuilder().store(Store(list(bundle))).time(now).build_server_verifier(x509.DNSName(NAME))
    try:
        verifier.verify(served, [])
    except VerificationError:
        return False
    return True


def first(now: datetime = NOW, terms: Terms = TERMS) -> Stored:
    """What the first turn makes of nothing."""
    nobody = Seen(bundles=(), bundles_since=now, served=(), served_by_all=True, served_since=now)
    stored, _, _ = advance(now, Stored(), nobody, terms)
    return stored


def in_force(stored: Stored, since: datetime = LONG_AGO) -> Seen:
    """Everybody trusts and serves what the Secret says."""
    assert stored.serving is not None
    return Seen(
        bundles=(stored.authorities,),
        bundles_since=since,
        served=(stored.serving.certificate,) * 2,
        served_by_all=True,
        served_since=since,
    )


def serving(stored: Stored) -> Pair:
    assert stored.serving is not None
    return stored.serving


def step(now: datetime, stored: Stored, seen: Seen) -> Step | None:
    return plan(now, stored, seen, TERMS).step


# What is issued.


def test_a_serving_certificate_verifies_under_its_authority_and_no_other() -> None:
    ours, other = issue_authority(NOW, LIFETIMES.authority), issue_authority(NOW, LIFETIMES.authority)
    leaf = issue_serving(ours, NAMES, NOW, LIFETIMES.serving).certificate
    assert verifies(leaf, (ours.certificate,), NOW)
    assert verifies(leaf, (other.certificate, ours.certificate), NOW)
    assert not verifies(leaf, (other.certificate,), NOW)
    assert issued_by(leaf, ours.certificate)
    assert not issued_by(leaf, other.certificate)


def test_certificates_hold_from_an_hour_ago_to_their_end_and_no_longer() -> None:
    authority = issue_authority(NOW, LIFETIMES.authority)
    leaf = issue_serving(authority, NAMES, NOW, LIFETIMES.serving).certificate
    bundle, second = (authority.certificate,), timedelta(seconds=1)
    assert verifies(leaf, bundle, NOW - BACKDATED)
    assert verifies(leaf, bundle, NOW + LIFETIMES.serving)
    assert not verifies(leaf, bundle, NOW - BACKDATED - second)
    assert not verifies(leaf, bundle, NOW + LIFETIMES.serving + second)


def test_a_serving_certificate_ends_with_its_authority() -> None:
    authority = issue_authority(NOW, timedelta(days=1))
    leaf = issue_serving(authority, NAMES, NOW, timedelta(days=90)).certificate
    assert leaf.not_valid_after_utc == NOW + timedelta(days=1)


def test_names_may_be_dns_names_and_addresses() -> None:
    names = ("Hook.Example", "127.0.0.1", "0:0:0:0:0:0:0:1", "a" * 63 + "." + "b" * 63)
    leaf = issue_serving(issue_authority(NOW, LIFETIMES.authority), names, NOW, LIFETIMES.serving).certificate
    assert names_of(leaf) == canonical(names) == {"hook.example", "127.0.0.1", "::1", names[3]}


def test_no_key_appears_where_an_object_is_shown() -> None:
    assert "key" not in repr(first()).lower()


# How it is stored.


def test_what_is_written_is_what_is_read() -> None:
    stored = first()
    again = read_secret({"data": stored.data})
    assert again.authorities == stored.authorities
    assert again.bundle == stored.bundle
    assert again.problems == ()
    assert again.authority is not None
    assert stored.authority is not None
    assert again.authority.key_pem == stored.authority.key_pem
    assert serving(again).certificate == serving(stored).certificate
    assert serving(again).key_pem == serving(stored).key_pem
    assert set(stored.data) == {"ca.crt", "ca.key", "tls.crt", "tls.key"}


def test_of_many_authorities_the_newest_is_the_last() -> None:
    old, new = issue_authority(NOW, LIFETIMES.authority), issue_authority(NOW, LIFETIMES.authority)
    stored = Stored(
        (old.certificate, new.certificate), new, issue_serving(old, NAMES, NOW, LIFETIMES.serving)
    )
    again = read_secret({"data": stored.data})
    assert again.authority is not None
    assert again.authority.certificate == new.certificate
    assert again.problems == ()


def encoded(text: bytes) -> str:
    return base64.b64encode(text).decode()


GARBAGE = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


@pytest.mark.parametrize(
    ("edit", "lost", "problem"),
    [
        ({"ca.crt": ""}, {"authorities", "authority"}, None),
        ({"ca.crt": encoded(GARBAGE)}, {"authorities", "authority"}, "ca.crt holds no certificate"),
        ({"ca.crt": "not base64!"}, {"authorities", "authority"}, None),
        ({"ca.crt": 7}, {"authorities", "authority"}, None),
        ({"ca.key": ""}, {"authority"}, "ca.key holds no key"),
        ({"ca.key": encoded(b"\xff\x00")}, {"authority"}, "ca.key holds no key"),
        ({"ca.key": "tls.key"}, {"authority"}, "ca.key does not belong"),
        ({"tls.crt": ""}, {"serving"}, None),
        ({"tls.crt": encoded(GARBAGE)}, {"serving"}, "tls.crt holds no certificate"),
        ({"tls.key": ""}, {"serving"}, "tls.key holds no key"),
        ({"tls.key": "ca.key"}, {"serving"}, "tls.key does not belong"),
    ],
)
def test_a_damaged_secret_is_read_as_far_as_it_can_be_used(
    edit: dict[str, object], lost: set[str], problem: str | None
) -> None:
    data = first().data
    changed = {
        name: data.get(value, value) if isinstance(value, str) else value for name, value in edit.items()
    }
    stored = read_secret({"data": {**data, **changed}})
    there = {"authorities": stored.authorities, "authority": stored.authority, "serving": stored.serving}
    assert {name for name, value in there.items() if not value} == lost
    assert [problem] == [one[: len(problem)] for one in stored.problems] if problem else not stored.problems


@pytest.mark.parametrize("secret", [None, {}, {"data": None}, {"data": []}, {"data": {}}])
def test_no_secret_or_an_empty_one_holds_nothing(secret: dict[str, object] | None) -> None:
    assert read_secret(secret) == Stored()


def test_a_bundle_is_read_up_to_its_bound() -> None:
    text = pem(issue_authority(NOW, LIFETIMES.authority).certificate)
    assert len(read_bundle(text * (MAX_CERTIFICATES + 5))) == MAX_CERTIFICATES


# What is due.


def test_at_first_everything_is_made_at_once() -> None:
    nobody = Seen(bundles=(), bundles_since=NOW, served=(), served_by_all=True, served_since=NOW)
    stored, taken, rest = advance(NOW, Stored(), nobody, TERMS)
    assert [one.step for one in taken] == [Step.ADD_AUTHORITY, Step.NEW_SERVING]
    assert rest.step is None
    assert rest.look_at == renew_at(serving(stored).certificate)
    assert verifies(serving(stored).certificate, stored.authorities, NOW)


def test_at_rest_nothing_is_due_until_a_third_of_the_life_is_left() -> None:
    stored = first()
    due = renew_at(serving(stored).certificate)
    assert step(NOW, stored, in_force(stored)) is None
    assert step(due - timedelta(seconds=1), stored, in_force(stored)) is None
    assert step(due, stored, in_force(stored)) is Step.NEW_SERVING
    assert not needs_served(NOW, stored, TERMS)
    assert needs_served(due, stored, TERMS)


def test_a_new_authority_is_added_before_it_signs_and_signs_only_when_trusted_by_all() -> None:
    stored = first()
    assert stored.authority is not None
    now = renew_at(stored.authority.certificate)
    stored = carry_out(Step.NEW_SERVING, now, stored, in_force(stored), TERMS)  # young enough
    old = in_force(stored)
    assert step(now, stored, old) is Step.ADD_AUTHORITY
    after = carry_out(Step.ADD_AUTHORITY, now, stored, old, TERMS)
    assert after.authorities[:-1] == stored.authorities
    assert after.serving == stored.serving

    assert step(now, after, old) is None, "nobody trusts it"
    one_of_two = replace(old, bundles=(after.authorities, stored.authorities))
    assert step(now, after, one_of_two) is None
    now_trusted = replace(old, bundles=(after.authorities,) * 2, bundles_since=now)
    assert step(now, after, now_trusted) is None, "not for long enough"
    assert step(now + LIFETIMES.settle, after, now_trusted) is Step.NEW_SERVING


def test_replicas_that_do_not_answer_are_taken_to_serve_what_the_secret_says() -> None:
    old, new = issue_authority(NOW, LIFETIMES.authority), issue_authority(NOW, LIFETIMES.authority)
    stored = Stored(
        (old.certificate, new.certificate), new, issue_serving(old, NAMES, NOW, LIFETIMES.serving)
    )
    unknown = Seen(
        bundles=((old.certificate,),),
        bundles_since=LONG_AGO,
        served=(),
        served_by_all=False,
        served_since=LONG_AGO,
    )
    assert step(NOW, stored, unknown) is None
    assert step(NOW, stored, replace(unknown, served_by_all=True)) is Step.NEW_SERVING, (
        "nobody serves anything"
    )


def test_what_nobody_trusts_is_replaced_at_once() -> None:
    old, new = issue_authority(NOW, LIFETIMES.authority), issue_authority(NOW, LIFETIMES.authority)
    other = issue_authority(NOW, LIFETIMES.authority).certificate
    stored = Stored(
        (old.certificate, new.certificate), new, issue_serving(old, NAMES, NOW, LIFETIMES.serving)
    )
    assert step(NOW, stored, replace(in_force(stored), bundles=((other,),))) is Step.NEW_SERVING


def test_an_old_authority_is_dropped_only_when_every_replica_serves_under_the_new_one() -> None:
    old, new = issue_authority(NOW, LIFETIMES.authority), issue_authority(NOW, LIFETIMES.authority)
    before, after = (issue_serving(one, NAMES, NOW, LIFETIMES.serving) for one in (old, new))
    stored = Stored((old.certificate, new.certificate), new, after)
    seen = in_force(stored, since=NOW)
    assert step(NOW, stored, seen) is None, "not for long enough"
    later = NOW + LIFETIMES.settle
    mixed = replace(seen, served=(before.certificate, after.certificate))
    assert step(later, stored, mixed) is None
    assert step(later, stored, replace(seen, served=(), served_by_all=False)) is None, "not known"
    assert step(later, stored, replace(seen, served=(after.certificate,), served_by_all=False)) is None
    assert step(later, stored, seen) is Step.DROP_AUTHORITIES
    dropped = carry_out(Step.DROP_AUTHORITIES, later, stored, seen, TERMS)
    assert dropped.authorities == (new.certificate,)
    assert step(later, dropped, in_force(dropped)) is None


def test_an_old_authority_that_has_expired_is_dropped_without_asking_anybody() -> None:
    old, new = issue_authority(LONG_AGO, timedelta(days=30)), issue_authority(NOW, LIFETIMES.authority)
    stored = Stored(
        (old.certificate, new.certificate), new, issue_serving(new, NAMES, NOW, LIFETIMES.serving)
    )
    unknown = replace(in_force(stored), served=(), served_by_all=False)
    assert step(NOW, stored, unknown) is Step.DROP_AUTHORITIES


def test_what_has_expired_is_replaced_at_once() -> None:
    stored = first(LONG_AGO)
    seen = in_force(stored)
    after, taken, _ = advance(NOW, stored, seen, TERMS)
    assert [one.step for one in taken] == [Step.NEW_SERVING]
    assert verifies(serving(after).certificate, after.authorities, NOW)


def test_a_clock_that_ran_ahead_when_all_was_issued_is_mended_at_once() -> None:
    stored = first(NOW + timedelta(days=1000))
    after, taken, _ = advance(NOW, stored, in_force(stored), TERMS)
    assert [one.step for one in taken] == [Step.ADD_AUTHORITY, Step.NEW_SERVING]
    assert verifies(serving(after).certificate, after.authorities, NOW)


def test_another_name_is_served_at_once_since_nobody_can_verify_the_old_one() -> None:
    stored = first(terms=Terms(("other.example.svc",), LIFETIMES))
    after, taken, _ = advance(NOW, stored, in_force(stored), TERMS)
    assert [one.step for one in taken] == [Step.NEW_SERVING]
    assert names_of(serving(after).certificate) == {NAME}


def test_a_lost_secret_does_not_break_those_who_serve_and_trust_what_was_in_it() -> None:
    """The replicas serve on from memory: the new authority joins the one that they are verified by."""
    stored = first()
    seen = in_force(stored)
    after, taken, _ = advance(NOW, Stored(), seen, TERMS)
    assert [one.step for one in taken] == [Step.ADD_AUTHORITY]
    assert after.serving is None
    assert after.authorities[:-1] == stored.authorities
    trusted = replace(seen, bundles=(after.authorities,), bundles_since=NOW)
    final, taken, _ = advance(NOW + LIFETIMES.settle, after, trusted, TERMS)
    assert [one.step for one in taken] == [Step.NEW_SERVING]
    assert verifies(serving(final).certificate, after.authorities, NOW)


def test_a_lost_secret_is_made_anew_at_once_where_nobody_serves() -> None:
    stored = first()
    seen = replace(in_force(stored), served=())
    _, taken, _ = advance(NOW, Stored(), seen, TERMS)
    assert [one.step for one in taken] == [Step.ADD_AUTHORITY, Step.NEW_SERVING]


def test_foreign_authorities_of_a_bundle_are_not_kept() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "somebody else's")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(7).not_valid_before(LONG_AGO).not_valid_after(NOW + timedelta(days=1))
    foreign = builder.sign(key, hashes.SHA256())
    seen = Seen(bundles=((foreign,),), bundles_since=NOW, served=(), served_by_all=True, served_since=NOW)
    stored, _, _ = advance(NOW, Stored(), seen, TERMS)
    assert len(stored.authorities) == 1
    assert foreign not in stored.authorities


def test_however_often_the_key_is_lost_the_bundle_is_bounded_and_keeps_the_one_in_use() -> None:
    stored = first()
    used = stored.authorities[0]
    seen = in_force(stored)
    for _ in range(2 * MAX_AUTHORITIES):
        stored = carry_out(Step.ADD_AUTHORITY, NOW, replace(stored, authority=None), seen, TERMS)
    assert len(stored.authorities) == MAX_AUTHORITIES
    assert used in stored.authorities
    assert stored.authority is not None
    assert stored.authorities[-1] == stored.authority.certificate


# The settings.


@pytest.mark.parametrize(
    "wrong",
    [
        {"settle": timedelta(seconds=1)},
        {"settle": timedelta(hours=2)},
        {"serving": timedelta(minutes=10)},
        {"serving": timedelta(days=399)},
        {"serving": timedelta(days=90), "authority": timedelta(days=100)},
        {"authority": timedelta(days=4000)},
    ],
)
def test_lifetimes_that_leave_no_room_for_a_rotation_are_refused(wrong: dict[str, timedelta]) -> None:
    with pytest.raises(ValueError, match=r"lives from|settle for"):
        Lifetimes(**wrong)
