"""The certificate that the webhook serves with, taken anew from its files without a restart.

A mounted Secret is exchanged by swapping a symbolic link, so the files are read through it once, into one
directory of which nothing changes any more; a pair that does not fit together, or cannot be read, changes nothing,
and the last good one is served on.

Invariant: a connection has the certificate that was good when it began its handshake; open ones are not touched.
New ones get theirs from a context of their own, exchanged as a whole, never from one that is half changed.
"""

from __future__ import annotations

import logging
import os
import ssl
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from cryptography import x509

from sluicegate_operator.certificates.authority import fingerprint

log = logging.getLogger(__name__)

CERTIFICATE_FILE: Final = "tls.crt"
KEY_FILE: Final = "tls.key"

#: Between two looks at the files, s. Costs two stats; the kubelet takes a minute to bring them.
LOOK_EVERY_S: Final = 5.0

#: Of each file; a chain has some kB.
MAX_FILE_BYTES: Final = 65_536


@dataclass(frozen=True, slots=True)
class Loaded:
    """What is served."""

    fingerprint: str
    ends: datetime


class ServingCertificate:
    """The files of one directory, and the context that servers are started with.

    Attributes:
        context: for the server, for its whole life.
        loaded: what new connections get; None until the files were good for the first time.
        reloads: how often files were taken, and how often they were found bad.
    """

    def __init__(self, directory: Path) -> None:
        """
        Args:
            directory: with CERTIFICATE_FILE and KEY_FILE in it; they need not be there yet.
        """
        self.context = _context()
        self.context.sni_callback = self._choose
        self.loaded: Loaded | None = None
        self.reloads = {"loaded": 0, "bad": 0}
        self._directory = directory
        self._current: ssl.SSLContext | None = None
        self._seen: tuple[object, ...] | None = None

    def look(self) -> bool:
        """Take the files if they have changed; whether something new is served."""
        seen = self._state()
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            context, loaded = _load(self._directory)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            self.reloads["bad"] += 1
            serving = "nothing is served yet" if self.loaded is None else "the last good one is served on"
            reason = error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)
            log.warning("the certificate in %s cannot be used, %s: %s", self._directory, serving, reason)
            return False
        if self.loaded == loaded:
            return False
        self._current, self.loaded = context, loaded
        self.reloads["loaded"] += 1
        extra = {"fingerprint": loaded.fingerprint[:16], "ends": loaded.ends.isoformat()}
        log.info("serving with a new certificate", extra=extra)
        return True

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> int | None:
        """Called by OpenSSL within each handshake."""
        if self._current is None:
            return ssl.ALERT_DESCRIPTION_INTERNAL_ERROR
        connection.context = self._current
        return None

    def _state(self) -> tuple[object, ...]:
        """What changes when the files do."""
        state: list[object] = []
        for name in (CERTIFICATE_FILE, KEY_FILE):
            try:
                there = (self._directory / name).stat()
            except OSError as error:
                state.append(error.errno)
            else:
                state.append((there.st_dev, there.st_ino, there.st_mtime_ns, there.st_size))
        return tuple(state)


def _load(directory: Path) -> tuple[ssl.SSLContext, Loaded]:
    # The directory that `..data` of a mounted Secret points to at this moment: both files from the same one.
    there = Path(os.path.realpath(directory / CERTIFICATE_FILE)).parent
    certificate_file, key_file = there / CERTIFICATE_FILE, there / KEY_FILE
    for file in (certificate_file, key_file):
        size = file.stat().st_size
        if not 0 < size <= MAX_FILE_BYTES:
            raise ValueError(f"{file.name} has {size} bytes")
    context = _context()
    context.load_cert_chain(certificate_file, key_file)  # checks that they belong together
    certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
    return context, Loaded(fingerprint(certificate), certificate.not_valid_after_utc)


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context
