"""A request's head, checked and understood.

llhttp has already refused what is not HTTP at all (spaces before a colon, folded lines, bare CR or LF, control
bytes, two lengths, signed or repeated lengths, lengths together with chunks). Here is the rest: what it lets
pass and a gate must not, because another reader of the same bytes might read them differently.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from sluicegate_sidecar.http.errors import problem
from sluicegate_sidecar.http.heads import PROTECTED, connection_tokens
from sluicegate_sidecar.http.limits import Limits

if TYPE_CHECKING:
    from sluicegate_sidecar.http.exchange import Exchange

#: reg-name, IPv4 or bracketed IPv6 with an optional port (RFC 3986, 3.2); loose inside, but no delimiters.
_HOST: Final = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~%!$&'()*+,;=\-]*)(?::[0-9]*)?")

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


class Framing:
    """How the body of a request is delimited, and what the client expects before it sends it."""

    __slots__ = ("chunked", "expects_continue", "length")

    def __init__(self, length: int, chunked: bool, expects_continue: bool) -> None:
        self.length = length
        self.chunked = chunked
        self.expects_continue = expects_continue


def split_request_line(line: bytes, limits: Limits) -> tuple[bytes, bytes, bool]:
    """Method, target, and whether it is HTTP/1.0.

    Raises:
        Problem: it is not three words with one space between them, or another version.
    """
    words = line.split(b" ")
    if len(words) != 3 or not words[1]:
        raise problem("bad_request")
    method, target, version = words
    if version == b"HTTP/1.1":
        http10 = False
    elif version == b"HTTP/1.0":
        http10 = True
    else:
        raise problem("bad_version" if version[:5] == b"HTTP/" else "bad_request")
    if len(target) > limits.target_bytes:
        raise problem("target_bytes")
    if method == b"CONNECT":
        raise problem("method")
    return method, target, http10


def understand(exchange: Exchange, limits: Limits) -> Framing:
    """Fill in what the head says; return how the body is delimited.

    Raises:
        Problem: the head is refused.
    """
    headers = exchange.headers
    fields = dict(reversed(headers))  # of repeated names the first stays
    if len(fields) != len(headers):
        _check_repeated(headers)
    exchange.set_fields(fields)
    host = fields.get(b"host")
    if host is None:
        if not exchange.http10:
            raise problem("bad_host")
    elif _HOST.fullmatch(host) is None:
        raise problem("bad_host")
    if exchange.target[:1] == b"/":
        exchange.path = exchange.target.partition(b"?")[0]
        if b"#" in exchange.target:
            raise problem("bad_target")
    else:
        _other_target(exchange)
    _connection(exchange, fields)
    return _framing(exchange, fields, limits)


def _check_repeated(headers: list[tuple[bytes, bytes]]) -> None:
    names = [name for name, _ in headers]
    for name in _SINGLE:
        if names.count(name) > 1:
            raise problem("bad_host" if name == b"host" else "bad_repeat")


def _other_target(exchange: Exchange) -> None:
    """absolute-form becomes origin-form with the authority as Host; asterisk-form is for OPTIONS only."""
    target = exchange.target
    if target == b"*" and exchange.method == b"OPTIONS":
        return
    match = _ABSOLUTE.fullmatch(target)
    if match is None or b"#" in target:
        raise problem("bad_target")
    authority, rest = match[1], match[2]
    if not authority or b"@" in authority or _HOST.fullmatch(authority) is None:
        raise problem("bad_target")
    exchange.origin = rest if rest[:1] == b"/" else b"/" + rest
    exchange.path = exchange.origin.partition(b"?")[0]
    exchange.headers[:] = [(b"host", authority), *[h for h in exchange.headers if h[0] != b"host"]]
    exchange.set_fields(dict(reversed(exchange.headers)))


def _connection(exchange: Exchange, fields: dict[bytes, bytes]) -> None:
    """What becomes of the connection, which fields stop here, and whether to switch protocols."""
    value = fields.get(b"connection")
    if value is None:
        exchange.keepalive = not exchange.http10
        exchange.asked_close = exchange.http10
        return
    upgrade = fields.get(b"upgrade")
    lists = [v for name, v in exchange.headers if name == b"connection"]
    tokens = _USUAL_CONNECTION.get(value) if len(lists) == 1 else None
    if tokens is None:
        tokens = connection_tokens(lists)
        exchange.listed = tokens - PROTECTED
    exchange.keepalive = b"close" not in tokens and (not exchange.http10 or b"keep-alive" in tokens)
    exchange.asked_close = not exchange.keepalive
    if upgrade is not None and b"upgrade" in tokens and not exchange.http10:
        asked = [part.strip(b" \t").lower() for part in upgrade.split(b",")]
        if not any(part.startswith(_REFUSED_UPGRADES) for part in asked):
            exchange.upgrade = upgrade


def _framing(exchange: Exchange, fields: dict[bytes, bytes], limits: Limits) -> Framing:
    length = 0
    text = fields.get(b"content-length")
    coding = fields.get(b"transfer-encoding")
    if text is not None:
        if coding is not None or not text.isdigit():
            raise problem("bad_framing")
        length = int(text) if len(text) <= 20 else limits.body_bytes + 1
        if length > limits.body_bytes:
            raise problem("body_bytes")
    elif coding is not None and (coding.lower() != b"chunked" or exchange.http10):
        raise problem("bad_framing")
    expect = fields.get(b"expect")
    if expect is not None and not exchange.http10:
        if expect.lower() != b"100-continue":
            raise problem("expectation")
        return Framing(length, coding is not None, True)
    return Framing(length, coding is not None, False)
