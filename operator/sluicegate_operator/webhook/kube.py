"""The API server as the webhook needs it: list, watch and get of AdmissionPolicies, and nothing else.

The connection (address, authority, token that is read again when it was replaced, kubeconfig) is lightkube's; its
own watch is not used, since it neither asks for bookmarks nor notices a connection that died silently.

Raises `KubeError` for whatever goes wrong, with the status where there was an answer.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx2 as httpx
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from lightkube.config.kubeconfig import KubeConfig
from lightkube.core.exceptions import ConfigError

from sluicegate_operator.names import GROUP, PLURAL, VERSION

BASE: Final = f"apis/{GROUP}/{VERSION}"

#: Policies in a page of a list.
PAGE: Final = 250

#: Pages of a list; more policies than that are more than the webhook keeps.
MAX_PAGES: Final = 40

#: For an answer to a list, s, a page.
LIST_S: Final = 30.0

#: Longest line of a watch: one policy at the size that etcd takes, twice, for what JSON adds.
MAX_EVENT_BYTES: Final = 4 * 1024 * 1024

#: Silence after which a watch counts as dead, s. Bookmarks come about each minute.
SILENCE_S: Final = 180.0

GONE: Final = 410


class KubeError(Exception):
    """A call came to nothing. `status` is the HTTP status, 0 where there was no answer."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a watch. `kind` is ADDED, MODIFIED, DELETED or BOOKMARK."""

    kind: str
    document: dict[str, Any]
    version: str


class PolicyApi:
    """AdmissionPolicies of a namespace, or of all. One connection pool; `close` it."""

    def __init__(self, kubeconfig: Path | None, namespace: str | None) -> None:
        """
        Args:
            kubeconfig: a file; None: KUBECONFIG, else as a pod within the cluster.
            namespace: the one to look at; None: all.

        Raises:
            KubeError: there is no configuration, or it cannot be used.
        """
        try:
            config = (KubeConfig.from_file(kubeconfig) if kubeconfig else KubeConfig.from_env()).get()
            if config is None:
                raise ConfigError("it has no current context")
            self._client = AsyncClient(config, ConnectionParams(timeout=httpx.Timeout(LIST_S)))
        except Exception as error:  # a bad file fails in the parsers below with errors of any kind
            raise KubeError(
                0, f"no usable configuration of a cluster: {str(error) or type(error).__name__}"
            ) from error
        self.namespace = namespace
        self._all = _path(namespace) if namespace else f"{BASE}/{PLURAL}"

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def get(self, namespace: str, name: str, *, timeout_s: float) -> dict[str, Any] | None:
        """One policy; None if there is none."""
        try:
            answer = await self._client.get(f"{_path(namespace)}/{name}", timeout=timeout_s)
        except httpx.HTTPError as error:
            raise KubeError(0, _why(error)) from error
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        return _object(answer)

    async def list(self) -> tuple[list[dict[str, Any]], str]:
        """All policies, and the version from which to watch."""
        items: list[dict[str, Any]] = []
        params: dict[str, str] = {"limit": str(PAGE)}
        for _ in range(MAX_PAGES):
            try:
                answer = await self._client.get(self._all, params=params)
            except httpx.HTTPError as error:
                raise KubeError(0, _why(error)) from error
            page = _object(answer)
            items += page.get("items") or ()
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                break
            params["continue"] = metadata["continue"]
        return items, str(metadata.get("resourceVersion") or "")

    async def watch(self, version: str, *, timeout_s: int) -> AsyncGenerator[Event, None]:
        """Events after that version, until the server ends the watch, in `timeout_s` or earlier."""
        params = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(timeout_s),
        }
        timeout = httpx.Timeout(LIST_S, read=SILENCE_S)
        try:
            async with self._client.stream("GET", self._all, params=params, timeout=timeout) as answer:
                if answer.status_code != httpx.codes.OK:
                    await answer.aread()
                    _object(answer)
                async for line in _lines(answer):
                    yield _event(line)
        except httpx.HTTPError as error:
            raise KubeError(0, _why(error)) from error


def _path(namespace: str) -> str:
    return f"{BASE}/namespaces/{namespace}/{PLURAL}"


async def _lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The stream's lines, each bounded in length."""
    rest = bytearray()
    async for chunk in answer.aiter_bytes():
        *lines, tail = chunk.split(b"\n")
        for line in lines:
            whole = bytes(rest) + line
            rest.clear()
            if whole:
                yield whole
        rest += tail
        if len(rest) > MAX_EVENT_BYTES:
            raise KubeError(0, "an event of the watch is too long")


def _event(line: bytes) -> Event:
    event = _json(line)
    kind, document = event.get("type"), event.get("object")
    if not isinstance(kind, str) or not isinstance(document, dict):
        raise KubeError(0, "the watch sent what is no event")
    if kind == "ERROR":
        raise KubeError(int(document.get("code") or 0), str(document.get("message") or "the watch failed"))
    return Event(kind, document, str((document.get("metadata") or {}).get("resourceVersion") or ""))


def _object(answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code != httpx.codes.OK:
        raise KubeError(answer.status_code, f"the API server answered {answer.status_code}")
    return _json(answer.content)


def _json(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise KubeError(0, "the API server sent what is no JSON") from error
    if not isinstance(value, dict):
        raise KubeError(0, "the API server sent what is no object")
    return value


def _why(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
