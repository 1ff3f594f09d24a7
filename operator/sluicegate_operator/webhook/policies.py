"""What the webhook knows of the cluster's policies.

`PolicyStore` is a plain table, filled from a list and kept by events; `watch` does both. Owned by the event loop.

Invariants:
- A policy that has become invalid (something slipped past the schema) keeps the last valid spec that was seen of
  it; one of which no valid spec was ever seen has none, and gates nobody. A policy that was deleted and made anew
  under its name begins anew.
- Bounded: at most `MAX_POLICIES`; what is beyond is not known, is told, and is found by asking the API server for
  that one policy.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from sluicegate_core.policy import Policy, PolicyError, Selector, parse_policy

log = logging.getLogger(__name__)

#: Policies in a cluster, some 20 kB each at most as kept here.
MAX_POLICIES: Final = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPolicy:
    """One policy as last seen. A `selection.Candidate`."""

    namespace: str
    name: str
    uid: str
    created_at: str
    generation: int
    spec: Policy | None  # the last valid one; None if none was ever seen
    problem: str = ""  # why the newest spec is not in force; empty if it is
    deleted: bool = False  # is being deleted: takes no more pods

    @property
    def selector(self) -> Selector | None:
        """The pods it wants; None for nobody."""
        return None if self.spec is None or self.deleted else self.spec.selector


def read_policy(document: Mapping[str, Any], last: KnownPolicy | None = None) -> KnownPolicy:
    """A policy from its object, with the last valid spec where this one is not valid."""
    metadata = document.get("metadata") or {}
    known = KnownPolicy(
        namespace=str(metadata.get("namespace") or ""),
        name=str(metadata.get("name") or ""),
        uid=str(metadata.get("uid") or ""),
        created_at=str(metadata.get("creationTimestamp") or ""),
        generation=int(metadata.get("generation") or 0),
        spec=None,
        deleted=bool(metadata.get("deletionTimestamp")),
    )
    try:
        return replace(known, spec=parse_policy(document))
    except PolicyError as error:
        kept = last.spec if last is not None and last.uid == known.uid else None
        return replace(known, spec=kept, problem=str(error.problems[0]) if error.problems else str(error))


class PolicyStore:
    """The policies by namespace and name."""

    def __init__(self) -> None:
        self._policies: dict[str, dict[str, KnownPolicy]] = {}
        self._count = 0
        self._left_out = False

    def __len__(self) -> int:
        return self._count

    def get(self, namespace: str, name: str) -> KnownPolicy | None:
        """The policy, if it is known."""
        return self._policies.get(namespace, {}).get(name)

    def within(self, namespace: str) -> Iterable[KnownPolicy]:
        """All known policies of a namespace."""
        return self._policies.get(namespace, {}).values()

    def put(self, document: Mapping[str, Any]) -> KnownPolicy:
        """Note a policy that was added or changed."""
        metadata = document.get("metadata") or {}
        last = self.get(str(metadata.get("namespace") or ""), str(metadata.get("name") or ""))
        known = read_policy(document, last)
        if known.problem and (last is None or last.problem != known.problem):
            kept = "the last valid one holds" if known.spec is not None else "it gates no pod"
            log.warning("policy %s/%s is not valid, %s: %s", known.namespace, known.name, kept, known.problem)
        if last is None and self._count >= MAX_POLICIES:
            if not self._left_out:
                log.error("more than %d policies: the others are asked for one by one", MAX_POLICIES)
            self._left_out = True
            return known
        self._count += last is None
        self._policies.setdefault(known.namespace, {})[known.name] = known
        return known

    def remove(self, namespace: str, name: str) -> None:
        """Note a policy that is gone."""
        there = self._policies.get(namespace, {})
        if there.pop(name, None) is not None:
            self._count -= 1
            if not there:
                del self._policies[namespace]

    def replace(self, documents: Iterable[Mapping[str, Any]]) -> None:
        """Note all policies that there are, as a list gives them: the others are gone."""
        before = {(one.namespace, one.name) for names in self._policies.values() for one in names.values()}
        self._left_out = False
        listed = list(documents)
        there = {_key(one) for one in listed}
        for namespace, name in before - there:
            self.remove(namespace, name)
        for document in listed:
            self.put(document)


def _key(document: Mapping[str, Any]) -> tuple[str, str]:
    metadata = document.get("metadata") or {}
    return str(metadata.get("namespace") or ""), str(metadata.get("name") or "")
