"""`sluicegate demo`: what admission control does to an overloaded engine, shown on a real one.

In this order: start the engine (or find the one named), measure what it can do, write the policy, start the
gate and let it learn, then replay one stretch of real arrivals twice at the chosen overload, straight to the
engine and through the gate, and compare.

Invariants: both replays share the schedule, the engine, the client and its patience; the second begins once
the engine has nothing left of the first; whatever was started is ended on every way out, Ctrl-C and SIGTERM
at any stage included; what is printed is what came out.

This module only puts the stages in order: the engine is `engine.py`, the gate `gate_process.py`, the traffic
`traffic.py` and `load.py`, the yardstick `outcome.py`, what is shown `live.py` and `report.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from pathlib import Path

from rich.console import Console

from sluicegate_lab import calibrate
from sluicegate_lab.demo_engine import DEFAULT_SLOTS, DEFAULT_URL_SLOTS, own_engine, running_engine
from sluicegate_lab.demo_policy import PolicyFileError, default_policy, read_policy
from sluicegate_lab.demo_results import PATIENCE, Trial, as_json, compare
from sluicegate_lab.engine import EngineError
from sluicegate_lab.gate_process import GateError, GateProcess
from sluicegate_lab.live import LiveView, View
from sluicegate_lab.load import Record, Replay, Target, Wording
from sluicegate_lab.report import Comparison, picture, write_report
from sluicegate_lab.traffic import BATCH, INTERACTIVE, MAX_REQUESTS, load_trace, make_schedule

FAILED = 1
USAGE = 2
INTERRUPTED = 130

PLAIN_WIDTH = 100
"""Columns where there is no terminal to ask: the table fits."""

EPILOG = f"""\
how an answer gets its true length, and why the gate cannot know it: the demo's own model counts down from the
last number of its prompt, so the engine itself ends each answer where the trace says. No field of a request
carries that length: every client of a class sends the same generous max_tokens. With --model or --engine-url
the model ends its answers as it will, and the trace gives arrivals and prompts only.

clients: interactive ones leave when no token has come after {PATIENCE.first_token_s[INTERACTIVE]:.0f} s, batch
ones after {PATIENCE.first_token_s[BATCH]:.0f} s, on both sides alike; a refusal is final, nothing is retried.

exit codes: 0 done, whoever won; 1 it could not be done; 2 wrong arguments or policy; 130 interrupted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `sluicegate demo`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "--seconds", type=_positive, default=30.0, help="length of each replay (default: %(default)g)"
    )
    parser.add_argument(
        "--overload",
        type=_positive,
        default=2.5,
        help="offered work over what the engine was measured to do (default: %(default)g)",
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="draws stretch, classes and clients (default: %(default)s)"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--model", type=Path, metavar="FILE", help="a GGUF file instead of the demo's own model"
    )
    where.add_argument(
        "--engine-url", metavar="URL", help="an OpenAI-compatible engine that runs already: http://HOST:PORT"
    )
    parser.add_argument(
        "--slots",
        type=_slots,
        default=None,
        help=f"requests the engine serves at once (default: {DEFAULT_SLOTS}; with --engine-url what it says, "
        f"else {DEFAULT_URL_SLOTS})",
    )
    parser.add_argument(
        "--policy", type=Path, metavar="FILE", help="a policy with the classes interactive and batch"
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="PATH",
        default=Path("sluicegate-demo.html"),
        help="where the HTML report goes (default: %(default)s)",
    )
    parser.add_argument(
        "--picture", type=Path, metavar="PATH", help="also write the result as one SVG picture"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--no-live", action="store_true", help="plain lines, also in a terminal")


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} does not lie between 0 and 3600")
    return value


