"""Logs: one line a record, bounded in rate, and nothing of a prompt, a key or who somebody is."""

import io
import json
import logging
from collections.abc import Callable, Iterator

import pytest
from tests.unit.observed import BATCH, Clock, Observed

from sluicegate_core.policy import Policy
from sluicegate_core.request import Request
from sluicegate_core.vocabulary import EngineStatus, Outcome, Reason
from sluicegate_sidecar import logs
from sluicegate_sidecar.logs import (
    MAX_DEBUG_LINES_PER_S,
    MAX_LINES_PER_S,
    MAX_REQUEST_ID_CHARS,
    MAX_TEXT_CHARS,
    SUMMARY_EVERY_S,
    ConsoleFormatter,
    JsonFormatter,
    LogWatcher,
    RateLimit,
    StderrHandler,
    configure,
)

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    loggers = [root, *map(logging.getLogger, logs.LOGGERS)]
    before = [(one, one.level, list(one.handlers)) for one in loggers]
    yield
    for one, level, handlers in before:
        one.setLevel(level)
        one.handlers[:] = handlers


def lines(capture: Capture) -> list[dict[str, object]]:
    """What stderr got, each line an object."""
    return [json.loads(line) for line in capture.readouterr().err.splitlines()]


class Timers:
    """Calls that are due later, made by hand."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.due: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.due.append((self._clock.now + delay_s, call))

    def pass_time(self) -> None:
        """Let the next one come due."""
        at, call = self.due.pop(0)
        self._clock.now = at
        call()


class Scene:
    """A watcher on a real controller whose engine is down: whatever arrives is refused."""

    def __init__(self) -> None:
        self.observed = Observed()
        self.timers = Timers(self.observed.clock)
        self.watcher = LogWatcher(clock=self.observed.clock, call_later=self.timers.call_later)
        self.observed.controller.engine_status(self.observed.clock.now, EngineStatus.DOWN)

    def refuse(self, **facts: object) -> Request:
        request = Request(**{"class_index": BATCH, "client": "c0ffee", "prompt_bytes": 400, **facts})  # type: ignore[arg-type]
        (effect,) = self.observed.controller.arrive(self.observed.clock.now, request)
        self.watcher.refused(request, effect.refusal, Outcome.REJECTED)  # type: ignore[union-attr]
        return request


# Formats.


def test_json_is_one_object_a_line_with_the_callers_fields(capsys: Capture) -> None:
    configure("json", "info")
    logging.getLogger("sluicegate").info("listening on %s", "x:1", extra={"address": "x:1"})
    (line,) = lines(capsys)
    assert line.pop("time")
    assert line == {
        "level": "info",
        "logger": "sluicegate",
        "message": "listening on x:1",
        "address": "x:1",
    }


def test_a_field_never_takes_the_place_of_a_line_s_own(capsys: Capture) -> None:
    configure("json", "info")
    logging.getLogger("sluicegate").info("true", extra={"level": "forged", "time": "never"})
    (line,) = lines(capsys)
    assert (line["level"], line["message"]) == ("info", "true")
    assert line["time"] != "never"


def test_a_stream_that_is_no_terminal_gets_json(capsys: Capture) -> None:
    configure("auto", "info")
    logging.getLogger("sluicegate").info("hello")
    assert lines(capsys)[0]["message"] == "hello"


def test_console_is_for_people(capsys: Capture) -> None:
    configure("console", "info")
    logging.getLogger("sluicegate").warning("engine is down", extra={"engine": "down", "none": None})
    text = capsys.readouterr().err
    assert text.endswith("WARNING engine is down engine=down\n")


def test_the_level_is_that_of_the_gates_own_parts(capsys: Capture) -> None:
    configure("json", "debug")
    logging.getLogger("sluicegate_sidecar.http.client").debug("ours")
    logging.getLogger("aiohttp.server").info("theirs")
    logging.getLogger("asyncio").warning("theirs, and urgent")
    assert [line["message"] for line in lines(capsys)] == ["ours", "theirs, and urgent"]
    configure("json", "error")
    logging.getLogger("sluicegate").warning("too low")
    logging.getLogger("sluicegate").error("once, though configured twice")
    assert [line["message"] for line in lines(capsys)] == ["once, though configured twice"]


def test_an_exception_is_within_the_line(capsys: Capture) -> None:
    configure("json", "info")
    try:
        raise ValueError("of the application")
    except ValueError:
        logging.getLogger("sluicegate").exception("failed")
    (line,) = lines(capsys)
    assert "ValueError: of the application" in str(line["exception"])


@pytest.mark.parametrize("formatter", [JsonFormatter(), ConsoleFormatter()])
def test_what_a_client_writes_neither_forges_lines_nor_moves_a_cursor(formatter: logging.Formatter) -> None:
    evil = "a\nINFO forged\r\x1b[2J\x00\u2028\u202e" + "x" * 20_000
    record = logging.makeLogRecord({"msg": "%s", "args": (evil,), "levelno": logging.INFO, "evil": evil})
    text = formatter.format(record)
    assert text.isprintable()
    assert len(text) < 3 * MAX_TEXT_CHARS


def test_a_stderr_that_is_gone_raises_nothing() -> None:
    stream = io.StringIO()
    handler = StderrHandler(stream)
    stream.close()
    handler.handle(logging.makeLogRecord({"msg": "into the void"}))


# Rate.


def test_lines_a_second_are_bounded_and_those_left_out_are_counted() -> None:
    clock = Clock()
    limit = RateLimit(clock)
    passed = [limit.filter(record(logging.DEBUG)) for _ in range(2 * MAX_DEBUG_LINES_PER_S)]
    assert passed == [True] * MAX_DEBUG_LINES_PER_S + [False] * MAX_DEBUG_LINES_PER_S
    clock.now += 1.0
    first, second = record(logging.DEBUG), record(logging.DEBUG)
    assert limit.filter(first)
    assert limit.filter(second)
    assert first.__dict__["lines_left_out"] == MAX_DEBUG_LINES_PER_S
    assert "lines_left_out" not in second.__dict__


def test_a_flood_at_debug_leaves_room_for_a_warning() -> None:
    limit = RateLimit(Clock())
    for _ in range(2 * MAX_DEBUG_LINES_PER_S):
        limit.filter(record(logging.DEBUG))
    warning = record(logging.WARNING)
    assert limit.filter(warning)
    assert warning.__dict__["lines_left_out"] == MAX_DEBUG_LINES_PER_S


def test_errors_are_bounded_too() -> None:
    limit = RateLimit(Clock())
    assert sum(limit.filter(record(logging.ERROR)) for _ in range(10_000)) == MAX_LINES_PER_S


def record(level: int) -> logging.LogRecord:
    return logging.makeLogRecord({"levelno": level, "msg": "x"})


# The watcher.


def test_a_line_a_refusal_at_debug(capsys: Capture) -> None:
    configure("json", "debug")
    scene = Scene()
    scene.refuse(request_id=b"abc-1")
    (line,) = lines(capsys)
    assert line["message"] == "rejected"
    assert (line["level"], line["reason"], line["class"]) == ("debug", "engine_down", "batch")
    assert (line["client"], line["request_id"]) == ("c0ffee", "abc-1")
    assert line["prompt_tokens"] == 120
    assert line["predicted_ttft_s"] is None
    assert 1.0 <= float(str(line["retry_after_s"])) <= 120.0


def test_a_line_a_failure_at_debug(capsys: Capture) -> None:
    scene = Scene()
    scene.observed.controller.engine_status(scene.observed.clock.now, EngineStatus.UP)
    configure("json", "debug")
    request = scene.observed.arrives(BATCH)
    scene.observed.streams(request, ttft_s=1.5, tokens=3, gap_s=0.25)
    scene.watcher.failed(request, Reason.ENGINE_RESET_MIDSTREAM)
    (line,) = lines(capsys)
    assert (line["message"], line["reason"]) == ("failed", "engine_reset_midstream")
    assert (line["elapsed_s"], line["tokens_out"]) == (2.0, 3)


def test_at_info_only_a_summary_with_one_example(capsys: Capture) -> None:
    configure("json", "info")
    scene = Scene()
    for _ in range(1000):
        scene.refuse()
    failed = scene.refuse(class_index=0)
    scene.watcher.failed(failed, Reason.ENGINE_HUNG)
    assert lines(capsys) == []
    scene.timers.pass_time()
    (line,) = lines(capsys)
    assert line["rejected"] == {"batch": {"engine_down": 1000}, "interactive": {"engine_down": 1}}
    assert line["failed"] == {"interactive": {"engine_hung": 1}}
    assert line["period_s"] == SUMMARY_EVERY_S
    assert line["message"] == (
        "in 10 s: rejected 1001 (batch engine_down 1000, interactive engine_down 1);"
        " failed 1 (interactive engine_hung 1)"
    )
    example = line["example"]
    assert isinstance(example, dict)
    assert example["reason"] == "engine_down"
    assert "request_id" not in example


def test_a_summary_each_period_while_there_is_something_and_none_when_it_is_quiet(capsys: Capture) -> None:
    configure("json", "info")
    scene = Scene()
    scene.refuse()
    scene.timers.pass_time()
    assert scene.timers.due == []
    scene.observed.clock.now += 1000.0
    scene.refuse()
    scene.refuse()
    assert len(scene.timers.due) == 1
    scene.timers.pass_time()
    assert [line["rejected"] for line in lines(capsys)] == [
        {"batch": {"engine_down": 1}},
        {"batch": {"engine_down": 2}},
    ]


def test_the_last_word_is_written_when_it_is_asked_for_and_not_twice(capsys: Capture) -> None:
    configure("json", "info")
    scene = Scene()
    scene.refuse()
    scene.observed.clock.now += 3.0
    scene.watcher.summarise()
    scene.timers.pass_time()
    (line,) = lines(capsys)
    assert line["period_s"] == 3.0


def test_after_an_early_summary_the_next_one_is_whole(capsys: Capture) -> None:
    """The timer of the period that was cut short may fire in the next one: nothing is lost or told twice."""
    configure("json", "info")
    scene = Scene()
    scene.refuse()
    scene.watcher.summarise()
    scene.refuse()
    while scene.timers.due:
        scene.timers.pass_time()
    assert [line["rejected"] for line in lines(capsys)] == 2 * [{"batch": {"engine_down": 1}}]


async def test_a_gates_watcher_lives_on_the_running_loop(capsys: Capture) -> None:
    configure("json", "info")
    observed = Observed(Policy())
    observed.controller.engine_status(observed.clock.now, EngineStatus.DOWN)
    request = Request(prompt_bytes=10)
    (effect,) = observed.controller.arrive(observed.clock.now, request)
    watcher = observed.gate.watcher
    assert isinstance(watcher, LogWatcher)
    watcher.refused(request, effect.refusal, Outcome.REJECTED)  # type: ignore[union-attr]
    assert lines(capsys) == []
    watcher.summarise()
    assert [line["rejected"] for line in lines(capsys)] == [{"default": {"engine_down": 1}}]


@pytest.mark.parametrize("level", ["debug", "info"])
def test_a_request_id_is_bounded_and_shown_as_it_is(capsys: Capture, level: str) -> None:
    configure("json", level)
    scene = Scene()
    scene.refuse(request_id=b"i\n" + b"d" * 10_000)
    scene.watcher.summarise()
    for line in lines(capsys):
        assert len(str(line.get("request_id", ""))) <= MAX_REQUEST_ID_CHARS
    if level == "debug":
        configure("console", level)
        scene.refuse(request_id=b"i\nd\x1b[2J")
        text = capsys.readouterr().err
        assert text.count("\n") == 1
        assert "\x1b" not in text
