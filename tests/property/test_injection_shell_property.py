"""The reader of shell scripts, against shells: whatever it says of a command's words, a shell makes of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluicegate_operator.injection.shell import Command, UnreadableError, Word, read_script

SHELLS = [shell for shell in ("bash", "dash") if shutil.which(shell)]
ENVIRONMENT = {"PORT": "8000", "EMPTY": "", "TWO": "a b", "FLAGS": "--x 1  --y=2"}
NAMES = ("PORT", "EMPTY", "TWO", "FLAGS", "A", "B", "UNSET")

STUB = r"""#!/bin/sh
for word in "$@"; do printf '%s\0' "$word"; done >> "$RECORD"
printf '\1\0' >> "$RECORD"
"""

texts = st.text("abz0189-_./:=,+", min_size=1, max_size=6).filter(
    lambda text: not text.startswith(("-e", "="))
)
names = st.sampled_from(NAMES)


@st.composite
def words(draw: st.DrawFn) -> str:
    """A word as scripts write them, quoted and expanded in all ways, in up to three pieces."""
    name, text = draw(names), draw(texts)
    piece = st.sampled_from(
        [
            text,
            f"'{text} $PORT'",
            f'"{text} {draw(texts)}"',
            f"${name}",
            f'"${name}"',
            f"${{{name}}}",
            f'"${{{name}:-{text}}}"',
            f"${{{name}:-{text}}}",
            f"${{{name}-{text}}}",
            f"$(printf %s {text})",
            f'"`printf %s {text}`"',
            f"\\{text[0]}" if text[0] in "z:,+" else text,
            f"{text}\\\n{text}",
            "''",
            '"\\"\\$x"',
        ]
    )
    whole = st.sampled_from(['"$@"', "$@", '"$1"', "$2", "$((1 + 2))"])
    if draw(st.integers(0, 5)) == 0:
        return draw(whole)
    return "".join(draw(st.lists(piece, min_size=1, max_size=3)))


class Counter:
    """Gives each command a name of its own."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> str:
        self.count += 1
        return f"id{self.count}"


@st.composite
def statements(draw: st.DrawFn, number: Counter, depth: int = 0) -> str:
    def run() -> str:
        arguments = " ".join(draw(st.lists(words(), max_size=4)))
        before = draw(st.sampled_from(["", "", "A=q ", "exec_not ", "B='x y' "])).replace("exec_not ", "")
        after = draw(st.sampled_from(["", " > /dev/null", " 2>&1", " </dev/null", " >/dev/null 2>&1"]))
        return f"{before}record {number()} {arguments}{after}"

    kind = draw(st.integers(0, 13 if depth < 2 else 6))
    inner = statements(number, depth + 1)
    if kind <= 2:
        return run()
    if kind == 3:
        return f"{draw(st.sampled_from(['A', 'B', 'PORT']))}={draw(words())}"
    if kind == 4:
        return f"export {draw(st.sampled_from(['A', 'B', 'PORT']))}={draw(words())}"
    if kind == 5:
        return f"set -- {' '.join(draw(st.lists(words(), max_size=3)))}"
    if kind == 6:
        return draw(
            st.sampled_from(
                [
                    "# record decoy --port 1",
                    "shift || true",
                    "shift 2 || true",
                    "unset A",
                    ": ${B:=fallback}",
                    "read A < /dev/null || true",
                    ". /dev/null",
                    "eval 'A=5'",
                    "export B",
                    "export $(echo A=7)",
                    "set -e; set +e",
                    "A=$A.more",
                    "(A=lost)",
                ]
            )
        )
    if kind == 7:
        condition = draw(st.sampled_from(['[ -n "$A" ]', "true", "false", '[ "$PORT" = 8000 ]']))
        otherwise = f"\nelse\n{draw(inner)}" if draw(st.booleans()) else ""
        return f"if {condition}; then\n{draw(inner)}{otherwise}\nfi"
    if kind == 8:
        return f"for A in x 'y z'; do\n{draw(inner)}\ndone"
    if kind == 9:
        return f'case "$PORT" in\n8*) {draw(inner)} ;;\n(a|b)\n{draw(inner)};;\nesac'
    if kind == 10:
        return f"cat <<'END' >/dev/null\nrecord decoy2 --port 9\nit's\nEND\n{run()}"
    if kind == 11:
        return f"{{ {draw(inner)}\n}}"
    if kind == 12:
        return f"true && {run()} || {run()}; false && A=never"
    return f"f{depth}() {{\n{draw(inner)}\n}}\nf{depth} arg"


