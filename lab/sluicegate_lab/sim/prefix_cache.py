"""The prefix cache of the engine model: whose leading blocks are already computed, and what can be evicted."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

#: Tokens a KV block holds: vLLM's default.
BLOCK_TOKENS: Final = 16


class PrefixCache:
    """Leading blocks of prompts by id, with who refers to them; those nobody refers to are evicted, oldest first.

    A block of the trace is `tokens` long and takes so many tokens' worth of KV blocks.
    """

    __slots__ = ("_idle", "_refs", "blocks_each", "tokens")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.blocks_each = tokens // BLOCK_TOKENS
        self._refs: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def idle_blocks(self) -> int:
        """KV blocks that could be had by evicting."""
        return len(self._idle) * self.blocks_each

    def hits(self, prefix: tuple[int, ...]) -> int:
        """How many leading blocks are there."""
        refs = self._refs
        count = 0
        for one in prefix:
            if one not in refs:
                break
            count += 1
        return count

    def refer(self, blocks: tuple[int, ...]) -> None:
        """One more sequence uses these, which are there."""
        for one in blocks:
            if not self._refs[one]:
                del self._idle[one]
            self._refs[one] += 1

    def keep(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        """A sequence has computed these: gives those that were not there, which it now refers to."""
        new = tuple(one for one in blocks if one not in self._refs)
        for one in new:
            self._refs[one] = 1
        return new

    def release(self, blocks: tuple[int, ...]) -> None:
        """A sequence uses these no more. The last block goes idle first: a chain is evicted from its end."""
        for one in reversed(blocks):
            self._refs[one] -= 1
            if not self._refs[one]:
                self._idle[one] = None

    def evict(self, kv_blocks: int) -> int:
        """Make at least so many KV blocks free, if there are; gives how many it were."""
        freed = 0
        while freed < kv_blocks and self._idle:
            one, _ = self._idle.popitem(last=False)
            del self._refs[one]
            freed += self.blocks_each
        return freed
