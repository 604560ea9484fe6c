"""Marconi (Pan et al., MLSys 2025, arXiv 2411.19379): which checkpoints it admits, which it evicts first.

Admission (section 4.1): where a prompt leaves what is cached, found by inserting it speculatively, and
where the last token was decoded; nothing else.  Here both are rounded down to the grid.  A trace that
does not say what was generated can never hit the second one, so the end of the prompt is admitted
too: there the next turn is found, as it would be at the end of the answer.

Eviction (section 4.2, equation 2): least S(n) = recency(n) + alpha x flop_efficiency(n) first, both scaled to
[0, 1] over the candidates.  flop_efficiency (equation 1) is what a hit saves, for a byte that the states of
the prefix take; FLOPs of a layer are those of appendix A, table 1.  Candidates have at most one child; KV
of an inner one goes over to the child (section 4.3), which in the grid tree it does by staying where it is.
alpha is 0 until the first eviction; a window of requests is then recorded and replayed with several, and
the one with the most token hits adopted.  Recording is the caller's: `alpha` may be set at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from bench.policies.recency import NodeRecency
from sglang_hybrid.geometry import block_bytes
from sglang_hybrid.pools.organization import Checkpoint
from sglang_hybrid.radix.node import Node
from sglang_hybrid.radix.order import EvictionOrder, Tier, tier_of
from sglang_hybrid.radix.placement import Branch
from sglang_hybrid.radix.tree import GridTree

MarconiAdmission = Branch
"""Two checkpoints a request, and the one that stands for the answer's where that is not known."""


class PrefixFlops(NamedTuple):
    """A model as table 1 of the paper's appendix A sees it."""

    width: int
    """Model dimension, D."""
    state: int
    """State dimension, N."""
    attention: int
    recurrent: int
    mlp: int
    """Layers of each kind."""

    def of(self, tokens: int) -> float:
        """FLOPs of a prefill of so many tokens, L."""
        squares = tokens * self.width**2
        attention = 8 * squares + 4 * tokens**2 * self.width
        recurrent = 12 * squares + 16 * tokens * self.width * self.state + 10 * tokens
        return float(self.attention * attention + self.recurrent * recurrent + self.mlp * 16 * squares)


class ScannedOrder(EvictionOrder):
    """Looks at all candidates each time; `worst` chooses among some of one tier."""

    def __init__(
        self,
        usable: Callable[[Checkpoint], bool],
        worst: Callable[[Sequence[Checkpoint]], Checkpoint],
    ) -> None:
        super().__init__(usable)
        self.usable = usable
        self.worst = worst
        self.candidates: dict[Checkpoint, None] = {}

    def __len__(self) -> int:
        return len(self.candidates)

    def file(self, checkpoint: Checkpoint) -> None:
        self.candidates[checkpoint] = None

    def refile(self, checkpoint: Checkpoint) -> None:
        """Nothing: where it stands is found out when it is asked for."""

    def take(self, last: Tier, before: int | None = None) -> Checkpoint | None:
        self.candidates = dict.fromkeys(filter(self.usable, self.candidates))
        if not self.candidates:
            return None
        tier = min(map(tier_of, self.candidates))
        if tier > last:
            return None
        chosen = self.worst([one for one in self.candidates if tier_of(one) == tier])
        del self.candidates[chosen]
        return chosen

    def trim(self, most: int) -> None:
        """Nothing: `take` does."""


class MarconiEviction(NodeRecency):
    """FLOP-aware eviction; with alpha 0 it is LRU."""

    def __init__(self, tree: GridTree, flops: PrefixFlops, alpha: float = 0.0) -> None:
        self.flops = flops
        self.alpha = alpha
        super().__init__(tree)
        model, grid = tree.organization.model, tree.organization.grid
        self._efficiency: dict[int, float] = {}
        self._bytes = block_bytes(model, grid) * model.arenas, model.checkpoint_bytes * model.arenas

    def order(self, usable: Callable[[Checkpoint], bool]) -> EvictionOrder:
        return ScannedOrder(usable, self.worst)

    def efficiency(self, blocks: int) -> float:
        """FLOPs saved for a byte of a prefix of so many blocks."""
        known = self._efficiency.get(blocks)
        if known is None:
            block, checkpoint = self._bytes
            saved = self.flops.of(blocks * self.organization.grid)
            known = self._efficiency[blocks] = saved / (blocks * block + checkpoint)
        return known

    def worst(self, candidates: Sequence[Checkpoint]) -> Checkpoint:
        """The one of these that goes first."""
        eligible = [one for one in candidates if not _is_branch(one)] or candidates
        if not self.alpha:
            return min(eligible, key=lambda one: one.stamp)
        efficiencies = [self.efficiency(_depth(one)) for one in eligible]
        oldest, newest = min(one.stamp for one in eligible), max(one.stamp for one in eligible)
        least, most = min(efficiencies), max(efficiencies)
        age, gain = newest - oldest or 1, most - least or 1.0
        scores = (
            (one.stamp - oldest) / age + self.alpha * (efficiency - least) / gain
            for one, efficiency in zip(eligible, efficiencies)
        )
        return min(zip(scores, eligible), key=lambda scored: (scored[0], scored[1].stamp))[1]


def _is_branch(checkpoint: Checkpoint) -> bool:
    return isinstance(checkpoint.owner, Node) and checkpoint.owner.is_branch


def _depth(checkpoint: Checkpoint) -> int:
    return checkpoint.owner.depth if isinstance(checkpoint.owner, Node) else 0
