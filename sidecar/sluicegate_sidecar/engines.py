"""What is known of each inference server by name: where it answers, and how its metrics are read.

Pure tables and parsers; the asking is done in `probe.py`. A metrics page is not parsed but searched: a page
of vLLM's has some 100 KB in a thousand series, of which the gate wants eight, each second, in between the
tokens of its streams.

Invariants:
- Unknown is None, never zero: a metric that is absent, or not a number, was not reported.
- Several series of one name (data-parallel ranks, models) are one engine to the gate: counts add up,
  fractions are averaged.
- A page is text from another process: every search is bounded, and nothing is raised on any text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from sluicegate_core.effects import EngineSnapshot
from sluicegate_core.policy import EngineType

#: Series of one name that are read: ranks times models of the largest deployments.
MAX_SERIES: Final = 256
#: The longest line that is read: vLLM's info series carry some fifty labels.
MAX_SERIES_BYTES: Final = 8192


class EngineReading(NamedTuple):
    """What an engine said of itself; None where it said nothing.

    Attributes:
        slots: sequences that it can run at once.
        running: requests that it works on.
        waiting: requests in its own queue.
        kv_capacity_tokens: tokens that its KV cache holds.
        kv_used_fraction: fraction of that in use, 0 to 1.
        preemptions_total: requests that it put back for want of KV, since its start.
        prompt_tokens_total: prompt tokens processed, since its start.
        generation_tokens_total: tokens generated, since its start.
        context_tokens: tokens that one request may have, prompt and output.
    """

    slots: int | None = None
    running: int | None = None
    waiting: int | None = None
    kv_capacity_tokens: int | None = None
    kv_used_fraction: float | None = None
    preemptions_total: int | None = None
    prompt_tokens_total: int | None = None
    generation_tokens_total: int | None = None
    context_tokens: int | None = None

    def with_info(self, info: EngineReading) -> EngineReading:
        """Return this reading, with what it lacks taken from `info` (what the engine said at its start)."""
        return self._replace(
            **{field: value for field, value in info._asdict().items() if getattr(self, field) is None}
        )

    def snapshot(self) -> EngineSnapshot:
        """Return the part of it that the core decides on."""
        return EngineSnapshot(
            slots=self.slots,
            running=self.running,
            waiting=self.waiting,
            kv_capacity_tokens=self.kv_capacity_tokens,
            kv_used=self.kv_used_fraction,
        )


class Metric(NamedTuple):
    """Where one number stands: the first of `names` that is there, of the series that carry `label`."""

    names: tuple[str, ...]
    label: str = ""
    mean: bool = False  # a fraction: averaged over the series, not added up


class Product(NamedTuple):
    """A number that is the product of two: of two metrics, or of two labels of one info series."""

    left: Metric
    right: Metric
    info: str = ""
    labels: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """How an engine is asked.

    Attributes:
        health_path: 200 when it serves; 503 while it loads.
        metrics_path: None where it has no metrics.
        metrics_port: where it is not the port of requests.
        info_path: a JSON document of constants, read once after each start; None where there is none.
        marks: prefixes of metric names by which its page is known.
        metrics: field of `EngineReading` -> where it stands.
        capacities: ways to compute the KV capacity in tokens; the first that is there counts.
    """

    health_path: str = "/health"
    metrics_path: str | None = "/metrics"
    metrics_port: int | None = None
    info_path: str | None = None
    marks: tuple[str, ...] = ()
    metrics: Mapping[str, Metric]
    capacities: tuple[Product, ...] = ()


def _metric(*names: str, label: str = "", mean: bool = False) -> Metric:
    return Metric(names, label, mean)


def _labels(info: str, left: str, right: str) -> Product:
    return Product(_metric(), _metric(), info, (left, right))


_NO_METRICS: Final[dict[str, Metric]] = {}
_TRT_REQUESTS: Final = "nv_trt_llm_request_metrics"
_TRT_BLOCKS: Final = "nv_trt_llm_kv_cache_block_metrics"

PROFILES: Final[dict[EngineType, EngineProfile]] = {
    EngineType.VLLM: EngineProfile(
        marks=("vllm:",),
        metrics={
            "running": _metric("vllm:num_requests_running"),
            "waiting": _metric("vllm:num_requests_waiting"),
            # The second name is of servers before the V1 engine.
            "kv_used_fraction": _metric("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", mean=True),
            "preemptions_total": _metric("vllm:num_preemptions_total"),
            "prompt_tokens_total": _metric("vllm:prompt_tokens_total"),
            "generation_tokens_total": _metric("vllm:generation_tokens_total"),
        },
        capacities=(_labels("vllm:cache_config_info", "block_size", "num_gpu_blocks"),),
    ),
    EngineType.LLAMA_CPP: EngineProfile(
        info_path="/props",
        marks=("llamacpp:",),
        metrics={
            "running": _metric("llamacpp:requests_processing"),
            "waiting": _metric("llamacpp:requests_deferred"),
            "kv_used_fraction": _metric("llamacpp:kv_cache_usage_ratio", mean=True),  # older servers
            "prompt_tokens_total": _metric("llamacpp:prompt_tokens_total"),
            "generation_tokens_total": _metric("llamacpp:tokens_predicted_total"),
        },
    ),
    EngineType.SGLANG: EngineProfile(
        marks=("sglang:",),
        metrics={
            "slots": _metric("sglang:max_running_requests"),
            "running": _metric("sglang:num_running_reqs"),
            "waiting": _metric("sglang:num_queue_reqs"),
            "kv_capacity_tokens": _metric("sglang:max_total_num_tokens"),
            "kv_used_fraction": _metric("sglang:token_usage", mean=True),
            "prompt_tokens_total": _metric("sglang:prompt_tokens_total"),
            "generation_tokens_total": _metric("sglang:generation_tokens_total"),
        },
        capacities=(_labels("sglang:cache_config_info", "page_size", "num_pages"),),
    ),
    EngineType.TGI: EngineProfile(
        info_path="/info",
        marks=("tgi_",),
        metrics={
            "running": _metric("tgi_batch_current_size"),
            "waiting": _metric("tgi_queue_size"),
            "prompt_tokens_total": _metric("tgi_request_input_length_sum"),
            "generation_tokens_total": _metric("tgi_request_generated_tokens_sum"),
        },
    ),
    EngineType.TENSORRT_LLM: EngineProfile(
        metrics_path="/prometheus/metrics",
        marks=("trtllm_", "trtllm:"),
        metrics={
            "running": _metric("trtllm_num_requests_running"),
            "waiting": _metric("trtllm_num_requests_waiting"),
            "kv_used_fraction": _metric("trtllm_kv_cache_utilization", mean=True),
        },
        capacities=(
            Product(
                _metric("trtllm_kv_cache_max_blocks"), _metric("trtllm_kv_cache_tokens_per_block", mean=True)
            ),
        ),
    ),
    EngineType.TRITON: EngineProfile(
        health_path="/v2/health/ready",
        metrics_port=8002,
        marks=("nv_inference_", "nv_trt_llm_"),
        metrics={
            "running": _metric(_TRT_REQUESTS, label='request_type="scheduled"'),
            "waiting": _metric(_TRT_REQUESTS, label='request_type="waiting"'),
            "kv_used_fraction": _metric(_TRT_BLOCKS, label='kv_cache_block_type="fraction"', mean=True),
        },
        capacities=(
            Product(
                _metric(_TRT_BLOCKS, label='kv_cache_block_type="max"'),
                _metric(_TRT_BLOCKS, label='kv_cache_block_type="tokens_per"', mean=True),
            ),
        ),
    ),
    EngineType.OLLAMA: EngineProfile(health_path="/", metrics_path=None, metrics=_NO_METRICS),
    # Any answer means that it is up; a 404 does, too.
    EngineType.OTHER: EngineProfile(metrics_path=None, metrics=_NO_METRICS),
}


# --- Metrics ----------------------------------------------------------------------------------------------


def parse_metrics(engine: EngineType, page: str) -> EngineReading:
    """Read an engine's page of metrics (Prometheus text format)."""
    profile = PROFILES.get(engine)
    if profile is None:
        return EngineReading()
    values: dict[str, Any] = {}
    for field, metric in profile.metrics.items():
        value = _value(page, metric)
        if value is not None:
            values[field] = value if metric.mean else int(value)
    if values.get("kv_capacity_tokens") is None:
        values["kv_capacity_tokens"] = _capacity(page, profile.capacities)
    used = values.get("kv_used_fraction")
    if used is not None:
        values["kv_used_fraction"] = min(used, 1.0)
    return EngineReading(**values)


