"""Recorded traffic: three traces that the package carries, or a CSV of the user's own.

The package's (`data/PROVENANCE.md` says where they come from and under which licences):

    conv      Azure 2023, conversations: steady, medium prompts, medium answers
    code      Azure 2023, code completion: long silences and violent bursts, medium prompts, short answers
    mooncake  Mooncake 2025, conversations with long contexts, and which prompts begin alike

A user's CSV has a header and one request a line: `time_s`, `prompt_tokens`, `output_tokens`, and where known `class`
and `client`. Lines may be in any order. Limits: `MAX_ROWS` lines, and no token count past `MAX_TOKENS`.
"""

from __future__ import annotations

import csv
import io
import lzma
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from itertools import accumulate
from pathlib import Path
from typing import Final

#: Lines of a CSV: what fits into memory and into a few minutes.
MAX_ROWS: Final = 5_000_000
MAX_TOKENS: Final = 2_000_000
#: The timestamps of the Mooncake trace are on a grid of 3 s; its requests are spread over it.
MOONCAKE_GRID_S: Final = 3.0
#: And each of its blocks of equal content has so many tokens.
MOONCAKE_BLOCK_TOKENS: Final = 512

FILES: Final = {
    "conv": "azure_conv.csv.xz",
    "code": "azure_code.csv.xz",
    "mooncake": "mooncake_conversation.csv.xz",
}


class TraceError(Exception):
    """A trace cannot be read; the message is one line that says where and how to mend it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in the order of their arrival.

    Attributes:
        name: for people.
        at_s: arrivals since the first, s.
        prompt_tokens, output_tokens: of each request.
        classes, clients: names; empty where the trace has none.
        shared: for each request (leading blocks shared, how many requests back is one that has them); empty
            where nothing is known.
        block_tokens: tokens of such a block.
    """

    name: str
    at_s: list[float]
    prompt_tokens: list[int]
    output_tokens: list[int]
    classes: list[str] = field(default_factory=list)
    clients: list[str] = field(default_factory=list)
    shared: list[tuple[int, int]] = field(default_factory=list)
    block_tokens: int = MOONCAKE_BLOCK_TOKENS

    def __len__(self) -> int:
        return len(self.at_s)

    def prefixes(self) -> list[tuple[int, ...]]:
        """For each request the ids of its prompt's whole blocks; equal ids, equal leading content."""
        if not self.shared:
            return [()] * len(self)
        chains: list[tuple[int, ...]] = []
        last = 0
        for row, (shared, back) in enumerate(self.shared):
            blocks = -(-self.prompt_tokens[row] // self.block_tokens)
            known = chains[row - back][:shared] if shared else ()
            new = max(blocks - len(known), 0)
            chains.append(known + tuple(range(last, last + new)))
            last += new
        return [
            chain[: tokens // self.block_tokens]
            for chain, tokens in zip(chains, self.prompt_tokens, strict=True)
        ]


def load_trace(name: str, *, seed: int = 1) -> Trace:
    """A trace by the package's name for it, or by the path of a CSV. Raises `TraceError`.

    Args:
        seed: spreads arrivals where the recording has them on a grid.
    """
    file = FILES.get(name)
    if file is not None:
        return _packaged(name, file, seed)
    path = Path(name)
    if not path.exists():
        raise TraceError(f"there is no trace {name!r}: neither a file nor one of {', '.join(FILES)}")
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            return _read_csv(path.stem, lines)
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{name}: {error}") from error


def _packaged(name: str, file: str, seed: int) -> Trace:
    data = resources.files("sluicegate_lab").joinpath("data", file).read_bytes()
    rows = list(csv.reader(io.StringIO(lzma.decompress(data).decode("ascii"))))[1:]
    at_s = [ms / 1000.0 for ms in accumulate(int(row[0]) for row in rows)]
    if name == "mooncake":
        rng = random.Random(seed)
        at_s = sorted(at + rng.random() * MOONCAKE_GRID_S for at in at_s)
    return Trace(
        name=name,
        at_s=at_s,
        prompt_tokens=[int(row[1]) for row in rows],
        output_tokens=[int(row[2]) for row in rows],
        shared=[(int(row[3]), int(row[4])) for row in rows] if len(rows[0]) > 3 else [],
    )


def _read_csv(name: str, lines: Iterable[str]) -> Trace:
    reader = csv.DictReader(lines)
    columns = set(reader.fieldnames or ())
    missing = [one for one in ("time_s", "prompt_tokens", "output_tokens") if one not in columns]
    if missing:
        raise TraceError(
            f"{name}: no column {missing[0]!r}; a trace has time_s, prompt_tokens, output_tokens"
        )
    rows: list[tuple[float, int, int, str, str]] = []
    for number, row in enumerate(reader, 2):
        if len(rows) >= MAX_ROWS:
            raise TraceError(f"{name}: more than {MAX_ROWS:,} lines; cut it into parts")
        rows.append(_row(name, number, row))
    if not rows:
        raise TraceError(f"{name}: no requests below the header")
    rows.sort(key=lambda row: row[0])
    start_s = rows[0][0]
    return Trace(
        name=name,
        at_s=[row[0] - start_s for row in rows],
        prompt_tokens=[row[1] for row in rows],
        output_tokens=[row[2] for row in rows],
        classes=[row[3] for row in rows] if "class" in columns else [],
        clients=[row[4] for row in rows] if "client" in columns else [],
    )


def _row(name: str, number: int, row: dict[str, str | None]) -> tuple[float, int, int, str, str]:
    try:
        at_s = float(row["time_s"] or "")
        prompt, output = int(row["prompt_tokens"] or ""), int(row["output_tokens"] or "")
    except ValueError as error:
        raise TraceError(f"{name}: line {number}: {error}") from error
    if not 0.0 <= abs(at_s) < float("inf"):
        raise TraceError(f"{name}: line {number}: a time is a finite number of seconds, not {at_s}")
    if not (0 < prompt <= MAX_TOKENS and 0 < output <= MAX_TOKENS):
        raise TraceError(f"{name}: line {number}: a prompt and an answer have 1 to {MAX_TOKENS:,} tokens")
    return at_s, prompt, output, row.get("class") or "", row.get("client") or ""
