"""Checkpoints that several requests want stay while the request that made them runs: `--hybrid-retention`.

Policy, not correctness: what is retained goes before any pin, and when a running request can get memory
in no other way.  A request *wants* the deepest boundary that the tree's KV covered when it came; it counts
once, however often it is preempted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_hybrid.pools.organization import Checkpoint
from sglang_hybrid.radix.lifetime import Lifetime
from sglang_hybrid.radix.node import Node

if TYPE_CHECKING:
    from sglang_hybrid.radix.live_state import LiveState


class Retention:
    """Knows who made the checkpoints of running requests; `threshold` distinct wants retain one."""

    def __init__(self, lifetime: Lifetime, threshold: int | None = None) -> None:
        if threshold is not None and threshold < 1:
            raise ValueError(f"a retention threshold of {threshold} is not a whole number of at least 1")
        self.lifetime = lifetime
        self.threshold = threshold
        self.retained_ever = 0
        self.reset()

    def reset(self) -> None:
        self._made: dict[Checkpoint, bool] = {}
        """Checkpoints whose producer runs; whether this retains them."""

    @property
    def retained(self) -> int:
        """Checkpoints that this keeps now."""
        return sum(self._made.values())

    def want(self, node: Node) -> None:
        """One more distinct request came down to the node's boundary."""
        node.wants += 1
        if node.checkpoint is not None:
            self._consider(node.checkpoint, node)

    def made(self, state: LiveState, node: Node) -> None:
        """The request has just given the node its checkpoint."""
        if self.threshold is not None and node.checkpoint is not None:
            if self._made.get(node.checkpoint):
                # A live state that went on in place, given up where it stood before.
                self.lifetime.unretain(node.checkpoint)
            state.made.append(node.checkpoint)
            self._made[node.checkpoint] = False
            self._consider(node.checkpoint, node)

    def ended(self, state: LiveState) -> None:
        """The producer is finished or preempted: normal rules hold again."""
        for checkpoint in state.made:
            if self._made.pop(checkpoint, False):
                self.lifetime.unretain(checkpoint)
        state.made.clear()

    def _consider(self, checkpoint: Checkpoint, node: Node) -> None:
        if self._made.get(checkpoint) is False and node.wants >= (self.threshold or 0):
            self._made[checkpoint] = True
            self.retained_ever += 1
            self.lifetime.retain(checkpoint)
