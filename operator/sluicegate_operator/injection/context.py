"""What an injection is given beside the pod and the policy, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

#: The user of the gate's image. A number is stated, since a pod's own `runAsUser: 0` would hold for the gate as well.
GATE_USER: Final = 65532

DEFAULT_REQUESTS: Final = (("cpu", "100m"), ("memory", "96Mi"))
"""An idle gate takes 35 MB; one core carries some 15,000 requests a second."""

DEFAULT_LIMITS: Final = (("memory", "768Mi"),)
"""No limit on CPU: a throttled gate delays every token. Of bodies a gate holds at most 512 MiB while requests wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectionContext:
    """The installation's settings, and what is new with each pod. The policy's `spec.gate` wins over them.

    Attributes:
        namespace: of pod and policy.
        policy_name: whose ConfigMap the gate reads.
        image: of the gate.
        drain_token: a secret of this pod alone: who has it can drain the gate.
        image_pull_policy: None: Kubernetes' default for the image's tag.
        requests, limits: resources, as (name, quantity).
        extra_args: flags for every gate.
        run_as_user: the gate's user and group; None: left to the platform, which then has to set one (OpenShift).
    """

    namespace: str
    policy_name: str
    image: str
    drain_token: str
    image_pull_policy: str | None = None
    requests: tuple[tuple[str, str], ...] = DEFAULT_REQUESTS
    limits: tuple[tuple[str, str], ...] = DEFAULT_LIMITS
    extra_args: tuple[str, ...] = ()
    run_as_user: int | None = GATE_USER


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectionResult:
    """What became of a pod.

    Attributes:
        pod: as it is to be created; the object given is never changed.
        warnings: for the answer of the webhook, each one line.
        refusal: why the pod has no gate; None where it has one.
        status: content of the pod's annotation.
    """

    pod: dict[str, Any]
    warnings: tuple[str, ...]
    refusal: str | None
    status: dict[str, Any]
