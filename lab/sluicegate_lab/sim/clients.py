"""What clients do: how long they wait, and whether they come back.

- *Patience*: a client whose first token has not come by then leaves, and what was computed for it is wasted.
- *Retries* after a refusal: none; as the openai SDK does (0.5 s, doubling to 8 s, up to a quarter less at random; a
  Retry-After of at most 120 s is honoured to the millisecond; `x-should-retry: false` is obeyed; two retries); or a
  storm, as hand-written loops do: at once, whatever the answer said, and also after leaving.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

SDK_FIRST_S: Final = 0.5
SDK_MOST_S: Final = 8.0
SDK_JITTER: Final = 0.25
#: openai-python 3.57 waits for 0 < Retry-After <= 120 s exactly, and does not come back after a longer one.
SDK_LONGEST_RETRY_AFTER_S: Final = 120.0


class Retry(StrEnum):
    """How clients come back."""

    NONE = "none"
    SDK = "sdk"
    STORM = "storm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Of all clients of a simulation.

    Attributes:
        patience_s: by class, wait for the first token before leaving.
        retry: how they come back.
        tries: of one demand at the most, the first included.
        storm_gap_s: mean gap between two tries of a storm.
        users: a closed loop: so many users, each with one demand at a time; None: open, by the workload's times.
        think_s: mean time between an answer and the same user's next demand.
    """

    patience_s: Sequence[float]
    retry: Retry = Retry.NONE
    tries: int = 3
    storm_gap_s: float = 0.2
    users: int | None = None
    think_s: float = 5.0


class Clients:
    """Decides with the seed. One for each simulation."""

    def __init__(self, habits: Habits, *, seed: int) -> None:
        self.habits = habits
        self._rng = random.Random(f"{seed} clients")

    def returns_in_s(
        self, tries: int, *, refused: bool, retry_after_s: float | None, should_retry: bool
    ) -> float | None:
        """When a client comes back after its `tries`-th try failed, s; None: it does not.

        Args:
            refused: False where it left by itself.
            retry_after_s: what the refusal said; None: nothing.
        """
        habits = self.habits
        if habits.retry is Retry.NONE or tries >= habits.tries:
            return None
        if habits.retry is Retry.STORM:
            return self._rng.expovariate(1.0 / habits.storm_gap_s)
        if not refused or not should_retry:
            return None
        if retry_after_s is not None:
            if retry_after_s > SDK_LONGEST_RETRY_AFTER_S:
                return None
            if retry_after_s > 0.0:
                return retry_after_s
        backoff_s: float = min(SDK_FIRST_S * 2.0 ** (tries - 1), SDK_MOST_S)
        return backoff_s * (1.0 - SDK_JITTER * self._rng.random())

    def think_s(self) -> float:
        """Time to a user's next demand, s."""
        return self._rng.expovariate(1.0 / self.habits.think_s) if self.habits.think_s > 0.0 else 0.0
