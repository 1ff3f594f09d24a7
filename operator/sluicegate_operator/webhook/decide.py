"""What is answered to a pod's creation: which outcome, which patch, which warnings.

Pure but for the drain token, which the caller draws. Injection itself lives in `sluicegate_operator.injection`,
who owns a pod in `sluicegate_operator.selection`; here they meet the question.

Invariants:
- The same question and the same policies give the same outcome, on every replica and however often it is asked:
  the API server asks again after other webhooks have changed the pod, and of two policies that select a pod each
  has an entry that fires, of which only the owner's acts, in whatever order they come.
- No outcome refuses a pod. Where the webhook itself fails, and the policy says `failurePolicy: Fail`, it gives no
  answer (`FailedError`), and the API server acts on that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from sluicegate_core.policy import FailurePolicy, Policy
from sluicegate_operator.injection import InjectionContext, inject, json_patch
from sluicegate_operator.selection import opted_out, owner_of
from sluicegate_operator.webhook.policies import KnownPolicy
from sluicegate_operator.webhook.review import Review

log = logging.getLogger(__name__)


class Outcome(StrEnum):
    """What became of a question; a label of the metrics."""

    INJECTED = "injected"
    ALREADY = "already"  # has its gate: asked again
    REFUSED = "refused"  # the injection leaves such a pod alone, and says why
    OTHER_OWNER = "other_owner"  # an older policy selects the pod, too
    NOT_SELECTED = "not_selected"  # the policy has changed since its entry was written
    OPTED_OUT = "opted_out"
    NO_POLICY = "no_policy"  # gone, or never there
    NOT_VALID = "not_valid"  # there is no valid spec of it
    NOT_A_POD = "not_a_pod"  # something that the webhook is not registered for
    FAILED = "failed"  # an error of ours


class FailedError(Exception):
    """The injection failed and the policy would rather have no pod: nothing is answered but an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The answer, yet to be written. `note` is for the log: why, in words."""

    outcome: Outcome
    patch: list[dict[str, Any]] = field(default_factory=list)
    warnings: tuple[str, ...] = ()
    note: str = ""
    policy: str = ""  # "namespace/name", where it is one that is known


def decide(
    review: Review,
    policy: KnownPolicy | None,
    neighbours: Iterable[KnownPolicy],
    context: InjectionContext,
) -> Decision:
    """The decision on a pod.

    Args:
        review: the question.
        policy: the one whose entry fired; None if there is none of that name.
        neighbours: all policies of the pod's namespace.
        context: for the injection: names, and what the installation has as defaults.

    Raises:
        FailedError: see there.
    """
    if not review.is_pod_creation or review.namespace != context.namespace:
        return Decision(outcome=Outcome.NOT_A_POD, note="not the creation of a pod in the policy's namespace")
    name = f"{context.namespace}/{context.policy_name}"
    if policy is None:
        warning = f"the pod is not gated: there is no AdmissionPolicy {name}"
        return Decision(outcome=Outcome.NO_POLICY, warnings=(warning,), note=warning)
    decision = _of_known(review, policy, neighbours, context)
    return replace(decision, policy=name)


def _of_known(
    review: Review, policy: KnownPolicy, neighbours: Iterable[KnownPolicy], context: InjectionContext
) -> Decision:
    labels = review.labels
    if opted_out(labels):
        return Decision(outcome=Outcome.OPTED_OUT, note="the pod opts out by label")
    if policy.spec is None:
        warning = f"the pod is not gated: AdmissionPolicy {policy.name} is not valid: {policy.problem}"
        return Decision(outcome=Outcome.NOT_VALID, warnings=(warning,), note=warning)
    # The policy itself may be known by asking alone, and be missing among its neighbours.
    candidates = {one.name: one for one in neighbours} | {policy.name: policy}
    owner = owner_of(labels, candidates.values())
    if owner is None:
        return Decision(outcome=Outcome.NOT_SELECTED, note="no policy selects the pod any more")
    if owner.name != policy.name:
        warning = f"AdmissionPolicy {policy.name} does not gate this pod: {owner.name}, which is older, selects it too"
        return Decision(outcome=Outcome.OTHER_OWNER, warnings=(warning,), note=warning)
    return _injected(review, policy, policy.spec, context)


def _injected(review: Review, known: KnownPolicy, policy: Policy, context: InjectionContext) -> Decision:
    try:
        result = inject(review.pod, policy, context)
        patch = json_patch(review.pod, result.pod)
    except Exception as error:
        # Whatever the pod is like: an error of ours must not decide about it, unless the policy says so.
        log.exception("the injection failed on a pod of policy %s/%s", known.namespace, known.name)
        reason = f"the injection failed ({type(error).__name__}); the webhook's log says why"
        if policy.injection.failure_policy is FailurePolicy.FAIL:
            raise FailedError(f"AdmissionPolicy {known.name}: {reason}") from error
        warning = f"the pod is not gated: {reason}"
        return Decision(outcome=Outcome.FAILED, warnings=(warning,), note=warning)
    if result.refusal is not None:
        # Its annotation says so, for whoever looks at the pod later.
        return Decision(outcome=Outcome.REFUSED, patch=patch, warnings=result.warnings, note=result.refusal)
    outcome = Outcome.INJECTED if patch else Outcome.ALREADY
    return Decision(outcome=outcome, patch=patch, warnings=result.warnings, note="; ".join(result.warnings))


def audit(decision: Decision) -> Mapping[str, str]:
    """What the cluster's audit log is told."""
    return {"outcome": decision.outcome.value}
