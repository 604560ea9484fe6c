"""Plain LRU, what our order of eviction is compared with: both kinds of entries in one list by last use."""

from __future__ import annotations

import heapq

from sglang_hybrid.pools.organization import Checkpoint
from sglang_hybrid.radix.demand import Kind
from sglang_hybrid.radix.lifetime import Lifetime
from sglang_hybrid.radix.order import Limit
from sglang_hybrid.radix.tree import Node


class PlainLru(Lifetime):
    """A hit, and a publication, refreshes its whole path; what was used longest ago goes first.

    Of entries last used together the deepest go first, a checkpoint before its block: what is left of
    a path can still be matched.  A block goes only as a leaf.  Pins and retention are not honoured.
    """

    def reset(self) -> None:
        super().reset()
        self._now = 0
        self._used: dict[Node, int] = {}
        self._heap: list[tuple[int, int, int, Node]] = []
        self._filed: dict[Node, int] = {}
        self._sequence = 0

    def touch(self, checkpoint: Checkpoint) -> None:
        self._now += 1
        node = checkpoint.owner
        while isinstance(node, Node) and not node.is_root:
            self._used[node] = self._now
            node = node.parent

    def offered(self, node: Node, kind: Kind) -> None:
        assert node.checkpoint is not None
        self.touch(node.checkpoint)

    def passed(self, node: Node) -> None:
        """Nothing: it was refreshed with its path."""

    def _on_leaf(self, node: Node) -> None:
        self._file(node)

    def _on_idle(self, checkpoint: Checkpoint) -> None:
        assert isinstance(checkpoint.owner, Node)
        self._file(checkpoint.owner)

    def _file(self, node: Node) -> None:
        self._sequence += 1
        self._filed[node] = self._sequence
        used = self._used.setdefault(node, self._now)
        heapq.heappush(self._heap, (used, -node.depth, self._sequence, node))

    def _next(self, leaves_only: bool) -> Node | None:
        aside = []
        found = None
        while self._heap and found is None:
            entry = heapq.heappop(self._heap)
            used, _, sequence, node = entry
            if self._filed.get(node) != sequence:
                continue
            del self._filed[node]
            if not self.tree.is_linked(node):
                del self._used[node]
            elif not self._is_idle_leaf(node) and (leaves_only or not self._has_idle_state(node)):
                if self._has_idle_state(node):
                    aside.append(node)  # otherwise it is filed again when it can go
            elif self._used[node] != used:
                self._file(node)
            else:
                found = node
        for node in aside:
            self._file(node)
        return found

    @staticmethod
    def _is_idle_leaf(node: Node) -> bool:
        return not node.has_children and not node.locks

    @staticmethod
    def _has_idle_state(node: Node) -> bool:
        return node.checkpoint is not None and not node.checkpoint.references

    def _evict_dead(self) -> bool:
        return False  # blocks wait for their turn like everything else

    def _evict_checkpoint(self, limit: Limit) -> bool:
        node = self._next(leaves_only=False)
        if node is None:
            return False
        if node.checkpoint is not None and not node.checkpoint.references:
            self.tree.evict_checkpoint(node.checkpoint)
            self.checkpoints_evicted += 1
            if self.tree.is_linked(node) and self._is_idle_leaf(node):
                self._file(node)
        else:
            self.tree.evict_leaf(node)
            self.dead_blocks_evicted += 1
        return True

    def _evict_leaf(self, limit: Limit) -> bool:
        node = self._next(leaves_only=True)
        if node is None:
            return False
        self.tree.evict_leaf(node)
        self.leaf_blocks_evicted += 1
        return True
