"""The policy's file: what is refused before it is built, and how a change is told."""

import json
import os
from pathlib import Path

import pytest

from sluicegate_core.policy import ClassPolicy, Policy, Slo
from sluicegate_sidecar.policy_file import (
    MAX_DEPTH,
    MAX_FILE_BYTES,
    MAX_NODES,
    PolicyFile,
    PolicyFileError,
    read_policy,
)

GOOD = b"classes:\n- name: chat\n  slo: {ttft: 2s}\n"
BETTER = b"classes:\n- name: chat\n  slo: {ttft: 1s}\n"
BAD = b"classes:\n- name: chat\n  slo: {ttft: 2}\n"

BOMB = b"a0: &a0 [x, x]\n" + b"".join(
    b"a%d: &a%d [%s]\n" % (level, level, b", ".join([b"*a%d" % (level - 1)] * 10)) for level in range(1, 10)
)


def chat(ttft_s: float) -> Policy:
    return Policy(classes=(ClassPolicy("chat", Slo(ttft_s)),))


def refusal(data: bytes) -> str:
    with pytest.raises(PolicyFileError) as caught:
        read_policy(data, "p.yaml")
    return str(caught.value)


def test_yaml_and_json_are_read() -> None:
    assert read_policy(GOOD, "p") == chat(2.0)
    document = {"classes": [{"name": "chat", "slo": {"ttft": "2s"}}]}
    for indent in (None, 2, "\t"):
        assert read_policy(json.dumps(document, indent=indent).encode(), "p") == chat(2.0)
    assert read_policy(b"\xef\xbb\xbf---\n" + GOOD + b"...\n", "p") == chat(2.0)


@pytest.mark.parametrize(
    ("data", "where", "said"),
    [
        (b"", "spec", "the document is empty"),
        (b"# nothing\n", "spec", "the document is empty"),
        (b"- classes", "spec", "not a mapping"),
        (b"classes: [", "line 2, column 1", "not valid YAML"),
        (b"classes:\n\t- name: a", "line 2, column 1", "not valid YAML"),
        (b"mode: Off\nmode: Enforce\n", "line 2, column 1", 'given twice, first at line 1, column 1'),
        (b"classes: [{name: a, name: a}]", "line 1, column 21", "given twice"),
        (b'{"mode": "Off", "mode": "Off"}', "line 1, column 17", "given twice"),
        (b"classes: &c [{name: a}]", "line 1, column 10", "has an anchor or an alias"),
        (b"classes: *c", "line 1, column 10", "has an anchor or an alias"),
        (BOMB, "line 1, column 5", "has an anchor or an alias"),
        (b"<<: {mode: Enforce}", "line 1, column 1", "merge key"),
        (b"mode: !!python/object/apply:os.getcwd []", "line 1, column 7", "has a tag"),
        (b"mode: !secret x", "line 1, column 7", "has a tag"),
        (b"? [a]\n: 1\n", "line 1, column 3", "a key that is no text"),
        (b"? {a: 1}\n: 1\n", "line 1, column 3", "a key that is no text"),
        (GOOD + b"---\n" + GOOD, "line 4, column 1", "second document"),
        (b"\xff\xfe", "byte 0", "not UTF-8"),
        (b"mode: \x00", "spec", "control characters"),
        (b"mode: 2001-99-99", "spec", "does not exist"),
        (b"mode: " + b"1" * 5000, "spec", "does not exist"),
        (b"mode: =", "line 1, column 7", "not valid YAML"),
        (b"a: " + b"[" * (MAX_DEPTH + 1), "line 1", "nested deeper than"),
        (b"[" * 500_000, "line 1", ""),
        (b"{a: " * 100_000, "line 1", "nested deeper than"),
        (b"- 1\n" * (MAX_NODES + 1), "line", "more than"),
        (b"#" * (MAX_FILE_BYTES + 1), "spec", "larger than 1048576 bytes"),
    ],
)  # fmt: skip
def test_what_is_unsafe_or_unclear_is_refused(data: bytes, where: str, said: str) -> None:
    line = refusal(data)
    assert line.startswith(f"p.yaml: {where}")
    assert said in line
    assert "Fix: " in line
    assert "\n" not in line