def _capacity(page: str, products: tuple[Product, ...]) -> int | None:
    for product in products:
        if product.info:
            left, right = product.labels
            found = [
                _label_number(labels, left) * _label_number(labels, right)
                for labels, _ in _series(page, product.info)
            ]
            tokens = sum(found) if found and all(found) else None
        else:
            count, size = _value(page, product.left), _value(page, product.right)
            tokens = int(count * size) if count and size else None
        if tokens:
            return tokens
    return None


def _value(page: str, metric: Metric) -> float | None:
    """Return a metric's value over its series; None where there is none, or where one is no usable number."""
    for name in metric.names:
        found = [number for labels, number in _series(page, name) if metric.label in labels]
        if found:
            total = sum(found)
            if not math.isfinite(total) or total < 0:
                return None
            return total / len(found) if metric.mean else total
    return None


def _series(page: str, name: str) -> list[tuple[str, float]]:
    """Return (labels, value) of each series of exactly this name."""
    found: list[tuple[str, float]] = []
    size = len(name)
    at = page.find(name)
    while at >= 0 and len(found) < MAX_SERIES:
        after = at + size
        if (at == 0 or page[at - 1] == "\n") and page[after : after + 1] in ("{", " "):
            end = page.find("\n", after, after + MAX_SERIES_BYTES)
            line = page[after : end if end >= 0 else after + MAX_SERIES_BYTES]
            labels, separator, rest = line.rpartition("}")
            if line[0] == "{" and not separator:
                return []
            found.append((labels, _number(rest.split())))
        at = page.find(name, after)
    return found


