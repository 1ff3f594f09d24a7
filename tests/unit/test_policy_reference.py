"""The policy reference and the schema say the same, and the examples are policies."""

import re
from pathlib import Path

import pytest
import yaml

from sluicegate_core.policy import parse_policy, policy_warnings
from sluicegate_core.policy.nodes import ListOf, Node, Record
from sluicegate_core.policy.schema import MAX_CLASSES, MAX_RULES, MAX_VALUES, every_field
from sluicegate_core.problems import Problems, show
from sluicegate_sidecar.policy_file import MAX_DEPTH, MAX_NODES, read_policy

ROOT = Path(__file__).parents[2]
REFERENCE = (ROOT / "docs" / "policy.md").read_text(encoding="utf-8")
ROWS = {
    cells[0].strip("`"): cells[1:]
    for line in REFERENCE.splitlines()
    if line.startswith("| `spec.")
    for cells in [[cell.strip() for cell in line.strip("|").split(" | ")]]
}
FIELDS = dict(every_field())
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def described(node: Node) -> str:
    """What a field holds, as the reference puts it."""
    match node:
        case Record():
            return node.what
        case ListOf():
            return f"a list of {node.least} to {node.most}, each {described(node.item)}"
    return node.allowed


def test_every_field_is_documented_and_every_documented_field_exists() -> None:
    assert list(ROWS) == list(FIELDS)


@pytest.mark.parametrize("path", FIELDS)
def test_a_row_says_what_the_schema_says(path: str) -> None:
    field = FIELDS[path]
    holds, default, meaning, example = ROWS[path]
    assert holds == described(field.node)
    assert default == ("required" if field.required else field.default_text)
    assert len(meaning) > 10
    problems = Problems()
    field.node.read(yaml.safe_load(example.strip("`")), path, problems)
    assert problems.found == []


@pytest.mark.parametrize("path", FIELDS)
def test_a_default_in_words_is_the_default(path: str) -> None:
    field = FIELDS[path]
    if field.default not in (None, ()):
        assert field.default_text == show(field.default).strip('"')


@pytest.mark.parametrize(
    "promise",
    [
        f"at most {MAX_CLASSES} classes, {MAX_RULES} rules, and {MAX_VALUES} values a rule",
        f"more than {MAX_DEPTH} levels",
        f"more than {MAX_NODES:,} values",
    ],
)
def test_limits_in_prose_are_the_limits(promise: str) -> None:
    assert promise in re.sub(r"\s+", " ", REFERENCE)


def test_the_policy_shown_in_the_reference_is_the_minimal_example() -> None:
    [shown] = re.findall(r"```yaml\n(.*?)```", REFERENCE, re.DOTALL)
    minimal = (ROOT / "examples" / "minimal.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(shown) == yaml.safe_load(minimal)
    assert len(minimal.splitlines()) <= 10


def test_every_example_is_named_in_the_reference() -> None:
    assert {path.name for path in EXAMPLES} == set(re.findall(r"examples/([\w-]+\.yaml)", REFERENCE))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_a_policy_without_loose_ends(path: Path) -> None:
    policy = read_policy(path.read_bytes(), path.name)
    loose = [one for one in policy_warnings(policy) if "read by the operator only" not in one]
    assert loose == []
    assert parse_policy(yaml.safe_load(path.read_bytes())) == policy
