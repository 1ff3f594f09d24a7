"""Keeps the table of policies: one list, then a watch from there, for as long as the process lives.

Invariants:
- The table is never emptied by trouble: what was known holds until the API server says otherwise.
- A watch goes on from the last version seen, bookmarks included; all is listed anew only when that has expired
  (410), or after MAX_FAILURES in a row, since a cluster restored from a backup never reaches it. Attempts are
  spaced by a backoff that doubles from MIN_BACKOFF_S to MAX_BACKOFF_S, with jitter, so that replicas do not come
  back together.
- A policy that is not in the table is asked for, once in MISS_S at most for each name, by at most MAX_ASKING calls
  at a time: the entry of a new policy may fire before its event has come.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from random import Random
from time import monotonic
from typing import Final

from sluicegate_operator.webhook.kube import GONE, KubeError, PolicyApi
from sluicegate_operator.webhook.policies import KnownPolicy, PolicyStore, read_policy

log = logging.getLogger(__name__)

MIN_BACKOFF_S: Final = 0.25
MAX_BACKOFF_S: Final = 30.0

#: A watch ends after this, s, plus as much again at random: it moves on to another API server now and then.
WATCH_S: Final = 300

CALLS: Final = ("list", "watch", "get")

#: Failed watches in a row after which all is listed anew.
MAX_FAILURES: Final = 6

#: One that ends sooner, s, counts as failed: not to ask in a circle.
MIN_WATCH_S: Final = 5.0

#: How long the answer that there is no such policy holds, s. A policy's event is here within milliseconds.
MISS_S: Final = 2.0
MAX_MISSES: Final = 1000

#: For asking after one policy, s: the API server waits five seconds for us.
ASK_S: Final = 1.5
MAX_ASKING: Final = 16


class PolicyWatch:
    """The table of policies and what keeps it. Owned by the event loop; `run` is its one task.

    Attributes:
        namespace: whose policies it follows; None: all.
        store: the table.
        synced: whether it has been listed once.
        failures: calls that came to nothing, by what they were.
        last_heard: monotonic time of the last word from the API server; None before the first.
    """

    def __init__(self, api: PolicyApi, random: Random, on_change: Callable[[], None] = lambda: None) -> None:
        self.namespace = api.namespace
        self.store = PolicyStore()
        self.synced = asyncio.Event()
        self.failures = dict.fromkeys(CALLS, 0)
        self.lists = 0
        self.last_heard: float | None = None
        self._api = api
        self._random = random
        self._on_change = on_change
        self._misses: dict[tuple[str, str], float] = {}
        self._asking = asyncio.Semaphore(MAX_ASKING)

    async def run(self) -> None:
        """List and watch; returns only by cancellation."""
        backoff_s, failed, version = MIN_BACKOFF_S, 0, ""
        while True:
            began = monotonic()
            try:
                if not version:
                    version = await self._list()
                    backoff_s = MIN_BACKOFF_S
                timeout_s = WATCH_S + self._random.randrange(WATCH_S)
                async with aclosing(self._api.watch(version, timeout_s=timeout_s)) as events:
                    async for event in events:
                        backoff_s, failed = MIN_BACKOFF_S, 0
                        version = event.version or version
                        self._apply(event.kind, event.document)
            except KubeError as error:
                failed += 1
                self._failed("watch" if version else "list", error, backoff_s)
                if error.status == GONE or failed >= MAX_FAILURES:
                    version, failed = "", 0
            else:
                failed = 0
                if monotonic() - began >= MIN_WATCH_S:
                    continue  # the server ended the watch as it was asked to
            await asyncio.sleep(backoff_s * (0.5 + self._random.random() / 2))
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def find(self, namespace: str, name: str) -> KnownPolicy | None:
        """The policy; asks the API server where the table has none. None: there is none.

        Raises:
            KubeError: it is not known, and cannot be asked for now.
        """
        known = self.store.get(namespace, name)
        if known is not None:
            return known
        key = (namespace, name)
        now = monotonic()
        if now < self._misses.get(key, 0.0):
            return None
        try:
            async with asyncio.timeout(ASK_S), self._asking:
                document = await self._api.get(namespace, name, timeout_s=ASK_S)
        except TimeoutError as error:
            self.failures["get"] += 1
            raise KubeError(0, f"no answer within {ASK_S} s") from error
        except KubeError:
            self.failures["get"] += 1
            raise
        if document is None:
            if len(self._misses) >= MAX_MISSES:
                self._misses.clear()
            self._misses[key] = now + MISS_S
            return None
        return read_policy(document)

    async def _list(self) -> str:
        documents, version = await self._api.list()
        self.store.replace(documents)
        self.lists += 1
        self._misses.clear()
        self._heard()
        if not self.synced.is_set():
            log.info("%d policies are known", len(self.store))
            self.synced.set()
        self._on_change()
        return version

    def _apply(self, kind: str, document: dict[str, object]) -> None:
        self._heard()
        if kind in ("ADDED", "MODIFIED"):
            known = self.store.put(document)
            self._misses.pop((known.namespace, known.name), None)
        elif kind == "DELETED":
            gone = read_policy(document)
            self.store.remove(gone.namespace, gone.name)
        else:
            return  # a bookmark
        self._on_change()

    def _failed(self, call: str, error: KubeError, backoff_s: float) -> None:
        self.failures[call] += 1
        if error.status == GONE:
            log.info("the %s of policies has fallen behind: all are listed anew", call)
        else:
            log.warning("the %s of policies failed, again in %.1f s: %s", call, backoff_s, error)

    def _heard(self) -> None:
        self.last_heard = monotonic()


class Policies:
    """What is known of policies, in all namespaces or in some: one watch for all, or one a namespace."""

    def __init__(self, watches: Sequence[PolicyWatch]) -> None:
        """
        Args:
            watches: one of all namespaces, or several of one each.
        """
        self.watches = tuple(watches)
        self._by_namespace = {one.namespace: one for one in watches}

    def __len__(self) -> int:
        return sum(len(one.store) for one in self.watches)

    @property
    def synced(self) -> bool:
        """Whether all has been listed once."""
        return all(one.synced.is_set() for one in self.watches)

    @property
    def last_heard(self) -> float | None:
        """Monotonic time since which the API server has said something to every watch; None: not yet."""
        heard = [one.last_heard for one in self.watches if one.last_heard is not None]
        return min(heard) if len(heard) == len(self.watches) else None

    @property
    def failures(self) -> dict[str, int]:
        """Calls that came to nothing, by what they were."""
        return {call: sum(one.failures[call] for one in self.watches) for call in CALLS}

    async def find(self, namespace: str, name: str) -> KnownPolicy | None:
        """As `PolicyWatch.find`; a namespace that nobody watches has no policies."""
        watch = self._watch(namespace)
        return None if watch is None else await watch.find(namespace, name)

    def within(self, namespace: str) -> Iterable[KnownPolicy]:
        """All known policies of a namespace."""
        watch = self._watch(namespace)
        return () if watch is None else watch.store.within(namespace)

    def _watch(self, namespace: str) -> PolicyWatch | None:
        return self._by_namespace.get(None) or self._by_namespace.get(namespace)
