"""Where a gate cannot start it says why in one line, and exits 2; where it can, it listens before all else."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.gate.gate_process import POLICY, ROOT, gate_running

from sluicegate_sidecar.run import main

TIMEOUT_S = 30


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    return path


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def run(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(ROOT / part) for part in ("sidecar", "lab"))
    return subprocess.run(
        [sys.executable, "-m", "sluicegate_sidecar", "run", *flags],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


def assert_refused(done: subprocess.CompletedProcess[str], pattern: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stdout == "" or "listening" in done.stdout
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert re.search(pattern, last), done.stderr


HERE = ("--upstream=http://127.0.0.1:9", "--listen=127.0.0.1:0", "--admin=127.0.0.1:0")


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ((), "--policy is required"),
        (("--policy=p.yaml",), "--upstream is required"),
        (("--policy=p.yaml", "--upstream=https://engine:1"), "http://HOST:PORT"),
        (("--policy=p.yaml", *HERE, "--listen=nowhere"), "--listen 'nowhere' is not HOST:PORT"),
        (("--policy=p.yaml", *HERE, "--drain-timeout=-1"), "--drain-timeout"),
        (("--policy=p.yaml", *HERE, "--unknown"), "--unknown"),
    ],
)
def test_flags_that_cannot_be_used(
    flags: tuple[str, ...], pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--admin=none", *flags]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert pattern in err


def test_a_policy_that_is_not_there() -> None:
    assert_refused(run("--policy=/nowhere/p.yaml", *HERE), "cannot be read: No such file")


def test_a_bad_policy_is_told_with_all_its_problems(policy: Path) -> None:
    policy.write_text("classes:\n- {name: a, wieght: 1}\n- {name: a, slo: {ttft: soon}}\n")
    done = run(f"--policy={policy}", *HERE)
    assert_refused(done, "spec")
    for problem in ("wieght", "weight", "soon"):
        assert problem in done.stderr


def test_a_data_port_that_is_taken(policy: Path, taken: int) -> None:
    assert_refused(run(f"--policy={policy}", *HERE, f"--listen=127.0.0.1:{taken}"), f"{taken}.*in use")


def test_an_admin_port_that_is_taken(policy: Path, taken: int) -> None:
    done = run(f"--policy={policy}", *HERE, f"--admin=127.0.0.1:{taken}")
    assert_refused(done, f"admin.*{taken}.*in use")


def test_an_address_that_is_not_ours(policy: Path) -> None:
    assert_refused(run(f"--policy={policy}", *HERE, "--listen=192.0.2.1:0"), "192.0.2.1")


def test_flags_from_the_environment(policy: Path, taken: int) -> None:
    done = run(
        SLUICEGATE_POLICY=str(policy),
        SLUICEGATE_UPSTREAM="http://127.0.0.1:9",
        SLUICEGATE_LISTEN=f"127.0.0.1:{taken}",
        SLUICEGATE_ADMIN="none",
    )
    assert_refused(done, f"{taken}.*in use")


def test_it_listens_and_says_so_in_one_line() -> None:
    with gate_running("http://127.0.0.1:9") as gate:
        assert len(gate.out.lines) == 1
