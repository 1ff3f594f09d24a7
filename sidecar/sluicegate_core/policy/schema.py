"""The schema of a policy's `spec`, as data: each field, what it may hold, and what holds without it.

`SPEC` is the list to read. The parser reads by it, the policy reference is held to it by a test, and errors
quote it. Bounds carry their reason here; meaning is told in the policy reference.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from sluicegate_core.policy.model import EngineType, LabelOperator, Mode, Provider
from sluicegate_core.policy.nodes import (
    Choice,
    Duration,
    Field,
    Flag,
    ListOf,
    MapOf,
    Node,
    Record,
    Text,
    Whole,
)

API_VERSION = "sluicegate.dev/v1alpha1"
KIND = "AdmissionPolicy"

MAX_CLASSES = 16
"""Each class is a label value of each metric, and each decision looks at all of them."""

MAX_RULES = 64
MAX_VALUES = 64
"""Of one rule. Together with MAX_RULES: 4,096 header values, above which classes belong in the gateway."""

MAX_LABELS = 64
"""Labels and requirements of a selector."""

MAX_WEIGHT = 1000
"""Beyond it a share is no share: the other class would wait for minutes between two turns."""

MAX_CONCURRENCY = 65_536
"""No engine serves more streams at once: a stream takes a connection, and there are no more ports."""

MAX_REPLICAS = 10_000
"""Far above any deployment of one model, far below what a slip of the finger could order."""

TTFT_MIN_S, TTFT_MAX_S = 0.001, 3600.0
ITL_MIN_S, ITL_MAX_S = 0.001, 60.0
"""Below a millisecond the gate's own work would count; above an hour and a minute nobody still listens."""

QUEUE_TIME_MAX_S = 3600.0
COLD_START_MAX_S = 7200.0
"""Two hours: pulling a large image and half a terabyte of weights over a slow link."""

_DNS_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_LABEL_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"

CLASS_NAME = Text(
    "a name of small letters, digits and inner dashes", re.compile(_DNS_LABEL), 63, example="interactive"
)
HEADER_NAME = Text(
    "the name of an HTTP header",
    re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"),  # a token, RFC 9110 section 5.6.2
    128,
    example="x-admission-class",
    lower=True,
)
HEADER_VALUE = Text(
    "text without control characters or blanks around it",
    re.compile(r"[^\s\x00-\x1f\x7f-\x9f\ud800-\udfff]([^\x00-\x1f\x7f-\x9f\ud800-\udfff]*"
               r"[^\s\x00-\x1f\x7f-\x9f\ud800-\udfff])?"),
    256,
    example="batch",
)  # fmt: skip
MODEL_PATTERN = Text(
    "the name of a model, or its beginning followed by `*`",
    re.compile(r"(?!\*$)[^\s*\x00-\x1f\x7f-\x9f\ud800-\udfff]+\*?"),
    256,
    example="llama-3*",
)
PATH_PATTERN = Text(
    "a path that begins with `/`, without a query, or its beginning followed by `*`",
    re.compile(r"/[!-)+->@-~]*\*?"),  # what prints in ASCII, but `*` and `?`
    256,
    example="/v1/embeddings",
)
ENGINE_PATH = Text(
    "a path that begins with `/`", re.compile(r"/[!-~]*"), 256, example="/health"
)  # fmt: skip
LABEL_KEY = Text(
    "a label key of Kubernetes",
    re.compile(rf"({_DNS_LABEL}(\.{_DNS_LABEL})*/)?{_LABEL_NAME}"),
    317,  # a prefix of 253, a slash, a name of 63
    example="app.kubernetes.io/name",
)
LABEL_VALUE = Text("a label value of Kubernetes", re.compile(rf"({_LABEL_NAME})?"), 63, example="llama-70b")

SLO = Record(
    "an SLO",
    (
        Field("ttft", Duration(TTFT_MIN_S, TTFT_MAX_S)),
        Field("itl", Duration(ITL_MIN_S, ITL_MAX_S)),
    ),
)

