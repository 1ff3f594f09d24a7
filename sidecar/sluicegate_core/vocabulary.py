"""The words of a request's fate: one word for one thing, in code, metrics, logs and headers.

An `Outcome` says in which of four ways an offered request ended; a `Reason` says why, and is what the
client reads in `x-sluicegate-reason`. The four outcomes close: offered = served + rejected + evicted +
failed + in flight, always.
"""

from enum import StrEnum
from typing import Final


class Outcome(StrEnum):
    """How an offered request ended."""

    SERVED = "served"  # the engine's answer reached the client, whole
    REJECTED = "rejected"  # refused at arrival
    EVICTED = "evicted"  # left the line unserved
    FAILED = "failed"  # handed to the engine, and not served


class Reason(StrEnum):
    """Why a request was not served. Grouped by outcome, in the order of the layers that decide it."""

    # Rejected at arrival.
    DRAINING = "draining"  # the pod is going away
    ENGINE_DOWN = "engine_down"  # nobody home
    SLO_UNREACHABLE = "slo_unreachable"  # too long for its SLO even on an idle engine
    TTFT = "ttft"  # predicted time to first token is past the SLO
    QUEUE_TIME = "queue_time"  # predicted wait is past the class's bound
    QUEUE_FULL = "queue_full"  # the gate's hard bound on waiting requests

    # Evicted from the line.
    DEADLINE = "deadline"  # its last moment passed while it waited
    CLIENT_GONE = "client_gone"  # its client left (waiting: evicted; running: failed)
    DRAINED = "drained"  # the drain's bound passed while it waited

    # Failed after hand-over.
    ENGINE_REFUSED = "engine_refused"  # connection refused
    ENGINE_RESET_EARLY = "engine_reset_early"  # closed before any byte of a response
    ENGINE_RESET_MIDSTREAM = "engine_reset_midstream"  # cut in the middle of a response
    ENGINE_HUNG = "engine_hung"  # no byte within the bound
    ENGINE_BAD_RESPONSE = "engine_bad_response"  # not HTTP
    ENGINE_BUSY = "engine_busy"  # the engine's own cap refused it (429 or 503)
    ENGINE_ERROR = "engine_error"  # a 5xx answer, or an error inside a 200 stream
    ABORTED = "aborted"  # ended from our side

    @property
    def nobody_home(self) -> bool:
        """True where a router should look for another pod for good (503), not merely for now (429)."""
        return self in _NOBODY_HOME


_NOBODY_HOME: Final = frozenset({Reason.DRAINING, Reason.ENGINE_DOWN, Reason.DRAINED})


class Hold(StrEnum):
    """Why the line does not move: what the next hand-over waits for."""

    ENGINE_DOWN = "engine_down"
    SLOTS = "slots"  # every slot of the engine is taken
    STALLED = "stalled"  # the engine has not begun what it was given
    BACKLOG = "backlog"  # the engine has prefill enough in hand
    PROMPT = "prompt"  # with this prompt it would have more than enough
    GAP = "gap"  # residents' tokens come at the limit of their SLO
    NEXT_GAP = "next_gap"  # one more would take residents past their SLO
    TURN = "turn"  # there is room, and it is another's turn
    CLASS_CAP = "class_cap"  # the class is at its maxConcurrency
    RESERVED = "reserved"  # what is free is kept for a class above


class EngineStatus(StrEnum):
    """What is known of the engine behind the gate."""

    UNKNOWN = "unknown"  # no word yet: requests pass
    LOADING = "loading"  # answers, and says that it is not ready
    UP = "up"
    DOWN = "down"


#: In these states nothing is handed over.
NOT_READY: Final = frozenset({EngineStatus.DOWN, EngineStatus.LOADING})
