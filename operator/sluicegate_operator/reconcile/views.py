"""Objects of the cluster, cut down to what is asked of them.

A cluster has many pods and each is some 10 kB of JSON; a view has what gating and status follow from, and two views
are equal where nothing of that has changed. Objects are trusted to be JSON objects of their kind and nothing more:
any field may be missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from sluicegate_core.policy import FailurePolicy, Policy, PolicyError, Problem, Selector, parse_policy
from sluicegate_operator.names import (
    GATE_CONTAINER,
    GATED_LABEL,
    POLICY_ANNOTATION,
    POLICY_KEY,
    REVISION_ANNOTATION,
    STATUS_ANNOTATION,
)
from sluicegate_operator.scaling.pods import ENDED, controller
from sluicegate_operator.scaling.scaled_object import ScaleTarget

Json = Mapping[str, Any]

#: Of a text that comes from a pod: a refusal, a container's reason.
MAX_TEXT_CHARS: Final = 300


class Key(NamedTuple):
    """A policy, by its name. There may be none: a ConfigMap and pods outlive it."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyView:
    """One policy. A `selection.Candidate` and a `webhook_configuration.Wanted`.

    Attributes:
        spec: the last valid one; None where none was ever seen.
        document: the object that `spec` came from.
        problems: what is wrong with the newest spec; empty where it is `spec`.
        status: as it stands in the cluster.
    """

    namespace: str
    name: str
    uid: str
    version: int
    created_at: str
    generation: int
    spec: Policy | None
    document: Json | None = field(compare=False)
    problems: tuple[Problem, ...] = ()
    status: Json = field(default_factory=dict)
    deleted: bool = False

    @property
    def key(self) -> Key:
        return Key(self.namespace, self.name)

    @property
    def selector(self) -> Selector | None:
        """The pods it wants; None for nobody."""
        return None if self.spec is None or self.deleted else self.spec.selector

    @property
    def failure_policy(self) -> FailurePolicy:
        """What becomes of a pod while the webhook does not answer."""
        return FailurePolicy.IGNORE if self.spec is None else self.spec.injection.failure_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class GateState:
    """The gate's container, as the kubelet reports it.

    Attributes:
        running: since when, RFC 3339; empty where it does not run.
        trouble: why it does not run, where that is no mere start.
        restarts: how often it was started again.
        last_end: how it ended the last time; empty where it never did.
    """

    running: str = ""
    trouble: str = ""
    restarts: int = 0
    last_end: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """One pod that has not ended."""

    namespace: str
    name: str
    uid: str
    version: int = field(compare=False)
    created_at: str
    labels: Mapping[str, str]
    gated: bool
    policy: str = ""  # whose gate it has, or who refused one
    revision: str = ""  # of the policy's document, as last touched
    refusal: str = ""  # why the injection left it alone
    warnings: tuple[str, ...] = ()  # of the injection
    ip: str = ""
    ready: bool = False
    leaving: bool = False
    gate: GateState = GateState()
    owner: ScaleTarget | None = None

    @property
    def key(self) -> Key:
        """Of the pod, not of a policy."""
        return Key(self.namespace, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigMapView:
    """The ConfigMap of one policy."""

    namespace: str
    name: str
    uid: str
    version: int
    policy: str
    content: str | None
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    immutable: bool = False

    @property
    def key(self) -> Key:
        """Of the policy."""
        return Key(self.namespace, self.policy)


def read_policy(document: Json, last: PolicyView | None = None) -> PolicyView:
    """A policy, with the last valid spec where this one is not valid."""
    metadata = document.get("metadata") or {}
    view = PolicyView(
        namespace=str(metadata.get("namespace") or ""),
        name=str(metadata.get("name") or ""),
        uid=str(metadata.get("uid") or ""),
        version=version_of(metadata),
        created_at=str(metadata.get("creationTimestamp") or ""),
        generation=int(metadata.get("generation") or 0),
        spec=None,
        document=None,
        status=document.get("status") or {},
        deleted=bool(metadata.get("deletionTimestamp")),
    )
    try:
        return replace(view, spec=parse_policy(document), document=document)
    except PolicyError as error:
        view = replace(view, problems=error.problems)
    if last is not None and last.uid == view.uid:
        view = replace(view, spec=last.spec, document=last.document)
    return view


def read_pod(document: Json) -> PodView | None:
    """A pod; None where it has ended."""
    metadata, status = document.get("metadata") or {}, document.get("status") or {}
    if status.get("phase") in ENDED:
        return None
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    told = _injection(annotations.get(STATUS_ANNOTATION))
    warnings = told.get("warnings")
    return PodView(
        namespace=str(metadata.get("namespace") or ""),
        name=str(metadata.get("name") or ""),
        uid=str(metadata.get("uid") or ""),
        version=version_of(metadata),
        created_at=str(metadata.get("creationTimestamp") or ""),
        labels=labels,
        gated=labels.get(GATED_LABEL) == "true" and _has_gate(document),
        policy=str(annotations.get(POLICY_ANNOTATION) or ""),
        revision=str(annotations.get(REVISION_ANNOTATION) or ""),
        refusal=str(told.get("refusal") or "")[:MAX_TEXT_CHARS],
        warnings=tuple(map(str, warnings)) if isinstance(warnings, list) else (),
        ip=str(status.get("podIP") or ""),
        ready=any(
            one.get("type") == "Ready" and one.get("status") == "True"
            for one in status.get("conditions") or ()
        ),
        leaving=bool(metadata.get("deletionTimestamp")),
        gate=_gate(status),
        owner=controller(document),
    )


def read_config_map(document: Json) -> ConfigMapView | None:
    """The ConfigMap of a policy; None where it is none."""
    metadata = document.get("metadata") or {}
    annotations = metadata.get("annotations") or {}
    policy = annotations.get(POLICY_ANNOTATION)
    if not policy:
        return None
    return ConfigMapView(
        namespace=str(metadata.get("namespace") or ""),
        name=str(metadata.get("name") or ""),
        uid=str(metadata.get("uid") or ""),
        version=version_of(metadata),
        policy=policy,
        content=(document.get("data") or {}).get(POLICY_KEY),
        labels=metadata.get("labels") or {},
        annotations=annotations,
        immutable=bool(document.get("immutable")),
    )


def version_of(metadata: Json) -> int:
    """The resource version as a number: the greater is the newer (documented since Kubernetes 1.35, true before)."""
    version = str(metadata.get("resourceVersion") or "")
    return int(version) if version.isdecimal() else 0


def _injection(text: object) -> Json:
    """What the injection said. Whoever may write pods may write anything here."""
    if not isinstance(text, str):
        return {}
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def _has_gate(document: Json) -> bool:
    spec = document.get("spec") or {}
    return any(one.get("name") == GATE_CONTAINER for one in spec.get("initContainers") or ())


def _gate(status: Json) -> GateState:
    for one in status.get("initContainerStatuses") or ():
        if one.get("name") == GATE_CONTAINER:
            break
    else:
        return GateState()
    state = one.get("state") or {}
    ended = (one.get("lastState") or {}).get("terminated") or state.get("terminated") or {}
    waiting = (state.get("waiting") or {}).get("reason") or ""
    return GateState(
        running=str((state.get("running") or {}).get("startedAt") or ""),
        trouble="" if waiting in ("", "PodInitializing", "ContainerCreating") else str(waiting),
        restarts=int(one.get("restartCount") or 0),
        last_end=_end(ended),
    )


def _end(ended: Json) -> str:
    if not ended:
        return ""
    said = str(ended.get("message") or "").strip().rsplit("\n", 1)[-1]
    text = f"{ended.get('reason') or 'Ended'} ({ended.get('exitCode')}){f': {said}' if said else ''}"
    return text[:MAX_TEXT_CHARS]
