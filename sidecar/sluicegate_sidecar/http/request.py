"""A request's head, checked and understood.

llhttp refuses what is not HTTP at all: spaces before a colon, folded lines, bare CR or LF, control bytes, two
lengths, signed or repeated lengths, lengths together with chunks. Here is the rest: what it lets pass and a
gate must not, because another reader of the same bytes might read them differently. A request is served only
where neither objects.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from sluicegate_sidecar.http.errors import problem
from sluicegate_sidecar.http.exchange import Exchange
from sluicegate_sidecar.http.heads import PROTECTED, connection_tokens
from sluicegate_sidecar.http.limits import Limits

if TYPE_CHECKING:
    from sluicegate_sidecar.http.client import ClientConnection

_VERSIONS: Final = (b"HTTP/1.1", b"HTTP/1.0")

#: Instead of a length: the body is chunked.
CHUNKED_BODY: Final = -1

#: reg-name, IPv4 or bracketed IPv6 with an optional port (RFC 3986, 3.2); loose inside, but no delimiters.
_HOST: Final = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~%!$&'()*+,;=\-]*)(?::[0-9]*)?[ \t]*")

#: absolute-form: a proxy's clients send it, and every server must take it (RFC 9112, 3.2.2).
_ABSOLUTE: Final = re.compile(rb"[Hh][Tt][Tt][Pp][Ss]?://([^/?#]*)(.*)")

#: What Connection usually says: spelled out here, so that it need not be taken apart.
_USUAL_CONNECTION: Final = {
    b"keep-alive": frozenset((b"keep-alive",)),
    b"Keep-Alive": frozenset((b"keep-alive",)),
    b"close": frozenset((b"close",)),
}

#: Protocols that would carry further HTTP requests past the gate: a request to switch to them is served as if
#: it had not been made, which any server may do (RFC 9110, 7.8).
_REFUSED_UPGRADES: Final = (b"h2c", b"h2", b"http/", b"tls/")

#: Fields of which one request can have only one, since readers differ in which of two they take.
_SINGLE: Final = (b"host", b"content-length", b"transfer-encoding", b"expect", b"content-type")

#: Digits of the longest length that is worth converting: 2^64 has 20.
_LENGTH_DIGITS: Final = 20


def read_head(
    client: ClientConnection, head: bytes, headers: list[tuple[bytes, bytes]], limits: Limits
) -> tuple[Exchange, int]:
    """The exchange that a head begins, and the length of its body, or `CHUNKED_BODY`.

    Args:
        client: where it came from.
        head: all of it, with the empty line at its end.
        headers: its header lines as llhttp read them, names in lower case.
        limits: those in force.

    Raises:
        Problem: the head is refused.
    """
    words = head[: head.index(b"\r\n")].split(b" ")
    if len(words) != 3:
        raise problem("bad_request")
    method, target, version = words
    if version not in _VERSIONS:
        raise problem("bad_version" if version[:5] == b"HTTP/" else "bad_request")
    if len(target) > limits.target_bytes:
        raise problem("target_bytes")
    fields = dict(reversed(headers))  # of repeated names the first stays
    if len(fields) != len(headers):
        _check_repeated(headers)
    exchange = Exchange(client, method, target, headers, fields)
    http10 = version == b"HTTP/1.0"
    if http10:
        exchange.http10 = exchange.asked_close = True
        exchange.keepalive = False
    host = fields.get(b"host")
    if not (http10 if host is None else _valid_host(host)):
        raise problem("bad_host")
    if b"#" in target:
        raise problem("bad_target")
    if target[:1] == b"/":
        exchange.path = target.partition(b"?")[0]
    else:
        _other_target(exchange)
    connection = fields.get(b"connection")
    if connection is not None:
        _read_connection(exchange, connection)
    return exchange, _read_framing(exchange, fields, limits)


@lru_cache(maxsize=256)
def _valid_host(host: bytes) -> bool:
    """Clients say the same few hosts again and again; the cache is bounded against those that do not."""
    return _HOST.fullmatch(host) is not None


def _check_repeated(headers: list[tuple[bytes, bytes]]) -> None:
    names = [name for name, _ in headers]
    for name in _SINGLE:
        if names.count(name) > 1:
            raise problem("bad_host" if name == b"host" else "bad_repeat")


def _other_target(exchange: Exchange) -> None:
    """absolute-form becomes origin-form with the authority as Host; asterisk-form is for OPTIONS only."""
    target = exchange.target
    if exchange.method == b"CONNECT":
        raise problem("method")
    if target == b"*" and exchange.method == b"OPTIONS":
        return
    match = _ABSOLUTE.fullmatch(target)
    if match is None:
        raise problem("bad_target")
    authority, rest = match[1], match[2]
    if not authority or not _valid_host(authority) or authority[-1:] in (b" ", b"\t"):
        raise problem("bad_target")
    exchange.origin = rest if rest[:1] == b"/" else b"/" + rest
    exchange.path = exchange.origin.partition(b"?")[0]
    exchange.replace_headers([(b"host", authority), *[h for h in exchange.headers if h[0] != b"host"]])


def _read_connection(exchange: Exchange, value: bytes) -> None:
    """What becomes of the connection, which fields stop here, and whether to switch protocols."""
    lists = [v for name, v in exchange.headers if name == b"connection"]
    tokens = _USUAL_CONNECTION.get(value) if len(lists) == 1 else None
    if tokens is None:
        tokens = connection_tokens(lists)
        exchange.listed = tokens - PROTECTED
    exchange.keepalive = b"close" not in tokens and (not exchange.http10 or b"keep-alive" in tokens)
    exchange.asked_close = not exchange.keepalive
    upgrade = exchange.header(b"upgrade")
    if upgrade is not None and b"upgrade" in tokens and not exchange.http10:
        asked = [part.strip(b" \t").lower() for part in upgrade.split(b",")]
        if not any(part.startswith(_REFUSED_UPGRADES) for part in asked):
            exchange.upgrade = upgrade


def _read_framing(exchange: Exchange, fields: dict[bytes, bytes], limits: Limits) -> int:
    """The length of the body, or `CHUNKED_BODY`; and whether the client waits to be asked for it."""
    length = 0
    text = fields.get(b"content-length")
    coding = fields.get(b"transfer-encoding")
    if text is not None:
        text = text.rstrip(b" \t")
        if coding is not None or not text.isdigit():
            raise problem("bad_framing")
        length = int(text) if len(text) <= _LENGTH_DIGITS else limits.body_bytes + 1
        if length > limits.body_bytes:
            raise problem("body_bytes")
    elif coding is not None:
        if coding.rstrip(b" \t").lower() != b"chunked" or exchange.http10:
            raise problem("bad_framing")
        length = CHUNKED_BODY
    expect = fields.get(b"expect")
    if expect is not None and not exchange.http10:
        if expect.rstrip(b" \t").lower() != b"100-continue":
            raise problem("expectation")
        exchange.expects_continue = length != 0
    return length
