"""The command line: `sluicegate COMMAND ...`.

Invariant: a command's module, and with it every heavy import, is loaded only once that command was chosen:
`sluicegate run` starts in the gate's own time and needs the gate's own packages, nothing of the lab's. So the
first word is looked up here, and everything after it belongs to the command's own parser.

Exit codes: 0 done; 1 it could not be done; 2 the command line, or the policy that was checked, is wrong; 130
interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

FAILED = 1
USAGE = 2
INTERRUPTED = 130

PROGRAM = "sluicegate"


@dataclass(frozen=True, slots=True)
class Command:
    """One command. `module` has `add_arguments(parser)` and `run(args) -> int`, or just `main(argv) -> int`."""

    name: str
    help: str
    module: str
    extra: str  # of the pip package: what brings the third-party packages that the command needs
    own_parser: bool = False  # the module parses its own arguments, in `main`


COMMANDS = (
    Command(
        "run",
        "the gate, in front of an engine of your own",
        "sluicegate_sidecar.__main__",
        extra="sidecar",
        own_parser=True,
    ),
    Command(
        "check",
        "read policies, print every problem or every default",
        "sluicegate_lab.check",
        extra="sidecar",
    ),
    Command(
        "demo",
        "show on a real engine what admission control does to an overload",
        "sluicegate_lab.demo",
        extra="lab",
    ),
    Command(
        "bench-datapath",
        "the data path against Envoy and nginx, interleaved",
        "sluicegate_lab.bench_datapath",
        extra="bench",
    ),
)

OUR_PACKAGES = ("sluicegate_core", "sluicegate_sidecar", "sluicegate_lab")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; argparse's own exits (--help, a wrong flag) pass."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = _choose(words)
    try:
        code = _run(command, words[1:])
        sys.stdout.flush()  # here, where a reader that has left can still be told from a failure
        return code
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing in OUR_PACKAGES or missing in sys.stdlib_module_names:
            raise
        print(
            f"{PROGRAM} {command.name}: the Python package {missing!r} is not installed. "
            f"Fix: pip install '{PROGRAM}[{command.extra}]'",
            file=sys.stderr,
        )
        return FAILED
    except BrokenPipeError:
        # The reader of our output has left (`sluicegate check ... | head`): not worth a traceback. Whatever is
        # still buffered goes nowhere, so that the interpreter does not try to flush it once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _choose(words: Sequence[str]) -> Command:
    """The command that the first word names; exits with a usage line where there is none."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="SLO admission control for LLM inference.",
        epilog="commands:\n" + "\n".join(f"  {one.name:<16}{one.help}" for one in COMMANDS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=f"{PROGRAM} [-h] [--version] COMMAND ...",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    parser.add_argument("command", metavar="COMMAND", help="`COMMAND --help` tells its arguments")
    name = parser.parse_args(words[:1]).command
    command = next((one for one in COMMANDS if one.name == name), None)
    if command is None:
        names = [one.name for one in COMMANDS]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
        parser.error(f"there is no command {name!r}: {hint}")
    return command


def _run(command: Command, words: Sequence[str]) -> int:
    module = importlib.import_module(command.module)
    if command.own_parser:
        main_of_module: Callable[[Sequence[str]], int] = module.main
        return main_of_module(words)
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} {command.name}", description=command.help)
    module.add_arguments(parser)
    run: Callable[[argparse.Namespace], int] = module.run
    return run(parser.parse_args(words))


class _Version(argparse.Action):
    """Looks the version up only when it is asked for: the look-up takes longer than the rest of this module."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        metadata = importlib.import_module("importlib.metadata")
        print(f"{PROGRAM} {metadata.version(PROGRAM)}")
        parser.exit()
