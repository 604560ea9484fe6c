"""Which cached state goes first (DESIGN.md, Lookup).

Dead halves go before anything useful: KV that no checkpoint at or below it can use.  Then the
checkpoint that was used longest ago; its block becomes a dead half when nothing below needs it.
Pinned checkpoints (a preempted request's) come last, and each one given up is counted.
The clock is logical, so that all ranks of a tensor-parallel group evict alike.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from sglang_hybrid.pools.organization import Checkpoint, Need
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
        tree.on_dead = self._on_dead
        self.organization.on_idle = self._on_idle
        self.reset()

    def reset(self) -> None:
        self._clock = 0
        self._sequence = 0
        # Lazy heap: an entry's stamp may have moved on since it was pushed, or it may be gone.
        self._idle: list[tuple[int, int, Checkpoint]] = []
        self._pinned: list[Checkpoint] = []
        self._dead: list[Node] = []

    def touch(self, checkpoint: Checkpoint) -> None:
        """The checkpoint was used.  Only this one: its ancestors on the path did not serve."""
        self._clock += 1
        checkpoint.stamp = self._clock

    def pin(self, checkpoint: Checkpoint) -> None:
        """Keep it for a preempted request until `unpin`, or until nothing else can make room."""
        checkpoint.pins += 1

    def unpin(self, checkpoint: Checkpoint) -> None:
        checkpoint.pins -= 1
        if not checkpoint.pins and any(pinned is checkpoint for pinned in self._pinned):
            self._pinned = [pinned for pinned in self._pinned if pinned is not checkpoint]
            checkpoint.queued = False
            self._on_idle(checkpoint)

    def make_room(self, need: Need) -> bool:
        """Evict, in order, until the need fits; False when everything left is executed on."""
        while not self.organization.fits(need):
            relief = self.organization.relief(need)
            if relief.units and self._evict_dead():
                continue
            if relief.checkpoints and self._evict_checkpoint():
                continue
            if relief.units and not relief.checkpoints and self._evict_leaf():
                continue
            return False
        return True

    @property
    def counts(self) -> EvictionCounts:
        return EvictionCounts(
            self.dead_blocks_evicted, self.leaf_blocks_evicted, self.checkpoints_evicted, self.pins_given_up
        )

    # -- order ------------------------------------------------------------------------------

    def _on_dead(self, node: Node) -> None:
        self._dead.append(node)

    def _on_idle(self, checkpoint: Checkpoint) -> None:
        if not checkpoint.queued:
            checkpoint.queued = True
            self._push(checkpoint)

    def _push(self, checkpoint: Checkpoint) -> None:
        self._sequence += 1
        heapq.heappush(self._idle, (checkpoint.stamp, self._sequence, checkpoint))

    def _evict_dead(self) -> bool:
        while self._dead:
            node = self._dead.pop()
            if node.children or node.locks or node.checkpoint is not None or not self.tree.is_linked(node):
                continue  # came back to life, or left, since it was filed
            self.tree.evict_leaf(node)
            self.dead_blocks_evicted += 1
            return True
        return False

    def _next_idle(self) -> Checkpoint | None:
        while self._idle:
            stamp, _, checkpoint = heapq.heappop(self._idle)
            if checkpoint.owner is None or checkpoint.references:
                checkpoint.queued = False  # gone, or executed on: it is filed again when idle
                continue
            if checkpoint.stamp != stamp:
                self._push(checkpoint)
                continue
            if checkpoint.pins:
                self._pinned.append(checkpoint)
                continue
            return checkpoint
        while self._pinned:
            checkpoint = self._pinned.pop(0)
            if checkpoint.owner is None or checkpoint.references:
                checkpoint.queued = False
                continue
            self.pins_given_up += 1
            return checkpoint
        return None

    def _evict_checkpoint(self) -> bool:
        checkpoint = self._next_idle()
        if checkpoint is None:
            return False
        checkpoint.queued = False
        self.tree.evict_checkpoint(checkpoint)
        self.checkpoints_evicted += 1
        return True

    def _evict_leaf(self) -> bool:
        """D0 short of units alone: the leaf whose checkpoint was used longest ago goes whole."""
        passed: list[Checkpoint] = []
        victim: Node | None = None
        while victim is None:
            checkpoint = self._next_idle()
            if checkpoint is None:
                break
            node = checkpoint.owner
            assert isinstance(node, Node)
            if node.children:
                passed.append(checkpoint)  # evicting it would free no unit
            else:
                checkpoint.queued = False
                victim = node
        for checkpoint in passed:
            self._push(checkpoint)
        if victim is None:
            return False
        self.tree.evict_leaf(victim)
        self.leaf_blocks_evicted += 1
        return True
