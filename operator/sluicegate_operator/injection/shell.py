"""Reading a shell script far enough to know which commands it starts, with which words, and where they stand.

A reader, not a shell: it follows quoting, expansions, assignments, `set --`, arrays, here-documents, comments,
compound commands and functions, and says "unknown" wherever the value of a word depends on something that is not
in the text. It runs nothing.

Invariants:
- A `Word` with a text has that text whenever the script is run with the given variables; if `sure` is false, then
  only where the image does not set the variable that a default stands in for.
- A word that may turn into none or several words says so (`many`).
- `start` and `end` are offsets into the script as given, so that whoever changes a word changes nothing else.
- Whatever cannot be read raises `UnreadableError`: the caller then leaves the script alone.

The tokens come from `lexer`, the values from `variables`; what the commands mean lives in `engines`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from sluicegate_operator.injection.lexer import (
    Lexer,
    Literal,
    Opaque,
    Parameter,
    Positionals,
    RawWord,
    Token,
    UnreadableError,
)
from sluicegate_operator.injection.variables import Assignment, Value, Variables, Volatile, Word

__all__ = ["Command", "UnreadableError", "Word", "read_script"]

#: Simple commands in a script. The longest found in public manifests has some 80.
MAX_COMMANDS: Final = 2000

_ASSIGNMENT: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_SEPARATORS: Final = frozenset({";", "\n", "&", "&&", "||", "|", "|&", ";;", ";&", ";;&", "(", ")"})
_OPENS: Final = frozenset({"if", "while", "until", "{"})
_CLOSES: Final = frozenset({"fi", "done", "esac", "}"})
_PASSED: Final = frozenset({"then", "elif", "else", "do", "!", "time", "coproc"})
_DECLARES: Final = frozenset({"export", "readonly", "declare", "typeset", "local"})
#: Builtins whose operands are names of variables that they set.
_SETS_NAMES: Final = frozenset({"read", "unset", "mapfile", "readarray", "getopts", "printf"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A simple command.

    Attributes:
        words: its name and arguments, expanded.
        environment: the variables that it is started with, as far as they are known by name.
        start: where assignments for it alone can be put.
        arguments: where its first argument begins, or its end.
        end: where further arguments can be put, in front of redirections that follow the last one.
        set_here: variables of its environment that the script sets itself.
    """

    words: tuple[Word, ...]
    environment: dict[str, Word]
    start: int
    arguments: int
    end: int
    set_here: frozenset[str]


def read_script(
    text: str,
    environment: Mapping[str, str | None],
    positionals: Sequence[str | None],
    replaced: Mapping[str, str | None],
) -> list[Command]:
    """The simple commands of a script in the order of its text.

    Args:
        text: as it stands in the manifest, before Kubernetes has replaced its `$(NAME)`.
        environment: the container's variables; None: set, to a value that the manifest does not tell.
        positionals: `$0`, `$1` and so on.
        replaced: those of the variables that Kubernetes replaces in the text, as `$(NAME)`.

    Raises UnreadableError.
    """
    volatile = Volatile()
    commands: list[Command] = []
    for _ in range(2):  # the first time only to see what is set where
        variables = Variables(environment, positionals, volatile)
        commands = _Reader(Lexer(text, replaced), variables).read()
        volatile = variables.seen()
    return commands


