"""Every load of the benchmark through the real gate, and through its data path alone: all of it is answered."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluicegate_lab.bench.loads import Loads, Target
from sluicegate_lab.bench.peers import STARTERS, Setting
from sluicegate_lab.bench.reactor import Reactor
from sluicegate_lab.bench.upstream import Upstream

pytestmark = pytest.mark.slow

WINDOW_S = 0.05


class Stage:
    """A stub and its loads, without a proxy yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reactor = Reactor()
        self.upstream = Upstream(self.reactor)
        self.loads = Loads(self.reactor, self.upstream, WINDOW_S)

    def setting(self, *, refusing: bool) -> Setting:
        core = max(os.sched_getaffinity(0))
        return Setting(upstream_port=self.upstream.port, core=core, folder=self.folder, refusing=refusing)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.upstream.close()
    stage.reactor.stop()


@pytest.mark.parametrize("kind", ["gate", "http-only"])
def test_everything_that_is_forwarded_is_answered(stage: Stage, kind: str) -> None:
    with STARTERS[kind](stage.setting(refusing=False)) as proxy:
        proxy.wait_listening(stage.reactor)
        proxy.wait_started(stage.reactor)
        target = Target(kind, proxy.port, proxy)
        loads = stage.loads
        for load in (loads.requests, loads.streams, loads.latency, loads.streams_and_bodies):
            sample = load(target)
            assert all(value >= 0.0 for value in sample.values.values())
            assert sample.conditions.proxy_busy > 0.0
        assert stage.upstream.streams == []


def test_a_busy_gate_refuses_each_request_at_arrival_and_keeps_the_connection(stage: Stage) -> None:
    with STARTERS["gate"](stage.setting(refusing=True)) as proxy:
        proxy.wait_listening(stage.reactor)
        proxy.wait_started(stage.reactor)
        target = Target("gate", proxy.port, proxy)
        stage.loads.serve_streams(target, count=5, length_s=0.1)
        release = stage.loads.hold_stream(target)
        # Anything but a 429 on a kept connection raises.
        assert stage.loads.refusals(target).values["requests_per_s"] > 0.0
        release()


def test_the_data_path_alone_refuses_each_request_and_keeps_the_connection(stage: Stage) -> None:
    with STARTERS["http-only"](stage.setting(refusing=True)) as proxy:
        proxy.wait_listening(stage.reactor)
        target = Target("http-only", proxy.port, proxy)
        assert stage.loads.refusals(target).values["requests_per_s"] > 0.0
