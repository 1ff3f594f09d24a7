"""Which class a request belongs to, and which client it comes from.

A policy's rules are compiled once into steps: neighbouring rules on the same header, the model, or the path
become one look-up in a table, so the cost depends on how often the policy changes the subject, not on how many
values it lists. The first rule that matches wins, as written.

The client is whom the gate is fair to within a class. It is read from the header that the policy names, else
from what gateways set, else from the credential. A client can write any header itself: where that matters, the
gateway in front sets or strips those that are trusted.
Invariant: a raw identity (it may be a key) never leaves this module; what leaves is a keyed hash, the same for
the same identity and salt. The cache of hashes is bounded in entries and in bytes.

How many flows the gate keeps, and what fair means, lives in `line`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

from sluicegate_core.policy import Policy, Rule

HeaderLookup = Callable[[bytes], bytes | None]
"""Gives the value of a header by its lower-cased name, without the blanks around it; None where absent."""

CLIENT_HEADERS = (b"x-llm-d-inference-fairness-id", b"x-gateway-inference-fairness-id")
"""What inference gateways set to name the tenant: llm-d's, and the Gateway API inference extension's."""

MAX_CACHED_CLIENTS = 4096
"""Hashes kept at hand, in each of two generations."""

MAX_CACHED_IDENTITY_BYTES = 1024
"""Longer identities are hashed each time (2 us), so that the cache stays below 8 MiB whoever sends what."""

HASH_BYTES = 8
"""64 bits: among a million clients, the odds that two share a hash are one in 37 million."""

MAX_SALT_BYTES = 32
"""The longest key that BLAKE2s takes (RFC 7693, section 2.1)."""

_ANONYMOUS = ""


def hash_client(raw: bytes, salt: bytes) -> str:
    """The identity as 16 hexadecimal digits: keyed BLAKE2s, so that it cannot be guessed without the salt.

    `salt` is at most MAX_SALT_BYTES long; ValueError beyond.
    """
    return hashlib.blake2s(raw, digest_size=HASH_BYTES, key=salt).hexdigest()


class Classifier:
    """The `classify` part of one policy, compiled. Immutable but for its cache; one per policy."""

    __slots__ = ("_client_headers", "_default", "_old", "_salt", "_steps", "_young")

    def __init__(self, policy: Policy, salt: bytes = b"") -> None:
        """`salt` keys the hashes of client identities; where it is empty, short identities can be guessed."""
        if len(salt) > MAX_SALT_BYTES:
            raise ValueError(f"a salt has at most {MAX_SALT_BYTES} bytes, not {len(salt)}")
        self._salt = salt
        self._default = policy.class_index(policy.classify.default)
        self._steps = tuple(_compile(policy))
        named = policy.classify.client_header
        first = () if named is None else (named.encode("ascii"),)
        self._client_headers = (*first, *CLIENT_HEADERS)
        self._young: dict[bytes, str] = {}
        self._old: dict[bytes, str] = {}

    def classify(self, header: HeaderLookup, model: str, path: str) -> tuple[int, str]:
        """The index of the request's class, and the hash of its client ("" where it is anonymous).

        `path` is without the query; `model` is empty where the request names none.
        """
        class_index = self._default
        value: _Value
        for subject, exact, prefixes in self._steps:
            if subject is _MODEL:
                value = model
            elif subject is _PATH:
                value = path
            else:
                value = header(subject)
            found = exact.get(value)
            if prefixes:
                found = _earliest(found, value, prefixes)
            if found is not None:
                class_index = found[1]
                break
        for name in self._client_headers:
            identity = header(name)
            if identity:
                break
        else:
            identity = _credential(header)
            if not identity:
                return class_index, _ANONYMOUS
        hashed = self._young.get(identity)
        return class_index, self._hash(identity) if hashed is None else hashed

    @property
    def cached_clients(self) -> int:
        """Hashes at hand, at most two generations of MAX_CACHED_CLIENTS."""
        return len(self._young) + len(self._old)

    def _hash(self, identity: bytes) -> str:
        """The hash of an identity that the young generation does not hold; kept there where it is short."""
        hashed = self._old.get(identity)
        if hashed is None:
            hashed = hash_client(identity, self._salt)
        if len(identity) <= MAX_CACHED_IDENTITY_BYTES:
            if len(self._young) >= MAX_CACHED_CLIENTS:
                # Whoever was not seen since the last change is forgotten; nobody is searched for.
                self._old, self._young = self._young, {}
            self._young[identity] = hashed
        return hashed


_MODEL = b":model"
_PATH = b":path"
"""Subjects of a step that are no header: a header's name has no colon."""

_Value = str | bytes | None
"""What a rule is compared with: a model or a path as text; a header as it came, None where it is absent."""

_Match = tuple[int, int]
"""Place among the rules, and the class that the rule leads to."""

_Prefix = tuple[str, _Match]
_Step = tuple[bytes, dict[_Value, _Match], tuple[_Prefix, ...]]
"""A subject, its exact values, and its prefixes in the order of the rules (of a model or a path only)."""


def _credential(header: HeaderLookup) -> bytes:
    """The key that the request brings; empty where it has none."""
    value = header(b"authorization")
    if value:
        # "Bearer KEY" and KEY in x-api-key are one client: the same key in two dialects of one API.
        scheme, blank, credential = value.partition(b" ")
        return credential.strip() if blank else scheme
    return header(b"x-api-key") or b""


def _earliest(exact: _Match | None, value: _Value, prefixes: tuple[_Prefix, ...]) -> _Match | None:
    """The first rule of the step that matches: the exact one, or a prefix written before it."""
    assert isinstance(value, str), "headers have no prefixes"
    for prefix, match in prefixes:
        if exact is not None and exact < match:
            return exact
        if value.startswith(prefix):
            return match
    return exact


def _compile(policy: Policy) -> Iterable[_Step]:
    """One step for each run of neighbouring rules on the same subject."""
    subject_before = b""
    exact: dict[_Value, _Match] = {}
    prefixes: list[_Prefix] = []
    for place, rule in enumerate(policy.classify.rules):
        subject, patterns = _condition(rule)
        if subject != subject_before:
            if subject_before:
                yield subject_before, exact, tuple(prefixes)
            subject_before, exact, prefixes = subject, {}, []
        match = (place, policy.class_index(rule.class_name))
        for pattern in patterns:
            if rule.header is None and pattern.endswith("*"):
                prefixes.append((pattern[:-1], match))
            else:
                exact.setdefault(pattern if rule.header is None else pattern.encode("utf-8"), match)
    if subject_before:
        yield subject_before, exact, tuple(prefixes)


def _condition(rule: Rule) -> tuple[bytes, tuple[str, ...]]:
    """The subject of a rule and the patterns it looks for."""
    if rule.header is not None:
        return rule.header.encode("ascii"), rule.values
    if rule.model is not None:
        return _MODEL, (rule.model,)
    assert rule.path is not None, "a rule has one condition"
    return _PATH, (rule.path,)