def _slots(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 1024:
        raise argparse.ArgumentTypeError(f"{text} does not lie between 1 and 1024")
    return value


def run(args: argparse.Namespace) -> int:
    """Runs the demo and returns its exit code."""
    return asyncio.run(_until_interrupted(args))


async def _until_interrupted(args: argparse.Namespace) -> int:
    """The demo as a task that SIGINT and SIGTERM cancel; every error that a user can mend is one line."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    live = console.is_terminal and not args.no_live
    view = LiveView(console) if live else View(console)
    loop = asyncio.get_running_loop()
    demo = loop.create_task(_demo(args, view))
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, demo.cancel)
    try:
        await demo
    except asyncio.CancelledError:
        print("interrupted; everything that was started has been stopped", file=sys.stderr)
        return INTERRUPTED
    except PolicyFileError as error:
        return _complain(error, USAGE)
    except (EngineError, GateError, calibrate.CalibrationError, OSError) as error:
        return _complain(error, FAILED)
    finally:
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(signum)
    return 0


def _complain(error: Exception, code: int) -> int:
    print(f"sluicegate demo: {error}", file=sys.stderr)
    return code


async def _demo(args: argparse.Namespace, view: View) -> None:
    given = read_policy(args.policy) if args.policy else None
    trace = load_trace()
    async with contextlib.AsyncExitStack() as stack:
        if args.engine_url:
            engine = await asyncio.to_thread(running_engine, args.engine_url, args.slots)
        else:
            engine = await stack.enter_async_context(own_engine(args.model, args.slots, view.note))
        capacity = await calibrate.measure(engine, trace, seed=args.seed, progress=view.note)
        view.note(
            f"full, it serves {capacity.requests_per_s:.1f} requests/s of this mix, "
            f"{capacity.output_tokens_per_s:.0f} tokens/s, a token every {capacity.full_gap_s * 1e3:.0f} ms; "
            f"idle, its first token comes after {capacity.idle_ttft_s * 1e3:.0f} ms"
        )
        policy = given or default_policy(capacity, engine.kind)
        view.heading("The policy")
        view.text(policy.text.rstrip())
        view.text("")
        gate = await stack.enter_async_context(GateProcess(engine.url, policy.text))
        through_gate = Target.of(gate.url, engine.target.model)
        view.note(f"the gate listens on {gate.url} and learns the engine's rates: {calibrate.TEACH_S:.0f} s")
        await calibrate.teach(engine, through_gate, trace, seed=args.seed)
        schedule = make_schedule(
            trace,
            cost=capacity.cost,
            overload=args.overload,
            seconds=args.seconds,
            seed=args.seed,
            expected_output_tokens=None if engine.counts_down else capacity.mean_output_tokens,
        )
        view.note(
            f"replaying {len(schedule.requests)} requests in {schedule.seconds:.0f} s, twice: "
            f"{schedule.overload:.2f}x of what the engine was measured to do"
        )
        if schedule.seconds < args.seconds:
            view.note(f"the engine is fast: {MAX_REQUESTS} requests last {schedule.seconds:.0f} s only")
        trial = Trial(engine, capacity, policy, schedule, args.seed)
        alone = await _replay(view, "Straight to the engine", trial, engine.target)
        view.note("waiting until the engine is empty")
        await calibrate.empty(engine)
        gated = await _replay(view, "Through the gate", trial, through_gate)
    _conclude(args, view, compare(trial, alone, gated), trial)


async def _replay(view: View, title: str, trial: Trial, target: Target) -> list[Record]:
    replay = Replay(target, Wording(title, trial.engine.counts_down), PATIENCE)
    watching = asyncio.create_task(view.watch(replay, title, trial.policy.goals, trial.schedule.seconds))
    try:
        await replay.run(trial.schedule.requests, trial.schedule.seconds)
    finally:
        watching.cancel()
        await asyncio.wait((watching,))
    return replay.records


def _conclude(args: argparse.Namespace, view: View, comparison: Comparison, trial: Trial) -> None:
    """The table, the verdict, the report, and the JSON."""
    view.heading("Side by side")
    view.comparison(comparison.rows)
    for sentence in comparison.verdict:
        view.text(sentence)
    view.text("")
    write_report(args.report, comparison)
    view.text(f"report: {args.report.resolve()}")
    if args.picture:
        args.picture.write_text(picture(comparison), encoding="utf-8")
        view.text(f"picture: {args.picture.resolve()}")
    if args.json:
        print(json.dumps(as_json(trial, comparison) | {"report": str(args.report.resolve())}), flush=True)
