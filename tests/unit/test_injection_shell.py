"""Scripts of the shell by example: what bash has over others, what Kubernetes does first, and what is not read."""

from __future__ import annotations

import pytest

from sluicegate_operator.injection.lexer import MAX_SCRIPT_CHARS
from sluicegate_operator.injection.shell import MAX_COMMANDS, UnreadableError, read_script

ENVIRONMENT = {"PORT": "8000", "UNTOLD": None, "SPACED": "a b"}


def texts(script: str) -> list[list[str | None]]:
    """The words of each command; None for one that is not known."""
    commands = read_script(script, ENVIRONMENT, ["sh", "one"], ENVIRONMENT)
    return [[word.text for word in command.words] for command in commands]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("run $(PORT) '$(PORT)' \"$(PORT)\"", [["run", "8000", "8000", "8000"]]),
        ("run $(UNTOLD)", [["run", None]]),
        ("run '$(UNTOLD)' '$(SPACED)'", [["run", None, "a b"]]),
        ("run $(SPACED)", [["run", None]]),
        ("run $$(PORT) $${PORT} '$$x'", [["run", None, "8000", "$x"]]),
        ("run $(date) `date` $((1+1)) ${#PORT} ${PORT%0}", [["run", None, None, None, None, None]]),
        ("run $? $# $! $0 $1 $2", [["run", None, None, None, "sh", "one"]]),
        ("run $'a\\n' $\"x\"", [["run", None, "x"]]),
        ("function f { run a; }\nf", [["run", "a"], ["f"]]),
        ("f() { run $PORT; }\nPORT=1\nf", [["run", None], ["f"]]),
        ("select X in a b; do run $X; done", [["run", None]]),
        ("case $X in a) run a ;; *) run b ;; esac; run c", [["run", "a"], ["run", "b"], ["run", "c"]]),
        ("case $X in\nesac; run c", [["run", "c"]]),
        ("[[ $A && -n $B ]] && run a", [["[[", None], ["-n", None, "]]"], ["run", "a"]]),
        ("A=(x 'y z' # no\n w)\nrun \"${A[@]}\" ${A[0]}", [["run", "x", "y z", "w", None]]),
        ("run <(sort x) 2>&1 &>/dev/null >out 3<in", [["run", None]]),
        ("run a \\\n  b \\\n", [["run", "a", "b"]]),
        ("cat <<-'X'\n\trun a\n\tX\nrun b", [["cat"], ["run", "b"]]),
        ("run a;; run b", [["run", "a"], ["run", "b"]]),
        ("time run a | tee x; ! run b", [["run", "a"], ["tee", "x"], ["run", "b"]]),
        ("", []),
    ],
)
def test_words(script: str, expected: list[list[str | None]]) -> None:
    assert texts(script) == expected


@pytest.mark.parametrize(
    "script",
    [
        "run 'a",
        'run "a',
        "run `a",
        "run $(a",
        "run ${a",
        "cat <<X\na",
        "A=(a",
        "A=(a;",
        "case x",
        "case x of",
        "for x in a",
        "f( x )",
        "case x in a",
        "run >",
        "x" * (MAX_SCRIPT_CHARS + 1),
        "run\n" * (MAX_COMMANDS + 1),
    ],
)
def test_what_cannot_be_read_is_said(script: str) -> None:
    with pytest.raises(UnreadableError):
        texts(script)
