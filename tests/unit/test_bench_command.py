"""The command around the benchmark: what it is asked, what it writes, what it says when it cannot."""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from sluicegate_lab import bench_datapath
from sluicegate_lab.bench import BenchError
from sluicegate_lab.bench.parts import PARTS
from sluicegate_lab.bench.peers import BUSY_POLICY, OPEN_POLICY, Setting, nginx
from sluicegate_lab.bench.processes import Proxy, free_port
from sluicegate_lab.bench.reactor import Reactor

SERVER = """
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    server.accept()
"""


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_datapath.add_arguments(parser)
    return parser.parse_args(words)


def test_an_unknown_part_is_one_line_that_names_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_datapath.run(arguments("--only", "requests,streems")) == 1
    said = capsys.readouterr().err
    assert said == f"bench-datapath: there is no part 'streems'; there are {', '.join(PARTS)}\n"


@pytest.mark.parametrize("words", [("--rounds", "0"), ("--window", "0")])
def test_rounds_and_windows_have_a_length(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_datapath.run(arguments(*words)) == 1
    assert "at least one round" in capsys.readouterr().err


def test_only_a_full_run_of_the_gate_writes_the_page_unasked(tmp_path: Path) -> None:
    names = list(PARTS)
    page = bench_datapath._where_to_write(arguments(), names)
    assert page is not None
    assert page.parts[-2:] == ("docs", "benchmarks.md")
    assert bench_datapath._where_to_write(arguments("--quick"), names) is None
    assert bench_datapath._where_to_write(arguments("--subject", "envoy"), names) is None
    assert bench_datapath._where_to_write(arguments(), names[:1]) is None
    assert bench_datapath._where_to_write(arguments("--no-write"), names) is None
    asked = tmp_path / "page.md"
    assert bench_datapath._where_to_write(arguments("--quick", "--write", str(asked)), names) == asked


def test_a_missing_nginx_is_one_line_with_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_args, **_kwargs: None)
    with pytest.raises(BenchError, match=r"nginx is missing: scripts/system-packages nginx installs it"):
        nginx(Setting(upstream_port=1, core=0, folder=tmp_path))


def test_the_policies_are_ones_the_gate_takes() -> None:
    import yaml

    from sluicegate_core.policy import parse_policy

    assert len(parse_policy(yaml.safe_load(OPEN_POLICY)).classes) == 4
    assert parse_policy(yaml.safe_load(BUSY_POLICY)).classes[0].max_concurrency == 1


@pytest.fixture
def core() -> int:
    return min(os.sched_getaffinity(0))


def test_a_proxy_is_pinned_measured_and_ended(core: int) -> None:
    reactor = Reactor()
    port = free_port()
    with Proxy("server", [sys.executable, "-c", SERVER, str(port)], port=port, core=core) as proxy:
        assert proxy.wait_listening(reactor) > 0.0
        assert os.sched_getaffinity(proxy.pid) == {core}
        assert min(proxy.cpu_ns()) >= 0
        assert proxy.cpu_ns()[0] > 0
        memory_mb = proxy.memory_mb()
        assert 0.0 < memory_mb["pss"] <= memory_mb["rss"]
        pid = proxy.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    proxy.stop()
    reactor.stop()


def test_a_proxy_that_ends_at_once_is_quoted(core: int) -> None:
    reactor = Reactor()
    command = [sys.executable, "-c", "print('unknown option'); print('no such port')"]
    with (
        Proxy("server", command, port=free_port(), core=core) as proxy,
        pytest.raises(BenchError, match=r"^server ended at once: no such port$"),
    ):
        proxy.wait_listening(reactor)
    reactor.stop()


@pytest.mark.slow
def test_the_cost_of_a_decision_is_measured_on_the_real_gate(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_datapath.run(arguments("--quick", "--only", "decision", "--json")) == 0
    bars = json.loads(capsys.readouterr().out.splitlines()[-1])["bars"]
    assert [bar["name"] for bar in bars] == ["decision_1kb", "decision_32kb", "decision_1mb", "decision_flat"]
    assert all(bar["value"] > 0.0 for bar in bars)
    assert all(bar["holds"] is (bar["value"] <= bar["bar"]) for bar in bars)
