"""The tokens of a shell script: words in their parts, operators, line ends.

Kubernetes replaces `$(NAME)` in a container's command and args before any shell sees them, where NAME is a
variable of the container; `$$` becomes `$`. So the same text is read by two languages, and this reader follows
both: `$(NAME)` of a known variable is its value, any other `$(` is a command substitution, whose output is unknown.

Invariants: the text is never changed, offsets are into it as given, and the work is linear in its length (nested
quotes and substitutions are skipped, not read).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

#: Bytes of a script that are read: a pod's object is bounded by etcd's 1.5 MiB, and no start script comes near.
MAX_SCRIPT_CHARS: Final = 262_144

_OPERATORS: Final = ("&&", "||", ";;&", ";;", ";&", "|&", "&", "|", ";", "(", ")")
_REDIRECTIONS: Final = ("<<<", "<<-", "<<", "<&", "<>", ">|", ">>", ">&", "<", ">")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KUBERNETES: Final = re.compile(r"\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")
#: `${NAME}`, `${NAME:-text}`, `${NAME-text}`, `${NAME:=text}`, `${NAME[@]}`; everything else in braces is unknown.
_BRACES: Final = re.compile(
    r"\$\{([A-Za-z_][A-Za-z0-9_]*|[0-9]+)(?:(\[[@*]\])|(:?[-=])([^{}$`\"'\\]*|\"[^{}$`\"'\\]*\"))?\}"
)
#: A value that means the same to a shell, wherever Kubernetes puts it.
_INERT: Final = re.compile(r"[A-Za-z0-9_./:=@%+,-]*\Z")
_ARRAY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=\(")
_BLANKS: Final = " \t\r"
_ENDS_WORD: Final = frozenset(" \t\r\n;&|()<>")
_ENDS_QUOTED: Final = frozenset('\\$`"')
_ENDS_PLAIN: Final = _ENDS_WORD | _ENDS_QUOTED | frozenset("'")
_BACKTICK: Final = re.compile(r"(?<!\\)`")


class UnreadableError(Exception):
    """The script cannot be read; the message says why."""


@dataclass(frozen=True, slots=True)
class Literal:
    """Text as it is."""

    text: str
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Parameter:
    """`$NAME`, `${NAME:-default}`, `${NAME[@]}`."""

    name: str
    quoted: bool = False
    default: str | None = None
    default_for_empty: bool = True
    assigns: bool = False
    all_elements: bool = False


@dataclass(frozen=True, slots=True)
class Positionals:
    """`$@` or `$*`."""

    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Opaque:
    """What is known only when the script runs."""

    quoted: bool = False


Part = Literal | Parameter | Positionals | Opaque


@dataclass(frozen=True, slots=True)
class RawWord:
    """A word before expansion. `array`: the elements of `NAME=( ... )`."""

    parts: tuple[Part, ...]
    start: int
    end: int
    array: tuple[RawWord, ...] | None = None

    @property
    def plain(self) -> str | None:
        """Its text, where it is text without any quotes: only such a word can be a keyword."""
        if len(self.parts) != 1:
            return None
        part = self.parts[0]
        return part.text if isinstance(part, Literal) and not part.quoted else None


@dataclass(frozen=True, slots=True)
class Token:
    """`kind` is "word", "operator" or "end"; `text` the operator, a line end being one."""

    kind: str
    text: str = ""
    word: RawWord | None = None


class Lexer:
    """Gives the tokens one after another; redirections and comments are passed over."""

    def __init__(self, text: str, environment: Mapping[str, str | None]) -> None:
        if len(text) > MAX_SCRIPT_CHARS:
            raise UnreadableError("longer than scripts that are read")
        self._text = text
        self._environment = environment
        self._at = 0
        self._heredocs: list[tuple[str, bool]] = []

    def next(self, *, at_command: bool) -> Token:
        """The next token. `at_command`: a command may begin here, so that `((` is arithmetic."""
        text = self._text
        while True:
            self._skip_blanks()
            if self._at >= len(text):
                return Token("end")
            char = text[self._at]
            if char == "\n":
                self._at += 1
                self._skip_heredocs()
                return Token("operator", "\n")
            if char == "#":
                end = text.find("\n", self._at)
                self._at = len(text) if end < 0 else end
                continue
            if text.startswith("&>", self._at):
                self._redirection("&>>" if text.startswith("&>>", self._at) else "&>")
                continue
            if char in "<>" and text[self._at + 1 : self._at + 2] != "(":
                self._redirection(next(one for one in _REDIRECTIONS if text.startswith(one, self._at)))
                continue
            if at_command and text.startswith("((", self._at):
                self._at = _after_parentheses(text, self._at)
                continue
            for operator in _OPERATORS:
                if text.startswith(operator, self._at):
                    self._at += len(operator)
                    return Token("operator", operator)
            word = self._word()
            if text[self._at : self._at + 1] in ("<", ">") and (word.plain or "").isdigit():
                continue  # the number of a file descriptor
            return Token("word", word=word)

    def skip_to(self, operator: str) -> None:
        """Read past the next such operator."""
        while True:
            token = self.next(at_command=False)
            if token.kind == "end":
                raise UnreadableError(f"no {operator} where one belongs")
            if token.text == operator:
                return

    # Between words.

    def _skip_blanks(self) -> None:
        text = self._text
        while self._at < len(text):
            if text[self._at] in _BLANKS:
                self._at += 1
            elif text.startswith("\\\n", self._at):
                self._at += 2
            else:
                return

    def _redirection(self, operator: str) -> None:
        """Pass over a redirection and its word; remember a here-document."""
        self._at += len(operator)
        self._skip_blanks()
        start = self._at
        word = self._word()
        if operator in ("<<", "<<-"):
            delimiter = re.sub(r"[\\'\"]", "", self._text[start : word.end])
            self._heredocs.append((delimiter, operator == "<<-"))

    def _skip_heredocs(self) -> None:
        for delimiter, tabs in self._heredocs:
            while True:
                if self._at >= len(self._text):
                    raise UnreadableError("a here-document without its end")
                end = self._text.find("\n", self._at)
                end = len(self._text) if end < 0 else end
                line = self._text[self._at : end]
                self._at = end + 1
                if (line.lstrip("\t") if tabs else line) == delimiter:
                    break
        self._heredocs.clear()
        self._at = min(self._at, len(self._text))

    # Words.

    def _word(self) -> RawWord:
        start, text = self._at, self._text
        parts: list[Part] = []
        if text.startswith(("<(", ">("), self._at):
            self._at = _after_parentheses(text, self._at + 1)
            return RawWord((Opaque(True),), start, self._at)
        array = _ARRAY.match(text, self._at)
        if array is not None:
            return self._array(array)
        while self._at < len(text) and text[self._at] not in _ENDS_WORD:
            if text.startswith("\\\n", self._at):
                self._at += 2
                continue
            parts += self._parts(quoted=False)
        if self._at == start:
            raise UnreadableError(f"unexpected {text[start : start + 1]!r}")
        return RawWord(_joined(parts), start, self._at)

    def _array(self, head: re.Match[str]) -> RawWord:
        start, self._at = self._at, head.end()
        words: list[RawWord] = []
        while True:
            self._skip_blanks()
            char = self._text[self._at : self._at + 1]
            if char == ")":
                self._at += 1
                name = Literal(head[0][:-1])
                return RawWord((name,), start, self._at, tuple(words))
            if char == "\n":
                self._at += 1
            elif char == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            elif char == "" or char in ";&|<>(":
                raise UnreadableError("an array without its end")
            else:
                words.append(self._word())

    def _parts(self, *, quoted: bool) -> list[Part]:
        """The part of a word that begins here; in double quotes there may be several."""
        text, at = self._text, self._at
        char = text[at]
        if char == "\\":
            follows = text[at + 1 : at + 2]
            self._at = min(at + 2, len(text))
            if quoted and follows not in ("$", "`", '"', "\\", "\n"):
                return [Literal("\\" + follows, True)]
            return [Literal("" if follows == "\n" else follows, True)]
        if char == "$":
            return self._dollar(quoted)
        if char == "`":
            end = _BACKTICK.search(text, at + 1)
            if end is None:
                raise UnreadableError("a ` without its other")
            self._at = end.end()
            return [Opaque(quoted)]
        if not quoted and char == "'":
            end_at = text.find("'", at + 1)
            if end_at < 0:
                raise UnreadableError("a ' without its other")
            self._at = end_at + 1
            return [self._single(text[at + 1 : end_at])]
        if not quoted and char == '"':
            return self._double()
        end_at = at + 1
        stops = _ENDS_QUOTED if quoted else _ENDS_PLAIN
        while end_at < len(text) and text[end_at] not in stops:
            end_at += 1
        self._at = end_at
        return [Literal(text[at:end_at], quoted)]

    def _double(self) -> list[Part]:
        """What stands in double quotes."""
        self._at += 1
        parts: list[Part] = []
        while True:
            if self._at >= len(self._text):
                raise UnreadableError('a " without its other')
            if self._text[self._at] == '"':
                self._at += 1
                return parts or [Literal("", True)]
            parts += self._parts(quoted=True)

    def _single(self, text: str) -> Part:
        """Text in single quotes, in which Kubernetes still replaces `$(NAME)`."""
        pieces: list[str] = []
        at = 0
        for found in _KUBERNETES.finditer(text):
            if found[1] in self._environment:
                value = self._environment[found[1]]
                if value is None or "'" in value:
                    return Opaque(True)
                pieces += [text[at : found.start()], value]
                at = found.end()
        return Literal("".join([*pieces, text[at:]]).replace("$$", "$"), True)

    def _dollar(self, quoted: bool) -> list[Part]:
        text, at = self._text, self._at
        kubernetes = _KUBERNETES.match(text, at)
        if kubernetes is not None and kubernetes[1] in self._environment:
            self._at = kubernetes.end()
            value = self._environment[kubernetes[1]]
            if value is None or not _INERT.match(value):
                # Put into the text as it is, so that the shell reads it: it could be anything.
                return [Opaque(False)]
            return [Literal(value, quoted)]
        if text.startswith("$$", at):
            self._at += 1  # Kubernetes leaves one of the two, and does not look at what follows
            return self._shell_dollar(quoted)
        return self._shell_dollar(quoted)

    def _shell_dollar(self, quoted: bool) -> list[Part]:
        """What a shell makes of the `$` here."""
        text, at = self._text, self._at
        if text.startswith("$(", at):
            self._at = _after_parentheses(text, at + 1)
            return [Opaque(quoted)]
        if text.startswith("${", at):
            return [self._braces(quoted)]
        follows = text[at + 1 : at + 2]
        if follows in ("@", "*"):
            self._at += 2
            return [Positionals(quoted)]
        name = _NAME.match(text, at + 1)
        if name is not None:
            self._at = name.end()
            return [Parameter(name[0], quoted)]
        if follows.isdigit():
            self._at += 2
            return [Parameter(follows, quoted)]
        if follows in ("?", "#", "!", "-", "$") and follows:
            self._at += 2
            return [Opaque(True)]
        self._at += 1
        if follows == "'" and not quoted:
            self._parts(quoted=False)
            return [Opaque(True)]  # escapes as in C
        if follows == '"' and not quoted:
            return self._double()
        return [Literal("$", quoted)]

    def _braces(self, quoted: bool) -> Part:
        found = _BRACES.match(self._text, self._at)
        if found is None:
            self._at = _after_braces(self._text, self._at)
            return Opaque(quoted)
        self._at = found.end()
        name, elements, operator, default = found.groups()
        return Parameter(
            name,
            quoted,
            default=None if default is None else default.strip('"'),
            default_for_empty=bool(operator) and operator.startswith(":"),
            assigns=bool(operator) and operator.endswith("="),
            all_elements=elements is not None,
        )


def _joined(parts: list[Part]) -> tuple[Part, ...]:
    """The parts with neighbouring texts of one kind made one."""
    joined: list[Part] = []
    for part in parts:
        before = joined[-1] if joined else None
        if isinstance(part, Literal) and isinstance(before, Literal) and part.quoted == before.quoted:
            joined[-1] = replace(before, text=before.text + part.text)
        else:
            joined.append(part)
    return tuple(joined)


def _after_parentheses(text: str, at: int) -> int:
    """The offset behind the parenthesis that closes the one at `at`; quotes within are respected."""
    depth = 0
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char == "'":
            at = text.find("'", at + 1)
            if at < 0:
                break
        elif char == '"':
            at = _after_double(text, at) - 1
        elif char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    raise UnreadableError("a ( without its other")


def _after_braces(text: str, at: int) -> int:
    depth = 0
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    raise UnreadableError("a { without its other")


def _after_double(text: str, at: int) -> int:
    at += 1
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == '"':
            return at + 1
        elif text.startswith("$(", at):
            at = _after_parentheses(text, at + 1) - 1
        at += 1
    raise UnreadableError('a " without its other')
