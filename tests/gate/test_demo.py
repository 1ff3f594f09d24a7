"""The demo as a user runs it: a real engine, a real gate, and nothing left behind however it ends."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sluicegate_lab import demo
from sluicegate_lab.tiny_model import ensure_model

pytestmark = pytest.mark.engine

COMMAND = [sys.executable, "-m", "sluicegate_lab", "demo", "--no-live"]


def children_of(pid: int) -> list[int]:
    """Every process whose parent is `pid`."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def ended(pids: list[int], timeout_s: float = 20.0) -> bool:
    """Whether all of these have ended or do so in time; who is gone already counts as ended."""
    with selectors.DefaultSelector() as selector:
        for pid in pids:
            try:
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + timeout_s
        while selector.get_map() and time.monotonic() < deadline:
            for key, _ in selector.select(timeout_s):
                os.close(key.fd)
                selector.unregister(key.fileobj)
        return not selector.get_map()


def fails(*arguments: str, code: int) -> str:
    """Runs a demo that cannot work; returns the one line that it says."""
    done = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.strip().splitlines()
    return line


@pytest.mark.slow
def test_a_short_demo_compares_both_sides_and_leaves_a_report(tmp_path: Path) -> None:
    report, picture = tmp_path / "report.html", tmp_path / "picture.svg"
    done = subprocess.run(
        [*COMMAND, "--seconds", "4", "--json", "--report", str(report), "--picture", str(picture)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    for side in ("engine", "gate"):
        total = result[side]["total"]
        assert total["offered"] == result["requests"]
        ends = ("served", "refused", "gave_up", "cut_off", "failed")
        assert sum(total[end] for end in ends) == total["offered"]
        assert total["failed"] == 0
    assert result["engine"]["total"]["refused"] == 0
    assert result["overload"] >= 2.5
    assert str(report) in done.stdout
    assert "weighted goodput" in done.stdout
    assert report.read_text().startswith("<!doctype html>")
    assert picture.read_text().startswith("<svg")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "signum"),
    [
        ("llama.cpp serves", signal.SIGINT),
        ("measuring the full engine", signal.SIGTERM),
        ("the gate listens", signal.SIGINT),
        ("Straight to", signal.SIGTERM),
    ],
)
def test_an_interrupted_demo_stops_all_that_it_started(
    tmp_path: Path, stage: str, signum: signal.Signals
) -> None:
    ensure_model()  # so that the time to the first stage is not that of writing it
    process = subprocess.Popen(
        [*COMMAND, "--report", str(tmp_path / "report.html")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if stage in line:
            break
    started = children_of(process.pid)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == demo.INTERRUPTED
    assert "Traceback" not in errors
    assert ended(started)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_a_killed_demo_leaves_no_process_behind(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--report", str(tmp_path / "report.html")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "the gate listens" in line:
            break
    started = children_of(process.pid)
    assert len(started) == 2
    process.kill()
    process.communicate()
    assert ended(started)


def test_an_engine_that_does_not_answer_is_one_line() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    line = fails("--engine-url", f"http://127.0.0.1:{port}", code=demo.FAILED)
    assert "no OpenAI-compatible engine answers" in line


def test_an_address_that_cannot_be_used_is_one_line() -> None:
    assert "http://HOST:PORT" in fails("--engine-url", "https://127.0.0.1:1", code=demo.FAILED)


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    assert "no model at" in fails("--model", str(tmp_path / "none.gguf"), code=demo.FAILED)


def test_a_wrong_policy_is_told_before_anything_is_started(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("classes:\n- {name: interactive}\n")
    assert "no class batch" in fails("--policy", str(policy), code=demo.USAGE)


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = subprocess.run(
        COMMAND,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "SLUICEGATE_CACHE": str(blocked / "below")},
    )
    assert done.returncode == demo.FAILED
    assert re.fullmatch(r"sluicegate demo: .*Not a directory.*\n", done.stderr)


def test_help_says_how_the_length_of_an_answer_stays_unknown() -> None:
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert "why the gate cannot know it" in done.stdout
