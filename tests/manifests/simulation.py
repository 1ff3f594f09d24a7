"""What a pod would do: which process listens where, and where each probe and each client arrives.

An oracle that shares nothing with the code under test. It starts a container's command as the kubelet and the shell
do, for real, with programs on the PATH that only write down how they were called; what the engine makes of its words
is read with argparse and by other plain means, from the engines' documentation. So an expectation in a table is not a
snapshot of what the code happens to do, but held against what a shell and an argument parser make of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

Json = Mapping[str, Any]

#: A script that waits for what a stub never gives is ended after this.
SCRIPT_S: Final = 5.0
ENGINES: Final = (
    "vllm", "python", "python3", "python3.10", "python3.11", "python3.12", "llama-server", "text-generation-launcher",
    "text-embeddings-router", "tritonserver", "trtllm-serve", "ollama", "sglang", "lmdeploy",
)  # fmt: skip
#: Programs that scripts call on the way, and whose work does not matter.
BYSTANDERS: Final = (
    "apt-get", "pip", "pip3", "ray", "nvidia-smi", "huggingface-cli", "curl", "wget", "git", "gsutil", "aws", "sleep",
    "update-alternatives", "mkdir", "cp", "ln", "rm", "chmod", "chown", "ls", "nc", "getent", "numactl", "sysctl",
    "mount", "install", "hostname", "export-nothing", "source-nothing", "tee", "ldconfig", "df", "free",
)  # fmt: skip
#: Programs that are what they are.
REAL: Final = (
    "env",
    "cat",
    "echo",
    "tr",
    "cut",
    "head",
    "grep",
    "sed",
    "seq",
    "true",
    "false",
    "date",
    "nohup",
    "test",
    "bash",
    "sh",
    "nice",
    "timeout",
    "taskset",
    "basename",
)

_STUB: Final = """#!{python} -ISE
import json, os, sys
call = {{"argv": [os.path.basename(sys.argv[0]), *sys.argv[1:]], "env": dict(os.environ)}}
with open(os.environ["SLUICEGATE_RECORD"], "a") as record:
    record.write(json.dumps(call) + "\\n")
"""


@dataclass(frozen=True)
class Image:
    """What an image adds to a manifest, as its Dockerfile says."""

    entrypoint: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


IMAGES: Final = {
    r"(^|/)vllm/vllm-openai(:|@|$)": Image(("python3", "-m", "vllm.entrypoints.openai.api_server")),
    r"(^|/)lmcache/vllm-openai(:|@|$)": Image(("/opt/venv/bin/vllm", "serve")),
    r"(^|/)vllm/vllm-openai-cpu(:|@|$)": Image(("vllm", "serve")),
    r"(^|/)vllm-cpu-release-repo(:|@|$)": Image(("vllm", "serve")),
    r"(^|/)ggml-org/llama.cpp:server": Image(("/app/llama-server",), (), (("LLAMA_ARG_HOST", "0.0.0.0"),)),
    r"(^|/)ggerganov/llama.cpp:server": Image(("/app/llama-server",), (), (("LLAMA_ARG_HOST", "0.0.0.0"),)),
    r"(^|/)huggingface/text-generation-inference(:|@|$)": Image(
        ("text-generation-launcher",), (), (("PORT", "80"),)
    ),
    r"(^|/)huggingface/text-embeddings-inference(:|@|$)": Image(
        ("text-embeddings-router",), (), (("PORT", "80"),)
    ),
    r"(^|/)ollama/ollama(:|@|$)": Image(("/bin/ollama",), ("serve",), (("OLLAMA_HOST", "0.0.0.0:11434"),)),
    r"(^|/)kserve/huggingfaceserver(:|@|$)": Image(("python3", "-m", "huggingfaceserver")),
}


@dataclass(frozen=True)
class Started:
    """A program that a container started."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


def start(container: Json, environment: Mapping[str, str] | None = None) -> list[Started]:
    """Start a container's command, and return the calls of programs, in order.

    `environment`: what its envFrom gives.
    """
    image = next(
        (one for pattern, one in IMAGES.items() if re.search(pattern, container.get("image", ""))), Image()
    )
    env = dict(image.environment) | dict(environment or {})
    own: dict[str, str] = {}
    for variable in container.get("env") or ():
        own[variable["name"]] = (
            _expand(variable.get("value", ""), own)
            if "valueFrom" not in variable
            else f"from-{variable['name']}"
        )
    command = [_expand(word, own) for word in container.get("command") or image.entrypoint]
    args = [_expand(word, own) for word in container.get("args") or ()]
    if not container.get("command") and not container.get("args"):
        args = list(image.arguments)
    return run(command + args, env | own)


