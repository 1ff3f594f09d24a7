"""`/metrics`: what the core counts anyway, in Prometheus' words.

Nothing here is on the path of a request: `GateCollector` reads plain numbers when it is scraped, on the event
loop, all of them between two events; so the numbers of one scrape close (offered = served + rejected + evicted +
failed + in flight). Making text of them takes some milliseconds; `Exposition` gives the loop a turn after each
family, so that no stream's token waits for more than one. `FAMILIES` is the list of all of them, and
docs/metrics.md says the same to people; a test compares the two.

Invariants:
- Unknown is absent, never 0. A count of what has not happened is 0 from the start, so that rates work.
- Labels are bounded: classes by the policy (16, and `MAX_CLASS_RECORDS` ever counted), all others by an enum or a
  table of ours. What clients send (models, names, paths) is no label.
- Base units (seconds, tokens, bytes, ratios); times are of the gate's own clock.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import accumulate
from platform import python_version
from time import time
from typing import Final, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry

from sluicegate_core.capacity import CapacityMeter
from sluicegate_core.stats import ClassStats, Histogram
from sluicegate_core.vocabulary import EngineStatus, Reason
from sluicegate_sidecar.http.errors import KINDS
from sluicegate_sidecar.state import GateProcess

#: The package's, written out: `importlib.metadata` would cost a megabyte. A test holds it to pyproject.toml's.
VERSION: Final = "0.1.0"

#: Why a request can be refused at arrival, leave the line, or fail: all of them have a series from the start.
REJECTED: Final = (
    Reason.DRAINING, Reason.ENGINE_DOWN, Reason.SLO_UNREACHABLE, Reason.TTFT, Reason.QUEUE_TIME,
    Reason.QUEUE_FULL,
)  # fmt: skip
EVICTED: Final = (Reason.DEADLINE, Reason.CLIENT_GONE, Reason.DRAINED)
FAILED: Final = (
    Reason.CLIENT_GONE, Reason.ENGINE_REFUSED, Reason.ENGINE_RESET_EARLY, Reason.ENGINE_RESET_MIDSTREAM,
    Reason.ENGINE_HUNG, Reason.ENGINE_BAD_RESPONSE, Reason.ENGINE_BUSY, Reason.ENGINE_ERROR, Reason.ABORTED,
)  # fmt: skip

#: For a kind of protocol error that the data path's table does not have.
OTHER_KIND: Final = "other"
#: Of the policy's hash, as a label: enough to tell two apart.
HASH_CHARS: Final = 12


class Kind(StrEnum):
    """Prometheus' types of metrics."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. `name` is what is exported, `_total` and `_info` included."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str

    def metric(self) -> Metric:
        """The family without samples."""
        match self.kind:
            case Kind.COUNTER:
                return CounterMetricFamily(self.name, self.help, labels=self.labels)
            case Kind.GAUGE:
                return GaugeMetricFamily(self.name, self.help, labels=self.labels)
            case Kind.HISTOGRAM:
                return HistogramMetricFamily(self.name, self.help, labels=self.labels)
            case Kind.INFO:
                return InfoMetricFamily(self.name.removesuffix("_info"), self.help, labels=())


def _family(kind: Kind, name: str, labels: str, text: str) -> Family:
    return Family(f"sluicegate_{name}", kind, tuple(labels.split()), text)


_counter = partial(_family, Kind.COUNTER)
_gauge = partial(_family, Kind.GAUGE)
_histogram = partial(_family, Kind.HISTOGRAM)
_info = partial(_family, Kind.INFO)