def _number(words: list[str]) -> float:
    """Return the first word as a number (a time stamp may follow it); NaN where it is none."""
    try:
        return float(words[0])
    except (ValueError, IndexError):
        return math.nan


def _label_number(labels: str, name: str) -> int:
    """Return a label's value; 0 where it is no number (vLLM writes `None` until it knows)."""
    found = re.search(rf'[{{,]{name}="(\d{{1,15}})"', labels)
    return int(found[1]) if found else 0


# --- Constants --------------------------------------------------------------------------------------------


def parse_info(engine: EngineType, document: bytes) -> EngineReading:
    """Read what an engine says of its constants: llama.cpp's `/props`, TGI's `/info`."""
    info = _json(document)
    if engine is EngineType.LLAMA_CPP:
        settings = info.get("default_generation_settings")
        context = settings.get("n_ctx") if isinstance(settings, dict) else None
        return EngineReading(slots=_positive(info.get("total_slots")), context_tokens=_positive(context))
    if engine is EngineType.TGI:
        return EngineReading(
            kv_capacity_tokens=_positive(info.get("max_batch_total_tokens")),
            context_tokens=_positive(info.get("max_total_tokens")),
        )
    return EngineReading()


def _json(document: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(document)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _positive(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


# --- Which engine it is -----------------------------------------------------------------------------------


class Answer(NamedTuple):
    """One HTTP answer: status (0 where there was none), the `Server` header, and the body."""

    status: int = 0
    server: str = ""
    body: bytes = b""


#: What is asked of an unknown engine, in this order, until one answer tells.
DETECTION_PATHS: Final = (
    "/props",
    "/metrics",
    "/prometheus/metrics",
    "/get_server_info",
    "/info",
    "/v2",
    "/version",
    "/api/version",
)


def detect(path: str, answer: Answer) -> EngineType | None:
    """Return the engine that gives this answer to this path; None where it could be any.

    `/version` tells of vLLM only because whatever else has such a path has told before.
    """
    if answer.server.lower().startswith("llama.cpp"):
        return EngineType.LLAMA_CPP
    if answer.status != 200:
        return None
    if path in ("/metrics", "/prometheus/metrics"):
        page = answer.body.decode("utf-8", "replace")
        for engine, profile in PROFILES.items():
            if any(page.startswith(mark) or f"\n{mark}" in page for mark in profile.marks):
                return engine
        return None
    info = _json(answer.body)
    for key_of_path, key, engine in _SIGNS:
        if path == key_of_path and key in info:
            return engine
    if path == "/v2" and str(info.get("name")).lower() == "triton":
        return EngineType.TRITON
    return None


_SIGNS: Final = (
    ("/props", "total_slots", EngineType.LLAMA_CPP),
    ("/get_server_info", "max_total_num_tokens", EngineType.SGLANG),
    ("/get_server_info", "internal_states", EngineType.SGLANG),
    ("/info", "max_concurrent_requests", EngineType.TGI),
    ("/version", "version", EngineType.VLLM),
    ("/api/version", "version", EngineType.OLLAMA),
)
