"""The parts of the benchmark: each a kind of load, the proxies it needs, and the bars that come out.

`PARTS` is the list to read. Proxies that forward are started once and shared by the parts that need them; while
one is measured the others on its core are idle. Proxies that refuse are others, set up to refuse, with the gate
busy for real: its one slot is taken by an open stream, and whoever comes is told 429 with a time to come back.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final, Self

from sluicegate_lab.bench import BenchError, peers
from sluicegate_lab.bench.bars import (
    DIRECT,
    ENVOY,
    ENVOY_AGAIN,
    NGINX,
    SUBJECT,
    Bar,
    Spread,
    added,
    ratio_bar,
    reading,
)
from sluicegate_lab.bench.loads import Loads, Sample, Target
from sluicegate_lab.bench.peers import Setting
from sluicegate_lab.bench.processes import Proxy
from sluicegate_lab.bench.reactor import Reactor
from sluicegate_lab.bench.rounds import Say, conditions, interleave, saturation
from sluicegate_lab.bench.upstream import Upstream

STARTS: Final = 5
#: Time after a start in which a process settles before its memory is read, s.
SETTLE_S: Final = 1.0
#: Streams that the gate serves before it is to refuse, so that it knows how long one takes, and their length.
LESSONS: Final = 5
LESSON_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How long to measure, and what. `subject` is a key of `peers.STARTERS`."""

    subject: str = "gate"
    window_s: float = 2.0
    rounds: int = 5
    starts: int = STARTS
    decisions: int = 4000


@dataclass
class Bench:
    """The running benchmark: reactor, engine stub and proxies. Ends all of it on leaving the context."""

    options: Options
    proxy_core: int
    say: Say
    remarks: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="sluicegate-bench-"))
        self._folder = Path(folder)
        self._begin()
        return self

    def _begin(self) -> None:
        """A reactor, an engine stub, and no proxy yet."""
        self._running = self._stack.enter_context(ExitStack())
        self.reactor = Reactor()
        self._running.callback(self.reactor.stop)
        self.upstream = Upstream(self.reactor)
        self._running.callback(self.upstream.close)
        self.loads = Loads(self.reactor, self.upstream, self.options.window_s)
        self._forwarding: list[Target] | None = None

    def start_over(self) -> None:
        """End the proxies and the stub, and begin anew: a part that failed has left connections behind."""
        self._running.close()
        self._begin()

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, kind: str, stack: ExitStack, *, refusing: bool = False) -> Proxy:
        """Start a proxy on the proxies' core and wait until it listens."""
        setting = Setting(
            upstream_port=self.upstream.port, core=self.proxy_core, folder=self._folder, refusing=refusing
        )
        proxy = stack.enter_context(peers.STARTERS[kind](setting))
        stack.callback(self._tell_if_dead, proxy)
        self.started_after_s = proxy.wait_listening(self.reactor)
        return proxy

    def _tell_if_dead(self, proxy: Proxy) -> None:
        obituary = proxy.obituary()
        if obituary is not None:
            self.say(obituary)

    def _start_all(self, stack: ExitStack, *, refusing: bool) -> list[Target]:
        kinds = {SUBJECT: self.options.subject, ENVOY: "envoy", ENVOY_AGAIN: "envoy", NGINX: "nginx"}
        targets = []
        for name, kind in kinds.items():
            proxy = self.start(kind, stack, refusing=refusing)
            proxy.wait_started(self.reactor)
            targets.append(Target(name, proxy.port, proxy))
        return targets

    def forwarding(self) -> list[Target]:
        """The proxies that forward."""
        if self._forwarding is None:
            self.say("starting the gate, Envoy twice, and nginx")
            self._forwarding = self._start_all(self._running, refusing=False)
            # A gate in service has seen streams; one that has just started is still permissive.
            self.loads.serve_streams(self._forwarding[0], count=LESSONS, length_s=LESSON_S)
        return self._forwarding

    @contextmanager
    def refusing(self) -> Iterator[list[Target]]:
        """The proxies that refuse, the subject with a stream inside."""
        with ExitStack() as stack:
            targets = self._start_all(stack, refusing=True)
            release = None
            if self.options.subject == "gate":
                self.loads.serve_streams(targets[0], count=LESSONS, length_s=LESSON_S)
                release = self.loads.hold_stream(targets[0])
            yield targets
            if release is not None:
                release()

    def direct(self) -> Target:
        """Straight to the engine stub."""
        return Target(DIRECT, self.upstream.port)

    def interleave(
        self, title: str, load: Callable[[Target], Sample], targets: list[Target]
    ) -> dict[str, list[Sample]]:
        """Measure a load in rounds, and note how busy both sides were."""
        samples = interleave(title, load, targets, self.options.rounds, self.say)
        self.remarks += [*saturation(title, samples), conditions(title, samples)]
        return samples


