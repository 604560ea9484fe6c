"""What a dense grid must answer when nothing was evicted: pure arithmetic, no pool and no tree.

`DenseGrid` remembers whole committed sequences and compares token by token, so that it shares no idea with
the tree that it judges: a prompt whose tail happens to go on as an earlier answer did matches longer too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Key = tuple[str | None, str | None]
"""(extra_key, cache_salt)."""

NO_KEY: Key = (None, None)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of equal leading tokens."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def hit(grid: int, common: int, n: int, logprob_start: int | None = None) -> int:
    """Cached tokens of a prompt of n tokens that shares `common` with something committed.

    The last prompt token is always computed; logprobs of the prompt are asked for from `logprob_start` on.
    """
    usable = min(common, n - 1)
    if logprob_start is not None and logprob_start >= 0:
        usable = min(usable, logprob_start)
    return grid * (usable // grid)


@dataclass
class DenseGrid:
    """A checkpoint at every boundary that a committed sequence passed, one root a key."""

    grid: int
    committed: dict[Key, list[tuple[int, ...]]] = field(default_factory=dict)

    def commit(self, prompt: Sequence[int], outputs: Sequence[int], key: Key = NO_KEY) -> None:
        """A finished request leaves prompt and outputs, less the last: nobody computed that one's state."""
        self.committed.setdefault(key, []).append((*prompt, *outputs[:-1]))

    def common(self, prompt: Sequence[int], key: Key = NO_KEY) -> int:
        """Longest common prefix with anything committed under the key, in tokens."""
        return max((common_prefix(prompt, seq) for seq in self.committed.get(key, ())), default=0)

    def hit(self, prompt: Sequence[int], key: Key = NO_KEY, logprob_start: int | None = None) -> int:
        """The cached tokens that a repeat of `prompt` must report."""
        return hit(self.grid, self.common(prompt, key), len(prompt), logprob_start)

    def nodes(self) -> int:
        """Distinct boundaries: each holds one attention block and one checkpoint, whoever asked for it."""
        return len(
            {
                (key, seq[:depth])
                for key, seqs in self.committed.items()
                for seq in seqs
                for depth in range(self.grid, len(seq) + 1, self.grid)
            }
        )

    def clear(self) -> None:
        """Forget everything, as a flush does."""
        self.committed.clear()


@dataclass
class ChosenGrid(DenseGrid):
    """As `DenseGrid`, with checkpoints only where a placement takes them (`--hybrid-checkpoints`).

    Of a request that is alone: where its prompt leaves what the cache knew, at the last boundary of the
    prompt and of the answer, and at the depths, in grid steps, that `keeps` names.
    """

    keeps: Callable[[int], bool] = lambda depth: False
    taken: set[tuple[Key, tuple[int, ...]]] = field(default_factory=set)

    def hit(self, prompt: Sequence[int], key: Key = NO_KEY, logprob_start: int | None = None) -> int:
        most = hit(self.grid, self.common(prompt, key), len(prompt), logprob_start)
        depths = range(most, 0, -self.grid)
        return next((depth for depth in depths if (key, tuple(prompt[:depth])) in self.taken), 0)

    def commit(self, prompt: Sequence[int], outputs: Sequence[int], key: Key = NO_KEY) -> None:
        left = hit(self.grid, self.common(prompt, key), len(prompt)) // self.grid
        sequence = (*prompt, *outputs[:-1])
        last = len(sequence) // self.grid
        depths = {left, len(prompt) // self.grid, last} | {d for d in range(1, last + 1) if self.keeps(d)}
        self.taken |= {(key, sequence[: depth * self.grid]) for depth in depths if depth}
        super().commit(prompt, outputs, key)

    def nodes(self) -> int:
        return len(self.taken)

    def clear(self) -> None:
        super().clear()
        self.taken.clear()


def sparse(pages: float) -> Callable[[int], bool]:
    """Depths that `sparse` keeps when a checkpoint takes so many blocks of memory (README)."""

    def keeps(depth: int) -> bool:
        best = math.sqrt(pages * pages + pages * (2 * depth + 1)) - pages
        step = 1
        while 2 * step <= best:
            step *= 2
        return depth % step == 0

    return keeps
