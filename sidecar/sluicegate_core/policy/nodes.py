"""The kinds of value that a policy is made of: each reads a decoded value, and says what it allows.

A node's `read` gives the value in the form that the model wants, or notes what is wrong and gives INVALID;
it never raises, whatever it is given. Its `allowed` is the one description of what may stand there: errors
quote it, and so does the policy reference.

Which field is of which kind lives in `schema`; what depends on several fields, in `parser`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, Final, Protocol

from sluicegate_core.durations import DurationError, format_duration, parse_duration
from sluicegate_core.problems import Problems, child, nearest, show


class Invalid(Enum):
    """The type of INVALID, which stands for a value whose problem is noted already."""

    INVALID = "invalid"


INVALID: Final = Invalid.INVALID


class Node(Protocol):
    """A kind of value."""

    @property
    def allowed(self) -> str:
        """What may stand there, as the end of "allowed is ..."."""
        ...

    def read(self, value: object, path: str, problems: Problems) -> Any:
        """The value as the model wants it, or INVALID with the problem noted."""
        ...


def refuse(node: Node, value: object, path: str, problems: Problems, *, why: str, fix: str) -> Invalid:
    """Note that the value is not what the node allows."""
    problems.add(path, value, f"{why}; allowed is {node.allowed}", fix)
    return INVALID


def _refuse_kind(node: Node, value: object, path: str, problems: Problems, fix: str) -> Invalid:
    """Note that the value is of another kind altogether; the traps of YAML are told apart."""
    match value:
        case None:
            return refuse(
                node, value, path, problems, why="has no value", fix="give it a value, or remove the line"
            )
        case bool():
            why = "is a boolean, as YAML reads on, off, yes, no, true and false without quotes"
        case int() | float():
            why = "is a number"
        case str():
            why = "is text"
        case Mapping():
            why = "is a mapping"
        case list() | tuple():
            why = "is a list"
        case _:
            why = f"is a {type(value).__name__}, as YAML reads it without quotes"
    return refuse(node, value, path, problems, why=why, fix=fix)


@dataclass(frozen=True, slots=True)
class Flag:
    """true or false."""

    @property
    def allowed(self) -> str:
        return "true or false"

    def read(self, value: object, path: str, problems: Problems) -> bool | Invalid:
        if isinstance(value, bool):
            return value
        return _refuse_kind(self, value, path, problems, "write true or false, without quotes")


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number within bounds, both included."""

    least: int
    most: int

    @property
    def allowed(self) -> str:
        return f"a whole number from {self.least} to {self.most}"

    def read(self, value: object, path: str, problems: Problems) -> int | Invalid:
        if isinstance(value, bool) or not isinstance(value, int):
            fix = f"write a whole number such as {self.least}"
            if isinstance(value, str) and value.isascii() and value.isdigit():
                fix = "remove the quotes"
            return _refuse_kind(self, value, path, problems, fix)
        if value < self.least:
            return refuse(self, value, path, problems, why="is too small", fix=f"write at least {self.least}")
        if value > self.most:
            return refuse(self, value, path, problems, why="is too large", fix=f"write at most {self.most}")
        return value


@dataclass(frozen=True, slots=True)
class Duration:
    """A duration in Go's notation within bounds, both included; read as float seconds."""

    least_s: float
    most_s: float

    @property
    def allowed(self) -> str:
        return f"a duration from {format_duration(self.least_s)} to {format_duration(self.most_s)}"

    def read(self, value: object, path: str, problems: Problems) -> float | Invalid:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            fix = 'write it with a unit, such as "1m30s"'
            if 0 <= value <= self.most_s * 1000:  # seconds or milliseconds, whichever was meant
                fix = f'write "{show(value)}s" for seconds, or "{show(value)}ms" for milliseconds'
            return refuse(self, value, path, problems, why="is a number without a unit", fix=fix)
        if not isinstance(value, str):
            return _refuse_kind(self, value, path, problems, 'write it with a unit, such as "1m30s"')
        try:
            duration_s = parse_duration(value)
        except DurationError as error:
            fix = 'write numbers with units out of h, m, s and ms and no spaces, such as "1m30s" or "500ms"'
            return refuse(self, value, path, problems, why=str(error), fix=fix)
        if duration_s < self.least_s:
            why = "is negative" if duration_s < 0 else "is too short"
            fix = f"write at least {format_duration(self.least_s)}"
            return refuse(self, value, path, problems, why=why, fix=fix)
        if duration_s > self.most_s:
            fix = f"write at most {format_duration(self.most_s)}"
            return refuse(self, value, path, problems, why="is too long", fix=fix)
        return duration_s


@dataclass(frozen=True, slots=True)
class Text:
    """Text of one shape. `what` says which, in words; `pattern` must match it whole."""

    what: str
    pattern: re.Pattern[str]
    max_length: int
    example: str
    lower: bool = False  # case does not matter: it is read as small letters

    @property
    def allowed(self) -> str:
        return f"{self.what}, at most {self.max_length} characters"

    def read(self, value: object, path: str, problems: Problems) -> str | Invalid:
        if not isinstance(value, str):
            fix = f"write text such as {self.example}"
            if isinstance(value, bool):
                fix = 'put the word that is meant in quotes: "on", "yes", "true" and so on'
            elif isinstance(value, (int, float)):
                fix = f'write it in quotes: "{show(value)}"'
            return _refuse_kind(self, value, path, problems, fix)
        if len(value) > self.max_length:
            fix = f"shorten it to {self.max_length} characters"
            return refuse(self, value, path, problems, why=f"has {len(value)} characters", fix=fix)
        if self.pattern.fullmatch(value) is None:
            why = "is not of this shape" if value else "is empty"
            return refuse(self, value, path, problems, why=why, fix=f"write it like {self.example}")
        return value.lower() if self.lower else value


