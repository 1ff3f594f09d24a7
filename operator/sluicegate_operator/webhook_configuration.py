"""The MutatingWebhookConfiguration: one entry a policy, for exactly the pods that the policy selects.

Pure: builds what is wanted and says what to write, if anything. The reconciler reads and writes; it replaces the
whole object with the resource version that was read (server-side apply would leave behind, of an entry that is no
longer wanted, what cert-manager owns in it: a `caBundle` without a webhook, which the API server refuses).

Invariants:
- No entry reaches a pod of kube-system or of the operator's own namespace, whatever policies say: the operator
  can always start, and so can what the cluster stands on.
- No entry reaches a pod that its policy does not select, or that opts out: the creation of any other pod never
  depends on the operator.
- At rest there is nothing to write: every field is stated as the API server would default it, and what it may
  default in times to come is not compared.
- A `caBundle` that cert-manager injects is left as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from sluicegate_core.policy import FailurePolicy, Selector
from sluicegate_operator.names import INJECT_LABEL
from sluicegate_operator.selection import OPT_OUT, label_selector

CONFIGURATION_NAME: Final = "sluicegate"
ENTRY_SUFFIX: Final = "inject.sluicegate.dev"

#: How long the API server waits for an answer, s. An injection takes milliseconds; a pod's creation waits for this.
TIMEOUT_S: Final = 5

#: Longest name of an entry: a DNS subdomain.
MAX_ENTRY_NAME: Final = 253

#: Entries in the one configuration. An entry has about 2.5 kB with two authorities in its bundle, and etcd takes
#: 1.5 MB an object.
MAX_ENTRIES: Final = 400

#: Namespaces whose pods are never touched, beside the operator's own.
NEVER: Final = frozenset({"kube-system"})

#: The label by which every namespace carries its own name.
NAMESPACE_LABEL: Final = "kubernetes.io/metadata.name"

#: The annotation by which cert-manager's injector knows whose authority to fill in.
INJECT_CA_FROM: Final = "cert-manager.io/inject-ca-from"

#: Optional fields of an entry that narrow it down and that no entry of ours has.
_NARROWING: Final = ("matchConditions",)


class Wanted(Protocol):
    """What is asked of a policy here."""

    @property
    def namespace(self) -> str:
        """Where the policy and its pods are."""

    @property
    def name(self) -> str:
        """Within its namespace."""

    @property
    def selector(self) -> Selector | None:
        """None selects nothing."""

    @property
    def failure_policy(self) -> FailurePolicy:
        """What becomes of a pod while the webhook does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The plainest `Wanted`."""

    namespace: str
    name: str
    selector: Selector | None
    failure_policy: FailurePolicy = FailurePolicy.IGNORE


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where API servers find the webhook, and whom they trust there.

    Attributes:
        namespace: the operator's own.
        service: the webhook's Service in it.
        port: the Service's.
        url: `https://host:port` instead of the Service, for a webhook outside of the cluster.
        ca_bundle: base64 of PEM; None where cert-manager injects it.
        inject_ca_from: `namespace/name` of cert-manager's Certificate; empty without cert-manager.
        labels: of the configuration.
        owner: an owner reference to a cluster-scoped object that the installation has, so that the configuration
            goes when the installation does; None to leave it to whoever uninstalls.
    """

    namespace: str
    service: str
    port: int = 443
    url: str | None = None
    ca_bundle: str | None = None
    inject_ca_from: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    owner: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if (self.ca_bundle is None) == (not self.inject_ca_from):
            raise ValueError("the bundle is either given or injected by cert-manager")


@dataclass(frozen=True, slots=True)
class Change:
    """The object to create, or to replace the live one with, and why."""

    configuration: dict[str, Any]
    reasons: tuple[str, ...]
    creates: bool


def excluded(namespace: str, target: Target) -> str:
    """Why pods of this namespace are never touched; empty if they may be."""
    if namespace in NEVER:
        return f"pods in {namespace} are never gated: the cluster stands on them"
    if namespace == target.namespace:
        return f"pods in {namespace} are never gated: the operator runs there, and must start without itself"
    return ""


def entry_name(namespace: str, policy: str) -> str:
    """The name of a policy's entry; the same policy has the same name always, no two have one."""
    name = f"{policy}.{namespace}.{ENTRY_SUFFIX}"
    if len(name) > MAX_ENTRY_NAME:
        name = f"{hashlib.sha256(policy.encode()).hexdigest()[:32]}.{namespace}.{ENTRY_SUFFIX}"
    return name


def entry_path(namespace: str, policy: str) -> str:
    """Where the webhook serves a policy."""
    return f"/inject/{namespace}/{policy}"


def build_configuration(policies: Iterable[Wanted], target: Target) -> dict[str, Any]:
    """The configuration that is wanted. Policies that may not have an entry, or select nothing, have none; of more
    than MAX_ENTRIES the first by namespace and name."""
    wanted = sorted(
        (one for one in policies if one.selector is not None and not excluded(one.namespace, target)),
        key=lambda one: (one.namespace, one.name),
    )
    metadata: dict[str, Any] = {"name": CONFIGURATION_NAME, "labels": dict(target.labels)}
    if target.inject_ca_from:
        metadata["annotations"] = {INJECT_CA_FROM: target.inject_ca_from}
    if target.owner is not None:
        metadata["ownerReferences"] = [dict(target.owner)]
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": metadata,
        "webhooks": [_entry(one, target) for one in wanted[:MAX_ENTRIES]],
    }


