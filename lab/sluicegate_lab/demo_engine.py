"""The engine of a demo: the one it starts itself, or one that runs already and is asked about itself.

The server process is `engine.py`, the demo's own model `tiny_model.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluicegate_lab.engine import EngineError, EngineOptions, LlamaServer
from sluicegate_lab.load import Target
from sluicegate_lab.tiny_model import ensure_model

DEFAULT_SLOTS = 4
DEFAULT_URL_SLOTS = 16
"""Streams at which an engine that does not say its slots is called full."""

CTX_TOKENS_PER_SLOT = 1024
"""The longest prompt and answer of the scaled trace take 640."""

HTTP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine of this demo. `kind` is its type in a policy, `model` what it serves, in words.

    `counts_down`: it runs the demo's own model, which ends each answer where its prompt says.
    """

    target: Target
    url: str
    kind: str
    model: str
    slots: int
    counts_down: bool


@contextlib.asynccontextmanager
async def own_engine(
    model: Path | None, slots: int | None, progress: Callable[[str], None]
) -> AsyncGenerator[Engine]:
    """A llama.cpp server of the demo's own for as long as the block lasts; None for the model: the demo's own."""
    counts_down = model is None
    if model is None:
        progress("the demo's own model: a random llama of 27 million weights that counts down")
        model = await asyncio.to_thread(ensure_model)
    slots = slots or DEFAULT_SLOTS
    options = EngineOptions(model=model, slots=slots, ctx_tokens=slots * CTX_TOKENS_PER_SLOT)
    async with LlamaServer(options) as server:
        progress(f"llama.cpp serves {model.name} on {server.url}, {slots} slots, {options.threads} thread")
        target = Target.of(server.url, options.alias)
        name = "the demo's own countdown model" if counts_down else str(model)
        yield Engine(target, server.url, "llama.cpp", name, slots, counts_down)


def running_engine(url: str, slots: int | None) -> Engine:
    """What an engine says about itself. Raises `EngineError` where it does not answer."""
    try:
        Target.of(url, "")
    except ValueError as error:
        raise EngineError(str(error)) from error
    base = url.rstrip("/")
    try:
        models = _get_json(f"{base}/v1/models")
        model = str(models["data"][0]["id"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise EngineError(f"no OpenAI-compatible engine answers at {base}/v1/models: {error}") from error
    if slots is None:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            slots = int(_get_json(f"{base}/props")["total_slots"])
    return Engine(Target.of(base, model), base, "Auto", model, slots or DEFAULT_URL_SLOTS, counts_down=False)


def _get_json(url: str) -> Any:
    # The scheme was checked by `Target.of`: plain http, as the client speaks it.
    with urllib.request.urlopen(url, timeout=HTTP_TIMEOUT_S) as answer:  # noqa: S310
        return json.load(answer)
