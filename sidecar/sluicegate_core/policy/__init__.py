"""The policy: the `spec` of an AdmissionPolicy, one schema, one parser for all who read it.

`model` has the values, `parse_policy` reads a decoded document into them.
"""

from sluicegate_core.policy.model import (
    DEFAULT_MAX_QUEUE_TIME_S,
    Autoscaling,
    Classify,
    ClassPolicy,
    EngineSpec,
    EngineType,
    LabelOperator,
    LabelRequirement,
    Mode,
    Policy,
    Provider,
    Rule,
    Selector,
    Slo,
)

__all__ = [
    "DEFAULT_MAX_QUEUE_TIME_S",
    "Autoscaling",
    "ClassPolicy",
    "Classify",
    "EngineSpec",
    "EngineType",
    "LabelOperator",
    "LabelRequirement",
    "Mode",
    "Policy",
    "Provider",
    "Rule",
    "Selector",
    "Slo",
]
