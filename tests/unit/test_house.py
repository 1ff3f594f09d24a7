"""House rules that a reviewer should not have to look for."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for top in ("operator", "sidecar", "lab") for path in (ROOT / top).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

MAX_MODULE_LINES = 400
"""Of code: what explains it (docstrings, comments, blank lines) is not what makes a module hard to hold."""

MAX_FUNCTION_LINES = 70
"""Of everything: a function has to be seen whole."""

NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}

# Traces of one machine, of the workshop, or of a package registry. Spelled so that this file has none.
FORBIDDEN = re.compile(
    "|".join(
        [
            "/" + r"work/(main|shared)",
            "/" + r"root\b",
            "pypi" + r"\.org",
            "python" + "hosted",
            "--(extra-)?index" + "-url",
            r"\bsub" + "agent",
            "cl" + "aude",
            "co-auth" + "ored-by",
            r"\biss" + r"ue #?\d",
        ]
    ),
    re.IGNORECASE,
)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code_lines(source: str) -> int:
    """Lines that hold code: neither blank, nor comment, nor docstring."""
    explained = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in NOT_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - explained)


def functions(source: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_a_module_is_small_explained_and_of_small_functions(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert code_lines(source) <= MAX_MODULE_LINES
    assert [name for name, lines in functions(source) if lines > MAX_FUNCTION_LINES] == []
    if source.strip():
        assert ast.get_docstring(ast.parse(source))


def test_the_import_contracts_hold() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [program, "--no-cache"], capture_output=True, text=True, check=False, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


def kept_files() -> list[Path]:
    """What is in the repository, or would be: everything that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
        cwd=ROOT,
    )
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


def test_no_trace_of_a_machine_or_a_registry() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    found = []
    for path in kept_files():
        data = path.read_bytes()
        if b"\0" in data:
            continue
        for number, line in enumerate(data.decode("utf-8").splitlines(), 1):
            if FORBIDDEN.search(line):
                found.append(f"{relative(path)}:{number}: {line.strip()[:100]}")
    assert found == []


@pytest.mark.parametrize("path", TESTS, ids=relative)
def test_tests_wait_for_events_and_not_for_the_clock(path: Path) -> None:
    """No real sleeps; `asyncio.sleep(0)` only lets others run."""
    sleeps = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "sleep"
        and not (node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0)
    ]
    assert sleeps == []


def test_test_files_have_names_of_their_own() -> None:
    """Without packages, two files of one name would be one module. (A conftest belongs to its folder.)"""
    names = [path.name for path in TESTS if path.name != "conftest.py"]
    assert sorted(set(names)) == sorted(names)
    assert not [path for path in TESTS if path.name == "__init__.py"]
