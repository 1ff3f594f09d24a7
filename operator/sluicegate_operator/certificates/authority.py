"""Issues certificates: a certificate authority of the operator's own, and what the webhook serves with.

Pure but for the randomness of keys and serial numbers; takes `now`. Keys are ECDSA on P-256, which every API
server verifies and which costs a small pod nothing to make.

Invariants:
- A serving certificate never outlives its authority: `issue_serving` cuts it short.
- Each authority has a subject of its own, so that a verifier with several in its bundle picks the right one by
  name as well as by key identifier.
- An authority can sign serving certificates and nothing below (path length 0).

When to issue what lives in `plan`; how it is laid out in a Secret in `secret`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

#: How long before its making a certificate is valid already: clocks of API servers and nodes differ.
BACKDATED: Final = timedelta(hours=1)

#: Subjects of our own authorities begin so; others in a bundle are not ours to keep alive.
AUTHORITY_PREFIX: Final = "sluicegate-webhook-ca-"

#: What fits into a common name (RFC 5280, ub-common-name); names are verified by the SAN, never by this one.
MAX_COMMON_NAME: Final = 64


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and the key that belongs to it."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def certificate_pem(self) -> bytes:
        """The certificate as PEM."""
        return pem(self.certificate)

    @property
    def key_pem(self) -> bytes:
        """The private key as unencrypted PKCS #8; it belongs into a Secret and nowhere else."""
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


def pem(certificate: x509.Certificate) -> bytes:
    """A certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256 of the certificate in hex: its name in logs and sightings."""
    return certificate.fingerprint(hashes.SHA256()).hex()


def issue_authority(now: datetime, lifetime: timedelta) -> Pair:
    """A new self-signed authority, valid until `now + lifetime`."""
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    name = x509.Name(
        [x509.NameAttribute(NameOID.COMMON_NAME, f"{AUTHORITY_PREFIX}{serial & 0xFFFFFFFF:08x}")]
    )
    usage = x509.KeyUsage(
        key_cert_sign=True,
        crl_sign=True,
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .serial_number(serial)
        .public_key(key.public_key())
        .not_valid_before(_whole(now - BACKDATED))
        .not_valid_after(_whole(now + lifetime))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Pair(certificate, key)


def issue_serving(authority: Pair, names: Sequence[str], now: datetime, lifetime: timedelta) -> Pair:
    """A serving certificate for these DNS names or IP addresses, valid until `now + lifetime`, or with its
    authority if that ends earlier."""
    if not names:
        raise ValueError("a serving certificate has at least one name")
    key = ec.generate_private_key(ec.SECP256R1())
    ends = min(_whole(now + lifetime), authority.certificate.not_valid_after_utc)
    common = next((name for name in names if len(name) <= MAX_COMMON_NAME), "sluicegate-webhook")
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=False,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    issuer_key = authority.key.public_key()
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)]))
        .issuer_name(authority.certificate.subject)
        .serial_number(x509.random_serial_number())
        .public_key(key.public_key())
        .not_valid_before(max(_whole(now - BACKDATED), authority.certificate.not_valid_before_utc))
        .not_valid_after(ends)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    return Pair(certificate, key)


def names_of(certificate: x509.Certificate) -> frozenset[str]:
    """The DNS names and IP addresses that a certificate is good for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return frozenset()
    addresses = (str(address) for address in names.get_values_for_type(x509.IPAddress))
    return frozenset(names.get_values_for_type(x509.DNSName)) | frozenset(addresses)


def issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether the authority has signed the certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (
        ValueError,
        TypeError,
        InvalidSignature,
        UnsupportedAlgorithm,
    ):  # by name, by kind of key, by signature
        return False
    return True


def is_own_authority(certificate: x509.Certificate) -> bool:
    """Whether this is an authority that this module made."""
    common = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return bool(common) and str(common[0].value).startswith(AUTHORITY_PREFIX)


def canonical(names: Iterable[str]) -> frozenset[str]:
    """The names as `names_of` gives them: addresses in their one short form, DNS names in small letters."""
    return frozenset(str(name.value) for name in map(_general_name, names))


def _general_name(name: str) -> x509.IPAddress | x509.DNSName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name.lower())


def _whole(when: datetime) -> datetime:
    """In UTC, without the fraction of a second that X.509 cannot say."""
    return when.astimezone(UTC).replace(microsecond=0)
