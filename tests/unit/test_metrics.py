"""`/metrics`: what is exported is documented, true, bounded, and absent where it is unknown."""

import asyncio
import math
import re
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.unit.observed import BATCH, Observed

from sluicegate_core.capacity import CapacityMeter
from sluicegate_core.effects import EngineSnapshot
from sluicegate_core.policy import ClassPolicy, Policy
from sluicegate_core.stats import Histogram
from sluicegate_core.vocabulary import EngineStatus, Reason
from sluicegate_sidecar.http import serve
from sluicegate_sidecar.http.errors import KINDS
from sluicegate_sidecar.metrics import (
    EVICTED,
    FAILED,
    FAMILIES,
    PROCESS_FAMILIES,
    REJECTED,
    VERSION,
    Exposition,
    Family,
    Kind,
)

ROOT = Path(__file__).parents[2]
DOCUMENT = (
    (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").partition("\n## The operator's metrics")[0]
)
OPENMETRICS = "application/openmetrics-text; version=1.0.0, text/plain; q=0.5"

Key = tuple[str, frozenset[tuple[str, str]]]


def parsed(page: bytes) -> dict[Key, float]:
    """Every sample of a page, by name and labels, read by Prometheus' own parser."""
    samples: dict[Key, float] = {}
    for family in parse_text(page.decode()):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in samples, f"twice: {key}"
            samples[key] = sample.value
    return samples


async def scrape(observed: Observed, lag: Histogram | None = None) -> dict[Key, float]:
    page, _ = await Exposition(observed, lag or Histogram((0.001, 0.1)), CapacityMeter()).render("")
    return parsed(page)


def value(samples: dict[Key, float], name: str, **labels: str) -> float | None:
    return samples.get((f"sluicegate_{name}", frozenset(labels.items())))


def names(samples: dict[Key, float]) -> set[str]:
    return {name for name, _ in samples}


def documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name -> type and labels, from the tables of docs/metrics.md."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]+) \| [^|]+ \| [^|]+ \|$", DOCUMENT, re.MULTILINE)
    assert len({name for name, _, _ in rows}) == len(rows), "a name is documented twice"
    return {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


# What is documented.


def test_every_metric_is_documented_with_its_type_and_labels_and_no_other() -> None:
    ours = {family.name: (family.kind.value, family.labels) for family in FAMILIES}
    found = documented()
    assert {name: found.pop(name) for name in PROCESS_FAMILIES}.keys() == set(PROCESS_FAMILIES)
    assert found == ours


async def test_a_gate_that_has_seen_everything_exports_every_family() -> None:
    observed = Observed()
    meter = Observed().is_pressed()
    observed.lives()
    observed.server = await serve(observed.gate, upstream_host="127.0.0.1", upstream_port=1)
    try:
        page, _ = await Exposition(observed, Histogram((0.1,)), meter).render(OPENMETRICS)
    finally:
        await observed.server.close()
    exported = {_exported_name(family): family for family in parse_openmetrics(page.decode())}
    assert exported.keys() == {family.name for family in FAMILIES} | set(PROCESS_FAMILIES)
    for family in FAMILIES:
        assert exported[family.name].type == family.kind
        for sample in exported[family.name].samples:
            assert sample.labels.keys() - {"le"} == set(family.labels), sample


def _exported_name(family: Metric) -> str:
    return family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_names_follow_the_conventions(family: Family) -> None:
    assert re.fullmatch(r"sluicegate(_[a-z]+)+", family.name)
    assert (family.kind is Kind.COUNTER) == family.name.endswith("_total")
    assert (family.kind is Kind.INFO) == family.name.endswith("_info")
    assert not re.search(r"_(milliseconds|ms|minutes|percent|kib|mb|count|sum|bucket)(_|$)", family.name)
    assert family.help.endswith(".")


def test_the_tables_of_reasons_and_kinds_are_those_of_the_code() -> None:
    for name, reasons in (("rejected", REJECTED), ("evicted", EVICTED), ("failed", FAILED)):
        row = re.search(rf"^\| `sluicegate_requests_{name}_total` \| ([^|]+) \|$", DOCUMENT, re.MULTILINE)
        assert row is not None
        assert re.findall(r"`(\w+)`", row[1]) == [reason.value for reason in reasons]
    for kind, (status, _) in KINDS.items():
        assert f"| `{kind}` | {status} |" in DOCUMENT


def test_the_queries_of_the_document_ask_for_what_is_exported() -> None:
    queries = re.findall(r"```promql\n(.*?)```", DOCUMENT, re.DOTALL)
    assert len(queries) == 5
    exported = {family.name for family in FAMILIES}
    for query in queries:
        asked = re.findall(r"sluicegate_\w+", query)
        assert asked
        assert {re.sub(r"_(bucket|count|sum)$", "", name) for name in asked} <= exported
    bounds = re.findall(r'le="([^"]+)"', DOCUMENT)
    ratio = Observed().controller.stats["batch"].prediction_ratio
    assert bounds
    assert set(bounds) <= {str(bound) for bound in ratio.bounds}


def test_the_version_is_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == VERSION


# What is exported.


async def test_a_new_gate_exports_zeros_for_what_has_not_happened() -> None:
    samples = await scrape(Observed())
    for name in ("interactive", "batch"):
        for metric in ("offered", "retries", "admitted", "queued", "served", "served_in_slo"):
            assert value(samples, f"requests_{metric}_total", **{"class": name}) == 0.0
        for metric, reasons in (("rejected", REJECTED), ("evicted", EVICTED), ("failed", FAILED)):
            for reason in reasons:
                labels = {"class": name, "reason": reason.value}
                assert value(samples, f"requests_{metric}_total", **labels) == 0.0
    for kind in (*KINDS, "other"):
        assert value(samples, "protocol_errors_total", kind=kind) == 0.0


async def test_a_new_gate_exports_nothing_of_what_it_does_not_know() -> None:
    samples = await scrape(Observed(Policy(classes=(ClassPolicy("only"),))))
    absent = {
        f"sluicegate_{name}"
        for name in (
            "engine_slots", "engine_slots_kept", "engine_reported_running", "engine_reported_waiting",
            "engine_reported_kv_used_ratio", "engine_reported_kv_capacity_tokens",
            "engine_reported_age_seconds", "learned_prefill_seconds_per_token",
            "learned_prefill_overhead_seconds", "learned_prefill_error_ratio",
            "learned_drain_requests_per_second", "learned_holding_seconds", "learned_next_gap_seconds",
            "class_load_erlangs", "class_slo_ttft_seconds", "class_slo_inter_token_seconds",
            "client_connections", "engine_connections",
        )
    }  # fmt: skip
    assert not absent & names(samples)
    assert value(samples, "engine_status", status="unknown") == 1.0


async def test_the_engines_word_is_dropped_when_it_is_old_and_its_age_is_told() -> None:
    observed = Observed()
    snapshot = EngineSnapshot(slots=4, running=0, waiting=None, kv_capacity_tokens=None, kv_used=0.5)
    observed.controller.engine_snapshot(observed.clock.now, snapshot)
    samples = await scrape(observed)
    assert value(samples, "engine_reported_running") == 0.0
    assert value(samples, "engine_reported_kv_used_ratio") == 0.5
    assert value(samples, "engine_reported_waiting") is None
    observed.clock.now += 60.0
    samples = await scrape(observed)
    assert value(samples, "engine_reported_running") is None
    assert value(samples, "engine_reported_age_seconds") == 60.0


async def test_the_counts_of_a_scrape_close_for_each_class() -> None:
    observed = Observed()
    observed.lives()
    for _ in range(3):
        observed.arrives(BATCH)
    samples = await scrape(observed)
    totals: defaultdict[tuple[str, str], float] = defaultdict(float)
    for (name, labels), one in samples.items():
        totals[name, dict(labels).get("class", "")] += one
    for class_name in ("interactive", "batch"):
        parts = [
            totals[f"sluicegate_requests_{part}", class_name]
            for part in (
                "served_total",
                "rejected_total",
                "evicted_total",
                "failed_total",
                "waiting",
                "running",
            )
        ]
        assert totals["sluicegate_requests_offered_total", class_name] == sum(parts)
    assert value(samples, "requests_failed_total", **{"class": "batch"}, reason="engine_reset_early") == 1.0
    assert value(samples, "requests_rejected_total", **{"class": "interactive"}, reason="engine_down") == 1.0
    assert value(samples, "requests_evicted_total", **{"class": "batch"}, reason="client_gone") == 1.0
    assert value(samples, "requests_retries_total", **{"class": "interactive"}) == 1.0
    # Of two slots one is kept for the class above.
    assert value(samples, "requests_waiting", **{"class": "batch"}) == 2.0
    assert value(samples, "requests_running", **{"class": "batch"}) == 1.0


async def test_a_histogram_is_cumulated_with_its_sum_and_count() -> None:
    observed = Observed()
    stats = observed.controller.stats["batch"]
    for seconds in (0.004, 0.005, 0.3, 100.0):
        stats.queue_delay_s.add(seconds)
    samples = await scrape(observed)
    buckets = {
        dict(labels)["le"]: count
        for (name, labels), count in samples.items()
        if name == "sluicegate_queue_delay_seconds_bucket" and ("class", "batch") in labels
    }
    for text, count in buckets.items():
        bound = math.inf if text == "+Inf" else float(text)
        assert count == sum(seconds <= bound for seconds in (0.004, 0.005, 0.3, 100.0)), text
    assert len(buckets) == len(stats.queue_delay_s.bounds) + 1
    assert value(samples, "queue_delay_seconds_count", **{"class": "batch"}) == 4.0
    assert value(samples, "queue_delay_seconds_sum", **{"class": "batch"}) == pytest.approx(100.309)


async def test_the_times_are_those_that_passed() -> None:
    observed = Observed()
    request = observed.arrives()
    observed.streams(request, ttft_s=0.25, tokens=5, gap_s=0.1)
    observed.finishes(request, prompt_tokens=120, output_tokens=5)
    samples = await scrape(observed)
    interactive = {"class": "interactive"}
    assert value(samples, "ttft_seconds_sum", **interactive) == pytest.approx(0.25)
    assert value(samples, "inter_token_seconds_count", **interactive) == 4.0
    assert value(samples, "inter_token_seconds_sum", **interactive) == pytest.approx(0.4)
    assert value(samples, "request_duration_seconds_sum", **interactive) == pytest.approx(0.65)
    assert value(samples, "prompt_tokens_total", **interactive) == 120.0
    assert value(samples, "output_tokens_total", **interactive) == 5.0
    assert value(samples, "requests_served_in_slo_total", **interactive) == 1.0


async def test_the_policys_state_is_told() -> None:
    observed = Observed()
    samples = await scrape(observed)
    assert value(samples, "policy_last_reload_success") == 1.0
    assert value(samples, "policy_info", hash="0123456789ab", mode="Enforce") == 1.0
    assert value(samples, "draining") == 0.0
    observed.reload.last_error = "spec.classes: is missing"
    observed.reload.generation = 3
    observed.controller.drain(observed.clock.now)
    samples = await scrape(observed)
    assert value(samples, "policy_last_reload_success") == 0.0
    assert value(samples, "policy_generation") == 3.0
    assert value(samples, "draining") == 1.0


@pytest.mark.parametrize("status", list(EngineStatus))
async def test_exactly_one_status_of_the_engine_is_set(status: EngineStatus) -> None:
    observed = Observed()
    observed.controller.engine_status(observed.clock.now, status)
    samples = await scrape(observed)
    told = {
        dict(labels)["status"]: v for (n, labels), v in samples.items() if n == "sluicegate_engine_status"
    }
    assert told == {one.value: float(one is status) for one in EngineStatus}


# Bounds.


def test_every_reason_has_its_place() -> None:
    assert {*REJECTED, *EVICTED, *FAILED} == set(Reason)


async def test_a_reason_in_a_place_of_its_own_is_not_lost() -> None:
    observed = Observed()
    observed.controller.stats["batch"].evicted[Reason.ABORTED] += 1
    samples = await scrape(observed)
    assert value(samples, "requests_evicted_total", **{"class": "batch"}, reason="aborted") == 1.0


async def test_what_clients_send_makes_no_series() -> None:
    """The page of a gate that has seen one client has as many samples as that of one that has seen hundreds."""
    few, many = Observed(), Observed()
    few.lives()
    many.lives()
    for number in range(500):
        request = many.arrives(BATCH, client=f"client{number}", model=f"model{number}")
        many.streams(request, tokens=2)
        many.finishes(request)
        many.gate.on_protocol_error(f"kind{number}")
    few.clock.now = many.clock.now
    few_samples, many_samples = await scrape(few), await scrape(many)
    assert few_samples.keys() == many_samples.keys()
    assert value(many_samples, "protocol_errors_total", kind="other") == 500.0


async def test_a_page_is_of_bounded_size() -> None:
    """With the most classes that a policy may have, what Prometheus stores for each class stays below 150."""
    policy = Policy(classes=tuple(ClassPolicy(f"class-{n}") for n in range(16)))
    none = await scrape(Observed(Policy(classes=(ClassPolicy("class-0"),))))
    sixteen = await scrape(Observed(policy))
    assert len(sixteen) - len(none) <= 15 * 150
    assert len(none) <= 300


async def test_names_of_classes_are_escaped() -> None:
    name = 'a"b\\c\nd'
    samples = await scrape(Observed(Policy(classes=(ClassPolicy(name),))))
    assert value(samples, "requests_offered_total", **{"class": name}) == 0.0


# The page.


async def test_a_scraper_gets_the_format_that_it_asks_for() -> None:
    exposition = Exposition(Observed(), Histogram((0.1,)), CapacityMeter())
    page, content_type = await exposition.render("")
    assert content_type.startswith("text/plain")
    assert b"# EOF" not in page
    page, content_type = await exposition.render(OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    assert page.endswith(b"# EOF\n")
    assert page.count(b"# EOF") == 1
    assert {family.name for family in parse_openmetrics(page.decode())}


async def test_a_scrape_is_of_one_moment_though_others_run_meanwhile() -> None:
    """While a page is made the loop turns; what arrives then is in the next scrape, in none of this one."""
    observed = Observed()
    turns = 0

    async def traffic() -> None:
        nonlocal turns
        while True:
            observed.arrives(BATCH)
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(traffic())
    await asyncio.sleep(0)
    turns_before = turns
    samples = await scrape(observed)
    task.cancel()
    assert turns - turns_before > 20
    offered = value(samples, "requests_offered_total", **{"class": "batch"})
    assert offered is not None
    assert offered <= turns_before + 1
    parts = [value(samples, f"requests_{part}", **{"class": "batch"}) for part in ("waiting", "running")]
    assert offered == sum(part or 0.0 for part in parts)


async def test_two_gates_in_a_process_do_not_mix() -> None:
    one, other = Observed(), Observed()
    one.arrives(BATCH)
    assert value(await scrape(one), "requests_offered_total", **{"class": "batch"}) == 1.0
    assert value(await scrape(other), "requests_offered_total", **{"class": "batch"}) == 0.0
