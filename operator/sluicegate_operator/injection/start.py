"""How a container starts: from `command`, `args` and `env` to the programs that run, with the place of each word.

A container starts one program directly, or a shell that starts several. Either way the result is a list of
`Invocation`s, whose words carry the place in the manifest that they came from, so that a change is a change of
exactly that place. Nothing is changed here (`edits`), and what a program is, is not known here (`engines`).

Kubernetes replaces `$(NAME)` before anything starts; so does `expand`. A variable whose value the manifest does not
tell (valueFrom) is unknown, and so is every word that depends on it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from sluicegate_operator.injection.images import Image
from sluicegate_operator.injection.shell import Command, UnreadableError, read_script

_REFERENCE: Final = re.compile(r"\$\$|\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")
SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh"})
#: Programs that start the program named by their own last arguments, and their options with a value.
WRAPPERS: Final[dict[str, frozenset[str]]] = {
    "exec": frozenset({"-a"}),
    "env": frozenset({"-u", "-C", "-S"}),
    "nohup": frozenset(),
    "nice": frozenset({"-n"}),
    "ionice": frozenset({"-c", "-n"}),
    "time": frozenset(),
    "timeout": frozenset({"-s", "-k"}),
    "numactl": frozenset({"-N", "-m", "-C", "-i", "-p"}),
    "taskset": frozenset(),
    "stdbuf": frozenset({"-o", "-i", "-e"}),
    "setsid": frozenset(),
    "tini": frozenset({"-p"}),
    "dumb-init": frozenset(),
    "gosu": frozenset(),
    "su-exec": frozenset(),
    "opentelemetry-instrument": frozenset(),
    "ddtrace-run": frozenset(),
    "trtllm-llmapi-launch": frozenset(),
    "nvidia_entrypoint.sh": frozenset(),
}
#: Wrappers whose first operand is theirs: a duration, a mask, a user.
_TAKES_ONE: Final = frozenset({"timeout", "taskset", "gosu", "su-exec"})


@dataclass(frozen=True, slots=True)
class Place:
    """A stretch of one string of the manifest. Empty (start == end): a place between."""

    field: str  # "command" or "args"
    index: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Arg:
    """One word of an invocation.

    Attributes:
        text: None where it is not known; then `prefix` is the known beginning.
        many: may be no word or several.
        sure: False for a default that the image's environment may override.
        place: what to change in order to change this word alone; None where there is no such place.
    """

    text: str | None
    prefix: str = ""
    many: bool = False
    sure: bool = True
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Invocation:
    """A program that a container starts.

    Attributes:
        args: its words, its name first; wrappers (`exec`, `env`, `tini --`) are left out.
        environment: its variables; a text of None is a value that is not known.
        after: where words can be added at its end.
        before: where assignments can be put in front of it; None where there is no shell to read them.
        in_shell: its words are read by a shell: what is added must be quoted for it.
        set_here: variables that the script sets itself, over the container's.
    """

    args: tuple[Arg, ...]
    environment: Mapping[str, Arg]
    after: Place
    before: Place | None = None
    in_shell: bool = False
    set_here: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Start:
    """All that a container starts, as far as it can be read.

    Attributes:
        invocations: in the order of the text.
        unreadable: why some or all of it could not be read; None where it could.
    """

    invocations: tuple[Invocation, ...]
    unreadable: str | None = None


class _Values(NamedTuple):
    """Variables of a container: all that programs see, and those that Kubernetes knows and replaces."""

    known: Mapping[str, str | None]
    own: Mapping[str, str | None]


def environment_of(container: Mapping[str, Any], image: Image | None) -> dict[str, str | None]:
    """The container's variables: the image's known ones, then `env`; None where the manifest gives no value.

    What `envFrom` brings is not known, not even by name; it beats the image's.
    """
    values: dict[str, str | None] = dict(image.environment) if image is not None else {}
    if container.get("envFrom"):
        values = dict.fromkeys(values)
    for variable in container.get("env") or ():
        if "valueFrom" in variable:
            values[variable["name"]] = None
        else:
            values[variable["name"]] = expand(variable.get("value") or "", values)
    return values


def expand(text: str, values: Mapping[str, str | None]) -> str | None:
    """Replace `$(NAME)` as Kubernetes does; None where a value is needed that is not known."""
    unknown = False

    def replaced(found: re.Match[str]) -> str:
        nonlocal unknown
        if found[0] == "$$":
            return "$"
        if found[1] not in values:
            return found[0]
        value = values[found[1]]
        unknown = unknown or value is None
        return value or ""

    expanded = _REFERENCE.sub(replaced, text)
    return None if unknown else expanded


def read_start(container: Mapping[str, Any], image: Image | None) -> Start:
    """Read how a container starts. `image`: what is known of its image."""
    values = _Values(environment_of(container, image), environment_of(container, None))
    words = _listed(container, "command", values.own) + _listed(container, "args", values.own)
    defaults: tuple[str, ...] = ()
    if not container.get("command"):
        if image is None and words and not _names_a_program(words[0]):
            return Start((), "the image's entrypoint is not known")
        if image is not None:
            defaults = () if words else image.arguments
            words = [Arg(text) for text in (*image.entrypoint, *defaults)] + words
    if not words:
        return Start((), "the manifest has no command, and the image's is not known")
    environment = {name: Arg(value) for name, value in values.known.items()}
    skip = _after_wrappers(words)
    rest = words[skip:]
    if rest and _basename(rest[0].text) in SHELLS:
        return _read_shell(container, rest, values)
    field = "args" if container.get("args") or not container.get("command") else "command"
    after = Place(field, len(container.get(field) or defaults), 0, 0)
    one = Invocation(tuple(rest), environment, after)
    return Start((one,))


def _listed(container: Mapping[str, Any], field: str, values: Mapping[str, str | None]) -> list[Arg]:
    listed = []
    for index, text in enumerate(container.get(field) or ()):
        value = expand(text, values)
        reference = _REFERENCE.search(text)
        prefix = text[: reference.start()] if value is None and reference is not None else ""
        listed.append(Arg(value, prefix, place=Place(field, index, 0, len(text))))
    return listed


def _names_a_program(word: Arg) -> bool:
    """Whether the first of `args` can only be a program: then the image's entrypoint starts what it is given."""
    name = _basename(word.text)
    return name is not None and (
        name in SHELLS or name in WRAPPERS or name in PROGRAMS or name.startswith("python")
    )


