"""Logs: one record a line on stderr, as JSON or for people to read.

`configure` is called once, by the process's entry; everybody else logs with the standard library and passes
fields by `extra`. `LogWatcher` turns what the gate tells it into lines: each refusal and failure at debug, and at
info one summary a `SUMMARY_EVERY_S` while there are any.

Invariants:
- Never a prompt, a key or a raw client identity: a request appears by its class, numbers and its client's hash.
- A record is one line, whatever a client put into it: control characters are escaped, text is cut at
  `MAX_TEXT_CHARS`, a request id at `MAX_REQUEST_ID_CHARS`.
- Bounded in rate: at most `MAX_DEBUG_LINES_PER_S` lines below info and `MAX_LINES_PER_S` others; what was left
  out is counted and told. Writing to stderr blocks the event loop for as long as the system takes, so at debug
  and under load this bound is what keeps the tokens flowing.
- A stderr that is gone or full never raises into the gate.
"""

import asyncio
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from time import monotonic
from typing import Final, TextIO

from sluicegate_core.effects import Refusal
from sluicegate_core.request import Request
from sluicegate_core.vocabulary import Outcome, Reason

#: Between two summaries, s: often enough to see an overload begin, rarely enough to keep a day of it readable.
SUMMARY_EVERY_S: Final = 10.0
#: A line costs some 40 us, so that these are 2 % of a core.
MAX_DEBUG_LINES_PER_S: Final = 500
#: At info and above. Errors come by the request where the engine is broken; a few of them tell the story.
MAX_LINES_PER_S: Final = 100
#: Longest text of a field or message; a traceback or the problems of a policy fit.
MAX_TEXT_CHARS: Final = 8192
#: As long as the gate lets a client's own id be.
MAX_REQUEST_ID_CHARS: Final = 128

#: Loggers of the gate's own parts. Others (asyncio, aiohttp) are heard from warning on.
LOGGERS: Final = ("sluicegate", "sluicegate_sidecar", "sluicegate_core")

#: What every record has; anything else came by `extra`.
_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}

#: Attributes of a module and members of an enum, looked up once: a refusal is to cost little.
_DEBUG: Final = logging.DEBUG
_FAILED: Final = Outcome.FAILED

log = logging.getLogger("sluicegate")


class OneLine(logging.Formatter):
    """A record as one line: what both formats share."""

    def fields(self, record: logging.LogRecord) -> dict[str, object]:
        """What the caller passed by `extra`, bounded."""
        return {k: _bounded(v) for k, v in record.__dict__.items() if k not in _STANDARD}

    def text(self, record: logging.LogRecord) -> str:
        """The message, bounded."""
        return record.getMessage()[:MAX_TEXT_CHARS]

    def traceback(self, record: logging.LogRecord) -> str | None:
        """The traceback, bounded at its start: the innermost frames say most."""
        if not record.exc_info or record.exc_info[0] is None:
            return None
        return self.formatException(record.exc_info)[-MAX_TEXT_CHARS:]

    def time(self, record: logging.LogRecord) -> str:
        """RFC 3339 in UTC, to the millisecond."""
        when = datetime.fromtimestamp(record.created, UTC)
        return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class JsonFormatter(OneLine):
    """One JSON object a line, for whoever collects logs."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": self.time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self.text(record),
        }
        for name, value in self.fields(record).items():
            line.setdefault(name, value)
        traceback = self.traceback(record)
        if traceback is not None:
            line["exception"] = traceback
        return json.dumps(line, default=str)


class ConsoleFormatter(OneLine):
    """Time, level, message and fields, for people."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(
            f" {name}={value if isinstance(value, str) else json.dumps(value, default=str)}"
            for name, value in self.fields(record).items()
            if value is not None
        )
        line = f"{self.time(record)[11:]} {record.levelname:<7} {self.text(record)}{fields}"
        traceback = self.traceback(record)
        return printable(line) + ("" if traceback is None else f"\n{printable(traceback, newlines=True)}")


def printable(text: str, *, newlines: bool = False) -> str:
    """The text with control characters escaped, so that it can neither forge lines nor move a cursor."""
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() or (newlines and sign == "\n") else ascii(sign)[1:-1] for sign in text
    )


def _bounded(value: object) -> object:
    return value[:MAX_TEXT_CHARS] if isinstance(value, str) else value


