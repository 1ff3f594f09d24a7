"""`/debug/state`: true, plain, bounded, and silent about who the clients are."""

import json
import math

from tests.unit.observed import BATCH, INTERACTIVE, Observed

from sluicegate_core.policy import ClassPolicy, Policy, Slo
from sluicegate_core.vocabulary import EngineStatus
from sluicegate_sidecar.http import serve
from sluicegate_sidecar.state import CLIENTS_SHOWN, SAMPLE_PROMPT_BYTES, snapshot


def shown(observed: Observed) -> dict[str, object]:
    """A snapshot as its reader gets it."""
    text = json.dumps(snapshot(observed), allow_nan=False)
    plain: dict[str, object] = json.loads(text)
    return plain


def at(state: object, *path: str | int) -> object:
    for step in path:
        assert isinstance(state, dict | list)
        state = state[step]  # type: ignore[index]
    return state


def numbers(state: object) -> list[float]:
    if isinstance(state, dict):
        return [n for value in state.values() for n in numbers(value)]
    if isinstance(state, list):
        return [n for value in state for n in numbers(value)]
    return [state] if isinstance(state, float) else []


def test_the_counts_close_for_each_class() -> None:
    observed = Observed()
    observed.lives()
    for _ in range(3):
        observed.arrives(BATCH)
    classes = at(shown(observed), "classes")
    assert isinstance(classes, dict)
    assert classes.keys() == {"interactive", "batch"}
    for counts in classes.values():
        ended = sum(sum(counts[how].values()) for how in ("rejected", "evicted", "failed"))
        assert counts["in_flight"] == counts["waiting"] + counts["running"]
        assert counts["offered"] == counts["served"] + ended + counts["in_flight"]
    assert at(classes, "batch", "failed") == {"engine_reset_early": 1}


def test_it_says_what_the_line_waits_for() -> None:
    observed = Observed()
    with_the_engine = observed.arrives(BATCH), observed.arrives(INTERACTIVE)
    observed.arrives(BATCH, client="0badcafe")
    observed.clock.now += 0.5
    state = shown(observed)
    head = at(state, "classes", "batch", "head")
    assert isinstance(head, dict)
    assert head["hold"] == "slots"
    assert head["waited_s"] == 0.5
    assert head["evicted_in_s"] == 59.5
    assert head["client"] == "0badcafe"
    assert at(state, "classes", "interactive", "head") is None
    assert at(state, "classes", "interactive", "new_request", "hold") == "slots"
    for request in with_the_engine:
        observed.streams(request)
        observed.finishes(request)
    assert at(shown(observed), "classes", "batch", "head") is None


def test_the_busiest_clients_are_shown_and_the_rest_counted() -> None:
    observed = Observed()
    for number in range(3 * CLIENTS_SHOWN):
        for _ in range(2 if number == 40 else 1):
            observed.arrives(BATCH, client=f"client{number}")
    clients = at(shown(observed), "classes", "batch", "clients")
    assert at(clients, "count") == 3 * CLIENTS_SHOWN
    busiest = at(clients, "busiest")
    assert isinstance(busiest, list)
    assert len(busiest) == CLIENTS_SHOWN
    assert busiest[0] == {"client": "client40", "waiting": 2, "running": 0}
    assert at(shown(observed), "classes", "interactive", "clients") == {"count": 0, "busiest": []}


def test_a_running_request_is_its_clients() -> None:
    observed = Observed()
    observed.arrives(BATCH, client="someone")
    clients = at(shown(observed), "classes", "batch", "clients", "busiest")
    assert clients == [{"client": "someone", "waiting": 0, "running": 1}]


def test_the_last_hundred_refusals_newest_first_with_their_numbers() -> None:
    observed = Observed()
    observed.controller.engine_status(observed.clock.now, EngineStatus.DOWN)
    for number in range(150):
        observed.clock.now += 1.0
        observed.arrives(BATCH, client=f"client{number}", prompt_bytes=1000)
    observed.clock.now += 2.0
    refusals = at(shown(observed), "recent_refusals")
    assert isinstance(refusals, list)
    assert len(refusals) == 100
    assert [refusals[0]["client"], refusals[-1]["client"]] == ["client149", "client50"]
    assert [refusals[0]["ago_s"], refusals[-1]["ago_s"]] == [2.0, 101.0]
    assert refusals[0]["reason"] == "engine_down"
    assert refusals[0]["class_name"] == "batch"
    assert refusals[0]["predicted_ttft_s"] is None
    assert refusals[0]["prompt_tokens"] > 0
    assert 1.0 <= refusals[0]["retry_after_s"] <= 120.0