CLASS = Record(
    "a class",
    (
        Field("name", CLASS_NAME, required=True),
        Field("slo", SLO),
        Field("weight", Whole(1, MAX_WEIGHT), "1", 1),
        Field("maxQueueTime", Duration(0.0, QUEUE_TIME_MAX_S), "the class's slo.ttft, else 30s"),
        Field("maxConcurrency", Whole(1, MAX_CONCURRENCY), "as many as the engine takes"),
        Field("reservedSlots", Whole(0, MAX_CONCURRENCY), "sized by the gate"),
        Field("preemptible", Flag(), "false", default=False),
    ),
)

RULE = Record(
    "a rule",
    (
        Field("header", HEADER_NAME),
        Field("values", ListOf(HEADER_VALUE, 1, MAX_VALUES, "value")),
        Field("model", MODEL_PATTERN),
        Field("path", PATH_PATTERN),
        Field("class", CLASS_NAME, required=True),
    ),
)

CLASSIFY = Record(
    "the classification",
    (
        Field("default", CLASS_NAME, "the first class"),
        Field(
            "client",
            Record(
                "the client's identity", (Field("header", HEADER_NAME, "well-known headers, else the key"),)
            ),
        ),
        Field("rules", ListOf(RULE, 0, MAX_RULES, "rule"), default=()),
    ),
)

SELECTOR = Record(
    "a selector",
    (
        Field("matchLabels", MapOf(LABEL_KEY, LABEL_VALUE, MAX_LABELS), default=()),
        Field(
            "matchExpressions",
            ListOf(
                Record(
                    "a requirement",
                    (
                        Field("key", LABEL_KEY, required=True),
                        Field("operator", Choice(LabelOperator), required=True),
                        Field("values", ListOf(LABEL_VALUE, 0, MAX_VALUES, "value"), default=()),
                    ),
                ),
                0,
                MAX_LABELS,
                "requirement",
            ),
            default=(),
        ),
    ),
)

ENGINE = Record(
    "an engine",
    (
        Field("type", Choice(EngineType), "Auto", EngineType.AUTO),
        Field("port", Whole(1, 65_535), "found out"),
        Field("slots", Whole(1, MAX_CONCURRENCY), "found out"),
        Field("healthPath", ENGINE_PATH, "by the engine's type"),
        Field("metricsPath", ENGINE_PATH, "by the engine's type"),
    ),
)

AUTOSCALING = Record(
    "the autoscaling",
    (
        Field("provider", Choice(Provider), "KEDA", Provider.KEDA),
        # Not 0: without a pod there is no gate, and without a gate nobody sees the demand.
        Field("minReplicas", Whole(1, MAX_REPLICAS), "1", 1),
        # No default: it bounds what may be spent, and that is for its owner to say.
        Field("maxReplicas", Whole(1, MAX_REPLICAS), "none; needed unless provider is None"),
        Field("coldStart", Duration(0.0, COLD_START_MAX_S), "measured"),
    ),
)

SPEC = Record(
    "a policy",
    (
        Field("selector", SELECTOR),
        Field("mode", Choice(Mode), "Enforce", Mode.ENFORCE),
        Field("engine", ENGINE),
        Field("classes", ListOf(CLASS, 1, MAX_CLASSES, "class"), required=True),
        Field("classify", CLASSIFY),
        Field("autoscaling", AUTOSCALING),
    ),
)


def every_field(node: Node = SPEC, path: str = "spec") -> Iterator[tuple[str, Field]]:
    """Each field below the node with its path, `spec.classes[].slo.ttft`, parents first."""
    match node:
        case Record():
            for field in node.fields:
                where = f"{path}.{field.name}"
                yield where, field
                yield from every_field(field.node, where)
        case ListOf():
            yield from every_field(node.item, f"{path}[]")
        case _:
            return