FAMILIES: Final[tuple[Family, ...]] = (
    # Requests, by class. The counts close: offered = served + rejected + evicted + failed + waiting + running.
    _counter("requests_offered_total", "class", "Requests that arrived, retries included."),
    _counter("requests_retries_total", "class", "Requests that arrived as retries of an earlier one."),
    _counter("requests_admitted_total", "class", "Requests handed to the engine."),
    _counter("requests_queued_total", "class", "Requests that had to wait in the gate."),
    _counter("requests_rejected_total", "class reason", "Requests refused at arrival."),
    _counter("requests_evicted_total", "class reason", "Requests that left the line unserved."),
    _counter("requests_failed_total", "class reason", "Requests handed to the engine and not served."),
    _counter("requests_served_total", "class", "Requests whose answer reached the client whole."),
    _counter("requests_served_in_slo_total", "class", "Requests served within the SLO of their class: goodput."),
    _gauge("requests_waiting", "class", "Requests waiting in the gate now."),
    _gauge("requests_running", "class", "Requests with the engine now."),
    _counter("requests_ungated_total", "", "Requests to paths that are not gated; they pass."),
    # Times, by class.
    _histogram("queue_delay_seconds", "class", "Arrival to hand-over, of requests handed to the engine."),
    _histogram("ttft_seconds", "class", "Arrival to first token."),
    _histogram("inter_token_seconds", "class", "Gap between tokens of a stream, for each piece that came."),
    _histogram("request_duration_seconds", "class", "Arrival to end of the answer, of requests served."),
    _histogram("ttft_prediction_ratio", "class", "TTFT predicted at arrival over the actual: the gate's error."),
    _gauge("class_slo_ttft_seconds", "class", "TTFT that the policy promises the class."),
    _gauge("class_slo_inter_token_seconds", "class", "Gap between tokens that the policy promises the class."),
    # Tokens, by class.
    _counter("prompt_tokens_total", "class", "Prompt tokens of served requests; estimated where not reported."),
    _counter("output_tokens_total", "class", "Output tokens of served requests, as reported or counted."),
    _counter("work_offered_total", "class", "Estimated work of what was offered, each demand counted once."),
    # The engine.
    _gauge("engine_status", "status", "1 for the state in which the engine was last found, 0 for the others."),
    _gauge("engine_slots", "", "Requests that the engine runs at once: stated, reported or found out."),
    _gauge("engine_slots_kept", "class", "Slots kept for the class, those it occupies included."),
    _gauge("engine_prefilling_requests", "", "Requests with the engine that have no token yet."),
    _gauge("engine_prefill_backlog_tokens", "", "Prompt tokens of those."),
    _gauge("engine_reported_running", "", "Requests running, by the engine's own word."),
    _gauge("engine_reported_waiting", "", "Requests in the engine's own queue, by its own word."),
    _gauge("engine_reported_kv_used_ratio", "", "Fraction of the KV cache in use, by the engine's own word."),
    _gauge("engine_reported_kv_capacity_tokens", "", "Tokens that the KV cache holds, by the engine's word."),
    _gauge("engine_reported_age_seconds", "", "Age of the engine's last word."),
    # What has been learned.
    _gauge("learned_prefill_seconds_per_token", "", "Service until the first token, for each prompt token."),
    _gauge("learned_prefill_overhead_seconds", "", "Service until the first token beside that."),
    _gauge("learned_prefill_error_ratio", "", "Mean error of predicted service, relative to it."),
    _gauge("learned_drain_requests_per_second", "class", "Hand-overs a second while the class has waiting ones."),
    _gauge("learned_holding_seconds", "class", "Mean time from hand-over to end of the answer."),
    _gauge("learned_next_gap_seconds", "", "Predicted gap between tokens with one more stream."),
    _gauge("class_load_erlangs", "class", "Offered load: arrivals a second times mean holding time."),
    # What this replica can do.
    _gauge("capacity_work_per_second", "", "Work a second that was measured while it had as much as it can take."),
    _counter("pressed_seconds_total", "", "Time in which it had as much as it can take."),
    # Policy and process.
    _gauge("policy_generation", "", "Of the policy in force; grows with each that is taken up."),
    _gauge("policy_last_reload_success", "", "0 while the policy's file is one that was refused."),
    _gauge("policy_loaded_timestamp_seconds", "", "When the policy in force was loaded, Unix time."),
    _info("policy_info", "hash mode", "The policy in force."),
    _gauge("draining", "", "1 from the beginning of a drain."),
    _info("build_info", "version python", "The gate's version."),
    _histogram("event_loop_lag_seconds", "", "How late a timer fires: what any event may have to wait."),
    # The data path.
    _counter("protocol_errors_total", "kind", "Requests answered by the data path: not HTTP, or over a limit."),
    _counter("client_connections_accepted_total", "", "Client connections accepted."),
    _gauge("client_connections", "", "Client connections open now."),
    _gauge("request_body_bytes", "", "Bytes of request bodies held now."),
    _counter("engine_connects_total", "", "Connections to the engine made, or tried."),
    _counter("engine_retries_total", "", "Requests sent again after an idle connection proved closed."),
    _gauge("engine_connections", "", "Connections to the engine open now."),
    _gauge("engine_connections_idle", "", "Those of them that wait for a request."),
)  # fmt: skip

#: What `prometheus_client` itself exports of the process, where `/proc` is readable.
PROCESS_FAMILIES: Final = (
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "process_virtual_memory_bytes",
    "process_start_time_seconds",
    "process_open_fds",
    "process_max_fds",
)

#: The last line of a page in OpenMetrics.
EOF_LINE: Final = b"# EOF\n"


