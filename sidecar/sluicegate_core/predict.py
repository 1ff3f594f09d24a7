"""Predict: how long until this request has its first token, if it were taken now.

TTFT has two parts, learned apart:

- the wait for one's turn: the work ahead in one's class, over the measured drain of that class's line, in work
  units and in requests, whichever is longer. Before a class has drained, the drain of the whole line at the
  class's share stands in; before any has, the engine's turnover by Little's law (running / mean holding time).
- one's own service: hand-over to first token, a line over the prefill tokens the engine had in hand then, one's
  own included.

Using the drain for one's own prefill would refuse everybody on an engine that is short of slots, and then
freeze: nothing passes, so nothing is learned. Who may go at once with nobody ahead waits zero, whatever the
averages say. Unknown is None, and passes.
"""

from typing import Final

from sluicegate_core.learn import DecayingRate, Drain, FittedLine, Mean
from sluicegate_core.line import Line
from sluicegate_core.policy import Policy
from sluicegate_core.request import Request

SERVICE_MEMORY: Final = 128
HOLDING_MEMORY: Final = 32
#: Least share of a silent answer's time that is taken for its service: the gap is not known that well.
MIN_SILENT_SHARE: Final = 0.02
#: Memories of a class's arrivals, for the slots kept for it: the greater rate counts, so that slots are kept from
#: the first seconds of a burst on, and not given away in its first lull.
ARRIVALS_TAU_S: Final = (5.0, 30.0)
#: How much of the service line's own error is added where a miss must be avoided: about the 90th percentile
#: of errors that fall off exponentially (ln 10 = 2.3 mean deviations).
CAUTION: Final = 2.3
#: And at most so many times the prediction: a wild learner must not refuse everybody.
MAX_CAUTION: Final = 2.0


class ClassTimes:
    """What is learned of one class."""

    __slots__ = ("_arrivals", "drain", "holding_s")

    def __init__(self) -> None:
        self.drain = Drain()
        self.holding_s = Mean(HOLDING_MEMORY)
        self._arrivals = tuple(DecayingRate(tau_s) for tau_s in ARRIVALS_TAU_S)

    def arrived(self, now: float) -> None:
        """One request came that an idle engine would have served."""
        for rate in self._arrivals:
            rate.add(now)

    def arrivals_per_s(self, now: float) -> float:
        """The greater of the rates."""
        return max(rate.at(now) for rate in self._arrivals)


