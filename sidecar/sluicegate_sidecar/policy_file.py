"""The policy's file: from bytes to a `Policy`, and from a changed file to a new one.

A file, or the directory of a mounted ConfigMap, whose `policy.yaml` it then is. A ConfigMap is exchanged by
swapping a symbolic link; editors replace files; copies write in place: so a change is a change of content, found
by reading the file again. That costs some 80 us for a policy of usual size, once a second.

Invariants: the file's text is untrusted, so its size, depth and number of values are bounded before any of it is
built; aliases are refused, for ten of them can stand for a billion values; a key given twice is refused, for
YAML would drop one of the two without a word. A bad file never changes what is in force: it is told, once.

JSON is read as the YAML that it is. What a policy may say lives in `sluicegate_core.policy`; who puts it in
force, and when, in `run`.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path
from typing import Any, Final

import yaml

from sluicegate_core.policy import Policy, PolicyError, Problem, parse_policy
from sluicegate_core.problems import MAX_PROBLEMS, show

#: Of a policy's file: what a ConfigMap can hold.
MAX_FILE_BYTES: Final = 1 << 20

#: A policy is six levels deep; metadata and status of a whole object may add some.
MAX_DEPTH: Final = 32

#: Scalars, lists and mappings in a document. The largest policy has some 5,000.
MAX_NODES: Final = 20_000

#: The file's name within a mounted ConfigMap.
NAME_IN_DIRECTORY: Final = "policy.yaml"

# libyaml's parser where PyYAML was built with it: ten times as fast, the same grammar.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_MERGE_TAG = "tag:yaml.org,2002:merge"


class PolicyFileError(Exception):
    """The file gives no policy; `problems` says all that is wrong with it, `str()` a line for each."""

    def __init__(self, source: str, problems: tuple[Problem, ...]) -> None:
        self.source = source
        self.problems = problems
        super().__init__("\n".join(f"{source}: {problem}" for problem in problems))


class PolicyFile:
    """One policy's file, watched by asking. Owned by one task; nothing here runs by itself.

    Attributes:
        path: as given: a file, or a directory with NAME_IN_DIRECTORY in it.
        generation: policies that this object has given out, 0 before the first.
        content_hash: SHA-256 of the content that the last of them came from, hexadecimal; empty before it.
        error: what is wrong with the file as it is now, None where it is good.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.generation = 0
        self.content_hash = ""
        self.error: PolicyFileError | None = None
        self._seen = ""  # the state last told: a content's hash, or the system's error

    def load(self) -> Policy:
        """The policy in the file, as it is now. Raises PolicyFileError."""
        self._seen = ""
        news = self.poll()
        if isinstance(news, Policy):
            return news
        assert news is not None, "nothing was told before, so there is news"
        raise news

    def awaited(self) -> bool:
        """Whether the policy is still to come: the directory of a ConfigMap that nobody has written yet."""
        return self.path.is_dir() and not (self.path / NAME_IN_DIRECTORY).exists()

    def poll(self) -> Policy | PolicyFileError | None:
        """What has changed since the last look: a policy to put in force, an error to tell, or nothing.

        Each change is told once. After an error the next good content is told even if it is the one that is
        still in force.
        """
        source = str(self.path)
        try:
            data = read_bounded(self.path)
        except OSError as error:
            if self._already_seen(f"error {error.errno}"):
                return None
            self.error = PolicyFileError(source, (unreadable(error),))
            return self.error
        content_hash = hashlib.sha256(data).hexdigest()
        if self._already_seen(content_hash):
            return None
        try:
            policy = read_policy(data, source)
        except PolicyFileError as error:
            self.error = error
            return error
        self.generation += 1
        self.content_hash = content_hash
        self.error = None
        return policy

    def _already_seen(self, state: str) -> bool:
        """Whether the file was in this state at the last look; from now on it was."""
        seen, self._seen = self._seen, state
        return seen == state


def read_bounded(path: Path) -> bytes:
    """The content of a regular file, or of NAME_IN_DIRECTORY in a directory, at most MAX_FILE_BYTES + 1 of it.

    Raises OSError; also where the path is something else, whose reading could block for ever.
    """
    if path.is_dir():
        path = path / NAME_IN_DIRECTORY
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read(MAX_FILE_BYTES + 1)


def read_policy(data: bytes, source: str) -> Policy:
    """The policy in a YAML or JSON text. Raises PolicyFileError, which names `source`."""
    try:
        return parse_policy(decode(data))
    except PolicyError as error:
        raise PolicyFileError(source, error.problems) from error


