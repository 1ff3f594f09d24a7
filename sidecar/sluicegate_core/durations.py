"""Durations as Kubernetes writes them: Go's notation, `300ms`, `1m30s`, `1.5h`, `0s`.

The grammar is that of Go's `time.ParseDuration`, which is what the API server applies to a `metav1.Duration`:
decimal numbers, each with a unit out of ns, us (also written with a micro sign), ms, s, m and h; no spaces; no
bare number but `0`. Values are exact to the nanosecond, as there, and become float seconds at the very end.
Signs are Go's too; that no policy field takes a negative one is the schema's business.
"""

from __future__ import annotations

import re

MAX_TEXT_LENGTH = 64
"""No duration that anybody means is longer; bounds the work on one that nobody means."""

MAX_NANOSECONDS = 2**63 - 1
"""Go holds a duration in a signed 64-bit count of nanoseconds: some 292 years."""

NANOSECONDS_PER_S = 1_000_000_000

_UNIT_NS = {
    "ns": 1,
    "us": 1_000,
    "\u00b5s": 1_000,  # the micro sign
    "\u03bcs": 1_000,  # the Greek letter, which keyboards also give
    "ms": 1_000_000,
    "s": NANOSECONDS_PER_S,
    "m": 60 * NANOSECONDS_PER_S,
    "h": 3_600 * NANOSECONDS_PER_S,
}
_FRACTION_SCALE: int = 10**MAX_TEXT_LENGTH
_PART = re.compile(r"([0-9]*)(?:\.([0-9]*))?([^0-9.]*)")
_WRITTEN = (("h", 3_600 * NANOSECONDS_PER_S), ("m", 60 * NANOSECONDS_PER_S))
_BELOW_ONE_S = (("ms", 1_000_000), ("us", 1_000), ("ns", 1))


class DurationError(ValueError):
    """The text is no duration; the message says why, in the words of one who has to mend it."""


def parse_duration(text: str) -> float:
    """The duration in seconds; DurationError where Go would not read it."""
    if len(text) > MAX_TEXT_LENGTH:
        raise DurationError(f"is {len(text)} characters long, which no duration is")
    unsigned = text[1:] if text[:1] in {"+", "-"} else text
    if unsigned == "0":
        return 0.0
    if not unsigned:
        raise DurationError("is empty")
    total_ns = 0
    position = 0
    while position < len(unsigned):
        part = _PART.match(unsigned, position)
        assert part is not None, "the pattern matches the empty text"
        total_ns += _part_ns(part)
        position = part.end()
    if total_ns > MAX_NANOSECONDS:
        raise DurationError("is longer than Kubernetes can hold (292 years)")
    return (-total_ns if text[0] == "-" else total_ns) / NANOSECONDS_PER_S


def _part_ns(part: re.Match[str]) -> int:
    """One number and its unit in nanoseconds, the rest below one cut off as in Go."""
    whole, fraction, unit = part.group(1), part.group(2) or "", part.group(3)
    if not whole and not fraction:
        raise DurationError(
            "has a unit without a number before it" if unit else "is not a number with a unit"
        )
    if not unit:
        raise DurationError(f"has no unit after {part.group(0)}")
    scale_ns = _UNIT_NS.get(unit)
    if scale_ns is None:
        raise DurationError(_unknown_unit(unit))
    below_ns = int(fraction + "0" * (MAX_TEXT_LENGTH - len(fraction))) * scale_ns // _FRACTION_SCALE
    return int(whole or "0") * scale_ns + below_ns


def _unknown_unit(unit: str) -> str:
    if unit != unit.strip() or " " in unit:
        return "has a space in it"
    if unit.startswith(","):
        return "has a comma where a decimal point is due"
    if unit in {"d", "day", "days", "w"}:
        return f"has the unit {unit}, which Kubernetes does not have: count in hours"
    if unit.lower() in _UNIT_NS:
        return f"has the unit {unit}: units are in small letters"
    return f"has the unit {unit!a}, which does not exist"


def format_duration(duration_s: float) -> str:
    """The shortest such text for a duration, rounded to the nanosecond: `1m30s`, `1.5s`, `300ms`, `0s`.

    What it writes, `parse_duration` reads back to the same nanosecond.
    """
    rest_ns = round(abs(duration_s) * NANOSECONDS_PER_S)
    if rest_ns == 0:
        return "0s"
    sign = "-" if duration_s < 0 else ""
    if rest_ns < NANOSECONDS_PER_S:
        unit, scale_ns = next((unit, scale) for unit, scale in _BELOW_ONE_S if rest_ns >= scale)
        return f"{sign}{_decimal(rest_ns, scale_ns)}{unit}"
    written = sign
    for unit, scale_ns in _WRITTEN:
        count, rest_ns = divmod(rest_ns, scale_ns)
        written += f"{count}{unit}" if count else ""
    return written + (f"{_decimal(rest_ns, NANOSECONDS_PER_S)}s" if rest_ns else "")


def _decimal(value_ns: int, scale_ns: int) -> str:
    """value / scale, exactly; the scale is a power of ten."""
    whole, rest = divmod(value_ns, scale_ns)
    digits = len(str(scale_ns)) - 1
    return f"{whole}.{rest:0{digits}d}".rstrip("0").rstrip(".") if rest else str(whole)
