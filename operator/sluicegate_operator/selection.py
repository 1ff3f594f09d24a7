"""Which policy owns a pod: label selectors as Kubernetes evaluates them, and who holds where several select.

Pure functions over labels and selectors, shared by the webhook (whose entry fires for a pod) and the reconciler
(which reports conflicts and pods without a gate), so that both always name the same owner.

Invariants:
- Selection is that of the API server's own `objectSelector`: an absent selector selects nothing, an empty one
  everything; NotIn and DoesNotExist hold for a pod without the key.
- The owner depends on the pod's labels and the set of policies alone, never on the order in which they are
  looked at: the oldest policy holds, by creation and then by name.
- A pod that opts out by label has no owner.

Namespaces are the caller's: a policy only ever meets pods of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from sluicegate_core.policy import LabelOperator, LabelRequirement, Selector
from sluicegate_operator.names import INJECT_LABEL

#: The value of the label that keeps a pod ungated. Nothing else does: a typing error must not remove a gate.
OPT_OUT: Final = "false"


class Candidate(Protocol):
    """What is asked of a policy here."""

    @property
    def name(self) -> str:
        """Within its namespace."""

    @property
    def created_at(self) -> str:
        """`metadata.creationTimestamp` as the API server writes it: RFC 3339 in UTC, so text orders as time."""

    @property
    def selector(self) -> Selector | None:
        """None selects nothing."""


C = TypeVar("C", bound=Candidate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """The plainest `Candidate`."""

    name: str
    created_at: str
    selector: Selector | None


def opted_out(labels: Mapping[str, str]) -> bool:
    """Whether a pod with these labels asks to be left alone."""
    return labels.get(INJECT_LABEL) == OPT_OUT


def selects(selector: Selector | None, labels: Mapping[str, str]) -> bool:
    """Whether the selector matches the labels."""
    if selector is None:
        return False
    return all(labels.get(key) == value for key, value in selector.match_labels) and all(
        _holds(one, labels) for one in selector.match_expressions
    )


def contenders_for(labels: Mapping[str, str], policies: Iterable[C]) -> list[C]:
    """All policies of one namespace that select the pod, the one that holds first; none if it opts out."""
    if opted_out(labels):
        return []
    return sorted((one for one in policies if selects(one.selector, labels)), key=_seniority)


def owner_of(labels: Mapping[str, str], policies: Iterable[C]) -> C | None:
    """The policy that gates a pod with these labels, or None."""
    if opted_out(labels):
        return None
    return min((one for one in policies if selects(one.selector, labels)), key=_seniority, default=None)


def label_selector(selector: Selector | None) -> dict[str, Any] | None:
    """The selector as Kubernetes writes it (`metav1.LabelSelector`), in a canonical order; None selects nothing."""
    if selector is None:
        return None
    written: dict[str, Any] = {}
    if selector.match_labels:
        written["matchLabels"] = dict(sorted(selector.match_labels))
    if selector.match_expressions:
        written["matchExpressions"] = [requirement(one) for one in selector.match_expressions]
    return written


def requirement(one: LabelRequirement) -> dict[str, Any]:
    """One line of `matchExpressions`. Without values where the operator takes none."""
    written: dict[str, Any] = {"key": one.key, "operator": one.operator.value}
    if one.operator in (LabelOperator.IN, LabelOperator.NOT_IN):
        written["values"] = list(one.values)
    return written


def query(selector: Selector) -> str:
    """The selector as the `labelSelector` parameter of a list call; empty selects everything."""
    parts = [f"{key}={value}" for key, value in sorted(selector.match_labels)]
    for one in selector.match_expressions:
        match one.operator:
            case LabelOperator.IN:
                parts.append(f"{one.key} in ({','.join(one.values)})")
            case LabelOperator.NOT_IN:
                parts.append(f"{one.key} notin ({','.join(one.values)})")
            case LabelOperator.EXISTS:
                parts.append(one.key)
            case LabelOperator.DOES_NOT_EXIST:
                parts.append(f"!{one.key}")
    return ",".join(parts)


def _holds(one: LabelRequirement, labels: Mapping[str, str]) -> bool:
    match one.operator:
        case LabelOperator.IN:
            return labels.get(one.key) in one.values
        case LabelOperator.NOT_IN:
            return labels.get(one.key) not in one.values
        case LabelOperator.EXISTS:
            return one.key in labels
        case LabelOperator.DOES_NOT_EXIST:
            return one.key not in labels


def _seniority(one: Candidate) -> tuple[str, str]:
    return one.created_at, one.name
