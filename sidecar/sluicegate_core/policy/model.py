"""What a policy says, once it has been read: frozen values, every default filled in.

Invariants: an object of these types is consistent in itself: a `Policy` has at least one class, its class
names are unique, and every class that a rule or the default names exists. Whoever builds one in code and
breaks that gets a `ValueError` (a bug); whoever writes one as a document gets every problem at once, from
`parser`. Durations are float seconds, counts are ints.

What may be written, within which bounds, lives in `schema`; which request belongs to which class, in
`sluicegate_core.classify`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

DEFAULT_MAX_QUEUE_TIME_S = 30.0
"""How long a request without a TTFT SLO may wait: long enough to ride out a burst, and well inside the 60 s
after which common proxies and clients give up on a silent connection."""

DEFAULT_DRAIN_TIMEOUT_S = 300.0
"""Longer than nearly every stream takes, and short enough for a rollout of many pods to end."""

DERIVED_S = -1.0
"""Stands for "derive it" where None would leak into a type that is never None once built: no queue time is
negative."""


class Mode(StrEnum):
    """What the gate does with its verdicts."""

    ENFORCE = "Enforce"  # acts on them
    SHADOW = "Shadow"  # lets everything pass and measures
    OFF = "Off"  # lets everything pass


class EngineType(StrEnum):
    """The inference servers whose metrics and endpoints are known by name."""

    AUTO = "Auto"  # found out from what the engine answers
    VLLM = "vLLM"
    LLAMA_CPP = "llama.cpp"
    SGLANG = "SGLang"
    TGI = "TGI"
    TRITON = "Triton"
    TENSORRT_LLM = "TensorRT-LLM"
    OLLAMA = "Ollama"
    OTHER = "Other"  # gated from the gate's own counters alone


class Provider(StrEnum):
    """Who scales the engine's replicas on the demand that the gates report."""

    KEDA = "KEDA"
    HPA = "HPA"
    NONE = "None"


class Takeover(StrEnum):
    """How the gate comes to stand in front of the engine in a pod."""

    AUTO = "Auto"  # the engine's own arguments or environment move it to another port
    NAMED_PORT = "NamedPort"  # the port's name moves to the gate
    EXPLICIT = "Explicit"  # both ports are stated, and nothing is moved


class FailurePolicy(StrEnum):
    """What becomes of a pod while the webhook does not answer."""

    IGNORE = "Ignore"  # it starts without a gate, and is reported
    FAIL = "Fail"  # it is not created


class Rollout(StrEnum):
    """What is done about pods that have no gate."""

    MANUAL = "Manual"  # they are reported
    RESTART = "Restart"  # their workload is restarted, in a paced way


class LabelOperator(StrEnum):
    """The operators of a Kubernetes label selector."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The engine behind the gate. None: the gate finds it out."""

    type: EngineType = EngineType.AUTO
    port: int | None = None
    slots: int | None = None  # requests that the engine serves at once
    health_path: str | None = None
    metrics_path: str | None = None


@dataclass(frozen=True, slots=True)
class Slo:
    """What a class promises. None: nothing is promised, and nothing is refused for its sake."""

    ttft_s: float | None = None  # from arrival at the gate to the first token
    itl_s: float | None = None  # between two tokens of one stream


@dataclass(frozen=True, slots=True)
class ClassPolicy:
    """A traffic class: what it is promised and what it may take."""

    name: str
    slo: Slo = Slo()
    weight: int = 1  # share of the engine's tokens, relative to the other classes
    max_queue_time_s: float = DERIVED_S  # the TTFT SLO, else DEFAULT_MAX_QUEUE_TIME_S
    max_concurrency: int | None = None  # None: as many as the engine takes
    reserved_slots: int | None = None  # None: sized by the gate
    preemptible: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a class has a name")
        if self.weight < 1:
            raise ValueError(f"class {self.name}: a weight is at least 1, not {self.weight}")
        if self.max_queue_time_s == DERIVED_S:
            derived_s = DEFAULT_MAX_QUEUE_TIME_S if self.slo.ttft_s is None else self.slo.ttft_s
            object.__setattr__(self, "max_queue_time_s", derived_s)
        if not self.max_queue_time_s >= 0:
            raise ValueError(f"class {self.name}: a queue time is not negative: {self.max_queue_time_s}")


