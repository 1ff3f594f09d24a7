"""Probes and hooks by exec: what goes to the engine, and what is left to the gate."""

from __future__ import annotations

from typing import Any

import pytest
from tests.manifests.building import container, engine_of, gated, pod, refusal

from sluicegate_operator.injection.probes import rewrite_command

REWRITTEN = [
    (["curl", "-f", "http://localhost:8000/health"], ["curl", "-f", "http://127.0.0.1:27000/health"]),
    (["curl", "http://127.0.0.1:8000"], ["curl", "http://127.0.0.1:27000"]),
    (["curl", "http://[::1]:8000/"], ["curl", "http://127.0.0.1:27000/"]),
    (["sh", "-c", "nc -z localhost 8000"], ["sh", "-c", "nc -z 127.0.0.1 27000"]),
    (["nc", "-z", "localhost", "8000"], ["nc", "-z", "127.0.0.1", "27000"]),
    (["python", "-c", 'connect(("localhost", 8000))'], ["python", "-c", 'connect(("127.0.0.1", 27000))']),
    (
        ["sh", "-c", "curl localhost:8000/a && curl 0.0.0.0:8000/b"],
        ["sh", "-c", "curl 127.0.0.1:27000/a && curl 127.0.0.1:27000/b"],
    ),
]
KEPT = [
    ["curl", "http://localhost:80000/"],
    ["curl", "http://localhost:18000/"],
    ["curl", "http://example:8000/"],
    ["curl", "http://mylocalhost:8001/"],
    ["cat", "/tmp/healthy"],
    ["sh", "-c", "[ $(cat /8000) ]"],
    ["check", "--port", "8000"],
]


@pytest.mark.parametrize(("command", "expected"), REWRITTEN)
def test_calls_to_the_pods_own_port_follow_the_engine(command: list[str], expected: list[str]) -> None:
    assert rewrite_command(command, 8000, 27000) == expected


@pytest.mark.parametrize("command", KEPT)
def test_all_else_stays(command: list[str]) -> None:
    assert rewrite_command(command, 8000, 27000) == command


def probe(command: list[str], **times: int) -> dict[str, Any]:
    return {"exec": {"command": command}, **times}


def test_a_probe_that_sends_an_inference_request_goes_to_the_engine() -> None:
    """Through the gate it would be refused under load, and the kubelet would restart a busy engine."""
    text = 'curl -sf localhost:8000/v1/completions -d \'{"prompt":"x","max_tokens":1}\''
    result = gated(pod(container(livenessProbe=probe(["bash", "-c", text], periodSeconds=30))))
    assert engine_of(result)["livenessProbe"] == probe(
        ["bash", "-c", text.replace("localhost:8000", "127.0.0.1:27000")], periodSeconds=30
    )
    assert result.warnings == ()


def test_a_port_that_is_not_understood_is_told() -> None:
    result = gated(pod(container(readinessProbe=probe(["check", "--port", "8000"]))))
    assert engine_of(result)["readinessProbe"] == probe(["check", "--port", "8000"])
    assert any("readinessProbe of container 'engine' names port 8000" in one for one in result.warnings)


def test_probes_of_neighbours_follow_too_but_their_hooks_and_commands_are_clients() -> None:
    other = {
        "name": "adapter",
        "image": "example/adapter",
        "command": ["adapter", "--engine=http://localhost:8000"],
        "livenessProbe": probe(["curl", "localhost:8000/health"]),
        "readinessProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 3},
        "lifecycle": {"postStart": {"exec": {"command": ["curl", "localhost:8000/v1/models"]}}},
    }
    adapter = engine_of(gated(pod(container(), other)), "adapter")
    assert adapter["command"] == other["command"]
    assert adapter["lifecycle"] == other["lifecycle"]
    assert adapter["livenessProbe"] == probe(["curl", "127.0.0.1:27000/health"])
    assert adapter["readinessProbe"] == {
        "httpGet": {"path": "/enginez", "port": 9901, "scheme": "HTTP"}, "periodSeconds": 3,
    }  # fmt: skip


def test_hooks_of_the_engine_follow_it() -> None:
    hook = {"postStart": {"exec": {"command": ["sh", "-c", "until nc -z localhost 8000; do sleep 1; done"]}}}
    lifecycle = engine_of(gated(pod(container(lifecycle=hook))))["lifecycle"]
    assert lifecycle["postStart"]["exec"]["command"][2] == "until nc -z 127.0.0.1 27000; do sleep 1; done"


def test_tcp_probes_of_other_ports_and_hosts_stay() -> None:
    probes = {
        "livenessProbe": {"tcpSocket": {"port": 8001}},
        "readinessProbe": {"tcpSocket": {"port": 8000, "host": "10.0.0.1"}},
        "startupProbe": {"grpc": {"port": 8001}},
    }
    engine = engine_of(gated(pod(container(**probes))))
    assert {kind: engine[kind] for kind in probes} == probes


def test_grpc_on_the_engines_port_is_refused() -> None:
    assert "speaks gRPC on port 8000" in refusal(
        pod(container(livenessProbe={"grpc": {"port": 8000}}, ports=None))
    )
