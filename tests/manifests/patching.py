"""RFC 6902, as far as the API server needs it here: an implementation of the test's own."""

from __future__ import annotations

import copy
from typing import Any


def apply_patch(document: Any, patch: list[dict[str, Any]]) -> Any:
    """The document with the operations carried out in order; KeyError or IndexError where one does not fit."""
    result = copy.deepcopy(document)
    for operation in patch:
        *parents, last = [
            part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]
        ]
        at = result
        for part in parents:
            at = at[int(part)] if isinstance(at, list) else at[part]
        op = operation["op"]
        if isinstance(at, list):
            index = len(at) if last == "-" else int(last)
            if op == "add":
                if index > len(at):
                    raise IndexError(operation)
                at.insert(index, copy.deepcopy(operation["value"]))
            elif op == "remove":
                del at[index]
            else:
                at[index] = copy.deepcopy(operation["value"])
        elif op == "remove":
            del at[last]
        else:
            if op == "replace" and last not in at:
                raise KeyError(operation)
            at[last] = copy.deepcopy(operation["value"])
    return result
