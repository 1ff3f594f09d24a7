"""The command line as it is typed: in processes of its own, so that what each command imports can be seen."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sluicegate_lab.cli import COMMANDS

ROOT = Path(__file__).parents[2]
GOOD = "classes:\n- name: chat\n  slo: {ttft: 2s}\n"
BAD = "mode: Off\nclasses:\n- name: chat\n  slo: {ttft: 2}\n"


def python(code: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=ROOT,
    )


def sluicegate(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return python("from sluicegate_lab.cli import main; raise SystemExit(main())", *arguments, stdin=stdin)


@pytest.fixture
def good(tmp_path: Path) -> str:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return str(path)


@pytest.fixture
def bad(tmp_path: Path) -> str:
    path = tmp_path / "bad.yaml"
    path.write_text(BAD)
    return str(path)


def test_help_lists_every_command() -> None:
    done = sluicegate("--help")
    assert done.returncode == 0
    for command in COMMANDS:
        assert f"  {command.name}" in done.stdout
        assert command.help in done.stdout


def test_the_version_is_that_of_the_package() -> None:
    done = sluicegate("--version")
    assert done.returncode == 0
    [line] = [
        line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("version")
    ]
    assert done.stdout.strip() == "sluicegate " + line.split('"')[1]


def test_python_dash_m_is_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sluicegate_lab", "--version"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.stdout == sluicegate("--version").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "required: COMMAND"),
        (("chekc",), "did you mean 'check'?"),
        (("zzz",), "there are run, check"),
        (("check",), "required: FILE"),
        (("check", "--zzz", "-"), "unrecognized arguments: --zzz"),
    ],
)
def test_a_command_line_that_is_wrong(arguments: tuple[str, ...], said: str) -> None:
    done = sluicegate(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_check_of_a_good_policy_prints_every_default(good: str) -> None:
    done = sluicegate("check", good)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{good}: a valid policy\n")
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines()}
    assert rows["mode"] == ["mode", "Enforce"]
    assert rows["chat"] == ["chat", "2s", "none", "1", "2s", "no", "cap", "sized", "by", "the", "gate"]
    assert rows["everything"] == ["everything", "->", "chat"]


def test_check_of_a_bad_policy_prints_every_problem(bad: str) -> None:
    done = sluicegate("check", bad)
    assert (done.returncode, done.stderr) == (2, "")
    mode, ttft = done.stdout.splitlines()
    assert mode.startswith(f"{bad}: spec.mode: is a boolean")
    assert ttft == (
        f"{bad}: spec.classes[0].slo.ttft: is a number without a unit; allowed is a duration from 1ms to 1h (got 2). "
        'Fix: write "2s" for seconds, or "2ms" for milliseconds'
    )


def test_check_goes_through_all_files(good: str, bad: str, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.yaml")
    done = sluicegate("check", good, bad, missing)
    assert done.returncode == 2
    assert f"{good}: a valid policy" in done.stdout
    assert f"{bad}: spec.mode" in done.stdout
    assert f"{missing}: spec: the file cannot be read: No such file" in done.stdout


def test_check_prints_warnings_and_passes() -> None:
    done = sluicegate("check", "-", stdin=GOOD + "mode: Shadow\n")
    assert done.returncode == 0
    assert "-: warning: spec.mode: Shadow" in done.stdout


def test_check_reads_a_mounted_directory(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(GOOD)
    assert sluicegate("check", str(tmp_path)).returncode == 0


def test_check_shows_all_that_a_policy_can_say() -> None:
    done = sluicegate("check", "examples/multi-tenant.yaml", "examples/chat-and-batch.yaml")
    assert done.returncode == 0
    for part in (
        "vLLM, port 8000, slots found out",
        "x-tier: premium or enterprise -> premium",
        "model internal-* -> standard",
        "path /v1/embeddings -> batch",
        "everything else -> free",
        "header x-tenant, else",
        "2 to 12, by KEDA, cold start 4m",
    ):
        assert part in done.stdout


def test_check_as_json(good: str, bad: str) -> None:
    done = sluicegate("check", "--json", good, bad)
    assert done.returncode == 2
    first, second = json.loads(done.stdout)["files"]
    assert first["valid"] is True
    assert first["warnings"] == []
    assert first["spec"]["classes"] == [
        {"name": "chat", "slo": {"ttft": "2s"}, "weight": 1, "maxQueueTime": "2s", "preemptible": False}
    ]
    assert second["valid"] is False
    assert [problem["path"] for problem in second["problems"]] == ["spec.mode", "spec.classes[0].slo.ttft"]
    assert all(set(problem) == {"path", "value", "message", "fix"} for problem in second["problems"])


def test_a_reader_that_leaves_is_no_failure_of_ours(good: str) -> None:
    code = "from sluicegate_lab.cli import main; raise SystemExit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "check", *[good] * 400],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 1


@pytest.mark.parametrize(
    "arguments",
    [("check", "-"), ("run", "--policy", "examples/minimal.yaml", "--upstream", "http://127.0.0.1:9")],
    ids=lambda arguments: arguments[0],
)
def test_a_missing_package_is_a_clear_line(arguments: tuple[str, ...]) -> None:
    # None in sys.modules is Python's own way to say that a module is not there.
    done = python(
        "import sys\n"
        "sys.modules['yaml'] = None\n"
        "from sluicegate_lab.cli import main\n"
        "raise SystemExit(main())",
        *arguments,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"sluicegate {arguments[0]}: the Python package 'yaml' is not installed. "
        "Fix: pip install 'sluicegate[sidecar]'\n"
    )


HEAVY = {
    "aiohttp",
    "uvloop",
    "httptools",
    "numpy",
    "rich",
    "gguf",
    "xllamacpp",
    "yaml",
    "msgspec",
    "prometheus_client",
}


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [(("--help",), set()), (("check", "-"), {"yaml"})],
)
def test_a_command_imports_only_what_it_needs(arguments: tuple[str, ...], needed: set[str]) -> None:
    done = python(
        "import sys\n"
        "from sluicegate_lab.cli import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    pass\n"
        "print(*sys.modules, file=sys.stderr)",
        *arguments,
        stdin=GOOD,
    )
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert loaded & HEAVY == needed
    assert "asyncio" not in loaded
