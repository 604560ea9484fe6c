"""Keys of the tree without tokens: eight bytes stand for a piece of a block, an eighth of it.

Pieces are those of `radix.history`, so that the tree and the history see a prompt as they would see its
tokens, less what two prompts share inside a piece.  Digests are 64 bits wide and the same in every process.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import lru_cache
from hashlib import blake2b
from struct import pack

from sglang_hybrid.radix.history import pieces_of

DIGEST_BYTES = 8
_MASK = (1 << 64) - 1


def stable(name: Hashable) -> int:
    """64 bits of an id, the same in every process, for what has a stable `repr`."""
    return int.from_bytes(blake2b(repr(name).encode(), digest_size=8).digest(), "little")


class Keys:
    """Makes keys for trees of one grid."""

    def __init__(self, grid: int) -> None:
        """Raises `ValueError` when a grid step has no eight equal pieces."""
        self.step, self.pieces = pieces_of(grid)
        if self.step * self.pieces != grid:
            raise ValueError(f"a grid of {grid} tokens cannot be simulated: use a multiple of {self.pieces}")
        self.block_bytes = self.pieces * DIGEST_BYTES

    def of(self, runs: Iterable[tuple[Hashable, int]]) -> bytes:
        """Digests of the whole pieces of these runs of content, end to end."""
        step = self.step
        parts: list[bytes] = []
        open_: list[int] = []
        missing = 0  # tokens until the open piece is whole
        for name, tokens in runs:
            base, start = _stable(name), 0
            if missing:
                start = min(missing, tokens)
                open_ += (base, 0, start)
                missing -= start
                if missing:
                    continue
                parts.append(pack("<Q", hash(tuple(open_)) & _MASK))
                open_ = []
            whole, rest = divmod(tokens - start, step)
            if whole:
                parts.append(_run(base, start, whole, step))
            if rest:
                open_ = [base, tokens - rest, tokens]
                missing = step - rest
        return b"".join(parts)


_stable = lru_cache(maxsize=1 << 16)(stable)


@lru_cache(maxsize=1 << 16)
def _run(base: int, start: int, count: int, step: int) -> bytes:
    """Digests of whole pieces of one content."""
    starts = range(start, start + count * step, step)
    return pack(f"<{count}Q", *[hash((base, at, at + step)) & _MASK for at in starts])
