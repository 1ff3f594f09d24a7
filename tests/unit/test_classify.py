"""Which class and which client a request is given."""

import hashlib

import pytest

from sluicegate_core.classify import (
    MAX_CACHED_CLIENTS,
    MAX_CACHED_IDENTITY_BYTES,
    Classifier,
    hash_client,
)
from sluicegate_core.policy import Classify, ClassPolicy, Policy, Rule

SALT = b"a salt of the test"
CHAT = "/v1/chat/completions"


def policy(*rules: Rule, client_header: str | None = None) -> Policy:
    classes = tuple(ClassPolicy(name) for name in ("standard", "batch", "premium"))
    return Policy(classes=classes, classify=Classify("standard", client_header, rules))


def class_of(given: Policy, headers: dict[bytes, bytes], model: str = "m", path: str = CHAT) -> str:
    index, _ = Classifier(given, SALT).classify(headers.get, model, path)
    return given.class_names[index]


def client_of(headers: dict[bytes, bytes], client_header: str | None = None) -> str:
    return Classifier(policy(client_header=client_header), SALT).classify(headers.get, "m", CHAT)[1]


BY_HEADER = policy(
    Rule("batch", header="x-admission-class", values=("batch", "nächtlich")),
    Rule("premium", header="x-admission-class", values=("premium",)),
)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, "standard"),
        ({b"x-admission-class": b"batch"}, "batch"),
        ({b"x-admission-class": b"premium"}, "premium"),
        ({b"x-admission-class": b"Batch"}, "standard"),  # values are compared exactly
        ({b"x-admission-class": b"batch2"}, "standard"),
        ({b"x-admission-class": b""}, "standard"),
        ({b"x-admission-class": "nächtlich".encode()}, "batch"),
        ({b"x-admission-class": b"n\xe4chtlich"}, "standard"),
        ({b"x-admission-class": b"\xff\xfe"}, "standard"),
        ({b"x-other": b"batch"}, "standard"),
    ],
)
def test_a_header_matches_by_its_exact_value(headers: dict[bytes, bytes], expected: str) -> None:
    assert class_of(BY_HEADER, headers) == expected


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("llama-3-8b", "batch"),
        ("llama-3", "batch"),
        ("llama-", "standard"),
        ("qwen", "premium"),
        ("qwen2", "standard"),
        ("", "standard"),
    ],
)
def test_a_model_matches_exactly_or_by_its_beginning(model: str, expected: str) -> None:
    given = policy(Rule("batch", model="llama-3*"), Rule("premium", model="qwen"))
    assert class_of(given, {}, model=model) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/v1/embeddings", "batch"), ("/v1/embeddings/x", "standard"), ("/v2/models/a/infer", "premium")],
)
def test_a_path_matches_exactly_or_by_its_beginning(path: str, expected: str) -> None:
    given = policy(Rule("batch", path="/v1/embeddings"), Rule("premium", path="/v2/*"))
    assert class_of(given, {}, path=path) == expected


def test_a_header_value_that_ends_in_a_star_is_no_prefix() -> None:
    given = policy(Rule("batch", header="x-a", values=("b*",)))
    assert class_of(given, {b"x-a": b"bb"}) == "standard"
    assert class_of(given, {b"x-a": b"b*"}) == "batch"


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ((Rule("batch", model="llama*"), Rule("premium", model="llama-3")), "batch"),
        ((Rule("premium", model="llama-3"), Rule("batch", model="llama*")), "premium"),
        ((Rule("batch", model="llama*"), Rule("premium", model="llama-*")), "batch"),
        ((Rule("premium", path=CHAT), Rule("batch", model="llama-3")), "premium"),
        ((Rule("batch", model="llama-3"), Rule("premium", path=CHAT)), "batch"),
        ((Rule("batch", header="x-a", values=("1",)), Rule("premium", path=CHAT)), "batch"),
        ((Rule("premium", path="/v1/*"), Rule("batch", header="x-a", values=("1",))), "premium"),
        (
            (
                Rule("batch", header="x-a", values=("2",)),
                Rule("batch", path="/other"),
                Rule("premium", header="x-a", values=("1",)),
            ),
            "premium",
        ),
    ],
)
def test_the_first_rule_that_matches_wins(rules: tuple[Rule, ...], expected: str) -> None:
    assert class_of(policy(*rules), {b"x-a": b"1"}, model="llama-3") == expected


def test_the_client_is_read_from_the_first_header_that_there_is() -> None:
    in_order: dict[bytes, bytes] = {
        b"x-tenant": b"tenant",
        b"x-llm-d-inference-fairness-id": b"llm-d",
        b"x-gateway-inference-fairness-id": b"gateway",
        b"authorization": b"Bearer sk-key",
        b"x-api-key": b"sk-other",
    }
    raw = [b"tenant", b"llm-d", b"gateway", b"sk-key", b"sk-other"]
    while in_order:
        assert client_of(in_order, "x-tenant") == hash_client(raw.pop(0), SALT)
        in_order.pop(next(iter(in_order)))
    assert client_of(in_order, "x-tenant") == ""


def test_a_header_without_a_value_names_nobody() -> None:
    assert client_of({b"x-tenant": b"", b"x-api-key": b"k"}, "x-tenant") == hash_client(b"k", SALT)
    assert client_of({b"x-api-key": b""}) == ""


@pytest.mark.parametrize(
    "value", [b"Bearer sk-key", b"bearer sk-key", b"Token sk-key", b"Bearer  sk-key", b"sk-key"]
)
def test_a_key_is_one_client_in_every_dialect(value: bytes) -> None:
    assert client_of({b"authorization": value}) == client_of({b"x-api-key": b"sk-key"})


def test_the_hash_is_keyed_blake2s() -> None:
    expected = hashlib.blake2s(b"someone", digest_size=8, key=SALT).hexdigest()
    assert hash_client(b"someone", SALT) == expected
    assert hash_client(b"someone", b"another salt") != expected
    assert client_of({b"x-api-key": b"someone"}) == expected


def test_a_salt_that_is_too_long_is_a_bug() -> None:
    with pytest.raises(ValueError, match="at most 32 bytes"):
        Classifier(policy(), b"x" * 33)


def test_the_same_client_has_the_same_hash_however_many_come_between() -> None:
    classifier = Classifier(policy(), SALT)
    hashes = set()
    for number in range(3 * MAX_CACHED_CLIENTS):
        identity = b"%d" % number
        hashes.add(classifier.classify({b"x-api-key": identity}.get, "", CHAT)[1])
        if number % 1000 == 0:
            assert classifier.classify({b"x-api-key": b"0"}.get, "", CHAT)[1] == hash_client(b"0", SALT)
    assert len(hashes) == 3 * MAX_CACHED_CLIENTS
    assert classifier.cached_clients <= 2 * MAX_CACHED_CLIENTS


def test_a_long_identity_is_hashed_and_not_kept() -> None:
    classifier = Classifier(policy(), SALT)
    identity = b"x" * (MAX_CACHED_IDENTITY_BYTES + 1)
    assert classifier.classify({b"x-api-key": identity}.get, "", CHAT)[1] == hash_client(identity, SALT)
    assert classifier.cached_clients == 0
    assert classifier.classify({b"x-api-key": identity[1:]}.get, "", CHAT)[1] == hash_client(
        identity[1:], SALT
    )
    assert classifier.cached_clients == 1
