"""A changed policy is taken up by a running gate; a bad one is refused; nobody notices but those it is for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.gate.gate_process import (
    DONE,
    POLICY,
    GateProcess,
    ScriptedEngine,
    State,
    ask,
    body_of,
    connect,
    gate_before,
    gate_running,
    serve_three,
    token,
)

STREAM = body_of(stream=True)
BATCH = b"X-Admission-Class: batch"

STREAMS = 20
CHANGES = 20


def replace(path: Path, text: str) -> None:
    """As editors and the kubelet do it: written beside, and moved there whole."""
    fresh = path.with_name("fresh")
    fresh.write_text(text)
    fresh.replace(path)


async def in_force(gate: GateProcess, generation: int) -> State:
    return await gate.until_state(lambda s: s["policy"]["generation"] == generation)


async def test_a_changed_policy_is_in_force_without_a_restart() -> None:
    async with ScriptedEngine() as engine, gate_before(engine.url) as gate:
        before = await gate.state()
        assert (await ask(gate.port, None, BATCH)).status == 200
        added = POLICY.replace("classes:\n", "classes:\n- {name: night, weight: 3}\n").replace(
            "values: [batch], class: batch", "values: [batch], class: night"
        )
        replace(gate.policy, added)
        state = await in_force(gate, 2)
        assert state["policy"]["content_hash"] != before["policy"]["content_hash"]
        assert state["policy"]["last_error"] is None
        assert await gate.count("policy_generation") == 2
        assert (await ask(gate.port, None, BATCH)).status == 200
        served = {name: c["served"] for name, c in (await gate.settled())["classes"].items()}
        assert served == {"night": 1, "interactive": 0, "batch": 1}  # what was counted stays
        await gate.log.line("policy generation 2 is in force, mode Enforce")


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("classes: []\n", "spec.classes"),
        (POLICY.replace("weight: 10", "wieght: 10"), "weight"),
        (POLICY + "  {", "YAML"),
    ],
)
async def test_a_bad_policy_is_refused_and_the_last_good_one_stays(bad: str, problem: str) -> None:
    async with ScriptedEngine() as engine, gate_before(engine.url) as gate:
        before = await gate.state()
        assert await gate.count("policy_last_reload_success") == 1
        replace(gate.policy, bad)
        state = await gate.until_state(lambda s: s["policy"]["last_error"])
        assert problem in state["policy"]["last_error"]
        assert any(problem in one for one in state["policy"]["problems"])
        for same in ("generation", "content_hash", "mode"):
            assert state["policy"][same] == before["policy"][same]
        assert await gate.count("policy_last_reload_success") == 0
        assert await gate.count("policy_generation") == 1
        line = await gate.log.line("the last good one stays in force")
        logged = json.loads(line.string)
        assert logged["level"] == "error"
        assert problem in logged["message"]
        assert (await ask(gate.port, None, BATCH)).status == 200
        assert (await gate.state())["classes"]["batch"]["served"] == 1

        replace(gate.policy, POLICY)
        state = await gate.until_state(lambda s: not s["policy"]["last_error"])
        assert state["policy"]["problems"] == []
        assert state["policy"]["content_hash"] == before["policy"]["content_hash"]
        assert await gate.count("policy_last_reload_success") == 1


async def test_a_policy_that_disappears_stays_in_force() -> None:
    async with ScriptedEngine() as engine, gate_before(engine.url) as gate:
        gate.policy.unlink()
        state = await gate.until_state(lambda s: s["policy"]["last_error"])
        assert state["policy"]["generation"] == 1
        await gate.works()
        gate.policy.write_text(POLICY.replace("weight: 10", "weight: 11"))
        state = await in_force(gate, 2)
        assert state["classes"]["interactive"]["promised"]["weight"] == 11


def mounted(folder: Path, generation: int, text: str) -> None:
    """A ConfigMap's volume: a folder of the time, and a link to it that is exchanged whole."""
    content = folder / f"..2026_{generation}"
    content.mkdir()
    (content / "policy.yaml").write_text(text)
    link = folder / "..data_tmp"
    link.symlink_to(content.name)
    os.replace(link, folder / "..data")
    policy = folder / "policy.yaml"
    if not policy.is_symlink():
        policy.symlink_to("..data/policy.yaml")


async def test_a_config_map_is_exchanged_under_a_running_gate(tmp_path: Path) -> None:
    mounted(tmp_path, 1, POLICY)
    async with ScriptedEngine() as engine, gate_before(engine.url, tmp_path) as gate:
        for generation, weight in ((2, 20), (3, 30)):
            mounted(tmp_path, generation, POLICY.replace("weight: 10", f"weight: {weight}"))
            state = await in_force(gate, generation)
            assert state["classes"]["interactive"]["promised"]["weight"] == weight
        mounted(tmp_path, 4, "classes: none\n")
        state = await gate.until_state(lambda s: s["policy"]["last_error"])
        assert state["policy"]["generation"] == 3
        await gate.works()