@dataclass(frozen=True, slots=True)
class Choice:
    """One word of an enum, spelled exactly."""

    of: type[StrEnum]

    @property
    def allowed(self) -> str:
        return "one of " + ", ".join(self.of)

    def read(self, value: object, path: str, problems: Problems) -> StrEnum | Invalid:
        words = list(self.of)
        if isinstance(value, str):
            if value in words:
                return self.of(value)
            near = nearest(value, words)
            fix = f"did you mean {near}?" if near else f"use one of them, such as {words[0]}"
            return refuse(self, value, path, problems, why="is not one of the words", fix=fix)
        fix = f"use one of them, such as {words[0]}"
        if value is False and "Off" in words:
            fix = 'write "Off" in quotes'
        return _refuse_kind(self, value, path, problems, fix)


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list of one kind; read as a tuple. An invalid item stays in it as INVALID, so that places hold."""

    item: Node
    least: int
    most: int
    noun: str  # of one item

    @property
    def allowed(self) -> str:
        return f"a list of {self.least} to {self.most}, each {self.item.allowed}"

    def read(self, value: object, path: str, problems: Problems) -> tuple[Any, ...] | Invalid:
        if not isinstance(value, (list, tuple)):
            fix = f"write a list: begin each {self.noun} with a dash"
            return _refuse_kind(self, value, path, problems, fix)
        if len(value) < self.least:
            fix = f"write at least {self.least}"
            return refuse(self, value, path, problems, why="is too short", fix=fix)
        if len(value) > self.most:
            why, fix = f"has {len(value)} items", f"leave at most {self.most}"
            return refuse(self, value, path, problems, why=why, fix=fix)
        return tuple(self.item.read(item, f"{path}[{place}]", problems) for place, item in enumerate(value))


@dataclass(frozen=True, slots=True)
class MapOf:
    """A mapping whose keys the writer chooses; read as a tuple of pairs, sorted by key."""

    key: Text
    value: Text
    most: int

    @property
    def allowed(self) -> str:
        return f"a mapping of at most {self.most}, from {self.key.what} to {self.value.what}"

    def read(self, value: object, path: str, problems: Problems) -> tuple[tuple[str, str], ...] | Invalid:
        if not isinstance(value, Mapping):
            return _refuse_kind(self, value, path, problems, "write a mapping such as app: llama-70b")
        if len(value) > self.most:
            why, fix = f"has {len(value)} entries", f"leave at most {self.most}"
            return refuse(self, value, path, problems, why=why, fix=fix)
        pairs = []
        for name, entry in value.items():
            key = self.key.read(name, child(path, name), problems)
            read = self.value.read(entry, child(path, name), problems)
            if key is not INVALID and read is not INVALID:
                pairs.append((str(key), str(read)))
        return tuple(sorted(pairs)) if len(pairs) == len(value) else INVALID


@dataclass(frozen=True, slots=True)
class Field:
    """A named value of a record. `default_text` says in words what holds where it is left out."""

    name: str
    node: Node
    default_text: str = "none"
    default: Any = None
    required: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """A mapping with known fields; read as a dict that has every field, with its default where left out."""

    what: str
    fields: tuple[Field, ...]

    @property
    def allowed(self) -> str:
        return f"{self.what} ({', '.join(field.name for field in self.fields)})"

    def read(self, value: object, path: str, problems: Problems) -> dict[str, Any] | Invalid:
        if not isinstance(value, Mapping):
            return _refuse_kind(self, value, path, problems, "write a mapping of fields: `name: value` lines")
        read: dict[str, Any] = {}
        for field in self.fields:
            where = child(path, field.name)
            if field.name in value:
                read[field.name] = field.node.read(value[field.name], where, problems)
            elif field.required:
                message = f"is missing; allowed is {field.node.allowed}"
                problems.note(where, "", message, f"add {field.name}: ...")
                read[field.name] = INVALID
            else:
                read[field.name] = field.default
        for name in value:
            if name not in read:
                self._refuse_unknown(name, value[name], path, problems)
        return read

    def _refuse_unknown(self, name: object, value: object, path: str, problems: Problems) -> None:
        names = [field.name for field in self.fields]
        message = f"is not a field of {self.what}; allowed are {', '.join(names)}"
        fix = "remove it"
        if isinstance(name, str):
            near = nearest(name, names)
            inside = [
                f"{field.name}.{name}"
                for field in self.fields
                if isinstance(field.node, Record) and any(name == inner.name for inner in field.node.fields)
            ]
            if inside:
                fix = f"write it inside: {inside[0]}"
            elif near is not None:
                fix = f"did you mean {near}?"
        elif isinstance(name, bool):
            fix = "write the name in quotes: YAML reads on, off, yes and no without quotes as booleans"
        problems.add(child(path, name), value, message, fix)
