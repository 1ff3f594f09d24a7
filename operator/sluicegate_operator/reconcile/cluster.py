"""What is known of the cluster: policies, pods, ConfigMaps and the webhook configuration.

Filled by one listing at the start, kept by events and by the answers to own writes, and compared with a listing now
and then. Owned by the event loop.

Invariants:
- Of one object the newer version stays, whichever way it came: the answer to a write is known before its event.
- Whatever changes names the policies that it concerns, and nothing else: a pod's, those that select it or selected
  it, and the one whose gate it has.
- An object that is gone stays gone when an older event of it comes late: what was removed is remembered by its UID.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Final, Generic, Protocol, TypeVar

from sluicegate_core.policy import PolicyError, parse_policy
from sluicegate_operator.reconcile.views import (
    ConfigMapView,
    Json,
    Key,
    PodView,
    PolicyView,
    read_config_map,
    read_pod,
    read_policy,
    version_of,
)
from sluicegate_operator.selection import selects

#: Removed objects that are remembered: events of several seconds, on a busy cluster.
MAX_GONE: Final = 10_000


class _View(Protocol):
    @property
    def namespace(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def uid(self) -> str: ...
    @property
    def version(self) -> int: ...


V = TypeVar("V", bound=_View)


class Table(Generic[V]):
    """Objects of one kind, by namespace and name."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, V]] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def __iter__(self) -> Iterator[V]:
        for rows in self._rows.values():
            yield from rows.values()

    def get(self, namespace: str, name: str) -> V | None:
        """The object, if there is one."""
        return self._rows.get(namespace, {}).get(name)

    def within(self, namespace: str) -> Iterable[V]:
        """All of a namespace."""
        return self._rows.get(namespace, {}).values()

    def put(self, view: V) -> V | None:
        """Take the object in unless a newer version is known or it is gone; the one that holds before, else None.

        Returns what was there before; the view itself where nothing is to be done.
        """
        last = self.get(view.namespace, view.name)
        if view.uid in self._gone:
            return view
        if last is not None and last.uid == view.uid and last.version >= view.version:
            return view
        self._rows.setdefault(view.namespace, {})[view.name] = view
        return last

    def remove(self, namespace: str, name: str, uid: str) -> V | None:
        """The object of that UID is gone; what was known of it."""
        self._gone[uid] = None
        while len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)
        rows = self._rows.get(namespace, {})
        last = rows.get(name)
        if last is None or last.uid != uid:
            return None
        del rows[name]
        if not rows:
            del self._rows[namespace]
        return last


