"""Asking the engine how it is: one task that polls health, metrics and constants, and tells what it hears.

Each second while the engine is up, four times a second while it is not, so that a gate opens within a moment
of its engine. What the answers mean lives in `engines.py`; what is made of them, in the core.

- **up**: its health path answers with anything but a 5xx. Not every engine has one, and a 404 is an answer.
- **loading**: it answers with a 5xx; 503 is what engines say while they load a model, and when they have lost it.
- **down**: the connection is refused or broken, or three answers in a row did not come in time. One late
  answer is no death: an engine with long batches may be slow to answer, and streams go on meanwhile.

Invariants:
- One request at a time, each with a bound in time and bytes, on a connection of its own (servers close idle
  ones as they please).
- Nothing is raised: neither by the engine's answers nor by who listens.
- A reading is never older than it says: when metrics stop coming, the last one stays with its time, and how
  long it is to be believed is for the core to say.

A client of its own, of sixty lines, because a whole HTTP library would cost the idle gate more memory than
the rest of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import httptools

from sluicegate_core.policy import EngineSpec, EngineType
from sluicegate_core.vocabulary import EngineStatus
from sluicegate_sidecar.engines import (
    DETECTION_PATHS,
    PROFILES,
    Answer,
    EngineProfile,
    EngineReading,
    detect,
    parse_info,
    parse_metrics,
)

_log = logging.getLogger(__name__)

#: The largest answer that is read: ten times a page of vLLM's with adapters.
MAX_ANSWER_BYTES: Final = 4 << 20
#: What is read at a time.
_READ_BYTES: Final = 65_536
#: Answers in a row that must be late before an engine that was up counts as down.
LATE_ANSWERS_TO_DOWN: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTiming:
    """When the engine is asked, in seconds."""

    up_s: float = 1.0  # from the end of one poll to the next while it is up
    down_s: float = 0.25  # the same while it is not
    answer_s: float = (
        2.0  # for one whole answer: health comes in a millisecond, a busy engine's page in 0.5 s
    )
    retry_metrics_s: float = 30.0  # before a path that has no metrics is asked again


DEFAULT_TIMING: Final = ProbeTiming()


class Observation(NamedTuple):
    """What is known of the engine now.

    Attributes:
        status: see the module's text.
        engine: its type, as the policy states it or as it was found out; AUTO until then.
        reading: its own numbers; all None where it has none.
        reading_at_s: when they were read, on the loop's clock; None if never.
        fresh: whether the reading came with this observation.
    """

    status: EngineStatus
    engine: EngineType
    reading: EngineReading
    reading_at_s: float | None
    fresh: bool


@dataclass(slots=True)
class _Collected:
    """One answer as the parser hears it."""

    server: str = ""
    body: list[bytes] = field(default_factory=list)
    size: int = 0
    complete: bool = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"server":
            self.server = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        self.size += len(data)
        self.body.append(data)

    def on_message_complete(self) -> None:
        self.complete = True


async def get(host: str, port: int, path: str) -> Answer:
    """GET a path of a server that speaks plain HTTP/1.1.

    Raises:
        OSError: nothing listens, the connection broke, or what came was no HTTP or too much of it.
    """
    reader, writer = await asyncio.open_connection(host, port, limit=_READ_BYTES)
    try:
        name = f"[{host}]" if ":" in host else host
        request = f"GET {path} HTTP/1.1\r\nHost: {name}:{port}\r\nAccept: */*\r\nConnection: close\r\n\r\n"
        writer.write(request.encode("latin-1", "replace"))
        collected = _Collected()
        parser = httptools.HttpResponseParser(collected)
        received = 0
        while not collected.complete:
            data = await reader.read(_READ_BYTES)
            received += len(data)
            if not data:
                break
            if received > MAX_ANSWER_BYTES:
                raise ConnectionAbortedError("the answer is too long")
            parser.feed_data(data)
        status = parser.get_status_code()
        if not 100 <= status <= 599:
            raise ConnectionAbortedError("no answer")
        return Answer(status, collected.server, b"".join(collected.body))
    except httptools.HttpParserError as error:
        raise ConnectionAbortedError("the answer is no HTTP") from error
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


class EngineProbe:
    """Polls one engine and tells its news to `on_observation`, on the loop it runs on.

    News is a change of status, at once, the engine's type once it is known, and each reading. `run` is a
    task's whole work: it goes on until it is cancelled, and ends clean then. `last` is the latest observation.
    The task owns all state.
    """

    def __init__(
        self,
        host: str,
        port: int,
        engine: EngineSpec,
        on_observation: Callable[[Observation], None],
        timing: ProbeTiming = DEFAULT_TIMING,
    ) -> None:
        self.last = Observation(EngineStatus.UNKNOWN, engine.type, EngineReading(), None, False)
        self._host = host
        self._port = port
        self._spec = engine
        self._listener = on_observation
        self._timing = timing
        self._late = 0  # answers in a row that were late
        self._look_now = asyncio.Event()
        # Of this start of the engine: which one it is, what it says of its constants.
        self._detected = False
        self._info: EngineReading | None = None
        self._metrics_at_s = 0.0  # when metrics are asked for again

    async def run(self) -> None:
        """Poll until cancelled; the first answer is told as soon as the engine gives it."""
        while True:
            status = await self._status()
            if status is not self.last.status:
                self._tell(self.last._replace(status=status, fresh=False))
            if status is not EngineStatus.UP:
                self._detected, self._info, self._metrics_at_s = False, None, 0.0
            elif not self._late:
                await self._read()
            await self._pause(self._timing.up_s if status is EngineStatus.UP else self._timing.down_s)

    def doubt(self) -> None:
        """Take it that the engine is down, because a request could not reach it, and look at once.

        What is found is news then, even where nothing between two looks has seen the engine away.
        """
        self.last = self.last._replace(status=EngineStatus.DOWN, fresh=False)
        self._detected, self._info, self._metrics_at_s = False, None, 0.0
        self._look_now.set()

    def age_s(self) -> float | None:
        """Return how old the last reading is, in seconds; None if there is none."""
        at = self.last.reading_at_s
        return None if at is None else asyncio.get_running_loop().time() - at

    async def _pause(self, pause_s: float) -> None:
        """Until the next look is due."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._look_now.wait()
        self._look_now.clear()

    def _tell(self, observation: Observation) -> None:
        self.last = observation
        try:
            self._listener(observation)
        except Exception:  # noqa: BLE001 - a listener's fault must not blind the gate
            _log.exception("an observation of the engine was not taken up")

    async def _read(self) -> None:
        """Ask an engine that is up for all it tells."""
        if not self._detected:
            engine = await self._detect() if self._spec.type is EngineType.AUTO else self._spec.type
            self._detected = True
            if engine is not self.last.engine:
                self._tell(self.last._replace(engine=engine, fresh=False))
        engine = self.last.engine
        profile = PROFILES.get(engine, PROFILES[EngineType.OTHER])
        if self._info is None:
            self._info = await self._read_info(engine, profile)
        info = self._info or EngineReading()
        reading = await self._read_metrics(engine, profile)
        if reading is not None or info != EngineReading():
            whole = (reading or EngineReading()).with_info(info)
            self._tell(Observation(EngineStatus.UP, engine, whole, asyncio.get_running_loop().time(), True))

    async def _status(self) -> EngineStatus:
        known = PROFILES.get(self.last.engine, PROFILES[EngineType.OTHER])
        try:
            answer = await self._ask(self._port, self._spec.health_path or known.health_path)
        except TimeoutError:
            self._late += 1
            return EngineStatus.DOWN if self._late >= LATE_ANSWERS_TO_DOWN else self.last.status
        except OSError:
            self._late = 0
            return EngineStatus.DOWN
        self._late = 0
        return EngineStatus.LOADING if answer.status >= 500 else EngineStatus.UP

    async def _detect(self) -> EngineType:
        for path in DETECTION_PATHS:
            try:
                found = detect(path, await self._ask(self._port, path))
            except OSError:
                continue
            if found is not None:
                return found
        return EngineType.OTHER

    async def _read_info(self, engine: EngineType, profile: EngineProfile) -> EngineReading | None:
        """Return what the engine says of its constants; None where it is to be asked again."""
        if profile.info_path is None:
            return EngineReading()
        try:
            answer = await self._ask(self._port, profile.info_path)
        except OSError:
            return None
        return parse_info(engine, answer.body) if answer.status == 200 else EngineReading()

    async def _read_metrics(self, engine: EngineType, profile: EngineProfile) -> EngineReading | None:
        path = self._spec.metrics_path or profile.metrics_path
        now = asyncio.get_running_loop().time()
        if path is None or now < self._metrics_at_s:
            return None
        try:
            answer = await self._ask(profile.metrics_port or self._port, path)
        except OSError:
            return None
        if answer.status != 200:
            self._metrics_at_s = now + self._timing.retry_metrics_s
            return None
        return parse_metrics(engine, answer.body.decode("utf-8", "replace"))

    async def _ask(self, port: int, path: str) -> Answer:
        async with asyncio.timeout(self._timing.answer_s):
            return await get(self._host, port, path)
