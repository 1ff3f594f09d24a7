"""The kinds of objects that the operator speaks of, and where the API server has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sluicegate_operator.names import GROUP, KIND, PLURAL, VERSION


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind. `group` is empty for the core's."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """As objects state it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str = "") -> str:
        """The path of one object, of those of a namespace, or of all."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if namespace and self.namespaced:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        if name is not None:
            parts.append(name)
        if subresource:
            parts.append(subresource)
        return "/".join(parts)


POLICIES: Final = Resource(GROUP, VERSION, PLURAL, KIND)
PODS: Final = Resource("", "v1", "pods", "Pod")
CONFIG_MAPS: Final = Resource("", "v1", "configmaps", "ConfigMap")
SECRETS: Final = Resource("", "v1", "secrets", "Secret")
EVENTS: Final = Resource("events.k8s.io", "v1", "events", "Event")
WEBHOOKS: Final = Resource(
    "admissionregistration.k8s.io",
    "v1",
    "mutatingwebhookconfigurations",
    "MutatingWebhookConfiguration",
    False,
)
REPLICA_SETS: Final = Resource("apps", "v1", "replicasets", "ReplicaSet")
DEPLOYMENTS: Final = Resource("apps", "v1", "deployments", "Deployment")
STATEFUL_SETS: Final = Resource("apps", "v1", "statefulsets", "StatefulSet")
DAEMON_SETS: Final = Resource("apps", "v1", "daemonsets", "DaemonSet")
SCALED_OBJECTS: Final = Resource("keda.sh", "v1alpha1", "scaledobjects", "ScaledObject")

#: Kinds whose pods `kubectl rollout restart` replaces.
RESTARTABLE: Final = {one.kind: one for one in (DEPLOYMENTS, STATEFUL_SETS, DAEMON_SETS)}
