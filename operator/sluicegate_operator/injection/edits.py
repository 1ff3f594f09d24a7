"""Carrying out planned changes of a container: exactly those places, from the last to the first.

Invariants: what is not named by a change stays byte for byte; the container given is not touched.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluicegate_operator.injection.start import Place


@dataclass(frozen=True, slots=True)
class Edit:
    """Put words in the place of what stands there, or in between where the place is empty.

    Attributes:
        in_shell: the words are quoted for the shell that reads them; else they are elements of a list.
        in_front: in between, they go in front of what comes next; else behind what came before.
    """

    place: Place
    words: tuple[str, ...]
    in_shell: bool
    in_front: bool = False


@dataclass(frozen=True, slots=True)
class SetVariable:
    """Set a variable of the container, in its place if it is there."""

    name: str
    value: str


Change = Edit | SetVariable


def changed_container(
    container: Mapping[str, Any], changes: Sequence[Change], defaults: Sequence[str] = ()
) -> dict[str, Any]:
    """A copy of the container with the changes made.

    `defaults`: the image's own arguments, which hold while there are no others.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(container))
    edits = [change for change in changes if isinstance(change, Edit)]
    # From the end, so that the places before stay where they are.
    if any(edit.place.field == "args" for edit in edits) and not (
        container.get("args") or container.get("command")
    ):
        changed["args"] = list(defaults)
    for edit in sorted(edits, key=_position, reverse=True):
        _edit(changed, edit)
    for change in changes:
        if isinstance(change, SetVariable):
            set_variable(changed, change)
    return changed


def _position(edit: Edit) -> tuple[str, int, int]:
    return edit.place.field, edit.place.index, edit.place.start


def _edit(container: dict[str, Any], edit: Edit) -> None:
    place = edit.place
    words: list[str] = container.setdefault(place.field, [])
    if not edit.in_shell:
        taken = 1 if place.end > place.start else 0
        words[place.index : place.index + taken] = edit.words
        return
    text = words[place.index]
    put = " ".join(shlex.quote(word) for word in edit.words)
    if place.start == place.end:
        put = f"{put} " if edit.in_front else f" {put}"
    words[place.index] = text[: place.start] + put + text[place.end :]


def set_variable(container: dict[str, Any], change: SetVariable) -> None:
    """Set one variable, whose value no longer comes from elsewhere."""
    variables: list[dict[str, Any]] = container.setdefault("env", [])
    value = {"name": change.name, "value": change.value}
    at = [index for index, one in enumerate(variables) if one.get("name") == change.name]
    if at:
        variables[at[-1]] = value  # of two of one name, the last counts
    else:
        variables.append(value)
