"""Logs of the operator's processes: one record a line on stderr, as JSON or for people to read.

`configure` is called once, by a process's entry; everybody else logs with the standard library and passes fields by
`extra`.

Invariants: a record is one line, whatever the content of a field: control characters are escaped, text is cut at
`MAX_TEXT_CHARS`. No Secret's content and no object of a user is ever passed here.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final

#: Longest text of a field, a message or a traceback.
MAX_TEXT_CHARS: Final = 8192

#: Loggers of our own; others (kopf, aiohttp, httpx) are heard from warning on.
LOGGERS: Final = ("sluicegate_operator", "sluicegate_core")

#: What every record has; anything else came by `extra`.
_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage()[:MAX_TEXT_CHARS],
        }
        for name, value in _fields(record).items():
            line.setdefault(name, value)
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)[-MAX_TEXT_CHARS:]
        return json.dumps(line, default=str)


class ConsoleFormatter(logging.Formatter):
    """Time, level, message and fields, for people."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(
            f" {name}={value if isinstance(value, str) else json.dumps(value, default=str)}"
            for name, value in _fields(record).items()
            if value not in (None, "")
        )
        line = f"{_time(record)[11:]} {record.levelname:<7} {record.getMessage()[:MAX_TEXT_CHARS]}{fields}"
        text = _printable(line, keep="")
        if record.exc_info and record.exc_info[0] is not None:
            text += "\n" + _printable(self.formatException(record.exc_info)[-MAX_TEXT_CHARS:], keep="\n")
        return text


def configure(log_format: str, level: str) -> None:
    """Set up the process's logging.

    Args:
        log_format: "json", "console", or "auto": console on a terminal, else JSON.
        level: "debug", "info", "warning" or "error".
    """
    console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(ConsoleFormatter() if console else JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(level.upper())


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {
        name: value[:MAX_TEXT_CHARS] if isinstance(value, str) else value
        for name, value in record.__dict__.items()
        if name not in _STANDARD
    }


def _time(record: logging.LogRecord) -> str:
    """RFC 3339 in UTC, to the millisecond."""
    when = datetime.fromtimestamp(record.created, UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _printable(text: str, *, keep: str) -> str:
    return "".join(sign if sign.isprintable() or sign in keep else ascii(sign)[1:-1] for sign in text)
