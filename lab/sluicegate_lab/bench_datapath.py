"""`sluicegate bench-datapath`: the gate against Envoy and nginx, interleaved; the bars that must hold.

Prints a line a round, then a table; with `--json` one object last. A full run writes docs/benchmarks.md of the
checkout it runs in. All it starts listens on 127.0.0.1 and ends with it, by process id, also when it is
interrupted. How it measures is told in `sluicegate_lab.bench` and in what it writes.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sluicegate_lab.bench import BenchError
from sluicegate_lab.bench.parts import PARTS, Bench, Options, run_parts
from sluicegate_lab.bench.peers import STARTERS
from sluicegate_lab.bench.processes import cores
from sluicegate_lab.bench.report import Machine, as_json, as_markdown, as_text

FAILED = 1
QUICK = Options(window_s=0.3, rounds=1, starts=1, decisions=500)
TERMINATED = 128 + signal.SIGTERM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    full = Options()
    parser.add_argument("--only", metavar="PART,...", help=f"measure these parts alone: {', '.join(PARTS)}")
    parser.add_argument(
        "--quick", action="store_true", help="one short round: does it run? Its numbers are noise"
    )
    parser.add_argument("--rounds", type=int, help=f"rounds of each part (default {full.rounds})")
    parser.add_argument("--window", type=float, metavar="S", help=f"seconds (default {full.window_s:g})")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--strict", action="store_true", help="exit 1 when a bar does not hold")
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="write the report there (default: docs/benchmarks.md, full runs)",
    )
    parser.add_argument("--no-write", action="store_true", help="write no report")
    parser.add_argument("--subject", choices=sorted(STARTERS), default="gate", help="what is put to the test")


def run(args: argparse.Namespace) -> int:
    """Run the command; 0, or 1 where a part could not be measured or, with `--strict`, a bar does not hold."""
    try:
        names = _parts(args.only)
        options = _options(args)
        began = time.monotonic()
        with _bench_conditions() as proxy_core, Bench(options, proxy_core, _say) as bench:
            bars, failures = run_parts(bench, names)
    except BenchError as error:
        print(f"bench-datapath: {error}", file=sys.stderr)
        return FAILED
    print(f"\n{as_text(bars)}\n")
    for remark in bench.remarks:
        print(remark)
    print(f"took {time.monotonic() - began:.0f} s")
    for failure in failures:
        print(f"bench-datapath: not measured: {failure}", file=sys.stderr)
    where = _where_to_write(args, names)
    if where is not None and not failures:
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(as_markdown(bars, Machine.here(), options, bench.remarks))
        print(f"written: {where}")
    if args.json:
        print(as_json(bars))
    return FAILED if failures or (args.strict and not all(bar.holds for bar in bars)) else 0


def _say(line: str) -> None:
    print(line, flush=True)


def _parts(only: str | None) -> list[str]:
    if only is None:
        return list(PARTS)
    names = [name.strip() for name in only.split(",")]
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise BenchError(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    return names


def _options(args: argparse.Namespace) -> Options:
    base = QUICK if args.quick else Options()
    rounds = base.rounds if args.rounds is None else args.rounds
    window_s = base.window_s if args.window is None else args.window
    if rounds < 1 or window_s <= 0:
        raise BenchError("there is at least one round, and a window has a length")
    return Options(
        subject=args.subject, window_s=window_s, rounds=rounds, starts=base.starts, decisions=base.decisions
    )


def _where_to_write(args: argparse.Namespace, names: list[str]) -> Path | None:
    """The file for the report: the one asked for, or the checkout's after a full run of the gate."""
    if args.no_write:
        return None
    if args.write is not None:
        chosen: Path = args.write
        return chosen
    if args.quick or len(names) < len(PARTS) or args.subject != "gate":
        return None
    checkout = Path(__file__).resolve().parents[2]
    return checkout / "docs" / "benchmarks.md" if (checkout / "pyproject.toml").exists() else None


@contextmanager
def _bench_conditions() -> Iterator[int]:
    """The client's core is its own, its garbage collector silent, and SIGTERM ends it in good order. Gives the
    proxies' core."""

    def terminated(_signal: int, _frame: object) -> None:
        raise SystemExit(TERMINATED)

    if not Path("/proc/self/schedstat").exists():
        raise BenchError("CPU time is read from /proc/PID/task/*/schedstat, which this system does not have")
    affinity = os.sched_getaffinity(0)
    client, proxies = cores()
    if client == proxies:
        _say("one core: client and proxies share it, delays mean little here")
    before = signal.signal(signal.SIGTERM, terminated)
    os.sched_setaffinity(0, {client})
    gc.disable()
    try:
        yield proxies
    finally:
        gc.enable()
        os.sched_setaffinity(0, affinity)
        signal.signal(signal.SIGTERM, before)