def test_what_is_learned_is_told_with_its_confidence() -> None:
    observed = Observed()
    service = at(shown(observed), "learned", "times", "service")
    assert service == {
        "seconds_per_prompt_token": None,
        "overhead_s": None,
        "relative_error": None,
        "samples": 0,
        "learned": False,
    }
    assert at(shown(observed), "learned", "pace", "curve", "learned") is False
    observed.lives()
    learned = at(shown(observed), "learned")
    assert at(learned, "times", "service", "learned") is True
    assert at(learned, "times", "service", "samples") >= 30  # type: ignore[operator]
    assert at(learned, "pace", "curve", "learned") is True
    assert at(learned, "pace", "classes", "interactive", "slo_itl_s") == 0.5
    assert at(learned, "lengths", "tokens_per_byte", "tiny", "learned") is True
    used = {one["class"]: one["samples"] for one in at(learned, "lengths", "output_tokens")}  # type: ignore[attr-defined]
    assert used["interactive"] >= 30


def test_the_prediction_for_a_new_request_is_the_controllers_own() -> None:
    observed = Observed()
    observed.lives()
    for _ in range(4):
        observed.arrives(BATCH)
    new = at(shown(observed), "classes", "interactive", "new_request")
    request = observed.arrives(INTERACTIVE, client="new", prompt_bytes=SAMPLE_PROMPT_BYTES, model="")
    assert request.predicted_ttft_s is not None
    assert at(new, "prompt_tokens") == request.prompt_tokens
    assert at(new, "predicted_ttft_s") == float(f"{request.predicted_ttft_s:.6g}")


def test_looking_changes_nothing() -> None:
    observed, unseen = Observed(), Observed()
    for one in (observed, unseen):
        one.lives()
        for number in range(6):
            one.arrives(BATCH, client=f"client{number}")
            if one is observed:
                snapshot(one)
    assert shown(observed) == shown(unseen)


def test_the_policy_and_what_is_wrong_with_its_file() -> None:
    observed = Observed()
    observed.reload.last_error = "policy.yaml: spec.clases: is not known"
    observed.reload.problems = ("spec.clases: is not known. Fix: did you mean classes?",)
    policy = at(shown(observed), "policy")
    assert policy == {
        "generation": 1,
        "content_hash": observed.reload.content_hash,
        "mode": "Enforce",
        "loaded_ago_s": 60.0,
        "last_error": observed.reload.last_error,
        "problems": list(observed.reload.problems),
    }


def test_a_class_that_is_gone_is_shown_until_its_requests_have_ended() -> None:
    observed = Observed()
    request = observed.arrives(BATCH)
    policy = Policy(classes=(ClassPolicy("interactive", Slo(ttft_s=2.0)),))
    observed.controller.reconfigure(observed.clock.now, policy)
    classes = at(shown(observed), "classes")
    assert at(classes, "batch", "in_flight") == 1
    assert at(classes, "interactive", "running") == 1
    observed.finishes(request)
    assert at(shown(observed), "classes").keys() == {"interactive"}  # type: ignore[attr-defined]


def test_numbers_are_finite_and_short() -> None:
    """A policy without a queue time holds requests for ever; JSON has no word for that."""
    observed = Observed(Policy(classes=(ClassPolicy("patient", max_queue_time_s=math.inf),)))
    observed.arrives()
    observed.clock.now += 1.0 / 3.0
    found = numbers(shown(observed))
    assert found
    assert all(len(f"{number:.12g}") <= 12 for number in found)


def test_before_the_data_port_listens_it_has_no_numbers() -> None:
    assert shown(Observed())["http"] is None


async def test_the_data_port_is_told_of() -> None:
    observed = Observed()
    observed.server = await serve(observed.gate, upstream_host="127.0.0.1", upstream_port=1)
    try:
        http = at(shown(observed), "http")
        assert at(http, "address") == f"127.0.0.1:{observed.server.port}"
        assert at(http, "client_connections") == 0
        assert at(http, "engine_retries") == 0
    finally:
        await observed.server.close()