class _Reader:
    """Goes through the tokens once; see `read_script`."""

    def __init__(self, lexer: Lexer, variables: Variables) -> None:
        self._lexer = lexer
        self._variables = variables
        self._commands: list[Command] = []
        self._in_case: list[bool] = []  # of each open case: a pattern comes next

    def read(self) -> list[Command]:
        words: list[RawWord] = []
        while True:
            token = self._lexer.next(at_command=not words)
            if token.word is not None:
                if words or not self._keyword(token.word):
                    words.append(token.word)
                continue
            if token.text == "(" and len(words) == 1:
                self._function()
            else:
                self._command(words)
                self._separator(token)
            words = []
            if token.kind == "end":
                return self._commands

    # Compound commands.

    def _keyword(self, word: RawWord) -> bool:
        """Take a reserved word where a command may begin; False where it is none."""
        variables, text = self._variables, word.plain
        if self._in_case and self._in_case[-1]:
            if text == "esac":
                self._in_case.pop()
                variables.close()
            else:
                self._lexer.skip_to(")")
                self._in_case[-1] = False
            return True
        if text is None:
            return False
        if text in _OPENS:
            variables.open()
        elif text in _CLOSES:
            if text == "esac" and self._in_case:
                self._in_case.pop()
            variables.close()
        elif text in ("for", "select", "case"):
            self._head_of(text)
        elif text == "function":
            self._lexer.next(at_command=False)
            variables.begin_function()
        elif text not in _PASSED:
            return False
        return True

    def _function(self) -> None:
        """`NAME()`: its body comes next."""
        if self._lexer.next(at_command=False).text != ")":
            raise UnreadableError("a ( where none belongs")
        self._variables.begin_function()

    def _head_of(self, keyword: str) -> None:
        """Read past `for NAME in WORDS` or `case WORD in`."""
        variables = self._variables
        variables.open()
        name = self._lexer.next(at_command=True)  # for (( is arithmetic, and passed over
        if keyword == "case":
            while True:
                token = self._lexer.next(at_command=False)
                if token.kind == "end":
                    raise UnreadableError("a case without its in")
                if token.word is not None and token.word.plain == "in":
                    break
            self._in_case.append(True)
            return
        if name.word is not None and name.word.plain is not None:
            variables.forget(name.word.plain)
        while name.text not in (";", "\n"):
            name = self._lexer.next(at_command=False)
            if name.kind == "end":
                raise UnreadableError("a loop without its body")

    def _separator(self, token: Token) -> None:
        text, variables = token.text, self._variables
        if self._in_case and self._in_case[-1]:
            return  # a ( in front of a pattern
        variables.conditional = text in ("&&", "||")
        if text == "(":
            variables.open()
        elif text == ")":
            variables.close()
        elif text in (";;", ";&", ";;&") and self._in_case:
            self._in_case[-1] = True

    # Simple commands.

    def _command(self, raw: list[RawWord]) -> None:
        variables = self._variables
        if not raw:
            return
        if len(self._commands) >= MAX_COMMANDS:
            raise UnreadableError("more commands than are read")
        assigned: list[Assignment] = []
        rest = list(raw)
        while rest and (found := self._assignment(rest[0])) is not None:
            assigned.append(found)
            rest.pop(0)
        words = [word for one in rest for word in self._expand(one)]
        if not rest:
            for one in assigned:
                variables.assign(one)
            return
        environment = variables.environment()
        for one in assigned:
            environment[one.name] = one.value[0] if len(one.value) == 1 and not one.append else Word(None)
        command = Command(
            words=tuple(words),
            environment=environment,
            start=rest[0].start,
            arguments=rest[1].start if len(rest) > 1 else rest[0].end,
            end=rest[-1].end,
            set_here=variables.set_here | {one.name for one in assigned},
        )
        self._commands.append(command)
        self._effects(command, rest)

    def _effects(self, command: Command, raw: list[RawWord]) -> None:
        """What a builtin does to the variables of the script."""
        variables = self._variables
        name = command.words[0].text if command.words else None
        if name in _DECLARES:
            for one in raw[1:]:
                found = self._assignment(one)
                if found is not None:
                    variables.assign(found, export=True)
                elif one.plain is None:
                    variables.forget_all()  # export $(cat FILE)
                else:
                    variables.export(one.plain)
        elif name == "set":
            texts = [word.text for word in command.words]
            if "--" in texts:
                variables.set_positionals(command.words[texts.index("--") + 1 :])
            elif not all((text is not None and text[:1] in "-+") or text == "pipefail" for text in texts[1:]):
                variables.forget_positionals()
        elif name in ("source", ".", "eval"):
            variables.forget_all()
            if name == "eval":
                variables.forget_positionals()
        elif name in _SETS_NAMES:
            for word in command.words[1:]:
                if word.text is not None and word.text.isidentifier():
                    variables.forget(word.text)
        elif name == "shift":
            variables.shift(by_one=len(command.words) == 1)

    def _assignment(self, word: RawWord) -> Assignment | None:
        """An assignment; None where the word is none."""
        first = word.parts[0] if word.parts else None
        if not isinstance(first, Literal) or first.quoted:
            return None
        found = _ASSIGNMENT.match(first.text)
        if found is None:
            return None
        name, append = found[1], bool(found[2])
        if word.array is not None:
            elements = tuple(element for one in word.array for element in self._expand(one))
            return Assignment(name, append, elements, is_array=True)
        # Nothing is split in an assignment.
        parts = tuple(
            Opaque(True) if isinstance(part, Positionals) else replace(part, quoted=True)
            for part in (Literal(first.text[found.end() :]), *word.parts[1:])
        )
        return Assignment(name, append, tuple(self._expand(RawWord(parts, 0, 0))), is_array=False)

    # Expansion.

    def _expand(self, word: RawWord) -> list[Word]:
        """The words that one word of the text becomes."""
        fields = _Fields(word)
        for part in word.parts:
            if isinstance(part, Literal):
                fields.literal(part.text, part.quoted)
            elif isinstance(part, Opaque):
                fields.unknown(part.quoted)
            elif isinstance(part, Positionals):
                fields.elements(self._variables.positionals, part.quoted)
            else:
                self._parameter(part, fields)
        return fields.done()

    def _parameter(self, part: Parameter, fields: _Fields) -> None:
        variables = self._variables
        if part.name.isdigit():
            self._positional(part, fields)
            return
        value = variables.get(part.name)
        if part.all_elements:
            fields.elements(value if variables.knows(part.name) else None, part.quoted)
        elif value is None or len(value) > 1:
            fields.unknown(part.quoted)
            if part.assigns:
                variables.forget(part.name)
        elif value and (value[0].text or part.default is None or not part.default_for_empty):
            fields.value(value[0], part.quoted)
        elif part.default is not None:
            # Not set here: the image may set it.
            word = Word(part.default, sure=variables.knows(part.name))
            fields.value(word, part.quoted)
            if part.assigns:
                variables.assign(Assignment(part.name, False, (word,), is_array=False))
        else:
            fields.unknown(part.quoted)

    def _positional(self, part: Parameter, fields: _Fields) -> None:
        at = int(part.name) - 1
        known = self._variables.positionals
        if at < 0:
            fields.value(self._variables.name, part.quoted)
        elif known is None or any(word.many for word in known[: at + 1]):
            fields.unknown(part.quoted)
        elif at < len(known) and (known[at].text != "" or part.default is None or not part.default_for_empty):
            fields.value(known[at], part.quoted)
        elif part.default is not None:
            fields.value(Word(part.default), part.quoted)
        elif part.quoted:
            fields.literal("", True)


