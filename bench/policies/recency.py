"""LRU of checkpoints, dead KV first: what SGLang does with its states, and Marconi without alpha."""

from __future__ import annotations

from sglang_hybrid.radix.demand import Kind
from sglang_hybrid.radix.eviction import ByStamp
from sglang_hybrid.radix.node import Node


class NodeRecency(ByStamp):
    """A hit refreshes the one that it used, not its ancestors (Marconi, section 4.3)."""

    def reset(self) -> None:
        super().reset()
        self.accesses = 0

    def touched(self, node: Node) -> None:
        assert node.checkpoint is not None
        self.accesses += 1
        self.stamp(node.checkpoint, self.accesses)

    def offered(self, node: Node, kind: Kind) -> None:
        self.touched(node)