def requests(bench: Bench) -> list[Bar]:
    samples = bench.interleave("requests of 1 KB", bench.loads.requests, bench.forwarding())
    title = "CPU a request, 1 KB, 16 connections"
    return [ratio_bar(samples, reading("cpu_us"), name="cpu_per_request", title=title, bar=0.9)]


def streams(bench: Bench) -> list[Bar]:
    targets = [*bench.forwarding(), bench.direct()]
    samples = bench.interleave("256 streams", bench.loads.streams, targets)
    return [
        ratio_bar(
            samples,
            reading("cpu_us"),
            name="cpu_per_chunk",
            title="CPU a streamed chunk, 256 streams x 50/s",
            bar=0.85,
        ),
        ratio_bar(
            samples,
            added("delay_p50_us"),
            name="added_chunk_delay",
            title="median delay added to a chunk, 256 streams",
            bar=0.6,
        ),
    ]


def refusals(bench: Bench) -> list[Bar]:
    with bench.refusing() as targets:
        samples = bench.interleave("refusals", bench.loads.refusals, targets)
    title = "CPU a refusal with the body read"
    return [ratio_bar(samples, reading("cpu_us"), name="cpu_per_refusal", title=title, bar=0.65)]


def latency(bench: Bench) -> list[Bar]:
    targets = [*bench.forwarding(), bench.direct()]
    samples = bench.interleave("200 requests a second", bench.loads.latency, targets)
    title = "median latency at 200 requests/s"
    return [ratio_bar(samples, reading("p50_us"), name="latency_200rps", title=title, bar=0.85)]


def bodies(bench: Bench) -> list[Bar]:
    samples = bench.interleave(
        "256 streams beside 20 bodies of 1 MB a second", bench.loads.streams_and_bodies, bench.forwarding()
    )
    title = "p99 chunk delay beside 20 x 1 MB bodies/s"
    return [ratio_bar(samples, reading("delay_p99_us"), name="large_body_delay", title=title, bar=1.0)]


def start(bench: Bench) -> list[Bar]:
    """Time to listen, and memory when idle, of processes that are started and ended in turn."""
    after_s: dict[str, list[float]] = {}
    memory_mb: dict[str, dict[str, float]] = {}
    for turn in range(bench.options.starts):
        for name, kind in ((SUBJECT, bench.options.subject), (ENVOY, "envoy"), (NGINX, "nginx")):
            with ExitStack() as stack:
                proxy = bench.start(kind, stack)
                after_s.setdefault(name, []).append(bench.started_after_s)
                if turn == 0:
                    proxy.wait_started(bench.reactor)
                    bench.reactor.run_for(SETTLE_S)
                    memory_mb[name] = dict(proxy.memory_mb())
    took_s = Spread.of(after_s[SUBJECT])
    bench.say(f"starts: listening after {took_s.median * 1e3:.0f} ms")
    bars = [
        Bar(
            name="listening_after",
            title="listening after the start of the process",
            value=took_s.median,
            bar=0.5,
            unit="s",
            spread=took_s,
            absolute={name: median(values) for name, values in after_s.items()},
            absolute_unit="s",
        )
    ]
    bars += [
        Bar(
            name=f"idle_{kind}",
            title=f"idle memory, {text}",
            value=memory_mb[SUBJECT][kind],
            bar=45.0,
            unit="MB",
            absolute={name: values[kind] for name, values in memory_mb.items()},
            absolute_unit="MB",
        )
        for kind, text in (("rss", "resident"), ("pss", "proportional"))
    ]
    return bars


def decision(bench: Bench) -> list[Bar]:
    """Cost of parsing and deciding; needs the gate's packages, and no proxy."""
    from sluicegate_lab.bench.decision import decision_bars  # noqa: PLC0415 - loads the gate into this process

    bench.say("parsing and deciding, in this process")
    return decision_bars(bench.options.decisions)


PARTS: Final[dict[str, Callable[[Bench], list[Bar]]]] = {
    "requests": requests,
    "streams": streams,
    "refusals": refusals,
    "latency": latency,
    "bodies": bodies,
    "start": start,
    "decision": decision,
}


def run_parts(bench: Bench, names: list[str]) -> tuple[list[Bar], list[str]]:
    """Run the named parts in the order of `PARTS`; returns the bars, and a line for each part that failed."""
    bars: list[Bar] = []
    failures: list[str] = []
    for name in PARTS:
        if name not in names:
            continue
        try:
            bars += PARTS[name](bench)
        except BenchError as error:
            failures.append(f"{name}: {error}")
            bench.say(f"given up: {failures[-1]}")
            bench.start_over()
    return bars, failures
