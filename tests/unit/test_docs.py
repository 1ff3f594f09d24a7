"""The words of the documentation are the words of the code."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from sluicegate_core.policy import parse_policy
from sluicegate_core.vocabulary import Hold, Outcome, Reason
from sluicegate_sidecar.settings import parse_settings

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
CONCEPTS = (ROOT / "docs" / "concepts.md").read_text()
MARKDOWN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def table(text: str, first_column: str) -> list[list[str]]:
    """The rows of the table whose header begins with this word."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def words(cell: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)`", cell))


def test_every_reason_is_explained_once() -> None:
    explained = [word for row in table(CONCEPTS, "reason") for word in sorted(words(row[0]))]
    assert sorted(explained) == sorted(reason.value for reason in Reason)


def test_the_outcomes_of_reasons_are_outcomes() -> None:
    for row in table(CONCEPTS, "reason"):
        outcomes = {word.strip() for word in row[1].split(",")}
        assert outcomes <= {outcome.value for outcome in Outcome}, row


def test_the_status_of_a_reason_is_what_clients_get() -> None:
    for row in table(CONCEPTS, "reason"):
        reason = Reason(next(iter(words(row[0]))))
        if row[1] in ("rejected", "evicted"):
            assert row[2] == ("503" if reason.nobody_home else "429"), row


def test_every_hold_is_explained() -> None:
    explained = {word for row in table(CONCEPTS, "hold") for word in words(row[0])}
    assert explained == {hold.value for hold in Hold}


def test_the_policy_of_the_readme_is_valid() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        parse_policy(yaml.safe_load(block))


def test_the_command_of_the_readme_is_understood() -> None:
    command = next(line for line in README.splitlines() if line.startswith("sluicegate run "))
    settings = parse_settings(command.split()[2:], {})
    assert (ROOT / settings.policy).is_file()


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda p: p.name)
def test_targets_that_are_named_exist(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    for block in re.findall(r"```\n(.*?)```", path.read_text(), re.DOTALL):
        for target in re.findall(r"^make ([a-z-]+)", block, re.MULTILINE):
            assert target in targets, f"{path.name} names make {target}"


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if "://" not in link:
            assert (path.parent / link).exists(), f"{path.name} links to {link}"


def test_the_first_two_commands_are_what_ci_runs() -> None:
    block = next(iter(re.findall(r"```\n(make demo.*?)```", README, re.DOTALL)))
    named = re.findall(r"^(make [a-z-]+)", block, re.MULTILINE)
    ci = (ROOT / ".ci" / "run").read_text()
    assert named == ["make demo", "make test"]
    for command in named:
        assert re.search(rf"^{command}\b", ci, re.MULTILINE), f".ci/run does not run {command}"


def test_the_changelog_knows_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"[{version}]" in changelog or "[Unreleased]" in changelog
