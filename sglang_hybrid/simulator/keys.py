"""Keys of the tree without tokens: eight bytes stand for a whole block.

So the tree, the lookup and the history see a prompt as they would see its tokens, in whole blocks: what two
prompts share inside a block stays unknown, and with it the causes that are about less than a block.
Digests are 64 bits wide and the same in every process.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import lru_cache
from hashlib import blake2b
from struct import pack

DIGEST_BYTES = 8
_MASK = (1 << 64) - 1


@lru_cache(maxsize=1 << 16)
def stable(name: Hashable) -> int:
    """64 bits of an id, the same in every process where its `repr` is."""
    return int.from_bytes(blake2b(repr(name).encode(), digest_size=8).digest(), "little")


def key_of(runs: Iterable[tuple[Hashable, int]], grid: int) -> bytes:
    """Digests of the whole blocks of these runs of content, end to end."""
    digests: list[int] = []
    parts: list[int] = []
    missing = grid
    for name, tokens in runs:
        # Numbers serve as they are; -1 and -2 have one hash.
        content, start = name if type(name) is int and name >= 0 else stable(name), 0
        while tokens - start >= missing:
            end = start + missing
            parts += (content, start, end)
            digests.append(hash(tuple(parts)) & _MASK)
            parts.clear()
            start, missing = end, grid
        if start < tokens:
            parts += (content, start, tokens)
            missing -= tokens - start
    return pack(f"<{len(digests)}Q", *digests)