async def test_who_waits_is_not_forgotten_when_the_policy_changes() -> None:
    """Its class is gone: it goes on in the default class. In a mode without enforcement nobody waits."""
    one_slot = POLICY.replace("slots: 2", "slots: 1")
    async with ScriptedEngine(None) as engine, gate_before(engine.url, one_slot) as gate:
        first = await connect(gate.port, STREAM, BATCH)
        call = await engine.call()
        second = await connect(gate.port, STREAM, BATCH)
        await gate.until_state(lambda s: s["waiting"] == 1)
        replace(gate.policy, "engine: {slots: 1}\nclasses: [{name: interactive, maxQueueTime: 60s}]\n")
        state = await in_force(gate, 2)
        assert state["classes"]["interactive"]["waiting"] == 1
        assert state["classes"]["batch"]["in_flight"] == 2  # they are counted where they arrived
        replace(gate.policy, 'mode: "Off"\nclasses: [{name: interactive}]\n')
        other = await engine.call()
        state = await in_force(gate, 3)
        assert (state["policy"]["mode"], state["running"], state["waiting"]) == ("Off", 2, 0)
        for one, client in ((call, first), (other, second)):
            serve_three(one)
            assert (await client.response()).complete
            client.close()
        assert (await gate.settled())["classes"].keys() == {"interactive"}
        assert await gate.count("requests_served_total", **{"class": "batch"}) == 2


async def test_a_changed_engine_is_watched_as_it_is_described() -> None:
    async with ScriptedEngine() as engine, gate_before(engine.url) as gate:
        engine.pages[b"/loads"] = 503
        await gate.until_state(lambda s: s["engine"]["status"] == "up")
        replace(gate.policy, POLICY.replace("slots: 2", "slots: 5, healthPath: /loads"))
        state = await gate.until_state(lambda s: s["engine"]["status"] == "loading")
        assert state["engine"]["slots"] == 5
        engine.pages[b"/loads"] = 200
        await gate.until_state(lambda s: s["engine"]["status"] == "up")
        await gate.works()


def changed(generation: int) -> str:
    """A policy unlike the one before: other weights, bounds and slots; every third one is without batch."""
    batch = generation % 3 != 0
    lines = [
        f"engine: {{slots: {STREAMS + 1 + generation % 4}}}",
        "classes:",
        f"- {{name: interactive, weight: {generation}, maxQueueTime: {30 + generation}s}}",
    ]
    if batch:
        lines.append(f"- {{name: batch, maxQueueTime: {60 + generation}s}}")
        lines.append("classify: {rules: [{header: x-admission-class, values: [batch], class: batch}]}")
    return "\n".join(lines) + "\n"


@pytest.mark.slow
async def test_twenty_changes_under_twenty_streams() -> None:
    """Each stream lives through every change; with each, others come, wait and go. Nobody is lost or cut."""
    async with ScriptedEngine(None) as engine, gate_before(engine.url, changed(1)) as gate:
        streams = [
            await connect(gate.port, STREAM, *((BATCH,) if index % 2 else ())) for index in range(STREAMS)
        ]
        calls = []
        for _ in streams:  # while nothing is learned the engine gets two at a time
            calls.append(await engine.call())
            calls[-1].begin(token(" 1"))
        served = 0
        for generation in range(2, CHANGES + 2):
            replace(gate.policy, changed(generation))
            passing = [await connect(gate.port, STREAM, *((BATCH,) if n % 2 else ())) for n in range(6)]
            state = await in_force(gate, generation)
            assert state["in_flight"] == STREAMS + len(passing)
            for call in calls:
                call.send(token(f" {generation}"))
            for _ in passing:
                serve_three(await engine.call())
            for client in passing:
                answer = await client.response()
                client.close()
                assert (answer.status, answer.complete) == (200, True)
                served += 1
        whole = b"".join(token(f" {n}") for n in range(1, CHANGES + 2)) + DONE
        for call, client in zip(calls, streams, strict=True):
            call.end()
            answer = await client.response()
            client.close()
            assert answer.complete
            assert answer.body == whole
        await gate.settled()
        counted = [
            await gate.count("requests_served_total", **{"class": c}) for c in ("interactive", "batch")
        ]
        assert sum(counted) == served + STREAMS


def test_a_gate_that_is_ended_while_it_reads_its_policy_ends_well(tmp_path: Path) -> None:
    with gate_running("http://127.0.0.1:9", POLICY) as gate:
        replace(gate.policy, changed(2))
        gate.log.wait_for("policy generation 2 is in force")