class Cluster:
    """The tables, and who is told of changes.

    Attributes:
        webhooks: the webhook configuration as it is; None where there is none.
        listed: everything has been listed once.
    """

    def __init__(self, due: Callable[[Key], None], installation_due: Callable[[], None]) -> None:
        """
        Args:
            due: told of each policy that something has changed for.
            installation_due: told when policies or the webhook configuration have changed.
        """
        self.policies: Table[PolicyView] = Table()
        self.pods: Table[PodView] = Table()
        self.config_maps: Table[ConfigMapView] = Table()
        self.webhooks: dict[str, Any] | None = None
        self.listed = False
        self._due = due
        self._installation_due = installation_due

    def keys(self) -> set[Key]:
        """Every policy that there is or that something is left of."""
        found = {one.key for one in self.policies} | {one.key for one in self.config_maps}
        return found | {Key(pod.namespace, pod.policy) for pod in self.pods if pod.gated and pod.policy}

    # Policies.

    def put_policy(self, document: Json) -> None:
        """A policy was added or changed."""
        metadata = document.get("metadata") or {}
        last = self.policies.get(str(metadata.get("namespace")), str(metadata.get("name")))
        view = self._with_last_good(read_policy(document, last))
        before = self.policies.put(view)
        if before is view:
            return
        self._policy_changed(view, before)

    def remove_policy(self, document: Json) -> None:
        """A policy is gone."""
        before = self.policies.remove(*_identity(document))
        if before is not None:
            self._policy_changed(before, None)

    def _with_last_good(self, view: PolicyView) -> PolicyView:
        """After a restart, what is in force of a policy that is not valid stands in its ConfigMap."""
        if view.spec is not None:
            return view
        published = next(
            (one for one in self.config_maps.within(view.namespace) if one.key == view.key), None
        )
        if published is None or published.content is None:
            return view
        try:
            document = json.loads(published.content)
            return replace(view, spec=parse_policy(document), document=document)
        except (ValueError, PolicyError, RecursionError):
            return view

    def _policy_changed(self, view: PolicyView, before: PolicyView | None) -> None:
        self._due(view.key)
        if before is not None and _same_claim(view, before):
            return
        self._installation_due()
        # Who owns a pod follows from all policies of the namespace.
        for other in self.policies.within(view.namespace):
            self._due(other.key)

    # Pods.

    def put_pod(self, document: Json) -> None:
        """A pod was added or changed."""
        view = read_pod(document)
        if view is None:
            self.remove_pod(document)
            return
        before = self.pods.put(view)
        if before is not view and before != view:
            self._pod_changed(view, before)

    def remove_pod(self, document: Json) -> None:
        """A pod is gone, or has ended."""
        before = self.pods.remove(*_identity(document))
        if before is not None:
            self._pod_changed(before, None)

    def _pod_changed(self, *views: PodView | None) -> None:
        concerned = set()
        for view in views:
            if view is None:
                continue
            if view.policy:
                concerned.add(Key(view.namespace, view.policy))
            for policy in self.policies.within(view.namespace):
                if selects(policy.selector, view.labels):
                    concerned.add(policy.key)
        for key in concerned:
            self._due(key)

    # ConfigMaps.

    def put_config_map(self, document: Json) -> None:
        """A ConfigMap was added or changed."""
        view = read_config_map(document)
        if view is None:
            # Somebody took away what marks it as a policy's: for us it is gone, but may come back.
            metadata = document.get("metadata") or {}
            there = self.config_maps.get(str(metadata.get("namespace")), str(metadata.get("name")))
            if there is not None and version_of(metadata) > there.version:
                self._due(there.key)
            return
        if self.config_maps.put(view) is view:
            return
        policy = self.policies.get(*view.key)
        if policy is not None and policy.spec is None:
            good = self._with_last_good(policy)
            if good.spec is not None:
                self.policies.put(replace(good, version=good.version + 1))
                self._policy_changed(good, policy)
        self._due(view.key)

    def remove_config_map(self, document: Json) -> None:
        """A ConfigMap is gone."""
        before = self.config_maps.remove(*_identity(document))
        if before is not None:
            self._due(before.key)

    # The webhook configuration.

    def put_webhooks(self, document: Json) -> None:
        """The webhook configuration was written."""
        if self.webhooks is not None:
            there = self.webhooks["metadata"]
            metadata = document.get("metadata") or {}
            if there.get("uid") == metadata.get("uid") and version_of(there) >= version_of(metadata):
                return
        self.webhooks = dict(document)
        self._webhooks_changed()

    def remove_webhooks(self) -> None:
        """The webhook configuration is gone."""
        if self.webhooks is not None:
            self.webhooks = None
            self._webhooks_changed()

    def _webhooks_changed(self) -> None:
        self._installation_due()
        for policy in self.policies:
            self._due(policy.key)


def _same_claim(one: PolicyView, other: PolicyView) -> bool:
    """Whether both want the same pods in the same way."""
    return (one.uid, one.selector, one.failure_policy) == (other.uid, other.selector, other.failure_policy)


def _identity(document: Json) -> tuple[str, str, str]:
    metadata = document.get("metadata") or {}
    return (
        str(metadata.get("namespace") or ""),
        str(metadata.get("name") or ""),
        str(metadata.get("uid") or ""),
    )
