"""What is wrong with a policy, told to the one who has to mend it.

A problem names the place, the value found there, what is allowed, and the fix. They are collected, not raised
one by one: who mends a file wants to see everything at once. Invariant: whatever is shown here is bounded in
length, however large or odd the value.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

MAX_PROBLEMS = 100
"""Nobody reads more; a document made to produce a million of them produces these."""

MAX_SHOWN_LENGTH = 60
"""Longer values are cut: enough to be recognised, short enough for a line of a log."""

MAX_SHOWN_BITS = 128
"""Longer integers are described: turning one into text takes time that grows with the square of its length."""

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,62}")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to mend. `value` is text ready to be shown; it is empty where there is nothing to show."""

    path: str
    value: str
    message: str
    fix: str

    def __str__(self) -> str:
        got = f" (got {self.value})" if self.value else ""
        return f"{self.path}: {self.message}{got}. Fix: {self.fix}"


class PolicyError(ValueError):
    """The document is no valid policy; `problems` has everything that is wrong with it."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


@dataclass(slots=True)
class Problems:
    """Collects problems, MAX_PROBLEMS of them; of the others it counts how many there were."""

    found: list[Problem] = field(default_factory=list)
    left_out: int = 0

    def add(self, path: str, value: object, message: str, fix: str) -> None:
        """Note a problem with a value, which is shown in a bounded form."""
        self.note(path, show(value), message, fix)

    def note(self, path: str, shown: str, message: str, fix: str) -> None:
        """Note a problem where the value is text already, or missing (empty)."""
        if len(self.found) < MAX_PROBLEMS:
            self.found.append(Problem(path, shown, message, fix))
        else:
            self.left_out += 1

    def raise_any(self) -> None:
        """PolicyError if there are any."""
        if self.left_out:
            last = Problem("spec", "", f"{self.left_out} more problems are not shown", "mend these first")
            raise PolicyError([*self.found, last])
        if self.found:
            raise PolicyError(self.found)


def show(value: object) -> str:
    """A value as it would stand in a policy, cut to MAX_SHOWN_LENGTH."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() if value.bit_length() > MAX_SHOWN_BITS:
            return f"an integer of {value.bit_length()} bits"
        case int() | float():
            return str(value)
        case str():
            cut = value[:MAX_SHOWN_LENGTH]
            return f'"{_quoted(cut)}"' + ("..." if len(value) > MAX_SHOWN_LENGTH else "")
        case Mapping():
            return f"a mapping of {len(value)}" if value else "an empty mapping"
        case list() | tuple():
            return f"a list of {len(value)}" if value else "an empty list"
    return f"a {type(value).__name__}"


def child(path: str, key: object) -> str:
    """The path of a key below `path`: `a.b`, or `a["b c"]` where the key is no plain word."""
    if isinstance(key, str) and _PLAIN_KEY.fullmatch(key):
        return f"{path}.{key}"
    return f"{path}[{show(key)}]"


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The one of `words` that was probably meant: the same but for case, `_` and `-`, or close in spelling."""
    word = word[:MAX_SHOWN_LENGTH]
    by_plain = {_plain(one): one for one in words}
    near = difflib.get_close_matches(_plain(word), by_plain, n=1, cutoff=0.6)
    return by_plain[near[0]] if near else None


def _plain(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")


def _quoted(text: str) -> str:
    """The text with quotes, backslashes and everything that does not print escaped."""
    return "".join(
        "\\" + sign if sign in '"\\' else sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text
    )
