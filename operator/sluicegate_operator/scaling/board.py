"""The board: the last demand of each policy, and how old it is.

The reconciler posts on it after each poll of a policy's gates; the endpoint, status and metrics read off it. An answer
is only as good as it is fresh: whoever reads after `MAX_AGE_S` gets `Unknown` with the age, whatever was posted, so
that a poller that hangs holds the replicas instead of scaling on what it saw last.

After a restart the board is empty and says so (`JUST_STARTED`), for every name that is asked: which policies there
are is not known before the first listing. Bounded by the policies that there are: `forget`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from sluicegate_operator.scaling.demand import Bounds, Demand, Unknown, Why, demand, situation
from sluicegate_operator.scaling.ledger import FRESH_S, Fleet, Ledger, Replica

#: As for the gates' reports.
MAX_AGE_S: Final = FRESH_S


class PolicyKey(NamedTuple):
    """Which AdmissionPolicy."""

    namespace: str
    name: str


@dataclass(slots=True)
class _Posted:
    ledger: Ledger
    answer: Demand | Unknown
    at: float


class Board:
    """Ledgers and answers by policy. One event loop owns it.

    Attributes:
        listed: the policies of the cluster have been listed: a name that is not on the board is none.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.listed = False
        self._clock = clock
        self._posted: dict[PolicyKey, _Posted] = {}

    def watch(self, key: PolicyKey) -> None:
        """There is such a policy; nothing is known of its gates yet."""
        self._of(key)

    def post(self, key: PolicyKey, replicas: Sequence[Replica], bounds: Bounds) -> Demand | Unknown:
        """Book one poll, and return what follows.

        Args:
            key: the policy.
            replicas: all pods that it selects, those that start, leave or did not answer included.
            bounds: of its `spec.autoscaling`.
        """
        posted = self._of(key)
        posted.at = self._clock()
        posted.ledger.book(posted.at, replicas)
        posted.answer = demand(situation(posted.ledger), bounds)
        return posted.answer

    def forget(self, key: PolicyKey) -> None:
        """The policy is gone."""
        self._posted.pop(key, None)

    @property
    def policies(self) -> tuple[PolicyKey, ...]:
        """All that it has, in no particular order."""
        return tuple(self._posted)

    def read(self, key: PolicyKey) -> tuple[Demand | Unknown, float] | None:
        """The answer and its age, s; None where there is no such policy."""
        posted = self._posted.get(key)
        if posted is None:
            return None if self.listed else (_just_started(), 0.0)
        age_s = self._clock() - posted.at
        if isinstance(posted.answer, Demand) and age_s > MAX_AGE_S:
            message = f"the gates were last polled {age_s:.0f} s ago"
            return Unknown(why=Why.STALE, message=message, fleet=posted.answer.fleet), age_s
        return posted.answer, age_s

    def _of(self, key: PolicyKey) -> _Posted:
        posted = self._posted.get(key)
        if posted is None:
            now = self._clock()
            posted = self._posted[key] = _Posted(Ledger(now), _just_started(), now)
        return posted


def _just_started() -> Unknown:
    return Unknown(
        why=Why.JUST_STARTED, message="the operator has just started and knows nothing yet", fleet=Fleet()
    )