@dataclass(frozen=True, slots=True)
class Rule:
    """One condition and the class it leads to. Exactly one of `header`, `model` and `path` is set."""

    class_name: str
    header: str | None = None  # lower-cased; its value is one of `values`
    values: tuple[str, ...] = ()
    model: str | None = None  # exact, or a prefix that ends in `*`
    path: str | None = None  # exact, or a prefix that ends in `*`; without the query

    def __post_init__(self) -> None:
        if sum(condition is not None for condition in (self.header, self.model, self.path)) != 1:
            raise ValueError(f"a rule has one condition: {self}")
        if (self.header is None) != (not self.values):
            raise ValueError(f"a header goes with values, and values with a header: {self}")


@dataclass(frozen=True, slots=True)
class Classify:
    """How a request finds its class and its client."""

    default: str = ""  # empty: the first class of the policy
    client_header: str | None = None  # lower-cased; looked at before the well-known ones
    rules: tuple[Rule, ...] = ()  # the first that matches wins


@dataclass(frozen=True, slots=True)
class LabelRequirement:
    """One line of `matchExpressions`."""

    key: str
    operator: LabelOperator
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Selector:
    """The pods that a policy gates: all conditions hold. Read by the operator only."""

    match_labels: tuple[tuple[str, str], ...] = ()  # sorted by key
    match_expressions: tuple[LabelRequirement, ...] = ()


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """Bounds of the engine's replicas. Read by the operator only."""

    provider: Provider = Provider.KEDA
    min_replicas: int = 1
    max_replicas: int | None = None  # None only where nobody scales
    cold_start_s: float | None = None  # from the order to the first token of a new replica; None: measured


@dataclass(frozen=True, slots=True)
class Injection:
    """How pods are given their gate. Read by the operator only."""

    container: str | None = None  # the engine's; None: found out
    takeover: Takeover = Takeover.AUTO
    upstream_port: int | None = None  # where the engine listens; with NamedPort and Explicit
    failure_policy: FailurePolicy = FailurePolicy.IGNORE


@dataclass(frozen=True, slots=True)
class GateSpec:
    """The gate's container. None and empty: as the installation says. Read by the operator only."""

    image: str | None = None
    image_pull_policy: str | None = None
    requests: tuple[tuple[str, str], ...] = ()  # resource and quantity
    limits: tuple[tuple[str, str], ...] = ()
    extra_args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Policy:
    """The `spec` of an AdmissionPolicy. `Policy()` is one class without an SLO, enforced."""

    mode: Mode = Mode.ENFORCE
    engine: EngineSpec = EngineSpec()
    classes: tuple[ClassPolicy, ...] = (ClassPolicy("default"),)
    classify: Classify = Classify()
    selector: Selector | None = None
    autoscaling: Autoscaling | None = None
    injection: Injection = Injection()
    gate: GateSpec = GateSpec()
    drain_timeout_s: float = DEFAULT_DRAIN_TIMEOUT_S  # how long a pod's end waits for what is in flight
    rollout: Rollout = Rollout.MANUAL

    def __post_init__(self) -> None:
        if not self.classes:
            raise ValueError("a policy has at least one class")
        names = self.class_names
        if len(set(names)) != len(names):
            raise ValueError(f"class names are unique: {names}")
        if not self.classify.default:
            object.__setattr__(self, "classify", replace(self.classify, default=names[0]))
        for name in (self.classify.default, *(rule.class_name for rule in self.classify.rules)):
            if name not in names:
                raise ValueError(f"no class is named {name!r}; there are {names}")

    @property
    def class_names(self) -> tuple[str, ...]:
        """In the policy's order, which is the order of class indices everywhere."""
        return tuple(one.name for one in self.classes)

    def class_index(self, name: str) -> int:
        """The index of the class; ValueError where there is none."""
        return self.class_names.index(name)