class HistogramReading(NamedTuple):
    """A histogram as it was at one moment."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


Labels = tuple[str, ...]
Value = float | Histogram
Reading = float | HistogramReading


class GateCollector(Collector):
    """Reads one gate when scraped. Call it on the gate's event loop only."""

    def __init__(self, process: GateProcess, loop_lag_s: Histogram, capacity: CapacityMeter) -> None:
        """
        Args:
            process: whose gate, data port and policy are read.
            loop_lag_s: filled by who samples it.
            capacity: likewise.
        """
        self._process = process
        self._loop_lag_s = loop_lag_s
        self._capacity = capacity
        self._versions = (VERSION, python_version())
        self._wall_offset_s = time() - process.gate.clock()

    def collect(self) -> Iterator[Metric]:
        """Every family that has a value now, in the order of `FAMILIES`: all are read before the first is built."""
        readings: dict[str, list[tuple[Labels, Reading]]] = {}
        for name, labels, value in self._read():
            if value is not None:
                reading = (
                    HistogramReading(value.bounds, tuple(value.counts), value.total)
                    if isinstance(value, Histogram)
                    else value
                )
                readings.setdefault(f"sluicegate_{name}", []).append((labels, reading))
        for family in FAMILIES:
            samples = readings.pop(family.name, None)
            if samples:
                yield _filled(family, samples)
        assert not readings, f"not in FAMILIES: {list(readings)}"

    def _read(self) -> Iterator[tuple[str, Labels, Value | None]]:
        for name, stats in self._process.gate.controller.stats.items():
            yield from _class_counts((name,), stats)
        yield from self._classes()
        yield from self._engine()
        yield from self._learned()
        yield from self._gate()
        yield from self._http()

    def _classes(self) -> Iterator[tuple[str, Labels, Value | None]]:
        """Gauges of the classes of the policy in force."""
        gate = self._process.gate
        controller, now = gate.controller, gate.clock()
        for index, policy in enumerate(controller.policy.classes):
            labels = (policy.name,)
            times = controller.predictor.classes[index]
            drain = times.drain.rates(now)
            yield "requests_waiting", labels, controller.line.queues[index].count
            yield "requests_running", labels, controller.engine.running_of[index]
            yield "class_slo_ttft_seconds", labels, policy.slo.ttft_s
            yield "class_slo_inter_token_seconds", labels, policy.slo.itl_s
            yield "engine_slots_kept", labels, controller.kept_slots(now, index)
            yield "learned_drain_requests_per_second", labels, None if drain is None else drain[1]
            yield "learned_holding_seconds", labels, times.holding_s.value
            if times.holding_s.value is not None:
                yield "class_load_erlangs", labels, controller.predictor.load(now, index)

    def _engine(self) -> Iterator[tuple[str, Labels, Value | None]]:
        gate = self._process.gate
        engine, now = gate.controller.engine, gate.clock()
        for status in EngineStatus:
            yield "engine_status", (status.value,), float(engine.status is status)
        yield "engine_slots", (), engine.slots(now)
        yield "engine_prefilling_requests", (), len(engine.pending)
        yield "engine_prefill_backlog_tokens", (), engine.pending_tokens
        yield "engine_reported_age_seconds", (), engine.snapshot_age_s(now)
        reported = engine.fresh_snapshot(now)
        if reported is not None:
            yield "engine_reported_running", (), reported.running
            yield "engine_reported_waiting", (), reported.waiting
            yield "engine_reported_kv_used_ratio", (), reported.kv_used
            yield "engine_reported_kv_capacity_tokens", (), reported.kv_capacity_tokens

    def _learned(self) -> Iterator[tuple[str, Labels, Value | None]]:
        controller = self._process.gate.controller
        service = controller.predictor.service
        if service.known:
            yield "learned_prefill_seconds_per_token", (), service.slope
            yield "learned_prefill_overhead_seconds", (), service.intercept
            yield "learned_prefill_error_ratio", (), service.relative_deviation
        yield "learned_next_gap_seconds", (), controller.pace.next_gap_s()
        yield "capacity_work_per_second", (), self._capacity.capacity(self._process.gate.clock()).work_per_s
        yield "pressed_seconds_total", (), self._capacity.pressed_s

    def _gate(self) -> Iterator[tuple[str, Labels, Value | None]]:
        gate, reload = self._process.gate, self._process.reload
        yield "requests_ungated_total", (), gate.ungated
        yield from _by_kind(gate.protocol_errors)
        yield "policy_generation", (), reload.generation
        yield "policy_last_reload_success", (), float(reload.last_error is None)
        yield "policy_loaded_timestamp_seconds", (), self._wall_offset_s + reload.loaded_at
        yield "policy_info", (reload.content_hash[:HASH_CHARS], reload.mode.value), 1.0
        yield "draining", (), float(self._process.leaving)
        yield "build_info", self._versions, 1.0
        yield "event_loop_lag_seconds", (), self._loop_lag_s

    def _http(self) -> Iterator[tuple[str, Labels, Value | None]]:
        server = self._process.server
        if server is None:
            return
        pool = server.pool
        yield "client_connections_accepted_total", (), server.accepted
        yield "client_connections", (), server.open_connections
        yield "request_body_bytes", (), server.body_bytes
        yield "engine_connects_total", (), pool.connects
        yield "engine_retries_total", (), pool.retries
        yield "engine_connections", (), pool.open_connections
        yield "engine_connections_idle", (), pool.idle_connections


