"""Which cached state goes first (DESIGN.md, Lookup).

Dead halves go before anything useful: KV that no checkpoint at or below it can use.  Then the
checkpoint that was used longest ago; its block becomes a dead half when nothing below needs it.
Retained checkpoints yield next.  Pinned ones (a preempted request's) come last, and each one given
up is counted.  The clock is logical, so that all ranks of a tensor-parallel group evict alike.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_hybrid.pools.organization import Checkpoint, Need
from sglang_hybrid.pools.pages import IntegrityError
from sglang_hybrid.radix.order import EvictionOrder, Tier
from sglang_hybrid.radix.tree import GridTree, Node


class EvictionCounts(NamedTuple):
    """Since start."""

    dead_blocks: int
    leaf_blocks: int
    checkpoints: int
    pins_given_up: int


class Lifetime:
    """Keeps a tree's entries in the order of eviction and makes room."""

    def __init__(self, tree: GridTree) -> None:
        self.tree = tree
        self.organization = tree.organization
        self.dead_blocks_evicted = 0
        self.leaf_blocks_evicted = 0
        self.checkpoints_evicted = 0
        self.pins_given_up = 0
        tree.on_leaf = self._on_leaf
        self.organization.on_idle = self._on_idle
        # Only separate pools can be short of units alone; then whole leaves go.
        self._separate = len(self.organization.pools) > 1
        self.reset()

    def reset(self) -> None:
        self._clock = 0
        self._idle = EvictionOrder(_is_idle)
        self._leaves = EvictionOrder(_is_idle_leaf)
        self._dead: list[Node] = []

    def touch(self, checkpoint: Checkpoint) -> None:
        """The checkpoint was used.  Only this one: its ancestors on the path did not serve."""
        self._clock += 1
        checkpoint.stamp = self._clock

    def pin(self, checkpoint: Checkpoint) -> None:
        """Keep it for a preempted request until `unpin`, or until nothing else can make room."""
        checkpoint.pins += 1

    def unpin(self, checkpoint: Checkpoint) -> None:
        if checkpoint.pins < 1:
            raise IntegrityError(f"checkpoint on pages {checkpoint.pages} is unpinned but has no pin")
        checkpoint.pins -= 1
        self._sunk(checkpoint)

    def retain(self, checkpoint: Checkpoint) -> None:
        """Keep it longer because it may be reused, until `unretain`; it yields before any pin."""
        checkpoint.retained += 1

    def unretain(self, checkpoint: Checkpoint) -> None:
        if checkpoint.retained < 1:
            raise IntegrityError(f"checkpoint on pages {checkpoint.pages} is not retained")
        checkpoint.retained -= 1
        self._sunk(checkpoint)

    def make_room(self, need: Need, last: Tier = Tier.PINNED) -> bool:
        """Evict, in order and no tier above `last`, until the need fits.

        False when it cannot: then everything left is executed on or stands above `last`.  A need
        that could not fit evicts nothing.
        """
        organization = self.organization
        if organization.fits(need):
            return True
        organization.resume_reclaims()
        if not organization.could_fit(need):
            return False
        while not organization.fits(need):
            relief = organization.relief(need)
            if relief.units and self._evict_dead():
                continue
            if relief.checkpoints and self._evict_checkpoint(last):
                continue
            if relief.units and not relief.checkpoints and self._evict_leaf(last):
                continue
            return False
        return True

    def give_up(self, checkpoint: Checkpoint) -> None:
        """The last means: its pins are void, and counted."""
        self.pins_given_up += checkpoint.pins > 0

    @property
    def counts(self) -> EvictionCounts:
        return EvictionCounts(
            self.dead_blocks_evicted, self.leaf_blocks_evicted, self.checkpoints_evicted, self.pins_given_up
        )

    # -- order ------------------------------------------------------------------------------

    def _on_leaf(self, node: Node) -> None:
        if node.checkpoint is None:
            if not node.filed:
                node.filed = True
                self._dead.append(node)
        else:
            self._file_leaf(node.checkpoint)

    def _on_idle(self, checkpoint: Checkpoint) -> None:
        self._idle.file(checkpoint)
        self._idle.trim(self.organization.checkpoints_cached)
        self._file_leaf(checkpoint)

    def _file_leaf(self, checkpoint: Checkpoint) -> None:
        if self._separate and _is_idle_leaf(checkpoint):
            self._leaves.file(checkpoint)
            self._leaves.trim(self.organization.checkpoints_cached)

    def _sunk(self, checkpoint: Checkpoint) -> None:
        self._idle.refile(checkpoint)
        self._leaves.refile(checkpoint)

    # -- eviction ---------------------------------------------------------------------------

    def _evict_dead(self) -> bool:
        while self._dead:
            node = self._dead.pop()
            node.filed = False
            if node.children or node.locks or node.checkpoint is not None or not self.tree.is_linked(node):
                continue  # came back to life, or left, since it was filed
            self.tree.evict_leaf(node)
            self.dead_blocks_evicted += 1
            return True
        return False

    def _evict_checkpoint(self, last: Tier) -> bool:
        checkpoint = self._idle.take(last)
        if checkpoint is None:
            return False
        self.give_up(checkpoint)
        self.tree.evict_checkpoint(checkpoint)
        self.checkpoints_evicted += 1
        return True

    def _evict_leaf(self, last: Tier) -> bool:
        """D0 short of units alone: the leaf whose checkpoint was used longest ago goes whole."""
        checkpoint = self._leaves.take(last)
        if checkpoint is None:
            return False
        self.give_up(checkpoint)
        assert isinstance(checkpoint.owner, Node)
        self.tree.evict_leaf(checkpoint.owner)
        self.leaf_blocks_evicted += 1
        return True


def _is_idle(checkpoint: Checkpoint) -> bool:
    return checkpoint.owner is not None and not checkpoint.references


def _is_idle_leaf(checkpoint: Checkpoint) -> bool:
    node = checkpoint.owner
    return _is_idle(checkpoint) and isinstance(node, Node) and not node.children and not node.locks
