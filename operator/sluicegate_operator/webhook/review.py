"""AdmissionReview, version 1: what the API server asks, and what it is answered.

Pure. The shapes are those of `admission.k8s.io/v1`; only what is needed of them is read, and it is checked, since
anybody in the cluster can reach the port.

Invariants: an answer carries the uid of its question; a pod is never refused here: `allowed` is always true. (A
policy that would rather have no pod than an ungated one says `failurePolicy: Fail`, and the API server refuses the
pod when there is no answer.) Warnings keep to what kubectl can show.
"""

from __future__ import annotations

import base64
import json
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

#: Of a request: the API server takes no object over 3 MiB itself, and a CREATE carries one.
MAX_BODY_BYTES: Final = 3 * 1024 * 1024 + 65_536

#: Longest warning: "should be limited to 120 characters" (the API's documentation); longer ones are broken up.
MAX_WARNING_CHARS: Final = 120

#: Warnings in an answer. The API server cuts all of a request's together at 4096 characters.
MAX_WARNINGS: Final = 20

#: Who warns: kubectl shows warnings of all webhooks alike.
PREFIX: Final = "sluicegate: "

#: Longest uid taken; the API server's are UUIDs.
MAX_UID_CHARS: Final = 128

API_VERSION: Final = "admission.k8s.io/v1"
KIND: Final = "AdmissionReview"


class ReviewError(ValueError):
    """The request is no AdmissionReview that can be answered; the text says why, without quoting it."""


@dataclass(frozen=True, slots=True)
class Review:
    """One question."""

    uid: str
    namespace: str
    operation: str
    resource: tuple[str, str, str]  # group, version, plural
    subresource: str
    pod: dict[str, Any]
    dry_run: bool

    @property
    def is_pod_creation(self) -> bool:
        """Whether this is what the webhook is registered for."""
        return self.resource == ("", "v1", "pods") and not self.subresource and self.operation == "CREATE"

    @property
    def labels(self) -> dict[str, str]:
        """The pod's labels."""
        labels = _mapping(self.pod.get("metadata")).get("labels")
        return {k: v for k, v in _mapping(labels).items() if isinstance(v, str)}

    @property
    def pod_name(self) -> str:
        """The pod's name, or what it will begin with: the API server gives the rest after admission."""
        metadata = _mapping(self.pod.get("metadata"))
        name, prefix = metadata.get("name"), metadata.get("generateName")
        return name if isinstance(name, str) and name else f"{prefix}*" if isinstance(prefix, str) else ""


def read_review(body: bytes) -> Review:
    """The question in a request's body.

    Raises:
        ReviewError: it is not one.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ReviewError("the body is no JSON") from error
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise ReviewError(f"the body is no {KIND}")
    if document.get("apiVersion") != API_VERSION:
        raise ReviewError(f"the {KIND} is not of {API_VERSION}")
    request = document.get("request")
    if not isinstance(request, dict):
        raise ReviewError(f"the {KIND} has no request")
    uid = request.get("uid")
    if not isinstance(uid, str) or not 0 < len(uid) <= MAX_UID_CHARS:
        raise ReviewError("the request has no uid")
    pod = request.get("object")
    if not isinstance(pod, dict):
        raise ReviewError("the request has no object")
    resource = _mapping(request.get("resource"))
    return Review(
        uid=uid,
        namespace=_text(request.get("namespace")),
        operation=_text(request.get("operation")),
        resource=(
            _text(resource.get("group")),
            _text(resource.get("version")),
            _text(resource.get("resource")),
        ),
        subresource=_text(request.get("subResource")),
        pod=pod,
        dry_run=request.get("dryRun") is True,
    )


def allow(
    uid: str,
    *,
    patch: list[dict[str, Any]] | None = None,
    warnings: Iterable[str] = (),
    audit: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The answer that lets the pod pass: as it is, or patched (RFC 6902).

    `audit` becomes annotations of the audit event; the API server prefixes each key with the entry's name.
    """
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if patch:
        response["patchType"] = "JSONPatch"
        encoded = json.dumps(patch, separators=(",", ":")).encode()
        response["patch"] = base64.b64encode(encoded).decode("ascii")
    if shown := bounded_warnings(warnings):
        response["warnings"] = shown
    if audit:
        response["auditAnnotations"] = dict(audit)
    return {"apiVersion": API_VERSION, "kind": KIND, "response": response}


def bounded_warnings(warnings: Iterable[str]) -> list[str]:
    """The warnings in lines that kubectl can show: each begins with the project's name, long ones are broken
    between words, control characters become spaces."""
    lines: list[str] = []
    for warning in warnings:
        named = warning if warning.startswith(PREFIX) else PREFIX + warning
        text = "".join(sign if sign.isprintable() else " " for sign in named)
        lines += textwrap.wrap(text, MAX_WARNING_CHARS, subsequent_indent="  ")
        if len(lines) > MAX_WARNINGS:
            return [*lines[: MAX_WARNINGS - 1], f"{PREFIX}more warnings are in the webhook's log"]
    return lines


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
