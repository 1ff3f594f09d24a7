"""What a request is worth: the work in it, in seconds of the engine at its fullest.

A token takes its own cost and its share of what a step costs whatever is in it. A step is shared by as many
sequences as fit, so the share of one is the part it takes of what is scarce: of the KV cache, by its context, or of
the sequences that may run at once, whichever is more:

    prompt    prefill_token_s x p
    answer    over its steps, at context n, the sum of
              sequence_s + kv_token_s x n + step_s x max(n / kv_tokens, 1 / max_sequences)

So an engine that is always full does at most about one second of work a second, and value is priced as cost is:
a policy gains nothing by picking the requests that the price flatters. Counting requests alone would reward picking
the short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sluicegate_lab.sim.engine import EngineModel

Array = np.ndarray[Any, np.dtype[np.float64]]


def kv_reads(prompt_tokens: Array, output_tokens: Array) -> Array:
    """Tokens of KV cache that the decoding steps of an answer read; the first token comes with the prompt."""
    steps = np.maximum(output_tokens - 1.0, 0.0)
    return steps * prompt_tokens + steps * (steps - 1.0) / 2.0


def work_s(
    model: EngineModel, prompt_tokens: Sequence[float] | Array, output_tokens: Sequence[float] | Array
) -> Array:
    """Work of each request, s."""
    p = np.asarray(prompt_tokens, dtype=np.float64)
    o = np.asarray(output_tokens, dtype=np.float64)
    steps = np.maximum(o - 1.0, 0.0)
    reads = kv_reads(p, o)
    # The larger share by the mean context: exact but for an answer that passes the crossing on its way.
    share = np.maximum(reads / model.kv_tokens, steps / model.max_sequences)
    own: Array = p * model.prefill_token_s + steps * model.sequence_s + reads * model.kv_token_s
    return own + model.step_s * share
