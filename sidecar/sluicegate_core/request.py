"""One request, from its arrival to its one end.

The shell fills in the facts and hands the object to the `Controller`, which owns every other field from
then on; `owner` is the shell's own, for finding its connection again. The object is its own ticket: it is
started at most once and released exactly once, and a second release is a bug that asserts.
"""

from enum import IntEnum
from typing import Final

from sluicegate_core.stats import ClassStats

#: Virtual cost of an output token in prompt tokens. Two, as in the fair scheduler for LLMs of Sheng et al.
#: (VTC, OSDI 2024, section 4.1); shares between classes and clients depend on it, predictions do not.
OUTPUT_TOKEN_COST: Final = 2.0


class Stage(IntEnum):
    """Where a request is. It only ever moves forward."""

    NEW = 0
    WAITING = 1  # in the line
    PREFILL = 2  # with the engine, no first token yet
    DECODE = 3  # with the engine, tokens come
    ENDED = 4


#: Looking a member up on its class costs 0.2 us on Python 3.11, several times a decision: these are for hot paths.
NEW: Final = Stage.NEW
WAITING: Final = Stage.WAITING
PREFILL: Final = Stage.PREFILL
DECODE: Final = Stage.DECODE
ENDED: Final = Stage.ENDED


class Request:
    """Facts of one request and its state in the gate. Times are seconds of the shell's monotonic clock."""

    __slots__ = (  # noqa: RUF023  # grouped by who owns them
        # Facts: the shell's.
        "class_index", "client", "model", "prompt_bytes", "known_prompt_tokens", "max_output_tokens",
        "choices", "streams", "generates", "is_retry", "request_id", "owner",
        # Estimate: what the work is believed to be.
        "prompt_tokens", "output_tokens", "cost",
        # Times.
        "arrived_at", "deadline", "started_at", "first_token_at", "last_token_at",
        # Predictions made at arrival and at hand-over, for the gate's own error.
        "predicted_ttft_s", "predicted_service_s", "backlog_at_start",
        # State.
        "stage", "was_queued", "tokens_out", "flow", "joins_at_take", "previous", "next", "sequence", "stats",
    )  # fmt: skip

    def __init__(
        self,
        *,
        class_index: int = 0,
        client: str = "",
        model: str = "",
        prompt_bytes: int = 0,
        known_prompt_tokens: int | None = None,
        max_output_tokens: int | None = None,
        choices: int = 1,
        streams: bool = True,
        generates: bool = True,
        is_retry: bool = False,
        request_id: bytes = b"",
        owner: object = None,
    ) -> None:
        self.class_index = class_index
        self.client = client
        self.model = model
        self.prompt_bytes = prompt_bytes
        self.known_prompt_tokens = known_prompt_tokens
        self.max_output_tokens = max_output_tokens
        self.choices = choices
        self.streams = streams
        self.generates = generates
        self.is_retry = is_retry
        self.request_id = request_id
        self.owner = owner

        self.prompt_tokens = 0
        self.output_tokens = 0
        self.cost = 0.0

        self.arrived_at = 0.0
        self.deadline = 0.0
        self.started_at = 0.0
        self.first_token_at = 0.0
        self.last_token_at = 0.0

        self.predicted_ttft_s: float | None = None
        self.predicted_service_s: float | None = None
        self.backlog_at_start = 0

        self.stage: Stage = NEW
        self.was_queued = False
        self.tokens_out = 0
        self.flow: object = None
        self.joins_at_take = 0
        self.previous: Request | None = None
        self.next: Request | None = None
        self.sequence = 0
        self.stats: ClassStats | None = None  # of the class it arrived in, whatever happens to the policy