def _expand(text: str, values: Mapping[str, str]) -> str:
    """`$(NAME)` as the kubelet does it: unknown names stay, `$$` is a dollar."""
    result, at = "", 0
    while at < len(text):
        if text.startswith("$$", at):
            result, at = result + "$", at + 2
        elif text.startswith("$(", at) and ")" in text[at:]:
            end = text.index(")", at)
            name = text[at + 2 : end]
            result, at = result + (values[name] if name in values else text[at : end + 1]), end + 1
        else:
            result, at = result + text[at], at + 1
    return result


def run(argv: list[str], env: Mapping[str, str]) -> list[Started]:
    """Run a command, and return the calls of programs that it made."""
    if not argv:
        return []
    with tempfile.TemporaryDirectory(prefix="sluicegate-start-") as folder:
        bin_ = Path(folder) / "bin"
        bin_.mkdir()
        stub = Path(folder) / "stub"
        stub.write_text(_STUB.format(python=sys.executable))
        stub.chmod(0o755)
        for name in (*ENGINES, *BYSTANDERS):
            (bin_ / name).symlink_to(stub)
        for name in REAL:
            real = next(path for path in (Path("/usr/bin") / name, Path("/bin") / name) if path.exists())
            (bin_ / name).symlink_to(real)
        record = Path(folder) / "record"
        # Paths of the image lead to the stubs; shells are the machine's own.
        programs = "|".join(re.escape(name) for name in sorted(ENGINES, key=len, reverse=True))
        words = [re.sub(rf"(?:/[\w.-]+)+/({programs})(?![\w.-])", rf"{bin_}/\1", word) for word in argv]
        words = [re.sub(r"\bbash (/[\w./-]+\.sh)", r"true \1", word) for word in words]
        if words[0].rsplit("/", 1)[-1] in ("tini", "dumb-init"):
            words = words[words.index("--") + 1 :]
        words = [
            "-c" if word == "-lc" else word for word in words
        ]  # a login shell would look for other programs
        executable = _executable(words[0], bin_)
        if not Path(executable).exists():
            return []  # a program of an image that is not here
        process = subprocess.Popen(
            words,
            env={**env, "PATH": f"{bin_}", "SLUICEGATE_RECORD": str(record), "HOME": folder},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            executable=executable,
        )
        try:
            process.wait(SCRIPT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        lines = record.read_text().splitlines() if record.exists() else []
    calls = [json.loads(line) for line in lines]
    return [Started(tuple(one["argv"]), one["env"]) for one in calls]


def _executable(word: str, bin_: Path) -> str:
    if "/" in word:
        return word
    return str(bin_ / word) if (bin_ / word).exists() else f"/bin/{word}"


# What engines make of their words.


@dataclass(frozen=True)
class Listens:
    host: str
    port: int


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(message)


def listens(one: Started) -> Listens | None:
    """Where a started program listens, if it is an engine's server."""
    words = list(one.argv)
    if words[0].startswith("python"):
        module = words[words.index("-m") + 1] if "-m" in words else ""
        if module in ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server"):
            return _flags(words[words.index(module) + 1 :], 8000, "0.0.0.0")
        if module == "sglang.launch_server":
            return _flags(words[words.index(module) + 1 :], 30000, "127.0.0.1")
        if module == "llama_cpp.server":
            env = one.env
            return _flags(words, int(env.get("PORT", "8000")), env.get("HOST", "localhost"))
        if module == "huggingfaceserver":
            return Listens("0.0.0.0", _flags(words, 8080, "", port="--http_port").port)
        return None
    if words[:2] == ["vllm", "serve"]:
        return _flags(words[2:], 8000, "0.0.0.0")
    if words[0] == "llama-server":
        env = one.env
        return _flags(words, int(env.get("LLAMA_ARG_PORT", "8080")), env.get("LLAMA_ARG_HOST", "127.0.0.1"))
    if words[:2] == ["sglang", "serve"]:
        return _flags(words[2:], 30000, "127.0.0.1")
    if words[0] in ("text-generation-launcher", "text-embeddings-router"):
        # clap refuses an option given twice.
        for option in ("--port", "--hostname"):
            assert sum(word.split("=")[0] == option for word in words) <= 1, (
                f"{option} is given twice: {words}"
            )
        env = one.env
        host = env.get("HOSTNAME", "0.0.0.0")
        host = host if re.fullmatch(r"[\d.]+|[\da-f:]+", host) else "0.0.0.0"
        words = ["--port" if word == "-p" else word for word in words]
        return _flags(words, int(env.get("PORT", "3000")), host, host_flag="--hostname")
    if words[0] == "tritonserver":
        return _flags(words, 8000, "0.0.0.0", port="--http-port", host_flag="--http-address")
    if words[0] == "trtllm-serve":
        return _flags(words[1:], 8000, "localhost")
    if words[:2] == ["lmdeploy", "serve"]:
        return _flags(words[3:], 23333, "0.0.0.0", port="--server-port", host_flag="--server-name")
    if words[:2] == ["ollama", "serve"]:
        address = one.env.get("OLLAMA_HOST", "127.0.0.1:11434").removeprefix("http://")
        host, _, port = address.rpartition(":") if ":" in address else (address, "", "11434")
        return Listens(host or "0.0.0.0", int(port))
    return None


def _flags(
    words: list[str], default_port: int, default_host: str, *, port: str = "--port", host_flag: str = "--host"
) -> Listens:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument(port, dest="port", type=int, default=default_port)
    parser.add_argument(host_flag, dest="host", default=default_host)
    known, _ = parser.parse_known_args(words)
    return Listens(known.host, known.port)


# A pod.


@dataclass(frozen=True)
class Simulated:
    """Who listens where in a pod: port -> (container, host)."""

    listeners: Mapping[int, tuple[str, str]]
    upstream: int | None  # of the gate

    def reaches(self, port: int, *, inside: bool = False) -> str:
        """Who answers on the pod's port: a container's name, or "nobody"."""
        found = self.listeners.get(port)
        if found is None:
            return "nobody"
        name, host = found
        return name if inside or host not in ("127.0.0.1", "localhost", "::1") else "nobody"


GATE: Final = "sluicegate-gate"


def simulate(pod: Json, environment: Mapping[str, str] | None = None) -> Simulated:
    """Start every main container of a pod, and the gate if it has one."""
    listeners: dict[int, tuple[str, str]] = {}
    upstream: int | None = None
    for container in pod["spec"]["containers"]:
        # A script may have an engine in each of its branches: those that ran.
        for at in {listens(one) for one in start(container, environment)} - {None}:
            assert at is not None
            assert at.port not in listeners, f"two listen on {at.port}"
            listeners[at.port] = (container["name"], at.host)
    for container in pod["spec"].get("initContainers") or ():
        if container["name"] == GATE:
            flags = dict(word.split("=", 1) for word in container["args"])
            for flag in ("--listen", "--admin"):
                host, _, port = flags[flag].rpartition(":")
                assert int(port) not in listeners, f"two listen on {port}"
                listeners[int(port)] = (GATE, host)
            assert flags["--upstream"].startswith("http://127.0.0.1:")
            upstream = int(flags["--upstream"].rsplit(":", 1)[1])
    return Simulated(listeners, upstream)


def named_ports(pod: Json) -> Iterator[tuple[str, int]]:
    """The named ports of a pod, as Services find them."""
    for container in [*pod["spec"]["containers"], *(pod["spec"].get("initContainers") or ())]:
        for port in container.get("ports") or ():
            if port.get("name"):
                yield port["name"], port["containerPort"]


def probe_target(container: Json, probe: Json) -> tuple[str, object]:
    """How and where a probe asks: ("http", port) and so on; for a command, the calls that it makes."""
    for how, kind in (("httpGet", "http"), ("tcpSocket", "tcp"), ("grpc", "grpc")):
        if how in probe:
            port = probe[how]["port"]
            names = {one.get("name"): one["containerPort"] for one in container.get("ports") or ()}
            return kind, names.get(port, port)
    return "exec", tuple(one.argv for one in run(list(probe["exec"]["command"]), {}))
