"""Calls of the API server: plain JSON in and out, counted, each with a bound in time.

Raises `ApiError` for whatever goes wrong, with the status where there was an answer. Nothing is tried again here: the
reconciler comes again anyway. A token never reaches a log: errors carry what the API server says, and no headers.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import httpx2 as httpx
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.core.exceptions import ConfigError

from sluicegate_operator.kube.resources import Resource
from sluicegate_operator.names import FIELD_MANAGER

#: For one call, s. The API server ends its own after 60.
CALL_S: Final = 10.0
#: Objects in a page of a list.
PAGE: Final = 250
#: Pages of a list: 100,000 objects, beyond which one process is too few anyway.
MAX_PAGES: Final = 400
#: Of what the API server says about an error.
MAX_MESSAGE_CHARS: Final = 400

NOT_FOUND: Final = 404
CONFLICT: Final = 409

_APPLY: Final = "application/apply-patch+yaml"  # JSON is YAML
_MERGE: Final = "application/merge-patch+json"
_METADATA_ONLY: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

Json = dict[str, Any]
Count = Callable[[str, str, int], None]


class ApiError(Exception):
    """A call came to nothing. `status` is the HTTP status, 0 where there was no answer."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


def load_config(kubeconfig: Path | None) -> SingleConfig:
    """The cluster that is meant: a file; None: KUBECONFIG, else as a pod within the cluster.

    Raises:
        ApiError: there is none, or it cannot be used.
    """
    try:
        found = KubeConfig.from_file(kubeconfig) if kubeconfig else KubeConfig.from_env()
        config = found.get()
    except (ConfigError, OSError, ValueError, TypeError, KeyError) as error:
        raise ApiError(0, f"no usable configuration of a cluster: {error}") from error
    if config is None:
        raise ApiError(0, "the configuration of the cluster has no current context")
    return config


class Api:
    """One connection pool to one API server; `close` it. On one event loop."""

    def __init__(self, config: SingleConfig, count: Count = lambda verb, resource, status: None) -> None:
        """
        Args:
            config: of the cluster.
            count: told of each call: verb, plural of the resource, HTTP status (0: no answer).
        """
        try:
            self._client = AsyncClient(config, ConnectionParams(timeout=httpx.Timeout(CALL_S)))
        except (ConfigError, OSError, ValueError) as error:
            raise ApiError(0, f"no usable configuration of a cluster: {error}") from error
        self._count = count

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Json | None:
        """One object; None if there is none."""
        try:
            return await self._call("get", resource, resource.path(namespace, name))
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
        metadata_only: bool = False,
    ) -> AsyncIterator[Json]:
        """The objects of a namespace, or all, page by page; items have no kind of their own."""
        params = {"limit": str(PAGE)}
        if labels:
            params["labelSelector"] = labels
        if fields:
            params["fieldSelector"] = fields
        headers = {"Accept": _METADATA_ONLY} if metadata_only else {}
        for _ in range(MAX_PAGES):
            path = resource.path(namespace)
            page = await self._call("list", resource, path, params=params, headers=headers)
            for item in page.get("items") or ():
                yield item
            follows = (page.get("metadata") or {}).get("continue")
            if not follows:
                return
            params["continue"] = follows
        raise ApiError(0, f"there are more than {PAGE * MAX_PAGES} {resource.plural}")

    async def apply(self, resource: Resource, wanted: Mapping[str, Any], subresource: str = "") -> Json:
        """Server-side apply: what is stated becomes so, what is no longer stated goes; returns the object."""
        metadata = wanted["metadata"]
        path = resource.path(metadata.get("namespace"), metadata["name"], subresource)
        params = {"fieldManager": FIELD_MANAGER, "force": "true"}
        return await self._call("patch", resource, path, params=params, body=wanted, content_type=_APPLY)

    async def merge(self, resource: Resource, namespace: str, name: str, patch: Mapping[str, Any]) -> Json:
        """A merge patch. With `metadata.uid` in it, another object of that name is a conflict."""
        path = resource.path(namespace, name)
        params = {"fieldManager": FIELD_MANAGER}
        return await self._call("patch", resource, path, params=params, body=patch, content_type=_MERGE)

    async def create(self, resource: Resource, wanted: Mapping[str, Any]) -> Json:
        """Create an object; a conflict if it is there."""
        path = resource.path(wanted["metadata"].get("namespace"))
        return await self._call("create", resource, path, params={"fieldManager": FIELD_MANAGER}, body=wanted)

    async def replace(self, resource: Resource, wanted: Mapping[str, Any]) -> Json:
        """Replace an object; a conflict if it is no longer of the `metadata.resourceVersion` that is stated."""
        metadata = wanted["metadata"]
        path = resource.path(metadata.get("namespace"), metadata["name"])
        return await self._call("update", resource, path, params={"fieldManager": FIELD_MANAGER}, body=wanted)

    async def delete(self, resource: Resource, namespace: str | None, name: str, uid: str) -> None:
        """Delete that very object; nothing happens if it is gone."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        try:
            await self._call("delete", resource, resource.path(namespace, name), body=body)
        except ApiError as error:
            if error.status not in (NOT_FOUND, CONFLICT):
                raise

    async def _call(
        self,
        verb: str,
        resource: Resource,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> Json:
        sent = dict(headers or {})
        content = None
        if body is not None:
            content = json.dumps(body, separators=(",", ":")).encode()
            sent["Content-Type"] = content_type
        status = 0
        try:
            answer = await self._client.request(
                _METHODS[verb], path, params=params, headers=sent, content=content
            )
            status = answer.status_code
        except httpx.HTTPError as error:
            raise ApiError(0, f"{verb} {path}: {type(error).__name__} {error}".strip()) from error
        finally:
            self._count(verb, resource.plural, status)
        try:
            value = json.loads(answer.content)
        except ValueError as error:
            raise ApiError(status, f"{verb} {path}: the answer ({status}) is no JSON") from error
        if not isinstance(value, dict):
            raise ApiError(status, f"{verb} {path}: the answer ({status}) is no object")
        if not answer.is_success:
            message = str(value.get("message") or "")[:MAX_MESSAGE_CHARS]
            raise ApiError(status, f"{verb} {path}: {status} {message}")
        return value


_METHODS: Final = {
    "get": "GET",
    "list": "GET",
    "patch": "PATCH",
    "create": "POST",
    "update": "PUT",
    "delete": "DELETE",
}