#: Programs of engines: see `engines`, which knows them by their arguments as well.
PROGRAMS: Final = frozenset(
    {
        "vllm", "llama-server", "text-generation-launcher", "text-embeddings-router", "tritonserver",
        "trtllm-serve", "sglang", "lmdeploy",
    }
)  # fmt: skip


def _basename(text: str | None) -> str | None:
    return None if text is None else text.rsplit("/", 1)[-1]


def _after_wrappers(words: Sequence[Arg]) -> int:
    """The index of the program that the wrappers start."""
    at = 0
    while at < len(words):
        name = _basename(words[at].text)
        if name is None or name not in WRAPPERS:
            return at
        options = WRAPPERS[name]
        operands = 1 if name in _TAKES_ONE else 0
        at += 1
        while at < len(words):
            text = words[at].text
            if text is None:
                return at
            if text == "--":
                at += 1
                break
            if text.startswith("-"):
                at += 2 if text in options else 1
            elif name == "env" and "=" in text:
                at += 1
            elif operands:
                operands -= 1
                at += 1
            else:
                break
    return at


def _script_of(words: Sequence[Arg]) -> tuple[Arg | None, Sequence[Arg]]:
    """The script of `sh -c SCRIPT NAME ARGS`, and what follows it: `$0` and the arguments."""
    is_command = False
    at = 1
    while at < len(words):
        text = words[at].text
        if text is None or not text.startswith(("-", "+")):
            break
        at += 1
        if text == "--":
            break
        if not text.startswith("--"):
            is_command = is_command or "c" in text
            at += "o" in text or "O" in text
    if not is_command or at >= len(words):
        return None, ()
    return words[at], words[at + 1 :]