def test_every_duplicate_is_told() -> None:
    assert len(refusal(b"mode: 1\nmode: 2\nengine: {port: 1, port: 2}\n").splitlines()) == 2


def test_the_problems_of_a_policy_are_told_with_the_file() -> None:
    lines = refusal(b"mode: Off\nclasses: [{name: A}]\n").splitlines()
    assert [line.split(": ")[1] for line in lines] == ["spec.mode", "spec.classes[0].name"]


def test_a_good_file_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(GOOD)
    file = PolicyFile(path)
    assert file.generation == 0
    assert file.load() == chat(2.0)
    assert (file.generation, file.error) == (1, None)
    assert len(file.content_hash) == 64
    assert file.poll() is None


def test_a_bad_file_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    file = PolicyFile(str(path))
    with pytest.raises(PolicyFileError, match="No such file"):
        file.load()
    path.write_bytes(BAD)
    with pytest.raises(PolicyFileError, match=r"spec\.classes\[0\]\.slo\.ttft"):
        file.load()
    with pytest.raises(PolicyFileError, match=r"spec\.classes\[0\]\.slo\.ttft"):
        file.load()  # asked again, it answers again
    assert (file.generation, file.content_hash) == (0, "")


def test_a_change_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(GOOD)
    file = PolicyFile(path)
    file.load()
    first = file.content_hash
    path.write_bytes(BETTER)  # of the same length, and possibly within one tick of the file system's clock
    assert file.poll() == chat(1.0)
    assert file.poll() is None
    assert file.generation == 2
    assert file.content_hash != first


def test_a_touched_file_is_no_change(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(GOOD)
    file = PolicyFile(path)
    file.load()
    os.utime(path, (1, 1))
    replacement = tmp_path / "q.yaml"
    replacement.write_bytes(GOOD)
    replacement.replace(path)
    assert file.poll() is None
    assert file.generation == 1


def test_a_bad_change_is_told_once_and_the_good_one_again(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(GOOD)
    file = PolicyFile(path)
    file.load()
    good_hash = file.content_hash
    path.write_bytes(BAD)
    error = file.poll()
    assert isinstance(error, PolicyFileError)
    assert file.poll() is None
    assert (file.error, file.generation, file.content_hash) == (error, 1, good_hash)
    path.write_bytes(GOOD)
    assert file.poll() == chat(2.0)
    assert (file.error, file.generation, file.content_hash) == (None, 2, good_hash)


def test_a_file_that_is_gone_for_a_moment(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(GOOD)
    file = PolicyFile(path)
    file.load()
    path.unlink()
    assert isinstance(file.poll(), PolicyFileError)
    assert file.poll() is None
    assert file.error is not None
    path.write_bytes(GOOD)
    assert file.poll() == chat(2.0)
    assert file.error is None


def test_a_mounted_config_map_is_followed_through_its_swap(tmp_path: Path) -> None:
    """As the kubelet does it: a new directory, and `..data` renamed over to point at it."""
    for name, content in (("..2026_1", GOOD), ("..2026_2", BETTER)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "policy.yaml").write_bytes(content)
    (tmp_path / "..data").symlink_to("..2026_1")
    (tmp_path / "policy.yaml").symlink_to("..data/policy.yaml")
    file = PolicyFile(tmp_path)
    assert file.load() == chat(2.0)
    (tmp_path / "..data_tmp").symlink_to("..2026_2")
    (tmp_path / "..data_tmp").replace(tmp_path / "..data")
    assert file.poll() == chat(1.0)
    assert file.poll() is None


def test_a_directory_without_a_policy_and_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(PolicyFileError, match="No such file"):
        PolicyFile(tmp_path).load()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PolicyFileError, match="not a regular file"):
        PolicyFile(tmp_path / "pipe").load()


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(b"#" * (3 * MAX_FILE_BYTES) + GOOD)
    with pytest.raises(PolicyFileError, match="larger than"):
        PolicyFile(path).load()
