"""How each inference server is told where to listen: its program, its flags, its variables, its defaults.

A table, read from the engines' own documentation and argument parsers (docs/injection.md names the sources). A row is
one program; an engine may have several. What the words of a command are is `start`'s to find out; what they mean is
here; what is done about it is in `listening`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from sluicegate_core.policy import EngineType
from sluicegate_operator.injection.start import Arg

ALL_INTERFACES: Final = "0.0.0.0"  # noqa: S104  # what engines call it
LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One way to start an engine.

    Attributes:
        name: as people call it.
        type: as the gate knows it.
        pattern: its words up to the first argument, joined by a space; paths are cut to their last part.
        port_flags, host_flags: any spelling; the first is the one to write.
        port_variable, host_variable: environment that counts where the flag is not given; empty: none.
        address_variable: one variable with both, `HOST:PORT`.
        port, host: where it listens when nothing is said.
        last_wins: a flag given twice counts as given last; otherwise it is an error.
        not_served: a flag, and why a gate cannot stand in front of what it asks for.
        config_flags: flags of files that may say more.
        shared_host_flags: flags that make the engine offer something else to other pods at the same host, so that only
            its port can move.
    """

    name: str
    type: EngineType
    pattern: str
    port_flags: tuple[str, ...] = ("--port",)
    host_flags: tuple[str, ...] = ("--host",)
    port_variable: str = ""
    host_variable: str = ""
    address_variable: str = ""
    port: int
    host: str = ALL_INTERFACES
    last_wins: bool = True
    not_served: Mapping[str, str] = field(default_factory=dict)
    config_flags: tuple[str, ...] = ()
    shared_host_flags: tuple[str, ...] = ()


_TLS: Final = "it serves TLS, which a gate cannot look into; end TLS in front of the pod"
_SOCKET: Final = "it listens on a Unix socket, which a gate cannot stand in front of"
_TOLD: Final = "it tells others its own address, which would then be the wrong one"
_NO_SERVER: Final = "it serves no requests in this pod; let the selector leave it out"

_VLLM_NOT_SERVED: Final = {
    "--ssl-keyfile": _TLS,
    "--ssl-certfile": _TLS,
    "--uds": _SOCKET,
    "--headless": _NO_SERVER,
}

PROGRAMS: Final[tuple[Program, ...]] = (
    Program(
        name="vLLM",
        type=EngineType.VLLM,
        pattern=r"(python\S* \S*)?vllm serve",
        port=8000,
        not_served=_VLLM_NOT_SERVED,
        config_flags=("--config",),
    ),
    Program(
        name="vLLM",
        type=EngineType.VLLM,
        pattern=r"python\S*( -[a-zA-Z]+)* -m vllm\.entrypoints\.(openai\.)?api_server",
        port=8000,
        not_served=_VLLM_NOT_SERVED,
        config_flags=("--config",),
    ),
    Program(
        name="llama.cpp",
        type=EngineType.LLAMA_CPP,
        pattern=r"llama-server",
        port_variable="LLAMA_ARG_PORT",
        host_variable="LLAMA_ARG_HOST",
        port=8080,
        host=LOOPBACK,
        not_served={"--ssl-key-file": _TLS, "--ssl-cert-file": _TLS},
    ),
    Program(
        name="llama-cpp-python",
        type=EngineType.OTHER,
        pattern=r"python\S* -m llama_cpp\.server",
        port_variable="PORT",
        host_variable="HOST",
        port=8000,
        host="localhost",
        not_served={"--ssl_keyfile": _TLS, "--ssl_certfile": _TLS},
        config_flags=("--config_file",),
    ),
    Program(
        name="SGLang",
        type=EngineType.SGLANG,
        pattern=r"(python\S*( -[a-zA-Z]+)* -m sglang\.launch_server|sglang serve)",
        port=30000,
        host=LOOPBACK,
        not_served={"--ssl-keyfile": _TLS, "--ssl-certfile": _TLS},
        config_flags=("--config",),
        # Its bootstrap server for disaggregated serving listens at the same host.
        shared_host_flags=("--disaggregation-mode",),
    ),
    Program(
        name="TGI",
        type=EngineType.TGI,
        pattern=r"text-generation-launcher",
        port_flags=("--port", "-p"),
        host_flags=("--hostname",),
        port_variable="PORT",
        host_variable="HOSTNAME",
        port=3000,
        last_wins=False,
    ),
    Program(
        name="TEI",
        type=EngineType.OTHER,
        pattern=r"text-embeddings-router",
        port_flags=("--port", "-p"),
        host_flags=("--hostname",),
        port_variable="PORT",
        port=3000,
        last_wins=False,
    ),
    Program(
        name="Triton",
        type=EngineType.TRITON,
        pattern=r"tritonserver",
        port_flags=("--http-port",),
        host_flags=("--http-address",),
        port=8000,
    ),
    Program(
        name="trtllm-serve",
        type=EngineType.TENSORRT_LLM,
        pattern=r"trtllm-serve",
        port=8000,
        host="localhost",
        not_served={"--metadata_server_config_file": _TOLD},
    ),
    Program(
        name="Ollama",
        type=EngineType.OLLAMA,
        pattern=r"ollama serve",
        port_flags=(),
        host_flags=(),
        address_variable="OLLAMA_HOST",
        port=11434,
        host=LOOPBACK,
    ),
    Program(
        name="LMDeploy",
        type=EngineType.OTHER,
        pattern=r"lmdeploy serve api_server",
        port_flags=("--server-port",),
        host_flags=("--server-name",),
        port=23333,
        not_served={"--ssl": _TLS, "--proxy-url": _TOLD},
    ),
    Program(
        name="KServe's Hugging Face server",
        type=EngineType.OTHER,
        pattern=r"python\S* -m huggingfaceserver",
        port_flags=("--http_port",),
        host_flags=(),
        port=8080,
    ),
)

#: Words of the longest pattern, with the options of an interpreter.
_MAX_PATTERN_WORDS: Final = 8
#: What a text that cannot be read says where an engine is in it.
_MENTIONS: Final = re.compile(
    r"vllm serve|vllm\.entrypoints|llama-server|llama_cpp\.server|sglang\.launch_server|sglang serve"
    r"|text-generation-launcher|tritonserver|trtllm-serve|ollama serve|lmdeploy serve"
)


def find_program(args: Sequence[Arg]) -> tuple[Program, int] | None:
    """Which engine a command starts, and how many words name it; None where it is none that is known."""
    texts: list[str] = []
    for arg in args[:_MAX_PATTERN_WORDS]:
        if arg.text is None or arg.many:
            break
        texts.append(arg.text.rsplit("/", 1)[-1])
    joined = " ".join(texts)
    for program in PROGRAMS:
        found = re.match(rf"(?:{program.pattern})(?= |\Z)", joined)
        if found is not None:
            return program, found[0].count(" ") + 1
    return None


def mentions_engine(text: str) -> bool:
    """Whether a text that could not be read names an engine's program."""
    return _MENTIONS.search(text) is not None
