"""The source's order of eviction: what was released longest ago goes first, KV and checkpoints in one queue.

It is vLLM's queue of free blocks: an entry can be found until its page is handed out again, and pages
without an entry wait for their turn in the same queue, so that what is cached goes although pages are
blank.  Here a pool's blank pages are interchangeable: only the times of their release are kept.

A request releases a checkpoint as soon as it has left the boundary, and its KV when it ends or is
preempted: superseded checkpoints go before the KV that they need, which is why checkpoints are the
ceiling of reuse.  A block goes only as a leaf.  Retained checkpoints are released when their producer is
done; they and pinned ones yield when nothing else is left, in that order.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from sglang_hybrid.pools.organization import Checkpoint, Need, Relief
from sglang_hybrid.pools.pages import PagePool
from sglang_hybrid.radix.interfaces import EvictionPolicy, Victim
from sglang_hybrid.radix.node import Node
from sglang_hybrid.radix.order import Limit, tier_of

Item = TypeVar("Item", Checkpoint, Node)


class Queue(Generic[Item]):
    """Items by the time of their release; one that has moved on or cannot go is left out where it is met."""

    def __init__(self, can_go: Callable[[Item], bool]) -> None:
        self._can_go: Callable[[Item], bool] = can_go
        self._heap: list[tuple[int, int, Item]] = []
        self._filed: dict[Item, int] = {}
        self._sequence = 0

    def file(self, item: Item, released: int) -> None:
        self._sequence += 1
        self._filed[item] = self._sequence
        heapq.heappush(self._heap, (released, self._sequence, item))

    def first(self) -> int | None:
        """When the next to go was released; None when nothing can go."""
        while self._heap:
            released, sequence, item = self._heap[0]
            if self._filed.get(item) == sequence:
                if self._can_go(item):
                    return released
                del self._filed[item]
            heapq.heappop(self._heap)
        return None

    def take(self) -> Item:
        """The item that `first` has found."""
        item = heapq.heappop(self._heap)[2]
        del self._filed[item]
        return item


class Blank:
    """When each blank page of a pool was released, oldest first."""

    def __init__(self, pool: PagePool, now: Callable[[], int]) -> None:
        self._pool = pool
        self.times = [0] * pool.size
        pool.on_free = lambda page: insort(self.times, now())

    def oldest(self, count: int) -> int:
        """When the last of the `count` that were released first was released: they are handed out next."""
        del self.times[: len(self.times) - self._pool.free]  # handed out since
        return self.times[count - 1]


class ReleaseOrder(EvictionPolicy):
    """`Setting.eviction` of the source's runs."""

    dead_first = False  # dead blocks wait for their turn

    def reset(self) -> None:
        self._now = 0
        self._checkpoints = Queue(_may_leave)
        self._blocks = Queue(self._is_free_leaf)
        self._released: dict[Node, int] = {}
        self._kept: dict[Checkpoint, None] = {}
        """Pinned or retained."""
        self._evicting: int | None = None
        """When what is being evicted was released: its pages keep their place in the queue."""
        self.blank = {pool: Blank(pool, self._time) for pool in self.organization.pools}
        self.broken = 0
        """Checkpoints that went because their KV did."""

    def _time(self) -> int:
        return self._now if self._evicting is None else self._evicting

    def finished(self, prompt_end: Node | None, answer_end: Node | None) -> None:
        """A request's KV is released; a checkpoint on its last boundary, released right after, goes first."""
        self._now += 1
        for end in (prompt_end, answer_end):
            node = end
            while node is not None and not node.is_root:
                if not node.locks:
                    self._released[node] = self._now + 1
                    if not node.has_children:
                        self.leaf(node)
                node = node.parent

    def leaf(self, node: Node) -> None:
        self._blocks.file(node, self._released.setdefault(node, self._now))

    def idle(self, checkpoint: Checkpoint) -> None:
        self._now += 1
        self._checkpoints.file(checkpoint, self._now)

    def kept(self, checkpoint: Checkpoint) -> None:
        self._kept[checkpoint] = None

    def let_go(self, checkpoint: Checkpoint) -> None:
        if not checkpoint.pins and not checkpoint.retained:
            self._kept.pop(checkpoint, None)
        if _may_leave(checkpoint):
            self.idle(checkpoint)

    def _is_free_leaf(self, node: Node) -> bool:
        return self.tree.is_linked(node) and not node.has_children and not node.locks and not _is_kept(node)

    # -- eviction ---------------------------------------------------------------------------

    def next(self, relief: Relief, limit: Limit) -> Victim | None:
        self._evicting = None
        organization = self.organization
        pool = organization.state_pool if relief.checkpoints else organization.unit_pool
        first = self._first(pool)
        return self._next_kept(limit) if first is None else self._take_first(pool, first)

    def ahead(self, need: Need) -> Iterator[Victim]:
        """What stands in the queue before the blank pages that are about to be handed out."""
        self._evicting = None
        for pool, count in self._pages(need):
            while count:
                first = self._first(pool)
                if first is None or first >= self.blank[pool].oldest(count):
                    break
                yield self._take_first(pool, first)
                self._evicting = None

    def _pages(self, need: Need) -> list[tuple[PagePool, int]]:
        """How many pages of each pool the need takes."""
        organization = self.organization
        if len(organization.pools) > 1:
            return [(organization.unit_pool, need.units), (organization.state_pool, need.checkpoints)]
        count = need.units + organization.unit_equivalent(need.checkpoints)
        if need.checkpoints <= organization.line_room:
            count = need.units + need.checkpoints * organization.members
        return [(organization.unit_pool, count)]

    def _first(self, pool: PagePool) -> int | None:
        """When the entry of this pool that goes next was released."""
        times = (self._checkpoints.first(), self._blocks.first())
        if len(self.organization.pools) > 1:
            return times[pool is self.organization.unit_pool]
        return min((time for time in times if time is not None), default=None)

    def _take_first(self, pool: PagePool, first: int) -> Victim:
        """The entry of this pool that was released `first`."""
        self._evicting = first
        is_state = self._checkpoints.first() == first  # of two released together, the checkpoint
        if is_state if len(self.organization.pools) == 1 else pool is self.organization.state_pool:
            return self._checkpoints.take()
        node = self._blocks.take()
        self._released.pop(node, None)
        self.broken += node.checkpoint is not None
        return node

    def _next_kept(self, limit: Limit) -> Checkpoint | None:
        """What policy, then what preempted requests keep, as far as the limit goes; its blocks follow."""
        kept = [one for one in self._kept if not one.references and isinstance(one.owner, Node)]
        kept = [one for one in kept if tier_of(one) <= limit.tier]
        return min(kept, key=tier_of) if kept else None


def _may_leave(checkpoint: Checkpoint) -> bool:
    return checkpoint.owner is not None and not (
        checkpoint.references or checkpoint.pins or checkpoint.retained
    )


def _is_kept(node: Node) -> bool:
    checkpoint = node.checkpoint
    return checkpoint is not None and bool(checkpoint.references or checkpoint.pins or checkpoint.retained)