class RateLimit(logging.Filter):
    """Lets so many lines a second pass, and tells how many it has left out with the next line that passes."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._second = -1
        self._passed = {True: 0, False: 0}  # by whether a line is below info
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        second = int(self._clock())
        if second != self._second:
            self._second = second
            self._passed = {True: 0, False: 0}
        debug = record.levelno < logging.INFO
        if self._passed[debug] >= (MAX_DEBUG_LINES_PER_S if debug else MAX_LINES_PER_S):
            self._left_out += 1
            return False
        self._passed[debug] += 1
        if self._left_out:
            record.lines_left_out = self._left_out
            self._left_out = 0
        return True


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes lines; a stream that cannot be written to is left alone, since there is nowhere to complain."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # the standard library's name
        pass


def configure(log_format: str, level: str) -> None:
    """Set up the process's logging; a second call replaces the first.

    Args:
        log_format: "json", "console", or "auto": console on a terminal, else JSON.
        level: "debug", "info", "warning" or "error".
    """
    console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    handler = StderrHandler(sys.stderr)
    handler.setFormatter(ConsoleFormatter() if console else JsonFormatter())
    handler.addFilter(RateLimit())
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, StderrHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(level.upper())


def _call_later(delay_s: float, call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(delay_s, call)


class LogWatcher:
    """Hears of refusals and failures from the gate (`gate.Watcher`), and writes of them.

    The first after a quiet time starts a period of `SUMMARY_EVERY_S`, at whose end all of it is summed up. Owned
    by the gate's event loop.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = monotonic,
        call_later: Callable[[float, Callable[[], None]], None] = _call_later,
    ) -> None:
        """
        Args:
            clock: the gate's: monotonic seconds.
            call_later: calls back after so many seconds, on the same thread.
        """
        self._clock = clock
        self._call_later = call_later
        self._since: float | None = None  # start of the period; None while it is quiet
        self._counts: dict[tuple[Outcome, str, Reason], int] = {}
        self._example: dict[str, object] | None = None

    def refused(self, request: Request, refusal: Refusal, outcome: Outcome) -> None:
        """A request was rejected or evicted. Under overload that is most of them: most are only counted."""
        self._count(outcome, request, refusal.reason)
        if self._example is None or log.isEnabledFor(_DEBUG):
            self._describe(request, refusal, outcome)

    def failed(self, request: Request, reason: Reason) -> None:
        """A request came to nothing with the engine."""
        self._count(_FAILED, request, reason)
        if log.isEnabledFor(_DEBUG):
            fields = self._fields(request, reason)
            fields["tokens_out"] = request.tokens_out
            log.debug("failed", extra={**fields, "request_id": _request_id(request)})

    def summarise(self) -> None:
        """Write what has come together since the last summary, if anything; the process's last word, too."""
        since, counts, example = self._since, self._counts, self._example
        self._since, self._counts, self._example = None, {}, None
        if since is None:
            return
        period_s = self._clock() - since
        by_outcome: dict[Outcome, Counter[tuple[str, Reason]]] = {}
        for (outcome, name, reason), n in counts.items():
            by_outcome.setdefault(outcome, Counter())[name, reason] = n
        parts = [
            f"{outcome.value} {count.total()} ("
            + ", ".join(f"{name} {reason.value} {n}" for (name, reason), n in count.most_common())
            + ")"
            for outcome, count in by_outcome.items()
        ]
        fields: dict[str, object] = {outcome.value: _nested(count) for outcome, count in by_outcome.items()}
        fields["period_s"] = _round(period_s)
        fields["example"] = example
        log.info("in %.0f s: %s", period_s, "; ".join(parts), extra=fields)

    def _describe(self, request: Request, refusal: Refusal, outcome: Outcome) -> None:
        """Write a line on a refusal at debug; keep the first of a period as the summary's example."""
        fields = self._fields(request, refusal.reason)
        fields["prompt_tokens"] = request.prompt_tokens
        fields["predicted_ttft_s"] = _round(refusal.predicted_ttft_s)
        fields["retry_after_s"] = _round(refusal.retry_after_s)
        if self._example is None:
            self._example = fields
        if log.isEnabledFor(_DEBUG):
            log.debug("%s", outcome.value, extra={**fields, "request_id": _request_id(request)})

    def _fields(self, request: Request, reason: Reason) -> dict[str, object]:
        assert request.stats is not None, "set at arrival"
        return {
            "reason": reason.value,
            "class": request.stats.name,
            "client": request.client,
            "elapsed_s": _round(self._clock() - request.arrived_at),
        }

    def _count(self, outcome: Outcome, request: Request, reason: Reason) -> None:
        assert request.stats is not None, "set at arrival"
        counts, key = self._counts, (outcome, request.stats.name, reason)
        counts[key] = counts.get(key, 0) + 1
        if self._since is None:
            self._since = self._clock()
            self._call_later(SUMMARY_EVERY_S, self.summarise)


def _request_id(request: Request) -> str | None:
    """The client's own id; the gate's ids are not on the request, and say nothing to anybody else."""
    return request.request_id[:MAX_REQUEST_ID_CHARS].decode("ascii", "backslashreplace") or None


def _nested(count: Counter[tuple[str, Reason]]) -> dict[str, dict[str, int]]:
    nested: dict[str, dict[str, int]] = {}
    for (name, reason), n in count.items():
        nested.setdefault(name, {})[reason.value] = n
    return nested


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
