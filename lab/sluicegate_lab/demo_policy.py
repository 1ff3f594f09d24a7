"""The policy of a demo: written from what the idle engine can do, or read from a file.

The default promises what a healthy engine of this size could keep: interactive traffic its first token within
a second, or four times what an idle engine takes if that is more, and then tokens at no more than three times
the pace of a full engine; batch its first token within twenty seconds, at any pace. It is written as the YAML
that a user would write, and printed.

The schema and the parser live in `sluicegate_core.policy`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from sluicegate_core.policy import Policy, PolicyError, parse_policy
from sluicegate_lab.calibrate import Capacity
from sluicegate_lab.load import CLASS_HEADER, CLIENT_HEADER
from sluicegate_lab.outcome import ClassGoal
from sluicegate_lab.traffic import BATCH, CLASSES, INTERACTIVE

LEAST_TTFT_S = 1.0
IDLE_TTFT_FACTOR = 4
LEAST_ITL_S = 0.05
FULL_GAP_FACTOR = 3
BATCH_TTFT_S = 20
INTERACTIVE_WEIGHT = 10
BATCH_WEIGHT = 1

MAX_POLICY_BYTES = 1 << 20
"""As much as a ConfigMap can hold."""


class PolicyFileError(Exception):
    """A policy that cannot be used for the demo; one line for each problem."""


@dataclass(frozen=True, slots=True)
class DemoPolicy:
    """The policy as text and as values."""

    text: str
    policy: Policy

    @property
    def goals(self) -> dict[str, ClassGoal]:
        """What the demo's classes were promised, in the order of the policy."""
        return {
            one.name: ClassGoal(one.slo.ttft_s, one.slo.itl_s, one.weight)
            for one in self.policy.classes
            if one.name in CLASSES
        }


def default_policy(capacity: Capacity, engine_type: str) -> DemoPolicy:
    """The demo's own policy, for an engine that was measured."""
    ttft_s = _rounded_up(max(LEAST_TTFT_S, IDLE_TTFT_FACTOR * capacity.idle_ttft_s), 0.1)
    itl_s = _rounded_up(max(LEAST_ITL_S, FULL_GAP_FACTOR * capacity.full_gap_s), 0.01)
    text = f"""\
engine: {{type: {engine_type}}}
classes:
- name: {INTERACTIVE}
  slo: {{ttft: {_duration(ttft_s)}, itl: {_duration(itl_s)}}}
  weight: {INTERACTIVE_WEIGHT}
- name: {BATCH}
  slo: {{ttft: {_duration(BATCH_TTFT_S)}}}
  weight: {BATCH_WEIGHT}
classify:
  default: {INTERACTIVE}
  client: {{header: {CLIENT_HEADER}}}
  rules:
  - {{header: {CLASS_HEADER}, values: [{BATCH}], class: {BATCH}}}
"""
    return _parsed(text, "the demo's policy")


def read_policy(path: Path) -> DemoPolicy:
    """The policy in a file: the `spec` of an AdmissionPolicy, or the whole object.

    Raises `PolicyFileError` where it cannot be read, is wrong, or knows another set of classes than the
    demo's traffic.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_POLICY_BYTES + 1)
    except OSError as error:
        raise PolicyFileError(f"{path}: {error.strerror}") from error
    if len(data) > MAX_POLICY_BYTES:
        raise PolicyFileError(f"{path}: larger than {MAX_POLICY_BYTES} bytes")
    return _parsed(data.decode(errors="replace"), str(path))


def _parsed(text: str, source: str) -> DemoPolicy:
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PolicyFileError(f"{source}: not YAML: {' '.join(str(error).split())}") from error
    if isinstance(document, dict) and "spec" in document:
        document = document["spec"]
    try:
        policy = parse_policy(document)
    except PolicyError as error:
        lines = [f"{source}: {one.path}: {one.message}. {one.fix}" for one in error.problems]
        raise PolicyFileError("\n".join(lines)) from error
    missing = _missing(policy.class_names)
    if missing:
        raise PolicyFileError(
            f"{source}: the demo's traffic is {' and '.join(CLASSES)}, told apart by the header "
            f"{CLASS_HEADER}; the policy has no class {' and no class '.join(missing)}"
        )
    return DemoPolicy(text, policy)


def _missing(names: Sequence[str]) -> list[str]:
    return [name for name in CLASSES if name not in names]


def _duration(seconds: float) -> str:
    """As Kubernetes writes it, in whole seconds or milliseconds."""
    return f"{seconds:.0f}s" if seconds == round(seconds) else f"{round(seconds * 1000)}ms"


def _rounded_up(seconds: float, step_s: float) -> float:
    # A millionth of slack: 0.6 is not rounded up because its binary form lies a hair above.
    return round(math.ceil(seconds / step_s - 1e-6) * step_s, 6)
