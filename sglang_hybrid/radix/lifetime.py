"""Keeps what must stay, evicts what a policy names, and counts (docs/architecture.md).

Dead halves go before anything useful: KV that no checkpoint at or below it can use.  Then the policy is asked
(`interfaces.EvictionPolicy`); the block of a checkpoint that it names becomes a dead half when nothing below
needs it.  Retained checkpoints yield next.  Pinned ones (a preempted request's) come last, and each one given
up is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sglang_hybrid.pools.organization import EITHER, Checkpoint, Need, Relief
from sglang_hybrid.pools.pages import IntegrityError
from sglang_hybrid.radix.eviction import DemandEviction
from sglang_hybrid.radix.interfaces import EvictionPolicy, Victim
from sglang_hybrid.radix.node import Node
from sglang_hybrid.radix.order import Limit
from sglang_hybrid.radix.tree import GridTree


class EvictionCounts(NamedTuple):
    """Since start."""

    dead_blocks: int
    leaf_blocks: int
    checkpoints: int
    pins_given_up: int
    retained_given_up: int


class Lifetime:
    """Pins, retention and room, over one tree; the order of eviction is `policy`'s."""

    def __init__(
        self, tree: GridTree, eviction: Callable[[GridTree], EvictionPolicy] = DemandEviction
    ) -> None:
        self.tree = tree
        self.organization = tree.organization
        self.policy = eviction(tree)
        # Most answer nothing: they are not asked each time.
        self._ahead = None if type(self.policy).ahead is EvictionPolicy.ahead else self.policy.ahead
        self.dead_blocks_evicted = 0
        self.leaf_blocks_evicted = 0
        self.checkpoints_evicted = 0
        self.pins_given_up = 0
        self.retained_given_up = 0
        self.on_given_up: Callable[[Checkpoint], None] | None = None
        """Called with a pinned checkpoint that nothing else could make room for, before it goes."""
        tree.on_leaf = self._on_leaf if self.policy.dead_first else self.policy.leaf
        self.organization.on_idle = self.policy.idle
        self._forget()

    def reset(self) -> None:
        self._forget()
        self.policy.reset()

    def _forget(self) -> None:
        self._dead: list[Node] = []
        self._kept: dict[Checkpoint, None] = {}
        """Those with pins or retained; some may have left the lookup since."""

    # -- what requests do -------------------------------------------------------------------

    def touch(self, checkpoint: Checkpoint) -> None:
        """A request starts from it."""
        node = checkpoint.owner
        if isinstance(node, Node):
            node.uses += 1
            self.policy.touched(node)

    def pin(self, checkpoint: Checkpoint) -> None:
        """Keep it for a preempted request until `unpin`, or until nothing else can make room."""
        checkpoint.pins += 1
        self._keep(checkpoint)

    def unpin(self, checkpoint: Checkpoint) -> None:
        if checkpoint.pins < 1:
            raise IntegrityError(f"checkpoint on pages {checkpoint.pages} is unpinned but has no pin")
        checkpoint.pins -= 1
        self._let_go(checkpoint)

    def retain(self, checkpoint: Checkpoint) -> None:
        """Keep it longer because it may be reused, until `unretain`; it yields before any pin."""
        checkpoint.retained += 1
        self._keep(checkpoint)

    def unretain(self, checkpoint: Checkpoint) -> None:
        if checkpoint.retained < 1:
            raise IntegrityError(f"checkpoint on pages {checkpoint.pages} is not retained")
        checkpoint.retained -= 1
        self._let_go(checkpoint)

    def _keep(self, checkpoint: Checkpoint) -> None:
        self._kept[checkpoint] = None
        self.policy.kept(checkpoint)

    def _let_go(self, checkpoint: Checkpoint) -> None:
        if not checkpoint.pins and not checkpoint.retained:
            self._kept.pop(checkpoint, None)
        self.policy.let_go(checkpoint)

    def kept(self) -> Need:
        """Pieces that pins and retention keep and nobody executes on: checkpoints, units of their paths."""
        units = checkpoints = 0
        seen: set[Node] = set()
        for checkpoint in self._kept:
            node = checkpoint.owner
            if not isinstance(node, Node):
                continue
            checkpoints += not checkpoint.references
            while node.parent is not None and not node.locks and node not in seen:
                seen.add(node)
                units += len(node.units)
                node = node.parent
        return Need(units, checkpoints)

    # -- room -------------------------------------------------------------------------------

    def make_room(self, need: Need, limit: Limit = Limit()) -> bool:  # noqa: B008 - it is immutable
        """Evict, in order and up to the limit, until the need fits.

        False when it cannot: then everything left is executed on or stands above the limit.  A need
        that could not fit evicts nothing.
        """
        if not self.organization.fits(need):
            organization = self.organization
            organization.resume_reclaims()
            if not organization.could_fit(need):
                return False
            while not organization.fits(need):
                if not self.evict_next(organization.relief(need), limit):
                    return False
        if self._ahead is not None:
            for victim in self._ahead(need):
                self._evict(victim)
        return True

    def evict_next(self, relief: Relief = EITHER, limit: Limit = Limit()) -> bool:  # noqa: B008
        """Evict what goes first of what brings relief; False when nothing up to the limit can go."""
        if relief.units and self._evict_dead():
            return True
        victim = self.policy.next(relief, limit)
        if victim is None:
            return False
        self._evict(victim)
        return True

    def give_up(self, checkpoint: Checkpoint) -> None:
        """It leaves the lookup whoever wants it; each of its pins is void, and counted."""
        self.retained_given_up += checkpoint.retained > 0
        if checkpoint.pins:
            self.pins_given_up += checkpoint.pins
            if self.on_given_up is not None:
                self.on_given_up(checkpoint)

    @property
    def counts(self) -> EvictionCounts:
        return EvictionCounts(
            self.dead_blocks_evicted,
            self.leaf_blocks_evicted,
            self.checkpoints_evicted,
            self.pins_given_up,
            self.retained_given_up,
        )

    # -- eviction ---------------------------------------------------------------------------

    def _on_leaf(self, node: Node) -> None:
        if node.checkpoint is not None:
            self.policy.leaf(node)
        elif not node.filed:
            node.filed = True
            self._dead.append(node)

    def _evict_dead(self) -> bool:
        while self._dead:
            node = self._dead.pop()
            node.filed = False
            alive = node.has_children or node.locks or node.checkpoint is not None
            if alive or not self.tree.is_linked(node):
                continue  # came back to life, or left, since it was filed
            self.tree.evict_leaf(node)
            self.dead_blocks_evicted += node.blocks
            return True
        return False

    def _evict(self, victim: Victim) -> None:
        if isinstance(victim, Checkpoint):
            if victim.owner is None:
                raise IntegrityError(f"the policy names a checkpoint that is gone, on pages {victim.pages}")
            self.give_up(victim)
            self.tree.evict_checkpoint(victim)
            self.checkpoints_evicted += 1
        elif victim.has_children or not self.tree.is_linked(victim):
            raise IntegrityError(f"the policy names the block at depth {victim.depth}, which is no leaf")
        elif victim.checkpoint is None:
            self.tree.evict_leaf(victim)
            self.dead_blocks_evicted += victim.blocks
        else:
            self.give_up(victim.checkpoint)
            self.tree.evict_leaf(victim)
            self.leaf_blocks_evicted += victim.blocks
