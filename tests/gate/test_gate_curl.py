"""curl against a real engine, alone and through the gate: same bytes, same exit status."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.gate.gate_process import NOT_COMPARED, Both, engine_and_gate, normal

CURL = shutil.which("curl")

pytestmark = [pytest.mark.engine, pytest.mark.skipif(CURL is None, reason="curl is not installed")]

TIMEOUT_S = 30

#: Above a megabyte curl asks by itself whether it may go on.
LARGE = 2 << 20

ANSWER = b" 4 3 2 1"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    with engine_and_gate(tmp_path_factory.mktemp("model")) as running:
        yield running


class Seen(NamedTuple):
    """What curl saw: exit status, its own numbers, headers, content."""

    exit_status: int
    numbers: str
    headers: list[tuple[str, str]]
    body: bytes


def curl(
    url: str, arguments: Sequence[str], folder: Path, numbers: str = "%{http_code} %{content_type}"
) -> Seen:
    head, content = folder / "head", folder / "content"
    for path in (head, content):
        path.unlink(missing_ok=True)
    filled = [argument.replace("URL", url) for argument in arguments]
    done = subprocess.run(
        [str(CURL), "-sS", "--noproxy", "*", "-D", str(head), "-o", str(content), "-w", numbers, *filled],
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    lines = [line.partition(": ") for line in head.read_text().splitlines() if ": " in line]
    headers = sorted((name.lower(), value) for name, _, value in lines if name.lower() not in NOT_COMPARED)
    # With -I the head is what is written as content.
    body = content.read_bytes() if content.exists() and "-I" not in arguments else b""
    return Seen(done.returncode, done.stdout.decode(), headers, normal(body))


def chat(**more: object) -> str:
    fields = {"messages": [{"role": "user", "content": "the gate is open 5"}], "temperature": 0, **more}
    return json.dumps(fields)


JSON = ["-H", "Content-Type: application/json"]
CHAT = ["URL/v1/chat/completions", *JSON, "-d", chat()]
STREAM = ["URL/v1/chat/completions", *JSON, "-N", "-d", chat(stream=True)]

CALLS: dict[str, tuple[list[str], bytes]] = {
    "plain": (CHAT, ANSWER),
    "streamed": (STREAM, b"data: [DONE]"),
    "HTTP/1.0": (["--http1.0", *CHAT], ANSWER),
    "HTTP/1.0, streamed": (["--http1.0", *STREAM], b"data: [DONE]"),
    "chunked upload": (["-H", "Transfer-Encoding: chunked", *CHAT], ANSWER),
    "expects 100-continue": (["-H", "Expect: 100-continue", *CHAT], ANSWER),
    "without any headers of its own": (["-H", "User-Agent:", "-H", "Accept:", *CHAT], ANSWER),
    "closes": (["-H", "Connection: close", *CHAT], ANSWER),
    "compressed": (["--compressed", *CHAT], ANSWER),
    "a query": (["URL/v1/chat/completions?timeout=5", *CHAT[1:]], ANSWER),
    "completion": (["URL/completion", *JSON, "-d", '{"prompt":"a 5","temperature":0}'], ANSWER),
    "completion, streamed": (
        ["URL/completion", *JSON, "-N", "-d", '{"prompt":"a 5","temperature":0,"stream":true}'],
        b'"stop":true',
    ),
    "messages": (["URL/v1/messages", *JSON, "-d", chat(max_tokens=9, model="m")], ANSWER),
    "infill": (
        ["URL/infill", *JSON, "-d", '{"input_prefix":"a","input_suffix":"b","n_predict":3}'],
        b"",
    ),
    "no JSON": (["URL/v1/chat/completions", *JSON, "-d", "{no"], b"error"),
    "no body": (["URL/v1/chat/completions", *JSON, "-X", "POST"], b"error"),
    "unknown path": (["URL/v1/nothing", "-d", "a"], b"not_found_error"),
    "models": (["URL/v1/models"], b"countdown"),
    "health": (["URL/health"], b"ok"),
    "tokenize": (["URL/tokenize", *JSON, "-d", '{"content":"the gate"}'], b"tokens"),
    "HEAD": (["-I", "URL/health"], b""),
    "HEAD of an inference path": (["-I", "URL/v1/chat/completions"], b""),
    "OPTIONS": (["-X", "OPTIONS", "URL/v1/chat/completions"], b""),
    "GET of an inference path": (["URL/v1/chat/completions"], b""),
    "fails on errors": (["--fail", "URL/v1/nothing"], b""),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_same_bytes(both: Both, tmp_path: Path, name: str) -> None:
    arguments, expected = CALLS[name]
    alone, gated = (curl(url, arguments, tmp_path) for url in both.urls)
    assert expected in alone.body
    assert gated == alone


@pytest.mark.parametrize("how", [[], ["-H", "Transfer-Encoding: chunked"]], ids=["by length", "in chunks"])
def test_a_large_body(both: Both, tmp_path: Path, how: list[str]) -> None:
    """It waits for 100 Continue by itself where it gives a length, and would give up waiting after a second."""
    file = tmp_path / "large.json"
    file.write_text(chat(user="x" * LARGE))
    large = ["URL/v1/chat/completions", *JSON, "--data-binary", f"@{file}", *how]
    numbers = "%{http_code} %{size_upload}"
    alone, gated = (curl(url, large, tmp_path, numbers) for url in both.urls)
    assert ANSWER in alone.body
    assert gated == alone
    if not how:
        interim = (tmp_path / "head").read_text().splitlines()[0]
        assert interim == "HTTP/1.1 100 Continue"


def test_a_connection_serves_request_after_request(both: Both, tmp_path: Path) -> None:
    """Though the engine closes its own after each answer."""
    twice = [*CHAT, "--next", "-sS", *STREAM, "-o", str(tmp_path / "second"), "-w", " %{num_connects}"]
    seen = curl(both.gate.url, twice, tmp_path, "%{num_connects}")
    assert (seen.exit_status, seen.numbers) == (0, "1 0")
    assert ANSWER in seen.body
    assert (tmp_path / "second").read_bytes().endswith(b"data: [DONE]\n\n")


def test_a_client_that_gives_up_is_no_trouble(both: Both, tmp_path: Path) -> None:
    """curl ends in mid-stream because nobody takes what it writes."""
    body = chat(stream=True, max_tokens=900, ignore_eos=True)
    command = [str(CURL), "-sSN", "--noproxy", "*", f"{both.gate.url}/v1/chat/completions", *JSON, "-d", body]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"data: ")
        process.stdout.close()
        assert process.wait(TIMEOUT_S) == 23  # could not write
    assert ANSWER in curl(both.gate.url, CHAT, tmp_path).body
