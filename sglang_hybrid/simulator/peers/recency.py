"""Recency of nodes, as Marconi keeps it, and an order of eviction whose scores depend on all candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_hybrid.pools.organization import Checkpoint
from sglang_hybrid.radix.lifetime import Lifetime
from sglang_hybrid.radix.node import Node
from sglang_hybrid.radix.order import EvictionOrder, Limit, Tier, tier_of
from sglang_hybrid.radix.tree import GridTree


class ScannedOrder(EvictionOrder):
    """Looks at all candidates each time; `worst` chooses among some of one tier."""

    def __init__(
        self,
        usable: Callable[[Checkpoint], bool],
        worst: Callable[[Sequence[Checkpoint]], Checkpoint],
    ) -> None:
        super().__init__(usable)
        self._worst = worst
        self._candidates: dict[Checkpoint, None] = {}

    def __len__(self) -> int:
        return len(self._candidates)

    def file(self, checkpoint: Checkpoint) -> None:
        self._candidates[checkpoint] = None

    def refile(self, checkpoint: Checkpoint) -> None:
        """Nothing: where it stands is found out when it is asked for."""

    def take(self, last: Tier, before: int | None = None) -> Checkpoint | None:
        """The next one to evict.  `before` is for stamps of our own order, which these are not."""
        self._prune()
        if not self._candidates:
            return None
        tier = min(map(tier_of, self._candidates))
        if tier > last:
            return None
        chosen = self._worst([one for one in self._candidates if tier_of(one) == tier])
        del self._candidates[chosen]
        return chosen

    def trim(self, most: int) -> None:
        if len(self._candidates) > 2 * most + 64:
            self._prune()

    def _prune(self) -> None:
        self._candidates = dict.fromkeys(filter(self._usable, self._candidates))


class NodeRecency(Lifetime):
    """LRU of checkpoints; a hit refreshes the one that it used, not its ancestors (Marconi, section 4.3)."""

    def __init__(self, tree: GridTree) -> None:
        self._accesses = 0
        super().__init__(tree)

    def worst(self, candidates: Sequence[Checkpoint]) -> Checkpoint:
        """The one of these that goes first."""
        return min(candidates, key=lambda one: one.stamp)

    def _order(self, usable: Callable[[Checkpoint], bool]) -> EvictionOrder:
        return ScannedOrder(usable, self.worst)

    def passed(self, node: Node) -> None:
        """Nothing: no guess is made of what is asked for next."""

    def finished(self, prompt_end: Node | None, answer_end: Node | None) -> None:
        """Nothing is learnt of it."""

    @property
    def inner_limit(self) -> Limit:
        return Limit(Tier.USEFUL)

    def _stamp(self, checkpoint: Checkpoint, node: Node) -> None:
        self._accesses += 1
        checkpoint.stamp = self._accesses

    def _rate(self, checkpoint: Checkpoint, node: Node) -> bool:
        return False
