"""No body makes the facts raise, and what a body means does not depend on how it is written."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluicegate_sidecar.endpoints import ENDPOINTS, endpoint_of
from sluicegate_sidecar.facts import MAX_CHOICES, MAX_OUTPUT_TOKENS, parse_facts

TRITON = [
    endpoint_of(b"POST", b"/v2/models/m/" + verb) for verb in (b"infer", b"generate", b"generate_stream")
]
ALL = [*dict.fromkeys(ENDPOINTS.values()), *(endpoint for endpoint in TRITON if endpoint)]

FIELDS = [
    "model", "messages", "prompt", "input", "inputs", "text", "max_tokens", "max_completion_tokens",
    "max_output_tokens", "n_predict", "n", "best_of", "stream", "stream_options", "parameters",
    "sampling_params", "input_ids", "system", "tools", "query", "documents",
]  # fmt: skip

# Few characters, and all that mean something in JSON.
texts = st.text('ab",:[]{} \\\u00e9\U0001f600\0', max_size=20)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
objects = st.dictionaries(st.sampled_from(FIELDS), values, max_size=8)


@given(st.sampled_from(ALL), st.binary(max_size=200) | objects.map(lambda body: json.dumps(body).encode()))
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_nothing_is_raised_and_everything_is_in_its_range(endpoint: Any, body: bytes) -> None:
    read = parse_facts(endpoint, b"application/json", body)
    assert 0 <= read.prompt_bytes <= max(len(body), 1)
    assert 1 <= read.choices <= MAX_CHOICES
    assert read.max_output_tokens is None or 0 <= read.max_output_tokens <= MAX_OUTPUT_TOKENS
    assert read.prompt_tokens_exact is None or 1 <= read.prompt_tokens_exact <= len(body)
    assert read.generates is endpoint.generates


@given(
    st.permutations(["model", "messages", "max_tokens", "stream", "n", "unknown"]),
    st.sampled_from([(",", ":"), (", ", ": ")]),
    st.none() | st.just("not a number"),
)
def test_order_and_spacing_say_nothing(order: list[str], separators: Any, wrong: str | None) -> None:
    whole = {
        "model": "m",
        "messages": ["hello"],
        "max_tokens": 9,
        "stream": True,
        "n": 2,
        "unknown": {"deep": [1, 2, {"x": None}]},
    }
    body = {name: whole[name] for name in order}
    if wrong is not None:
        body["n_predict"] = wrong  # read field by field then
    endpoint = ENDPOINTS[b"/v1/chat/completions"]
    read = parse_facts(endpoint, None, json.dumps(body, separators=separators).encode())
    assert read.model == "m"
    assert (read.prompt_bytes, read.max_output_tokens, read.stream, read.choices) == (9, 9, True, 2)


@pytest.mark.parametrize("nested", [False, True])
@given(
    prompts=st.lists(st.lists(st.integers(0, 200_000), min_size=1, max_size=20), min_size=1, max_size=5),
    indent=st.none() | st.just(1),
)
def test_token_ids_are_counted(nested: bool, prompts: list[list[int]], indent: int | None) -> None:
    prompt: Any = prompts if nested else prompts[0]
    endpoint = ENDPOINTS[b"/v1/completions"]
    read = parse_facts(endpoint, None, json.dumps({"prompt": prompt}, indent=indent).encode())
    assert read.prompt_tokens_exact == (sum(map(len, prompts)) if nested else len(prompts[0]))
    assert read.choices == (len(prompts) if nested else 1)


@given(st.lists(texts, min_size=1, max_size=6), st.sampled_from([(",", ":"), (", ", ": ")]))
def test_prompts_in_a_list_are_counted(prompts: list[str], separators: Any) -> None:
    endpoint = ENDPOINTS[b"/v1/completions"]
    body = json.dumps({"prompt": prompts}, separators=separators).encode()
    assert parse_facts(endpoint, None, body).choices == len(prompts)