class Predictor:
    """Learns times and predicts with them. Owned by the `Controller`."""

    __slots__ = ("_names", "_silent", "_weights", "classes", "drain", "service")

    def __init__(self, policy: Policy) -> None:
        self.classes = [ClassTimes() for _ in policy.classes]
        self._names = [c.name for c in policy.classes]
        self._weights = [float(c.weight) for c in policy.classes]
        self.drain = Drain()
        self.service = FittedLine(SERVICE_MEMORY)
        self._silent = FittedLine(SERVICE_MEMORY)  # total time over output tokens, of answers not streamed

    def reconfigure(self, policy: Policy) -> None:
        """A class keeps what was learned of it, by name; a new one starts with nothing."""
        known = dict(zip(self._names, self.classes, strict=True))
        self.classes = [known.get(c.name) or ClassTimes() for c in policy.classes]
        self._names = [c.name for c in policy.classes]
        self._weights = [float(c.weight) for c in policy.classes]

    # The line's movement.

    def line_changed(self, now: float, line: Line) -> None:
        """Call whenever the line, or a class in it, may have become empty or ceased to be."""
        self.drain.backlogged(now, line.count > 0)
        for times, queue in zip(self.classes, line.queues, strict=True):
            times.drain.backlogged(now, queue.count > 0)

    def handed_over(self, now: float, request: Request) -> None:
        """Call before the request leaves the line."""
        self.drain.handed_over(now, request.cost)
        self.classes[request.class_index].drain.handed_over(now, request.cost)

    # The prediction.

    def wait_s(self, now: float, request: Request, line: Line, running: int) -> float | None:
        """Predicted wait of a request that has to queue, s; None while nothing is known."""
        cost, requests = line.ahead_of(request.class_index, request.client, request.cost)
        times = self.classes[request.class_index]
        rates = times.drain.rates(now)
        if rates is None:
            share = self._share(request.class_index, line)
            whole = self.drain.rates(now)
            if whole is not None:
                rates = whole[0] * share, whole[1] * share
            else:
                holding_s = times.holding_s.value
                if not running or not holding_s:
                    return None
                return (requests + 1.0) * holding_s / (running * share)
        cost_rate, request_rate = rates
        # The request's own turn counts as one: with nobody ahead it still waits for the next hand-over.
        by_requests_s = (requests + 1.0) / request_rate
        if cost > 0.0 and cost > by_requests_s * cost_rate:
            return cost / cost_rate
        return by_requests_s

    def _share(self, class_index: int, line: Line) -> float:
        """The class's share of the line by weight, among the classes that wait, itself included."""
        total = 0.0
        for index, queue in enumerate(line.queues):
            if queue.count or index == class_index:
                total += self._weights[index]
        return self._weights[class_index] / total

    def service_s(self, request: Request, backlog_tokens: int) -> float | None:
        """Predicted hand-over to first token, s, with so many prefill tokens before it in the engine."""
        return self.service.at(backlog_tokens + request.prompt_tokens)

    def cautious_service_s(self, request: Request) -> float | None:
        """The same with its own error added, for deadlines: an engine with nothing before it."""
        service_s = self.service.at(request.prompt_tokens)
        if service_s is None:
            return None
        caution = 1.0 + CAUTION * self.service.relative_deviation
        return service_s * (caution if caution < MAX_CAUTION else MAX_CAUTION)

    # The truth.

    def learn_service(self, request: Request, service_s: float) -> None:
        self.service.add(request.backlog_at_start + request.prompt_tokens, service_s)

    def silent_service_s(self, total_s: float, output_tokens: int, gap_s: float | None) -> float | None:
        """Service within the time of an answer that was not streamed, s; None while it cannot be told apart.

        The gap between its tokens is the streams' where there are any, else the slope of total time over output
        tokens among such answers.
        """
        self._silent.add(output_tokens, total_s)
        if gap_s is None:
            if not self._silent.known:
                return None
            gap_s = self._silent.slope
        return max(total_s - output_tokens * gap_s, MIN_SILENT_SHARE * total_s)

    def learn_holding(self, class_index: int, holding_s: float) -> None:
        self.classes[class_index].holding_s.add(holding_s)

    def load(self, now: float, class_index: int) -> float:
        """Offered load of a class in Erlangs: arrivals a second x mean holding time, s; 0.0 before any end."""
        times = self.classes[class_index]
        holding_s = times.holding_s.value
        return times.arrivals_per_s(now) * holding_s if holding_s is not None else 0.0

    def state(self, now: float) -> dict[str, object]:
        """What has been learned, for `/debug/state`."""
        drain = self.drain.rates(now)
        return {
            "service": {
                "seconds_per_prompt_token": self.service.slope if self.service.known else None,
                "overhead_s": self.service.intercept if self.service.known else None,
                "relative_error": self.service.relative_deviation if self.service.known else None,
                "samples": self.service.samples,
                "learned": self.service.known,
            },
            "drain": None if drain is None else {"cost_per_s": drain[0], "requests_per_s": drain[1]},
            "classes": {
                name: {
                    "drain_requests_per_s": rates[1] if (rates := times.drain.rates(now)) else None,
                    "holding_s": times.holding_s.value,
                    "arrivals_per_s": times.arrivals_per_s(now),
                    "load_erlangs": self.load(now, index),
                }
                for index, (name, times) in enumerate(zip(self._names, self.classes, strict=True))
            },
        }
