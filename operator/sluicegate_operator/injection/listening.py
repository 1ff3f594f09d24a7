"""Where an engine listens, and the changes that move it: pure reading of one invocation of a known program.

Two questions with different burdens. Where it listens *now* must be right, for the gate takes that port: it is
`sure` where nothing unseen can change it, and otherwise has to agree with what the manifest or the policy says of
ports. Where it *will* listen must be certain: flags beat variables, and the last flag wins where the program is so;
so it can be moved even where it is not known from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from sluicegate_operator.injection.edits import Change, Edit, SetVariable
from sluicegate_operator.injection.engines import LOOPBACK, Program
from sluicegate_operator.injection.start import Arg, Invocation

LOOPBACKS: Final = frozenset({"127.0.0.1", "localhost", "::1", "[::1]"})


@dataclass(frozen=True, slots=True)
class Listening:
    """Where an engine listens, as far as its command and its environment say.

    Attributes:
        port: None where it is not known.
        sure: nothing unseen can make it another.
        host: as it was said; None where it is not known.
        source: what said the port, for people.
        refusal: why no gate can stand in front of it; None where one can.
    """

    port: int | None
    sure: bool
    host: str | None
    source: str
    refusal: str | None = None

    @property
    def on_loopback(self) -> bool:
        return self.host in LOOPBACKS


@dataclass(frozen=True, slots=True)
class _Flag:
    """A flag as it was given. `value_at`: index of the word that holds the value, itself or the next."""

    spelling: str
    value: str | None
    sure: bool
    value_at: int
    joined: bool  # --port=8000


def read_listening(program: Program, words: int, one: Invocation, *, unseen: bool) -> Listening:
    """Where the engine of this invocation listens.

    Args:
        program: which engine it is.
        words: how many of its words name it.
        one: the invocation.
        unseen: the engine may have variables that the manifest does not tell, from its image or from envFrom.
    """
    args = one.args[words:]
    for flag in _flags(args, tuple(program.not_served)):
        return Listening(None, False, None, flag.spelling, program.not_served[flag.spelling])
    hidden = _hidden_from(args)
    port, sure, source = program.port, True, f"the default of {program.name}"
    host: str | None = (
        None if unseen and (program.host_variable or program.address_variable) else program.host
    )
    known_port: int | None = port
    for variable, is_port in ((program.port_variable, True), (program.host_variable, False)):
        if variable and variable in one.environment:
            value = one.environment[variable]
            if is_port:
                known_port, sure, source = _number(value.text), value.sure, f"the variable {variable}"
            else:
                host = value.text
        elif variable and is_port:
            sure = sure and not unseen
    if program.address_variable:
        address = one.environment.get(program.address_variable)
        if address is not None:
            host, known_port = split_address(address.text, program.port)
            sure, source = address.sure, f"the variable {program.address_variable}"
        else:
            sure = not unseen
    flags = list(_flags(args, program.port_flags))
    if flags:
        last = flags[-1]
        known_port, sure, source = _number(last.value), last.sure, f"the flag {last.spelling}"
        sure = sure and not (hidden is not None and hidden > last.value_at)
    elif hidden is not None or any(_flags(args, program.config_flags)):
        sure = False
    for flag in _flags(args, program.host_flags):
        host = flag.value
    if host is not None and host.endswith(".sock"):
        return Listening(None, False, host, source, "it listens on a Unix socket")
    return Listening(known_port, sure and known_port is not None, host, source)


def can_hide(program: Program, words: int, one: Invocation) -> bool:
    """Whether the engine can be told to listen on loopback alone."""
    shared = any(_flags(one.args[words:], program.shared_host_flags))
    return bool(program.host_flags or program.address_variable) and not shared


def changes_to_move(
    program: Program, words: int, one: Invocation, port: int
) -> tuple[list[Change], str | None]:
    """The changes after which the engine listens on 127.0.0.1:port, or why there are none that are certain.

    A flag that is given is changed where it stands; one that is not is added; what may be hidden in an expansion is
    overruled by adding the flag behind it, where the last one wins.
    """
    if program.address_variable:
        return _set_variable(one, program.address_variable, f"{LOOPBACK}:{port}")
    changes: list[Change] = []
    missing: list[str] = []
    args = one.args[words:]
    hidden = _hidden_from(args)
    wanted = [(program.port_flags, str(port))]
    if can_hide(program, words, one):
        wanted.append((program.host_flags, LOOPBACK))
    for spellings, value in wanted:
        flags = list(_flags(args, spellings))
        beaten = not flags  # by something that comes later, or has no place
        for flag in flags:
            word = args[flag.value_at]
            if word.place is None:
                beaten = True
                continue
            text = f"{flag.spelling}={value}" if flag.joined else value
            changes.append(Edit(word.place, (text,), one.in_shell))
        last = flags[-1].value_at if flags else -1
        if hidden is not None and hidden > last:
            if not program.last_wins:
                return [], f"words of the command that are known only when it runs may hold {spellings[0]}"
            beaten = True
        if beaten and flags and not program.last_wins:
            return [], f"{spellings[0]} is given in a place that cannot be changed"
        if beaten:
            missing += [spellings[0], value]
    if missing:
        changes.append(Edit(one.after, tuple(missing), one.in_shell))
    return changes, None


def _set_variable(one: Invocation, name: str, value: str) -> tuple[list[Change], str | None]:
    """A variable of the container; where a script sets it over, in front of its command."""
    if name not in one.set_here:
        return [SetVariable(name, value)], None
    if one.before is not None:
        return [Edit(one.before, (f"{name}={value}",), True, in_front=True)], None
    return [], f"{name} is set in a place that cannot be changed"


def split_address(text: str | None, port: int) -> tuple[str | None, int | None]:
    """Host and port of `[SCHEME://]HOST[:PORT][/PATH]`, as Ollama reads it; None where the text is not known."""
    if text is None:
        return None, None
    scheme, separator, rest = text.strip().rpartition("://")
    otherwise = {"http": 80, "https": 443}.get(scheme, port) if separator else port
    rest = rest.partition("/")[0].strip("\"'")
    host, colon, number = rest.rpartition(":")
    if not colon or number.endswith("]"):
        return rest or LOOPBACK, otherwise
    return host or "0.0.0.0", _number(number) if number else otherwise  # noqa: S104


def _flags(args: Sequence[Arg], spellings: Sequence[str]) -> Iterator[_Flag]:
    """The flags of these spellings, in order. A flag and its value may be one word or two."""
    for at, arg in enumerate(args):
        text = arg.text if arg.text is not None else arg.prefix
        for spelling in spellings:
            if text == spelling and arg.text is not None:
                following = args[at + 1] if at + 1 < len(args) else Arg(None)
                yield _Flag(spelling, following.text, following.sure, min(at + 1, len(args) - 1), False)
            elif text.startswith(spelling + "="):
                value = None if arg.text is None else text[len(spelling) + 1 :]
                yield _Flag(spelling, value, arg.sure, at, True)


def _hidden_from(args: Sequence[Arg]) -> int | None:
    """The index of the last word that may hold flags that nobody sees."""
    hidden = [at for at, arg in enumerate(args) if arg.many or (arg.text is None and not arg.prefix)]
    # The unknown value of a flag that is known is no flag.
    hidden = [
        at for at in hidden if args[at].many or at == 0 or not (args[at - 1].text or "").startswith("-")
    ]
    return hidden[-1] if hidden else None


def _number(text: str | None) -> int | None:
    """A port, or None where the text is none."""
    if text is None or not text.isascii() or not text.isdigit():
        return None
    number = int(text)
    return number if 0 < number <= 65535 else None
