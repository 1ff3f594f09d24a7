"""What one gate says of itself, read and checked: `GET /report` on its admin port (docs/metrics.md).

A gate is not trusted blindly: it shares its pod with whatever the user runs there. Everything is bounded, a number
is finite and not negative, and what does not fit the contract is a `ReportError`, never a default. Fields that are
not known here are passed over: a newer gate may say more.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

#: The version of the contract that is read here.
REPORT_VERSION: Final = 1
#: A report with 64 classes and every reason is about 60 kB.
MAX_REPORT_BYTES: Final = 262_144
MAX_CLASSES: Final = 64
MAX_REASONS: Final = 64
MAX_PROBLEMS: Final = 20
MAX_TEXT_CHARS: Final = 500
#: No count of a process gets past this.
MAX_COUNT: Final = 2**63

T = TypeVar("T")


class ReportError(ValueError):
    """What a gate answered is no report; one line says where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassReport:
    """Counts of one class since the start of the gate's process; `waiting` and `running` are of now.

    Work is in prompt tokens, an output token as two.
    """

    offered: int
    retries: int
    admitted: int
    queued: int
    served: int
    served_in_slo: int
    rejected: Mapping[str, int]
    evicted: Mapping[str, int]
    failed: Mapping[str, int]
    waiting: int
    running: int
    work_offered: float
    work_predicted: float
    work_served: float
    work_failed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityReport:
    """What the replica was measured to do while it had as much as it can take. None: not known."""

    work_per_s: float | None
    pressed_s: float
    ended: float
    age_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """One gate at one moment. None: not known."""

    instance: str  # of the process: with another one, all counts began anew
    uptime_s: float
    content_hash: str
    generation: int
    mode: str
    error: str | None
    problems: tuple[str, ...]
    engine_status: str
    engine_slots: int | None
    engine_running: int
    engine_reported_running: int | None
    engine_reported_waiting: int | None
    engine_reported_age_s: float | None
    draining: bool
    classes: Mapping[str, ClassReport]
    work_waiting: float
    pressed: bool
    pressed_s: float
    capacity: CapacityReport


def parse_report(data: bytes) -> GateReport:
    """The report in an answer's body.

    Raises:
        ReportError: it is none, or of another version.
    """
    if len(data) > MAX_REPORT_BYTES:
        raise ReportError(f"the report has {len(data)} bytes, and {MAX_REPORT_BYTES} is the most")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ReportError("the report is not JSON") from error
    report = _Object(document, "report")
    version = report.get("version", _count)
    if version != REPORT_VERSION:
        raise ReportError(f"the report is of version {version}, and {REPORT_VERSION} is understood")
    policy, engine, work = report.object("policy"), report.object("engine"), report.object("work")
    return GateReport(
        instance=report.get("instance", _text),
        uptime_s=report.get("uptime_s", _number),
        content_hash=policy.get("content_hash", _text),
        generation=policy.get("generation", _count),
        mode=policy.get("mode", _text),
        error=policy.maybe("error", _text),
        problems=policy.get("problems", _texts),
        engine_status=engine.get("status", _text),
        engine_slots=engine.maybe("slots", _count),
        engine_running=engine.get("running", _count),
        engine_reported_running=engine.maybe("reported_running", _count),
        engine_reported_waiting=engine.maybe("reported_waiting", _count),
        engine_reported_age_s=engine.maybe("reported_age_s", _number),
        draining=report.get("draining", _flag),
        classes={name: _class(one) for name, one in report.object("classes").objects(MAX_CLASSES)},
        work_waiting=work.get("waiting", _number),
        pressed=work.get("pressed", _flag),
        pressed_s=work.get("pressed_s", _number),
        capacity=_capacity(work.object("capacity")),
    )


def _class(one: "_Object") -> ClassReport:
    return ClassReport(
        offered=one.get("offered", _count),
        retries=one.get("retries", _count),
        admitted=one.get("admitted", _count),
        queued=one.get("queued", _count),
        served=one.get("served", _count),
        served_in_slo=one.get("served_in_slo", _count),
        rejected=one.get("rejected", _counts),
        evicted=one.get("evicted", _counts),
        failed=one.get("failed", _counts),
        waiting=one.get("waiting", _count),
        running=one.get("running", _count),
        work_offered=one.get("work_offered", _number),
        work_predicted=one.get("work_predicted", _number),
        work_served=one.get("work_served", _number),
        work_failed=one.get("work_failed", _number),
    )


def _capacity(one: "_Object") -> CapacityReport:
    return CapacityReport(
        work_per_s=one.maybe("work_per_s", _number),
        pressed_s=one.get("pressed_s", _number),
        ended=one.get("ended", _number),
        age_s=one.maybe("age_s", _number),
    )


class _Object:
    """A JSON object and where it stands; what is missing or of a wrong kind is said by its path."""

    def __init__(self, value: object, path: str) -> None:
        if not isinstance(value, dict):
            raise ReportError(f"{path} is no object")
        self._value = value
        self._path = path

    def get(self, key: str, kind: Callable[[object], T | None]) -> T:
        found = self.maybe(key, kind)
        if found is None:
            raise ReportError(f"{self._path}.{key} is null")
        return found

    def maybe(self, key: str, kind: Callable[[object], T | None]) -> T | None:
        if key not in self._value:
            raise ReportError(f"{self._path}.{key} is missing")
        value = self._value[key]
        if value is None:
            return None
        found = kind(value)
        if found is None:
            raise ReportError(f"{self._path}.{key} is not what it should be")
        return found

    def object(self, key: str) -> "_Object":
        return _Object(self._value.get(key), f"{self._path}.{key}")

    def objects(self, most: int) -> list[tuple[str, "_Object"]]:
        if len(self._value) > most:
            raise ReportError(f"{self._path} has {len(self._value)} entries, and {most} is the most")
        return [
            (str(key)[:MAX_TEXT_CHARS], _Object(one, f"{self._path}.{key}"))
            for key, one in self._value.items()
        ]


# Kinds: the value as it is used, or None where it is no such thing.


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= MAX_COUNT and math.isfinite(value) else None


def _count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value <= MAX_COUNT else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return value[:MAX_TEXT_CHARS] if isinstance(value, str) else None


def _texts(value: object) -> tuple[str, ...] | None:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        return None
    return tuple(one[:MAX_TEXT_CHARS] for one in value[:MAX_PROBLEMS])


def _counts(value: object) -> dict[str, int] | None:
    if not isinstance(value, dict) or len(value) > MAX_REASONS:
        return None
    counts = {str(key): _count(one) for key, one in value.items()}
    return (
        {key: one for key, one in counts.items() if one is not None} if None not in counts.values() else None
    )
