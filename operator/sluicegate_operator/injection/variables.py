"""What is known of a script's variables at each place of its text.

Invariants: a value that is given is the one that a shell would have there; whatever may be otherwise is None. An
assignment in a branch, behind `&&` or in a loop may not have happened; a function is run later than it is read; a
loop's body is run again after what follows in it. So what is set inside of compound commands is unknown inside of
them from the beginning, which takes having read the script once before: see `Volatile`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command, or, with `many`, none or several of them.

    Attributes:
        text: None where it is not known.
        prefix: the known beginning of a text that is not known (`--port=` of `--port=$X`).
        many: an expansion that may be no word at all, or several.
        sure: False where the text is a default that the image's environment may override.
        start, end: where it stands; equal where there is no place of its own to change.
    """

    text: str | None
    prefix: str = ""
    many: bool = False
    sure: bool = True
    start: int = 0
    end: int = 0

    @property
    def has_place(self) -> bool:
        return self.end > self.start

    @property
    def elsewhere(self) -> Word:
        """The same word where it is not written out."""
        return replace(self, start=0, end=0)


Value = tuple[Word, ...]
"""One word, or the elements of an array."""


class Assignment(NamedTuple):
    name: str
    append: bool
    value: Value
    is_array: bool


class Volatile(NamedTuple):
    """What a whole script sets: known once it has been read to its end."""

    anywhere: frozenset[str] = frozenset()
    inside: frozenset[str] = frozenset()  # of compound commands
    positionals: bool = False  # set or shifted inside


class Variables:
    """Variables and positional parameters while a script is read from its beginning.

    Attributes:
        name: `$0`.
        depth: of compound commands around the place that is read.
        conditional: what is read may be passed over, for it stands behind `&&` or `||`.
    """

    def __init__(
        self, environment: Mapping[str, str | None], positionals: Sequence[str | None], volatile: Volatile
    ) -> None:
        self.name = Word(positionals[0]) if positionals else Word(None)
        self.depth = 0
        self.conditional = False
        self._values: dict[str, Value | None] = {
            name: None if value is None else (Word(value),) for name, value in environment.items()
        }
        self._positionals: Value | None = tuple(Word(one) for one in positionals[1:])
        self._exported = set(environment)
        self._volatile = volatile
        self._set: set[str] = set()
        self._set_inside: set[str] = set()
        self._positionals_inside = False
        self._functions: list[int] = []

    # Where the reader is.

    def begin_function(self) -> None:
        """What follows is a function's body."""
        self._functions.append(self.depth)

    def open(self) -> None:
        self.depth += 1

    def close(self) -> None:
        self.depth = max(0, self.depth - 1)
        if self._functions and self.depth <= self._functions[-1]:
            self._functions.pop()

    @property
    def certain(self) -> bool:
        """What is read here is run, once, and now."""
        return self.depth == 0 and not self.conditional and not self._functions

    # What is known.

    def knows(self, name: str) -> bool:
        """Whether the variable is set, as far as the text says."""
        return name in self._values

    def get(self, name: str) -> Value | None:
        """The value; empty where it is not set, None where it is not known."""
        if self._functions and name in self._volatile.anywhere:
            return None
        if self.depth > 0 and name in self._volatile.inside:
            return None
        return self._values.get(name, ())

    @property
    def positionals(self) -> Value | None:
        if self._functions or (self.depth > 0 and self._volatile.positionals):
            return None
        return self._positionals

    def environment(self) -> dict[str, Word]:
        """What a program is started with, as far as it is known by name."""
        found: dict[str, Word] = {}
        for name in self._exported & self._values.keys():
            value = self.get(name)
            found[name] = value[0] if value is not None and len(value) == 1 else Word(None)
        return found

    @property
    def set_here(self) -> frozenset[str]:
        """Exported variables that the script sets itself, somewhere."""
        return frozenset((self._set | self._volatile.anywhere) & self._exported)

    def seen(self) -> Volatile:
        """What was set, once the script has been read to its end."""
        return Volatile(frozenset(self._set), frozenset(self._set_inside), self._positionals_inside)

    # What changes it.

    def assign(self, one: Assignment, *, export: bool = False) -> None:
        name = one.name
        self._note(name)
        if export:
            self._exported.add(name)
        if not self.certain:
            self._values[name] = None
            return
        value: Value | None = one.value
        if one.append:
            before = self._values.get(name, () if one.is_array else (Word(""),))
            if before is None:
                value = None
            elif one.is_array:
                value = before + one.value
            else:
                texts = [word.text for word in (*before, *one.value)]
                value = None if None in texts else (Word("".join(text or "" for text in texts)),)
        self._values[name] = None if value is None else tuple(word.elsewhere for word in value)

    def export(self, name: str) -> None:
        self._exported.add(name)

    def forget(self, name: str) -> None:
        """It is set to something that is not known, or not set any more."""
        self._note(name)
        self._values[name] = None

    def forget_all(self) -> None:
        """Something ran that may have set any variable."""
        for name in self._values:
            self.forget(name)

    def set_positionals(self, given: Value) -> None:
        """`set -- ...`. What a branch appends may be there or not."""
        self._note_positionals()
        given = tuple(word.elsewhere for word in given)
        before = self._positionals
        if self.certain:
            self._positionals = given
        elif before is not None and given[: len(before)] == before:
            self._positionals = before + ((Word(None, many=True),) if len(given) > len(before) else ())
        else:
            self._positionals = None

    def shift(self, *, by_one: bool) -> None:
        self._note_positionals()
        known = self._positionals if self.certain and by_one else None
        self._positionals = known[1:] if known and not known[0].many else None

    def forget_positionals(self) -> None:
        self._note_positionals()
        self._positionals = None

    def _note(self, name: str) -> None:
        self._set.add(name)
        if self.depth > 0 or self._functions:
            self._set_inside.add(name)

    def _note_positionals(self) -> None:
        self._positionals_inside = self._positionals_inside or self.depth > 0