def plan_configuration(live: Mapping[str, Any] | None, wanted: Mapping[str, Any]) -> Change | None:
    """What to write so that the live configuration says what is wanted; None at rest."""
    if live is None:
        if not wanted["webhooks"]:
            return None  # nothing to say, and nothing that has to be taken back
        return Change(dict(wanted), ("there is no configuration",), creates=True)
    reasons: list[str] = []
    metadata = _metadata(live.get("metadata") or {}, wanted["metadata"], reasons)
    live_entries = {one.get("name"): one for one in live.get("webhooks") or ()}
    entries = [_with_bundle(one, live_entries) for one in wanted["webhooks"]]
    names = [one["name"] for one in entries]
    reasons += [f"{name}: not wanted" for name in live_entries if name not in names]
    for one in entries:
        there = live_entries.get(one["name"])
        reasons += [f"{one['name']}: missing"] if there is None else _differences(there, one)
    if not reasons:
        return None
    return Change({**wanted, "metadata": metadata, "webhooks": entries}, tuple(reasons), creates=False)


def ca_bundles(live: Mapping[str, Any] | None) -> list[str | None]:
    """The `caBundle` of each entry of a live configuration."""
    entries: Sequence[Mapping[str, Any]] = (live or {}).get("webhooks") or ()
    return [(one.get("clientConfig") or {}).get("caBundle") for one in entries]


def _entry(policy: Wanted, target: Target) -> dict[str, Any]:
    path = entry_path(policy.namespace, policy.name)
    client: dict[str, Any]
    if target.url is not None:
        client = {"url": target.url + path}
    else:
        service = {"name": target.service, "namespace": target.namespace, "path": path, "port": target.port}
        client = {"service": service}
    if target.ca_bundle is not None:
        client["caBundle"] = target.ca_bundle
    selected = label_selector(policy.selector) or {}
    not_opted_out = {"key": INJECT_LABEL, "operator": "NotIn", "values": [OPT_OUT]}
    expressions = [*selected.get("matchExpressions", ()), not_opted_out]
    return {
        "name": entry_name(policy.namespace, policy.name),
        "admissionReviewVersions": ["v1"],
        "clientConfig": client,
        "failurePolicy": policy.failure_policy.value,
        "matchPolicy": "Equivalent",
        "namespaceSelector": {"matchLabels": {NAMESPACE_LABEL: policy.namespace}},
        "objectSelector": {**selected, "matchExpressions": expressions},
        "reinvocationPolicy": "IfNeeded",  # other webhooks may add containers that have to be looked at
        "rules": [
            {
                "apiGroups": [""],
                "apiVersions": ["v1"],
                "operations": ["CREATE"],
                "resources": ["pods"],
                "scope": "Namespaced",
            }
        ],
        "sideEffects": "None",
        "timeoutSeconds": TIMEOUT_S,
    }


def _with_bundle(entry: dict[str, Any], live: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
    """The entry, with the bundle that cert-manager has injected where we have none. An entry that is new borrows
    that of another, so that it works before the injector has come by."""
    client = entry["clientConfig"]
    if "caBundle" in client:
        return entry
    there = [live[entry["name"]]] if entry["name"] in live else []
    for one in (*there, *live.values()):
        bundle = (one.get("clientConfig") or {}).get("caBundle")
        if bundle:
            return {**entry, "clientConfig": {**client, "caBundle": bundle}}
    return entry


def _metadata(live: Mapping[str, Any], wanted: Mapping[str, Any], reasons: list[str]) -> dict[str, Any]:
    """The live metadata with ours in it: labels and annotations of others stay."""
    merged: dict[str, Any] = {"name": wanted["name"]}
    for version in ("resourceVersion", "uid"):
        if version in live:
            merged[version] = live[version]
    for kind in ("labels", "annotations"):
        there, ours = live.get(kind) or {}, wanted.get(kind) or {}
        stays = {k: v for k, v in there.items() if k != INJECT_CA_FROM}
        together = {**stays, **ours}
        if together != there:
            reasons.append(f"metadata.{kind} differ")
        merged[kind] = together
    owners = wanted.get("ownerReferences")
    if owners is None:
        owners = live.get("ownerReferences") or []
    elif owners != live.get("ownerReferences"):
        reasons.append("metadata.ownerReferences differ")
    merged["ownerReferences"] = owners
    if "finalizers" in live:
        merged["finalizers"] = live["finalizers"]
    return merged


def _differences(live: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Where a live entry differs from the one that is wanted."""
    name = wanted["name"]
    found = [f"{name}: {key} differs" for key, value in wanted.items() if live.get(key) != value]
    return found + [f"{name}: {key} is not wanted" for key in _NARROWING if live.get(key)]
