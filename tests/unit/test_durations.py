"""Durations against what Go's `time.ParseDuration` and `Duration.String` are documented to do."""

import pytest

from sluicegate_core.durations import (
    MAX_NANOSECONDS,
    MAX_TEXT_LENGTH,
    DurationError,
    format_duration,
    parse_duration,
)

# What Go makes of each text, in nanoseconds.
READ_BY_GO = {
    "0": 0,
    "5s": 5 * 10**9,
    "30s": 30 * 10**9,
    "1478s": 1478 * 10**9,
    "-5s": -5 * 10**9,
    "+5s": 5 * 10**9,
    "-0": 0,
    "+0": 0,
    "0s": 0,
    "5.0s": 5 * 10**9,
    "5.6s": 5_600_000_000,
    "5.s": 5 * 10**9,
    ".5s": 500_000_000,
    "1.0s": 10**9,
    "1.004s": 1_004_000_000,
    "100.00100s": 100_001_000_000,
    "10ns": 10,
    "11us": 11_000,
    "12\u00b5s": 12_000,
    "12\u03bcs": 12_000,
    "13ms": 13_000_000,
    "14s": 14 * 10**9,
    "15m": 15 * 60 * 10**9,
    "16h": 16 * 3600 * 10**9,
    "3h30m": 12_600 * 10**9,
    "10.5s4m": 250_500_000_000,
    "-2m3.4s": -123_400_000_000,
    "1h2m3s4ms5us6ns": 3_723_004_005_006,
    "39h9m14.425s": 140_954_425_000_000,
    "0.3333333333333333333h": 1_200_000_000_000 - 1,
    "0.9ns": 0,
    "2562047h47m16.854775807s": MAX_NANOSECONDS,
}

REFUSED_BY_GO = [
    "",
    "3",
    "-",
    "s",
    ".",
    "-.",
    ".s",
    "+.s",
    "1d",
    "\x85\x85",
    "\uffff",
    "hello \uffff world",
    "1 s",
    " 1s",
    "1s ",
    "1,5s",
    "1.2.3s",
    "1S",
    "1sm",
    "--1s",
    "1e3s",
    "\u0663s",  # a digit, but no ASCII one
    "2562047h47m16.854775808s",
    "9223372036854775808ns",
    "9" * MAX_TEXT_LENGTH + "s",
    "1" * 5000 + "s",
]


@pytest.mark.parametrize("text", READ_BY_GO)
def test_reads_what_go_reads(text: str) -> None:
    assert parse_duration(text) == READ_BY_GO[text] / 10**9


@pytest.mark.parametrize("text", REFUSED_BY_GO)
def test_refuses_what_go_refuses(text: str) -> None:
    with pytest.raises(DurationError):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("2d", "the unit d, which Kubernetes does not have: count in hours"),
        ("2 s", "a space"),
        ("1,5s", "a comma"),
        ("2S", "small letters"),
        ("2", "no unit after 2"),
        ("ms", "a unit without a number"),
        ("2parsecs", "'parsecs', which does not exist"),
    ],
)
def test_says_what_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(DurationError) as caught:
        parse_duration(text)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0.0, "0s"),
        (-0.0, "0s"),
        (0.3, "300ms"),
        (0.0005, "500us"),
        (1e-9, "1ns"),
        (1.5, "1.5s"),
        (60.0, "1m"),
        (90.0, "1m30s"),
        (3600.0, "1h"),
        (5400.0, "1h30m"),
        (3723.25, "1h2m3.25s"),
        (-2.0, "-2s"),
        (0.0125, "12.5ms"),
    ],
)
def test_writes_the_shortest_text(duration_s: float, text: str) -> None:
    assert format_duration(duration_s) == text
