"""What is written is read back, to the nanosecond; no text brings the parser down."""

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from sluicegate_core.durations import DurationError, format_duration, parse_duration

# Float seconds hold a nanosecond exactly up to 2**53 of them, 104 days: every bound of a policy is far below.
EXACT_NANOSECONDS = 2**53


@given(st.integers(-EXACT_NANOSECONDS, EXACT_NANOSECONDS))
def test_what_is_written_is_read_back(nanoseconds: int) -> None:
    duration_s = nanoseconds / 10**9
    assert parse_duration(format_duration(duration_s)) == duration_s


@given(st.text() | st.text("0123456789.+-hmsnu\u00b5 ,"))
def test_any_text_is_a_duration_or_refused(text: str) -> None:
    with contextlib.suppress(DurationError):
        assert isinstance(parse_duration(text), float)


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(["h", "m", "s", "ms", "us", "ns"])), min_size=1)
)
def test_parts_add_up(parts: list[tuple[int, str]]) -> None:
    scale = {"h": 3600 * 10**9, "m": 60 * 10**9, "s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
    text = "".join(f"{count}{unit}" for count, unit in parts)
    total = sum(count * scale[unit] for count, unit in parts)
    try:
        assert parse_duration(text) == total / 10**9
    except DurationError:
        assert len(text) > 64 or total >= 2**63