def _class_counts(labels: Labels, stats: ClassStats) -> Iterator[tuple[str, Labels, Value | None]]:
    yield "requests_offered_total", labels, stats.offered
    yield "requests_retries_total", labels, stats.retries
    yield "requests_admitted_total", labels, stats.started
    yield "requests_queued_total", labels, stats.queued
    yield "requests_served_total", labels, stats.served
    yield "requests_served_in_slo_total", labels, stats.served_in_slo
    yield from _by_reason("requests_rejected_total", labels, stats.rejected, REJECTED)
    yield from _by_reason("requests_evicted_total", labels, stats.evicted, EVICTED)
    yield from _by_reason("requests_failed_total", labels, stats.failed, FAILED)
    yield "queue_delay_seconds", labels, stats.queue_delay_s
    yield "ttft_seconds", labels, stats.ttft_s
    yield "inter_token_seconds", labels, stats.itl_s
    yield "request_duration_seconds", labels, stats.total_s
    yield "ttft_prediction_ratio", labels, stats.prediction_ratio
    yield "prompt_tokens_total", labels, stats.tokens_in
    yield "output_tokens_total", labels, stats.tokens_out
    yield "work_offered_total", labels, stats.work_offered


def _by_reason(
    name: str, labels: Labels, counts: Counter[Reason], expected: Sequence[Reason]
) -> Iterator[tuple[str, Labels, Value]]:
    for reason in dict.fromkeys((*expected, *counts)):
        yield name, (*labels, reason.value), counts[reason]


def _by_kind(counts: Counter[str]) -> Iterator[tuple[str, Labels, Value]]:
    for kind in KINDS:
        yield "protocol_errors_total", (kind,), counts[kind]
    unknown = sum(count for kind, count in counts.items() if kind not in KINDS)
    yield "protocol_errors_total", (OTHER_KIND,), unknown


def _filled(family: Family, samples: Iterable[tuple[Labels, Reading]]) -> Metric:
    metric = family.metric()
    for labels, value in samples:
        if isinstance(metric, HistogramMetricFamily):
            assert isinstance(value, HistogramReading)
            metric.add_metric(labels, _buckets(value), value.total)
        elif isinstance(metric, InfoMetricFamily):
            metric.add_metric((), dict(zip(family.labels, labels, strict=True)))
        else:
            assert isinstance(metric, CounterMetricFamily | GaugeMetricFamily)
            assert not isinstance(value, HistogramReading)
            metric.add_metric(labels, value)
    return metric


def _buckets(histogram: HistogramReading) -> list[tuple[str, float]]:
    """Cumulated counts with their upper bounds, as Prometheus wants them."""
    counts = (float(count) for count in accumulate(histogram.counts))
    return list(zip((*map(str, histogram.bounds), "+Inf"), counts, strict=True))


class _One(Collector):
    """A single family, for an encoder that takes collectors."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


class Exposition:
    """A registry of its own for one gate, and the encodings that a scraper may ask for."""

    def __init__(self, process: GateProcess, loop_lag_s: Histogram, capacity: CapacityMeter) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(GateCollector(process, loop_lag_s, capacity))
        ProcessCollector(registry=self._registry)

    async def render(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type: OpenMetrics where `accept` asks for it, else Prometheus' text."""
        encode, content_type = choose_encoder(accept)
        pages: list[bytes] = []
        end = b""
        for metric in self._registry.collect():
            page = encode(_One(metric))
            if page.endswith(EOF_LINE):
                page, end = page.removesuffix(EOF_LINE), EOF_LINE
            pages.append(page)
            await asyncio.sleep(0)
        return b"".join((*pages, end)), content_type
