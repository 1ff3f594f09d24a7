"""What is known of engines' images: the program that they start, its arguments, its environment.

Read from the images' own Dockerfiles. An image is known by the end of its repository's path, so that mirrors and
pull-through caches of a registry are known as well; and only where its entrypoint has been the same in all of its
releases, or where the differences do not matter here. Whatever is not in the table is not known: nothing is guessed
from a name that merely looks alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class Image:
    """An image's own configuration, as far as it matters to where its program listens."""

    entrypoint: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


_VLLM: Final = Image(("vllm", "serve"))
_LLAMA: Final = Image(("/app/llama-server",), environment={"LLAMA_ARG_HOST": "0.0.0.0"})  # noqa: S104
_TGI: Final = Image(("text-generation-launcher",), environment={"PORT": "80"})
_TEI: Final = Image(("text-embeddings-router",), ("--json-output",), {"PORT": "80"})
_OLLAMA: Final = Image(("/bin/ollama",), ("serve",), {"OLLAMA_HOST": "0.0.0.0:11434"})
#: Its entrypoint prints a banner and then starts what it is given.
_NVIDIA: Final = Image(("/opt/nvidia/nvidia_entrypoint.sh",))
_KSERVE: Final = Image(("python", "-m", "huggingfaceserver"))

#: End of the repository's path, pattern of the tag, image. The first that matches counts.
_IMAGES: Final[tuple[tuple[str, str, Image], ...]] = (
    # Up to 0.8 the entrypoint was `python3 -m vllm.entrypoints.openai.api_server`: the same flags, ports and host.
    ("vllm/vllm-openai", "", _VLLM),
    ("vllm/vllm-openai-rocm", "", _VLLM),
    ("vllm/vllm-openai-cpu", "", _VLLM),
    ("vllm-cpu-release-repo", "", _VLLM),
    ("lmcache/vllm-openai", "", _VLLM),
    ("ggml-org/llama.cpp", "server", _LLAMA),
    ("ggerganov/llama.cpp", "server", _LLAMA),
    ("huggingface/text-generation-inference", "", _TGI),
    ("huggingface/text-embeddings-inference", "", _TEI),
    ("ollama/ollama", "", _OLLAMA),
    ("nvidia/tritonserver", "", _NVIDIA),
    ("nvidia/tensorrt-llm/release", "", _NVIDIA),
    ("lmsysorg/sglang", "", _NVIDIA),
    ("kserve/huggingfaceserver", "", _KSERVE),
)


def find_image(reference: str) -> Image | None:
    """What is known of the image of this reference, `REGISTRY/PATH:TAG@DIGEST`; None where nothing is."""
    name = reference.partition("@")[0]
    path, _, tag = name.rpartition(":")
    if not path or "/" in tag:
        path, tag = name, ""
    for suffix, pattern, image in _IMAGES:
        if (path == suffix or path.endswith("/" + suffix)) and re.match(pattern, tag):
            return image
    return None
