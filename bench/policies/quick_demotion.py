"""LRU with quick demotion (Yang et al., HotOS 2023): what was asked for once has a small queue of its own.

A newcomer waits in a FIFO queue of a tenth of the cache.  When it has been asked for again by the end of it,
it belongs to the LRU; otherwise it goes, and is remembered: a newcomer that is remembered is none.
"""

from __future__ import annotations

from sglang_hybrid.pools.organization import Checkpoint, Relief
from sglang_hybrid.radix.demand import Kind
from sglang_hybrid.radix.eviction import ByStamp, is_idle, node_of
from sglang_hybrid.radix.interfaces import Victim
from sglang_hybrid.radix.node import Node
from sglang_hybrid.radix.order import Limit

NEWCOMERS = 10
"""One of so many cached checkpoints may be a newcomer."""


class QuickDemotion(ByStamp):
    """Newcomers by the time of their arrival, all others by their last use."""

    def reset(self) -> None:
        super().reset()
        self.events = 0
        self.newcomers: dict[Checkpoint, None] = {}
        self.demoted: dict[int, None] = {}
        """Fingerprints of newcomers that went, as many as there are cached checkpoints."""
        self.young = self.order(lambda one: is_idle(one) and one in self.newcomers)
        self.old = self.order(lambda one: is_idle(one) and one not in self.newcomers)

    def touched(self, node: Node) -> None:
        assert node.checkpoint is not None
        self.newcomers.pop(node.checkpoint, None)
        self._use(node.checkpoint)

    def offered(self, node: Node, kind: Kind) -> None:
        assert node.checkpoint is not None
        if self.demoted.pop(node.fingerprints()[-1], 0) == 0:
            self.newcomers[node.checkpoint] = None
        self._use(node.checkpoint)

    def _use(self, checkpoint: Checkpoint) -> None:
        self.events += 1
        self.stamp(checkpoint, self.events)

    def idle(self, checkpoint: Checkpoint) -> None:
        super().idle(checkpoint)
        order = self.young if checkpoint in self.newcomers else self.old
        order.file(checkpoint)
        order.trim(self.organization.checkpoints_cached)
        if len(self.newcomers) > self.organization.checkpoints_cached + 64:
            self.newcomers = dict.fromkeys(one for one in self.newcomers if one.owner is not None)

    def let_go(self, checkpoint: Checkpoint) -> None:
        super().let_go(checkpoint)
        self.young.refile(checkpoint)
        self.old.refile(checkpoint)

    def next(self, relief: Relief, limit: Limit) -> Victim | None:
        if not relief.checkpoints:
            return super().next(relief, limit)
        crowded = NEWCOMERS * len(self.newcomers) > self.organization.checkpoints_cached
        for order in (self.young, self.old) if crowded else (self.old, self.young):
            checkpoint = order.take(*limit)
            if checkpoint is not None:
                if self.newcomers.pop(checkpoint, 0) is None:
                    self._remember(node_of(checkpoint).fingerprints()[-1])
                return checkpoint
        return None

    def _remember(self, fingerprint: int) -> None:
        self.demoted[fingerprint] = None
        while len(self.demoted) > self.organization.checkpoints_cached + 64:
            del self.demoted[next(iter(self.demoted))]