def _read_shell(container: Mapping[str, Any], words: Sequence[Arg], values: _Values) -> Start:
    script, positionals = _script_of(words)
    if script is None:
        return Start((), "the shell runs a file that is not in the manifest")
    if script.place is None:
        return Start((), "the script is in the image")
    place = script.place
    text = container[place.field][place.index]
    given = [one.text for one in positionals]
    try:
        commands = read_script(text, values.known, given, values.own)
        invocations = []
        unreadable = None
        for command in commands:
            one = _invocation(command, place)
            if one.args and one.args[0].text == "eval":
                found = _evaluated(one, command, _Script(text, place, given, values.own))
                unreadable = unreadable if found else "an eval of what is known only when it runs"
                invocations += found
            elif one.args and _basename(one.args[0].text) in SHELLS:
                unreadable = "a shell within the shell"
            else:
                invocations.append(one)
    except UnreadableError as error:
        return Start((), f"the script cannot be read: {error}")
    return Start(tuple(invocations), unreadable)


def _invocation(command: Command, script: Place) -> Invocation:
    """A command of a script, with its places in the manifest."""

    def place(start: int, end: int) -> Place:
        return Place(script.field, script.index, start, end)

    args = [
        Arg(
            word.text,
            word.prefix,
            word.many,
            word.sure,
            place(word.start, word.end) if word.has_place else None,
        )
        for word in command.words
    ]
    return Invocation(
        args=tuple(args[_after_wrappers(args) :]),
        environment={
            name: Arg(word.text, word.prefix, word.many, word.sure)
            for name, word in command.environment.items()
        },
        after=place(command.end, command.end),
        before=place(command.start, command.start),
        in_shell=True,
        set_here=command.set_here,
    )


class _Script(NamedTuple):
    """A script of the manifest: its text and place, and what it is given."""

    text: str
    place: Place
    positionals: list[str | None]
    replaced: Mapping[str, str | None]


def _evaluated(one: Invocation, command: Command, script: _Script) -> list[Invocation]:
    """The command that an `eval` runs, where that is one command and nothing else.

    Where the eval's words stand in the script they are read and changed there, one level of double quotes taken
    off. Where they come out of variables whose values are known, what is added goes behind the eval, which joins
    its words.
    """
    environment = {name: arg.text for name, arg in one.environment.items()}
    unquoted = _unquoted(script.text, command.arguments, command.end)
    if unquoted is not None:
        inner, offsets = unquoted
        commands = read_script(inner, environment, script.positionals, script.replaced)
        if len(commands) == 1 and commands[0].words and commands[0].words[0].text is not None:
            return [_at_offsets(_invocation(commands[0], script.place), offsets)]
    texts = [arg.text for arg in one.args[1:]]
    if None in texts:
        return []
    joined = " ".join(text or "" for text in texts)
    commands = read_script(joined, environment, script.positionals, {})
    if len(commands) != 1 or commands[0].end != len(joined.rstrip()):
        return []
    args = [Arg(word.text, word.prefix, word.many, word.sure) for word in commands[0].words]
    return [replace(one, args=tuple(args[_after_wrappers(args) :]))]


def _unquoted(text: str, start: int, end: int) -> tuple[str, list[int]] | None:
    """What is left of text[start:end] without its double quotes, and where each character stood; None where other
    quotes or escapes make it another text when it is read again."""
    kept: list[str] = []
    offsets: list[int] = []
    quoted = any_quoted = False
    for at in range(start, end):
        char = text[at]
        if char == '"':
            quoted = not quoted
            any_quoted = True
            continue
        if char in "'`" or (char == "\\" and text[at + 1 : at + 2] != "\n"):
            return None
        kept.append(char)
        offsets.append(at)
    return ("".join(kept), [*offsets, end]) if any_quoted and kept else None


def _at_offsets(one: Invocation, offsets: list[int]) -> Invocation:
    """The invocation with its places moved to where the characters stood.

    What is added goes behind the last word that is known: an unknown one may hold more than words, when it is read
    again by the eval.
    """

    def moved(place: Place | None) -> Place | None:
        if place is None:
            return None
        if place.start == place.end:
            at = offsets[place.start - 1] + 1 if place.start else offsets[0]
            return replace(place, start=at, end=at)
        return replace(place, start=offsets[place.start], end=offsets[place.end - 1] + 1)

    args = tuple(replace(arg, place=moved(arg.place)) for arg in one.args)
    known = [arg.place for arg in args if arg.text is not None and arg.place is not None]
    after = replace(known[-1], start=known[-1].end) if known else moved(one.after)
    before = moved(one.before)
    assert after is not None
    return replace(one, args=args, after=after, before=before)
