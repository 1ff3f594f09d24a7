"""The arrivals of the demo: real in their pattern, scaled as documented, the same for both replays."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluicegate_lab.load import Target, Wording, request_bytes
from sluicegate_lab.traffic import (
    BATCH,
    CLIENTS,
    INTERACTIVE,
    MAX_REQUESTS,
    MAX_TOKENS,
    OUTPUT_BOUNDS,
    PROMPT_BOUNDS,
    Request,
    Schedule,
    TraceRow,
    WorkCost,
    load_trace,
    make_schedule,
    prompt_text,
    scaled_lengths,
)

TRACE = load_trace()
COST = WorkCost(prompt_token_s=1 / 450, output_token_s=1 / 200)


def schedule(*, seed: int = 1, overload: float = 2.5, seconds: float = 40.0) -> Schedule:
    return make_schedule(TRACE, cost=COST, overload=overload, seconds=seconds, seed=seed)


def test_the_cut_is_in_order_and_of_the_size_its_provenance_says() -> None:
    offsets = [row.offset_s for row in TRACE]
    assert offsets == sorted(offsets)
    assert offsets[0] >= 0
    assert 715 < offsets[-1] < 720
    assert all(row.prompt_tokens > 0 and row.output_tokens > 0 for row in TRACE)


def test_one_seed_gives_one_schedule_and_another_seed_another() -> None:
    assert schedule(seed=7) == schedule(seed=7)
    assert schedule(seed=7) != schedule(seed=8)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    overload=st.floats(0.2, 10),
    seconds=st.floats(5, 120),
    prompt_token_s=st.floats(1e-4, 1e-2),
    output_token_s=st.floats(1e-4, 1e-2),
)
def test_the_overload_is_met_to_within_one_request(
    seed: int, overload: float, seconds: float, prompt_token_s: float, output_token_s: float
) -> None:
    cost = WorkCost(prompt_token_s, output_token_s)
    made = make_schedule(TRACE, cost=cost, overload=overload, seconds=seconds, seed=seed)
    largest_s = cost.of(PROMPT_BOUNDS[1] + 2, OUTPUT_BOUNDS[1])
    assert overload * made.seconds <= made.work_s + 1e-6
    assert made.work_s <= overload * made.seconds + largest_s
    offsets = [request.offset_s for request in made.requests]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0.0
    assert offsets[-1] < made.seconds


def test_the_gaps_keep_their_proportions() -> None:
    made = make_schedule(
        [TraceRow(offset, 1600, 40) for offset in (0.0, 1.0, 3.0, 7.0, 7.5)] * 1,
        cost=WorkCost(0.0, 0.1),
        overload=1.0,
        seconds=4.0,
        seed=0,
    )
    gaps = [b.offset_s - a.offset_s for a, b in zip(made.requests, made.requests[1:], strict=False)]
    assert len(made.requests) == 4
    real = [1.0, 2.0, 4.0, 0.5, 1.5]  # the last one leads back to the beginning
    start = next(
        index
        for index in range(len(real))
        if all(
            gap / gaps[0] == pytest.approx(real[(index + step) % 5] / real[index])
            for step, gap in enumerate(gaps)
        )
    )
    assert 0 <= start < 5


def test_rows_of_the_same_millisecond_make_no_stretch_without_length() -> None:
    made = make_schedule(
        [TraceRow(offset, 1600, 40) for offset in (1.0, 1.0, 1.0, 2.0)],
        cost=WorkCost(0.0, 0.1),
        overload=1.0,
        seconds=2.0,
        seed=1,
    )
    assert len(made.requests) == 2
    assert all(0 <= request.offset_s < 2.0 for request in made.requests)


def test_a_fast_engine_gets_a_shorter_replay_at_the_same_overload() -> None:
    made = make_schedule(TRACE, cost=WorkCost(1e-6, 1e-6), overload=2.5, seconds=60.0, seed=1)
    assert len(made.requests) == MAX_REQUESTS
    assert made.seconds < 60.0
    assert made.overload == pytest.approx(2.5)


def test_classes_and_clients_come_in_their_shares() -> None:
    made = make_schedule(TRACE, cost=WorkCost(1e-6, 1e-6), overload=2.5, seconds=60.0, seed=1)
    classes = Counter(request.class_name for request in made.requests)
    assert classes[INTERACTIVE] / len(made.requests) == pytest.approx(0.7, abs=0.03)
    for name in (INTERACTIVE, BATCH):
        clients = {request.client for request in made.requests if request.class_name == name}
        assert clients == {client for client, _ in CLIENTS[name]}


def test_lengths_are_scaled_within_their_bounds() -> None:
    assert scaled_lengths(TraceRow(0.0, 1020, 129)) == (64, 32)
    assert scaled_lengths(TraceRow(0.0, 1, 1)) == (PROMPT_BOUNDS[0], OUTPUT_BOUNDS[0])
    assert scaled_lengths(TraceRow(0.0, 10**6, 10**6)) == (PROMPT_BOUNDS[1], OUTPUT_BOUNDS[1])


def test_an_unknown_length_of_answers_is_replaced_by_its_expectation() -> None:
    cost = WorkCost(0.0, 0.01)
    made = make_schedule(TRACE, cost=cost, overload=1.0, seconds=10.0, seed=1, expected_output_tokens=100.0)
    assert len(made.requests) == 10


def test_the_replays_differ_in_words_and_in_nothing_else() -> None:
    request = schedule().requests[3]
    first = prompt_text(request, salt="first", counts_down=True)
    second = prompt_text(request, salt="second", counts_down=True)
    assert first != second
    assert len(first.split()) == len(second.split()) == request.prompt_words + 1
    assert first.split()[-1] == second.split()[-1] == str(request.output_tokens)
    assert first == prompt_text(request, salt="first", counts_down=True)


def test_another_model_is_not_told_a_number() -> None:
    request = Request(0, 0.0, BATCH, "summaries", 30, 77)
    assert "77" not in prompt_text(request, salt="s", counts_down=False)


def test_no_field_of_a_request_tells_how_long_its_answer_will_be() -> None:
    """Requests that differ in the length of the answer alone differ on the wire in the prompt's text alone."""
    wording = Wording("s", counts_down=True)
    target = Target("127.0.0.1", 8080, "countdown")

    def sent(output_tokens: int) -> tuple[bytes, dict[str, object]]:
        wire = request_bytes(target, Request(4, 1.0, INTERACTIVE, "chat-web", 20, output_tokens), wording)
        head, _, body = wire.partition(b"\r\n\r\n")
        return head, json.loads(body)

    (short_head, short), (long_head, long) = sent(11), sent(99)
    assert short_head == long_head
    assert short.pop("messages") != long.pop("messages")
    assert short == long
    assert short["max_tokens"] == MAX_TOKENS[INTERACTIVE]
