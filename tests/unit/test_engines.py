"""What each engine's pages say, in the words of the real ones, and what unknown pages do not say."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from sluicegate_core.effects import EngineSnapshot
from sluicegate_core.policy import EngineType
from sluicegate_sidecar.engines import (
    MAX_SERIES,
    PROFILES,
    Answer,
    EngineReading,
    detect,
    parse_info,
    parse_metrics,
)

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 5.0
vllm:num_requests_running{engine="1",model_name="meta-llama/Llama-3.1-8B-Instruct"} 3.0
# HELP vllm:num_requests_waiting_by_reason Number of requests waiting, by reason.
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 90.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="odd } name"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:kv_cache_usage_perc{engine="1"} 0.75
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",num_gpu_blocks_override="None",engine="0",num_gpu_blocks="1000"} 1.0
vllm:cache_config_info{block_size="16",num_gpu_blocks_override="None",engine="1",num_gpu_blocks="500"} 1.0
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0"} 4.0
vllm:num_preemptions_created{engine="0"} 1.7e+09
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0"} 1.5e+06
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0"} 7.0 1796102857000
"""

LLAMA_CPP = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed, excluding cached tokens
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 16
# HELP llamacpp:prompt_tokens_cached_total Number of prompt tokens reused from the cache
# TYPE llamacpp:prompt_tokens_cached_total counter
llamacpp:prompt_tokens_cached_total 26
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 37
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 2
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 0
"""

SGLANG = """\
sglang:num_running_reqs{model_name="m"} 7.0
sglang:num_queue_reqs{model_name="m"} 1.0
sglang:token_usage{model_name="m"} 0.28
sglang:max_total_num_tokens{model_name="m"} 161721.0
sglang:prompt_tokens_total{model_name="m"} 8.128902e+06
sglang:generation_tokens_total{model_name="m"} 7.557572e+06
"""

TGI = """\
# TYPE tgi_queue_size gauge
tgi_queue_size 3
# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 8
tgi_request_input_length_sum 1000
tgi_request_generated_tokens_sum 2000
"""

TRTLLM = """\
trtllm_num_requests_running{engine_type="trt"} 4.0
trtllm_num_requests_waiting{engine_type="trt"} 1.0
trtllm_kv_cache_utilization{engine_type="trt"} 0.25
trtllm_kv_cache_max_blocks{engine_type="trt"} 100.0
trtllm_kv_cache_tokens_per_block{engine_type="trt"} 32.0
"""

TRITON = """\
nv_inference_request_success{model="ensemble",version="1"} 9
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 1
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="context",version="1"} 2
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 5
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.4
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 200
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 64
"""

PAGES = [
    (
        EngineType.VLLM,
        VLLM,
        EngineReading(
            running=8,
            waiting=2,
            kv_capacity_tokens=24_000,
            kv_used_fraction=0.625,
            preemptions_total=4,
            prompt_tokens_total=1_500_000,
            generation_tokens_total=7,
        ),
    ),
    (
        EngineType.LLAMA_CPP,
        LLAMA_CPP,
        EngineReading(running=2, waiting=0, prompt_tokens_total=16, generation_tokens_total=37),
    ),
    (
        EngineType.SGLANG,
        SGLANG,
        EngineReading(
            running=7,
            waiting=1,
            kv_capacity_tokens=161_721,
            kv_used_fraction=0.28,
            prompt_tokens_total=8_128_902,
            generation_tokens_total=7_557_572,
        ),
    ),
    (
        EngineType.TGI,
        TGI,
        EngineReading(running=8, waiting=3, prompt_tokens_total=1000, generation_tokens_total=2000),
    ),
    (
        EngineType.TENSORRT_LLM,
        TRTLLM,
        EngineReading(running=4, waiting=1, kv_capacity_tokens=3200, kv_used_fraction=0.25),
    ),
    (
        EngineType.TRITON,
        TRITON,
        EngineReading(running=5, waiting=1, kv_capacity_tokens=12_800, kv_used_fraction=0.4),
    ),
]


@pytest.mark.parametrize(("engine", "page", "reading"), PAGES)
def test_a_page_is_read(engine: EngineType, page: str, reading: EngineReading) -> None:
    assert parse_metrics(engine, page) == reading
    assert parse_metrics(engine, page.replace("\n", "\r\n")) == reading


@pytest.mark.parametrize("engine", EngineType)
@pytest.mark.parametrize(
    "page", ["", "\n", "nonsense", "# only a comment\n", "x" * 100_000, "vllm:", "a{b 1\n"]
)
def test_what_is_not_there_is_unknown_and_not_zero(engine: EngineType, page: str) -> None:
    assert parse_metrics(engine, page) == EngineReading()


def test_older_vllm_servers() -> None:
    page = 'vllm:gpu_cache_usage_perc{model_name="m"} 0.5\nvllm:num_requests_swapped{model_name="m"} 1.0\n'
    assert parse_metrics(EngineType.VLLM, page) == EngineReading(kv_used_fraction=0.5)


def test_newer_sglang_servers() -> None:
    page = 'sglang:cache_config_info{model_name="m",page_size="64",num_pages="100"} 1.0\n'
    assert parse_metrics(EngineType.SGLANG, page) == EngineReading(kv_capacity_tokens=6400)


@pytest.mark.parametrize("blocks", ["None", "0", "-5", "1e9"])
def test_a_capacity_that_is_not_known_yet(blocks: str) -> None:
    page = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{blocks}"}} 1.0\n'
    assert parse_metrics(EngineType.VLLM, page).kv_capacity_tokens is None


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "", "many", "{"])
def test_a_value_that_is_no_number(value: str) -> None:
    page = f"llamacpp:requests_processing {value}\nllamacpp:requests_deferred 3\n"
    assert parse_metrics(EngineType.LLAMA_CPP, page) == EngineReading(waiting=3)


def test_a_fraction_is_at_most_one() -> None:
    page = 'vllm:kv_cache_usage_perc{engine="0"} 1.0000001\n'
    assert parse_metrics(EngineType.VLLM, page).kv_used_fraction == 1.0


def test_very_many_series_are_read_only_so_far() -> None:
    page = "".join(f'vllm:num_requests_running{{engine="{rank}"}} 1\n' for rank in range(MAX_SERIES * 2))
    assert parse_metrics(EngineType.VLLM, page).running == MAX_SERIES


label_values = st.text('ab ,{}="\\\n', max_size=8)
numbers = st.floats(0, 1e9, allow_subnormal=False) | st.integers(0, 10**9)


@given(st.dictionaries(label_values, numbers, max_size=5), st.booleans())
def test_against_a_whole_parser(series: dict[str, float], commented: bool) -> None:
    """Any labels, escaped as the format says: the sum is the one that a full parser finds."""
    lines = ["# TYPE vllm:num_requests_running gauge"] if commented else []
    for label, value in series.items():
        escaped = label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        lines.append(f'vllm:num_requests_running{{model_name="{escaped}"}} {value}')
    page = "\n".join(lines) + "\n"
    expected = [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "vllm:num_requests_running"
    ]
    running = parse_metrics(EngineType.VLLM, page).running
    assert running == (int(sum(expected)) if expected else None)


@given(st.sampled_from(EngineType), st.text('vllm:num_requests_running{}"= 0.9\n#', max_size=200))
def test_no_page_raises(engine: EngineType, page: str) -> None:
    parse_metrics(engine, page)


# --- Constants ---


def test_llama_cpp_props() -> None:
    props = {"default_generation_settings": {"n_ctx": 1024, "params": {}}, "total_slots": 2}
    assert parse_info(EngineType.LLAMA_CPP, json.dumps(props).encode()) == EngineReading(
        slots=2, context_tokens=1024
    )


def test_tgi_info() -> None:
    info = {"max_concurrent_requests": 128, "max_total_tokens": 4096, "max_batch_total_tokens": 65_536}
    assert parse_info(EngineType.TGI, json.dumps(info).encode()) == EngineReading(
        kv_capacity_tokens=65_536, context_tokens=4096
    )


@pytest.mark.parametrize("engine", EngineType)
@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b'{"total_slots":0,"default_generation_settings":{"n_ctx":-1}}',
        b'{"total_slots":"2","default_generation_settings":7,"max_batch_total_tokens":null}',
        b'{"total_slots":true}',
        b"[" * 100_000,
    ],
)
def test_a_document_that_says_nothing(engine: EngineType, document: bytes) -> None:
    assert parse_info(engine, document) == EngineReading()


def test_a_reading_is_completed_by_constants() -> None:
    reading = EngineReading(slots=None, running=3, waiting=0)
    whole = reading.with_info(EngineReading(slots=4, running=9, context_tokens=1024))
    assert whole == EngineReading(slots=4, running=3, waiting=0, context_tokens=1024)
    assert whole.snapshot() == EngineSnapshot(slots=4, running=3, waiting=0)


# --- Which engine it is ---


@pytest.mark.parametrize(("engine", "page", "_reading"), PAGES)
def test_a_page_tells_the_engine(engine: EngineType, page: str, _reading: Any) -> None:
    path = PROFILES[engine].metrics_path
    assert path is not None
    assert detect(path, Answer(200, "uvicorn", page.encode())) is engine
    assert detect(path, Answer(404, "uvicorn", page.encode())) is None


@pytest.mark.parametrize(
    ("path", "document", "engine"),
    [
        ("/props", {"total_slots": 4}, EngineType.LLAMA_CPP),
        ("/get_server_info", {"max_total_num_tokens": 1}, EngineType.SGLANG),
        ("/info", {"max_concurrent_requests": 128}, EngineType.TGI),
        ("/v2", {"name": "triton", "version": "2.50"}, EngineType.TRITON),
        ("/version", {"version": "0.32.0"}, EngineType.VLLM),
        ("/api/version", {"version": "0.9.0"}, EngineType.OLLAMA),
        ("/props", {}, None),
        ("/v2", {"name": "other"}, None),
        ("/metrics", {"total_slots": 4}, None),
        ("/anything", {"version": "1"}, None),
    ],
)
def test_a_document_tells_the_engine(path: str, document: Any, engine: EngineType | None) -> None:
    assert detect(path, Answer(200, "", json.dumps(document).encode())) is engine


def test_llama_cpp_names_itself_even_where_it_refuses() -> None:
    assert detect("/metrics", Answer(501, "llama.cpp", b"{}")) is EngineType.LLAMA_CPP
    assert detect("/metrics", Answer(404, "nginx", b"")) is None
    assert detect("/metrics", Answer()) is None


def test_every_engine_has_a_profile() -> None:
    assert set(PROFILES) == set(EngineType) - {EngineType.AUTO}
    for profile in PROFILES.values():
        assert set(profile.metrics) <= set(EngineReading._fields)
