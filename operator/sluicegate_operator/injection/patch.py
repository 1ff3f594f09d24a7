"""The difference of two JSON documents as an RFC 6902 patch.

Not the smallest patch: lists are compared at their common beginning and end, and what lies between is replaced. It
applies in order to exactly `before`, and gives exactly `after`.
"""

from __future__ import annotations

from typing import Any


def json_patch(before: Any, after: Any) -> list[dict[str, Any]]:
    """The operations that make `after` of `before`; none where they are equal."""
    operations: list[dict[str, Any]] = []
    _compare(before, after, "", operations)
    return operations


def _compare(before: Any, after: Any, path: str, operations: list[dict[str, Any]]) -> None:
    if isinstance(before, dict) and isinstance(after, dict):
        operations += [{"op": "remove", "path": _child(path, key)} for key in before if key not in after]
        for key, value in after.items():
            if key not in before:
                operations.append({"op": "add", "path": _child(path, key), "value": value})
            else:
                _compare(before[key], value, _child(path, key), operations)
    elif isinstance(before, list) and isinstance(after, list):
        _compare_lists(before, after, path, operations)
    elif not _equal(before, after):
        operations.append({"op": "replace", "path": path, "value": after})


def _compare_lists(before: list[Any], after: list[Any], path: str, operations: list[dict[str, Any]]) -> None:
    if len(before) == len(after):
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            _compare(old, new, f"{path}/{index}", operations)
        return
    start = 0
    while start < min(len(before), len(after)) and _equal(before[start], after[start]):
        start += 1
    end = 0
    while end < min(len(before), len(after)) - start and _equal(before[-1 - end], after[-1 - end]):
        end += 1
    old_end, new_end = len(before) - end, len(after) - end
    common = min(old_end, new_end)
    for index in range(start, common):
        _compare(before[index], after[index], f"{path}/{index}", operations)
    # From the end, so that the indices before stay what they are.
    operations += [
        {"op": "remove", "path": f"{path}/{index}"} for index in range(old_end - 1, common - 1, -1)
    ]
    operations += [
        {"op": "add", "path": f"{path}/{index}", "value": after[index]} for index in range(common, new_end)
    ]


def _equal(one: Any, other: Any) -> bool:
    """Equal as JSON: True is not 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_equal(a, b) for a, b in zip(one, other, strict=True))
    return type(one) is type(other) and bool(one == other)


def _child(path: str, key: str) -> str:
    return f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