class _Fields:
    """Collects what one word of the text becomes."""

    def __init__(self, raw: RawWord) -> None:
        self._raw = raw
        self._done: list[Word] = []
        self._text: str | None = ""
        self._prefix = ""
        self._many = False
        self._sure = True
        self._any = False  # something of the current field is there, if only quotes

    def literal(self, text: str, quoted: bool) -> None:
        self._any = self._any or quoted or bool(text)
        if self._text is None:
            return
        self._text += text

    def unknown(self, quoted: bool) -> None:
        self._any = True
        if self._text is not None:
            self._prefix = self._text
        self._text = None
        self._many = self._many or not quoted

    def value(self, word: Word, quoted: bool) -> None:
        """One value: as it is in quotes, else split at white space."""
        if word.text is None:
            self.unknown(quoted)
            return
        self._sure = self._sure and word.sure
        if quoted:
            self.literal(word.text, True)
            return
        if any(char in word.text for char in "*?["):
            self.unknown(False)  # a pattern, if there are files that it fits
            return
        pieces = word.text.split()
        if word.text[:1].isspace():
            self._break()
        for at, piece in enumerate(pieces):
            if at:
                self._break()
            self.literal(piece, False)
        if pieces and word.text[-1:].isspace():
            self._break()

    def elements(self, words: Value | None, quoted: bool) -> None:
        """`"$@"` and `"${NAME[@]}"`: each element a word of its own."""
        if words is None:
            self.unknown(False)
            return
        for at, word in enumerate(words):
            if at:
                self._break()
            if word.many:
                self.unknown(False)
            else:
                self.value(word, quoted)

    def done(self) -> list[Word]:
        self._break()
        if len(self._done) == 1:
            return [replace(self._done[0], start=self._raw.start, end=self._raw.end)]
        return self._done

    def _break(self) -> None:
        if self._any:
            self._done.append(Word(self._text, self._prefix, self._many, self._sure))
        self._text, self._prefix, self._many, self._sure, self._any = "", "", False, True, False