@st.composite
def scripts(draw: st.DrawFn) -> str:
    number = Counter()
    body = draw(st.lists(st.deferred(lambda: statements(number)), min_size=1, max_size=6))
    return "\n".join(body) + "\n"


def run_in(shell: str, script: str, positionals: Sequence[str]) -> list[list[str]]:
    """The words of each `record` that the shell runs."""
    with tempfile.TemporaryDirectory(prefix="sluicegate-shell-") as folder:
        record = Path(folder) / "record"
        stub = Path(folder) / "stub"
        stub.write_text(
            '#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done >> "$RECORD"\nprintf "\\1\\0" >> "$RECORD"\n'
        )
        stub.chmod(0o755)
        stub.rename(Path(folder) / "record-it")
        prefix = f'record() {{ "{folder}/record-it" "$@"; }}\n'
        subprocess.run(
            [shell, "-c", prefix + script, "name", *positionals],
            env={**ENVIRONMENT, "PATH": os.environ["PATH"], "RECORD": str(record)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=20,
            check=False,
            cwd=folder,
        )
        data = record.read_bytes().decode() if record.exists() else ""
    return [one.split("\0")[:-1] for one in data.split("\1\0")[:-1]]


def fits(words_: Sequence[Word], argv: Sequence[str]) -> bool:
    """Whether the words may have become these: an unknown one is any, `many` any number of any."""
    if not words_:
        return not argv
    first, rest = words_[0], words_[1:]
    if first.many:
        return any(fits(rest, argv[skipped:]) for skipped in range(len(argv) + 1))
    if not argv or not fits(rest, argv[1:]):
        return False
    return argv[0].startswith(first.prefix) if first.text is None else argv[0] == first.text


def found_by_id(commands: Sequence[Command]) -> dict[str, Command]:
    return {
        command.words[1].text: command
        for command in commands
        if len(command.words) > 1 and command.words[0].text == "record" and command.words[1].text is not None
    }


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(script=scripts(), positionals=st.lists(texts, max_size=3))
def test_the_words_are_those_that_a_shell_makes(shell: str, script: str, positionals: list[str]) -> None:
    commands = read_script(script, ENVIRONMENT, ["name", *positionals], {})
    known = found_by_id(commands)
    for argv in run_in(shell, script, positionals):
        assert argv[0] in known, (script, argv)
        words_ = known[argv[0]].words[1:]
        assert fits(words_, argv), (script, argv, words_)


@settings(max_examples=200, deadline=None)
@given(script=scripts())
def test_places_hold_what_they_say(script: str) -> None:
    """What stands at a word's place, read alone, is the word; and places do not overlap."""
    for command in read_script(script, ENVIRONMENT, ["name"], {}):
        ends = [command.start]
        for word in command.words:
            if not word.has_place:
                continue
            assert ends[-1] <= word.start < word.end <= command.end
            ends.append(word.end)
            if word.text is not None and not {'"', "'", "\\", "$", "`"} & set(script[word.start : word.end]):
                assert script[word.start : word.end] == word.text


@settings(max_examples=500, deadline=None)
@given(text=st.text("ab \n\t\"'`$(){}[]<>&|;\\#=@*-_/:", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        commands = read_script(text, ENVIRONMENT, (), ENVIRONMENT)
    except UnreadableError:
        return
    for command in commands:
        assert 0 <= command.start <= command.arguments <= command.end <= len(text)
        json.dumps([word.text for word in command.words])
