"""The policy: the `spec` of an AdmissionPolicy, one schema, one parser for all who read it.

`model` has the values, `schema` what may be written, `parser` the way from a decoded document to the values,
`writer` the way back.
"""

from sluicegate_core.policy.model import (
    DEFAULT_MAX_QUEUE_TIME_S,
    Autoscaling,
    Classify,
    ClassPolicy,
    EngineSpec,
    EngineType,
    FailurePolicy,
    GateSpec,
    Injection,
    LabelOperator,
    LabelRequirement,
    Mode,
    Policy,
    Provider,
    Rollout,
    Rule,
    Selector,
    Slo,
    Takeover,
)
from sluicegate_core.policy.parser import parse_policy
from sluicegate_core.policy.writer import policy_warnings, write_spec
from sluicegate_core.problems import PolicyError, Problem

__all__ = [
    "DEFAULT_MAX_QUEUE_TIME_S",
    "Autoscaling",
    "ClassPolicy",
    "Classify",
    "EngineSpec",
    "EngineType",
    "FailurePolicy",
    "GateSpec",
    "Injection",
    "LabelOperator",
    "LabelRequirement",
    "Mode",
    "Policy",
    "PolicyError",
    "Problem",
    "Provider",
    "Rollout",
    "Rule",
    "Selector",
    "Slo",
    "Takeover",
    "parse_policy",
    "policy_warnings",
    "write_spec",
]