def decode(data: bytes) -> object:
    """The one document in a YAML or JSON text as plain data. Raises PolicyError where it is none, or unsafe."""
    if len(data) > MAX_FILE_BYTES:
        raise _refused(
            "spec", f"is larger than {MAX_FILE_BYTES} bytes, the most allowed", "remove what is no policy"
        )
    try:
        text = data.decode("utf-8-sig")
        _check_events(text)
        return _construct(text)
    except UnicodeDecodeError as error:
        place = f"byte {error.start}"
        raise _refused(place, "is not UTF-8, the only encoding allowed", "save the file as UTF-8") from error
    except yaml.MarkedYAMLError as error:
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise _refused(
            _place(error.problem_mark), f"is not valid YAML: {what}", "mend the line, or the one before it"
        ) from error
    except yaml.YAMLError as error:
        # Characters that no YAML text may have: the message has the place.
        message = f"is not valid YAML: {' '.join(str(error).split())}"
        raise _refused("spec", message, "remove the character") from error


def _check_events(text: str) -> None:
    """Refuse what is unsafe to build. Reads the text as a stream of events, and no further than the limits."""
    depth = nodes = documents = 0
    for event in yaml.parse(text, Loader=_Loader):
        place = _place(event.start_mark)
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise _refused(
                    place, "begins a second document; allowed is one", "put each policy in its own file"
                )
        if isinstance(event, yaml.NodeEvent):
            nodes += 1
            _check_node_event(event, place)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise _refused(
                place, f"is nested deeper than {MAX_DEPTH}, the most allowed", "remove what is no policy"
            )
        if nodes > MAX_NODES:
            raise _refused(
                place, f"has more than {MAX_NODES} values, the most allowed", "remove what is no policy"
            )


def _check_node_event(event: Any, place: str) -> None:
    """Refuse aliases, anchors and tags: what makes YAML more than the notation of plain data."""
    if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
        message = f"has an anchor or an alias, {show(event.anchor)}, which are not allowed"
        raise _refused(place, message, "write the values out; text that begins with & or * goes in quotes")
    if getattr(event, "tag", None) is not None:
        message = f"has a tag, {show(event.tag)}, which is not allowed"
        raise _refused(place, message, "remove it; text that begins with ! goes in quotes")


def _construct(text: str) -> object:
    """Build the document of a text whose events are checked."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        problems: list[Problem] = []
        _check_keys(node, problems)
        if problems:
            raise PolicyError(problems[:MAX_PROBLEMS])
        document: object = loader.construct_document(node)
        return document
    except (ValueError, OverflowError) as error:
        if isinstance(error, PolicyError):
            raise
        # A scalar that looks like a number or a date and is none: 2001-99-99, or digits by the thousand.
        fix = "write it in quotes, or correct it"
        raise _refused("spec", "has a number or a date that does not exist", fix) from error
    finally:
        loader.dispose()


def _check_keys(node: yaml.Node, problems: list[Problem]) -> None:
    """Note each key that stands twice in a mapping, and merge keys."""
    if isinstance(node, yaml.MappingNode):
        first: dict[tuple[str, str], str] = {}
        for key, value in node.value:
            _check_keys(value, problems)
            if not isinstance(key, yaml.ScalarNode):
                problems.append(
                    Problem(_place(key.start_mark), "", "is a key that is no text", "write a name")
                )
                continue
            place = _place(key.start_mark)
            if key.tag == _MERGE_TAG:
                message, fix = "is a merge key, which is not allowed", "write the fields out"
                problems.append(Problem(place, show(key.value), message, fix))
            elif (before := first.setdefault((key.tag, key.value), place)) != place:
                message = f"is given twice, first at {before}; allowed is once"
                problems.append(Problem(place, show(key.value), message, "remove one of the two"))
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_keys(item, problems)


def unreadable(error: OSError) -> Problem:
    """The problem of a file that the system does not let us read."""
    why = error.strerror or "cannot be read"
    return Problem(
        "spec", "", f"the file cannot be read: {why}", "name a readable file, or a directory with it"
    )


def _refused(path: str, message: str, fix: str) -> PolicyError:
    return PolicyError([Problem(path, "", message, fix)])


def _place(mark: Any) -> str:
    """Lines and columns as editors count them, from 1."""
    return "spec" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}"
