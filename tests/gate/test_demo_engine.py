"""The real engine of the demo and of other tests: it counts down, and it never outlives who started it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluicegate_lab import engine as engine_module
from sluicegate_lab.engine import EngineError, EngineOptions, LlamaServer
from sluicegate_lab.tiny_model import SMALLEST, ensure_model

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_model(SMALLEST, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[LlamaServer]:
    with LlamaServer(EngineOptions(model=model, slots=2, ctx_tokens=2048)) as started:
        yield started


def chat(url: str, content: str, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], **more}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        parsed: dict[str, Any] = json.load(answer)
        return parsed


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize("length", [1, 7, 999])
def test_the_model_ends_each_answer_where_the_prompt_says(server: LlamaServer, length: int) -> None:
    answer = chat(server.url, f"the gate is open {length}", max_tokens=1000)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == length
    assert answer["choices"][0]["message"]["content"].split() == [str(n) for n in range(length - 1, 0, -1)]


def test_a_prompt_of_known_words_has_the_length_that_was_planned(server: LlamaServer) -> None:
    answer = chat(server.url, "water river stone 3".replace("stone", "rock"))
    assert answer["usage"]["prompt_tokens"] == 5


def test_any_other_prompt_is_answered_within_bounds(server: LlamaServer) -> None:
    answer = chat(server.url, "Grüße, 你好 🙂!", max_tokens=64)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert 1 < answer["usage"]["completion_tokens"] <= 32


def test_json_mode_gives_json(server: LlamaServer) -> None:
    answer = chat(server.url, "an object", response_format={"type": "json_object"}, max_tokens=64)
    assert json.loads(answer["choices"][0]["message"]["content"]) == {}


def test_a_restarted_engine_listens_where_it_did(model: Path) -> None:
    with LlamaServer(EngineOptions(model=model)) as one:
        port, pid = one.port, one.pid
        one.kill()
        assert not alive(pid)
        one.start()
        assert one.port == port
        assert one.pid != pid
        chat(one.url, "again 2")
    assert not is_open(port)


def test_the_engine_ends_with_its_parent_even_if_that_is_killed(model: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from sluicegate_lab.engine import *\n"
        "e = LlamaServer(EngineOptions(model=Path(sys.argv[1]))); e.start()\n"
        "print(e.pid, flush=True); sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    watched = os.pidfd_open(pid)
    try:
        parent.kill()
        parent.communicate()
        # A pidfd becomes readable when its process has ended.
        import selectors

        with selectors.DefaultSelector() as selector:
            selector.register(watched, selectors.EVENT_READ)
            assert selector.select(timeout=20)
    finally:
        os.close(watched)


async def test_a_start_that_is_cancelled_leaves_nothing_behind(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[int] = []
    launched = asyncio.Event()
    loop = asyncio.get_running_loop()
    start_child = engine_module.ChildProcess

    def recorded(*args: Any, **more: Any) -> engine_module.ChildProcess:
        child = start_child(*args, **more)
        children.append(child.pid)
        loop.call_soon_threadsafe(launched.set)
        return child

    monkeypatch.setattr(engine_module, "ChildProcess", recorded)
    server = LlamaServer(EngineOptions(model=model))
    entering = asyncio.ensure_future(server.__aenter__())
    await launched.wait()
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert len(children) == 1
    assert not alive(children[0])


def test_a_port_that_is_taken_is_one_line(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(EngineError, match=r"^port \d+ is not free: .*$"):
            LlamaServer(EngineOptions(model=model, port=taken.getsockname()[1])).start()


def test_a_model_that_is_none_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF and then nothing")
    with pytest.raises(EngineError, match=r"^llama.cpp could not load .*$"):
        LlamaServer(EngineOptions(model=path)).start()
    with pytest.raises(EngineError, match=r"^no model at .*: No such file or directory$"):
        LlamaServer(EngineOptions(model=tmp_path / "none.gguf")).start()


def test_too_little_memory_is_one_line(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "available_memory_bytes", lambda: 64 << 20)
    with pytest.raises(EngineError, match=r"^not enough memory for the engine: .* 64 MB are free$"):
        LlamaServer(EngineOptions(model=model)).start()


def test_memory_is_found_out_on_this_machine() -> None:
    free = engine_module.available_memory_bytes()
    assert free is None or free > 0


def test_a_platform_without_a_wheel_is_told_what_to_do(model: Path, tmp_path: Path) -> None:
    """The package is hidden from a real child by one that cannot be imported."""
    (tmp_path / "xllamacpp.py").write_text("raise ImportError('no wheel for this platform')\n")
    done = subprocess.run(
        [sys.executable, "-m", "sluicegate_lab.engine", "--model", str(model)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == engine_module.EXIT_NO_ENGINE
    assert "--engine-url" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_signal_ends_the_engine_as_a_program(model: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-m", "sluicegate_lab.engine", "--model", str(model)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    assert program.stdout.readline().startswith("ready http://127.0.0.1:")
    program.send_signal(signal.SIGINT)
    program.communicate(timeout=20)
    assert program.returncode == 0
