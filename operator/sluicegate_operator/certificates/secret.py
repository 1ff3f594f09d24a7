"""The Secret that holds the webhook's certificates, read and written.

    ca.crt    the authorities that are trusted, newest last: what `caBundle` of the webhook's entries is
    ca.key    the key of the newest authority; webhook pods mount the Secret without it
    tls.crt   what the webhook serves with; empty while there is nothing that could be verified
    tls.key   its key

It is of the type that cert-manager writes too (kubernetes.io/tls, whose two keys have to be there but may be empty),
so that changing from one to the other keeps the name.

Invariants: reading never raises, whatever somebody has put there: what cannot be used is left out and told in
`Stored.problems`, without a byte of the content. Keys appear in no `repr`.

What to change, and when, lives in `plan`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sluicegate_operator.certificates.authority import Pair, pem

AUTHORITIES: Final = "ca.crt"
AUTHORITY_KEY: Final = "ca.key"
SERVING: Final = "tls.crt"
SERVING_KEY: Final = "tls.key"
SECRET_TYPE: Final = "kubernetes.io/tls"  # noqa: S105  # the name of a type

#: Certificates read from one PEM text. A bundle of ours has two during a rotation; one that somebody has filled
#: with the certificates of a whole system is not worked through at each look.
MAX_CERTIFICATES: Final = 16


@dataclass(frozen=True, slots=True)
class Stored:
    """What the Secret says, as far as it can be used."""

    authorities: tuple[x509.Certificate, ...] = ()
    authority: Pair | None = field(default=None, repr=False)  # the newest, and able to sign
    serving: Pair | None = field(default=None, repr=False)
    problems: tuple[str, ...] = ()

    @property
    def bundle(self) -> bytes:
        """The trusted authorities as PEM."""
        return b"".join(map(pem, self.authorities))

    @property
    def data(self) -> dict[str, str]:
        """The Secret's `data`."""
        content = {
            AUTHORITIES: self.bundle,
            AUTHORITY_KEY: self.authority.key_pem if self.authority else b"",
            SERVING: self.serving.certificate_pem if self.serving else b"",
            SERVING_KEY: self.serving.key_pem if self.serving else b"",
        }
        return {name: base64.b64encode(value).decode("ascii") for name, value in content.items()}


def read_secret(secret: Mapping[str, Any] | None) -> Stored:
    """What a Secret, as the API server gives it, holds; None is one that is not there."""
    if secret is None:
        return Stored()
    data = secret.get("data")
    content = _decoded(data if isinstance(data, Mapping) else {})
    problems: list[str] = []
    authorities = read_bundle(content.get(AUTHORITIES, b""))
    if content.get(AUTHORITIES) and not authorities:
        problems.append(f"{AUTHORITIES} holds no certificate that can be read")
    authority = None
    if authorities:
        authority = _pair(authorities[-1], content.get(AUTHORITY_KEY, b""), AUTHORITY_KEY, problems)
    serving = None
    if content.get(SERVING):
        chain = read_bundle(content[SERVING])
        if chain:
            serving = _pair(chain[0], content.get(SERVING_KEY, b""), SERVING_KEY, problems)
        else:
            problems.append(f"{SERVING} holds no certificate that can be read")
    return Stored(authorities, authority, serving, tuple(problems))


def read_bundle(text: bytes) -> tuple[x509.Certificate, ...]:
    """The certificates in a PEM text, the first MAX_CERTIFICATES of them; none if it cannot be read."""
    if not text.strip():
        return ()
    try:
        return tuple(x509.load_pem_x509_certificates(text)[:MAX_CERTIFICATES])
    except ValueError:
        return ()


def read_ca_bundle(encoded: object) -> tuple[x509.Certificate, ...]:
    """The certificates of a `caBundle`, which is base64 of PEM; none if it is absent or cannot be read."""
    return read_bundle(_base64(encoded))


def _pair(certificate: x509.Certificate, key_text: bytes, name: str, problems: list[str]) -> Pair | None:
    try:
        key = serialization.load_pem_private_key(key_text, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        problems.append(f"{name} holds no key that can be read")
        return None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        problems.append(f"{name} does not belong to its certificate")
        return None
    return Pair(certificate, key)


def _decoded(data: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: _base64(data.get(name)) for name in (AUTHORITIES, AUTHORITY_KEY, SERVING, SERVING_KEY)}


def _base64(encoded: object) -> bytes:
    if not isinstance(encoded, str):
        return b""
    try:
        return base64.b64decode(encoded, validate=True)
    except (ValueError, binascii.Error):
        return b""
