"""Orders of eviction that a server may be started with: `--hybrid-eviction` (docs/architecture.md).

**demand**: the checkpoint that is least likely to be used again goes first.  The chance of a use halves with
every `HALF_LIFE` requests in which there was none, so its logarithm falls by one step for all checkpoints
alike, and their order stays as it was.  A checkpoint's stamp is the time of its last use, put forward by
HALF_LIFE for each doubling of what `Demand` expects of it.  It changes only when the checkpoint is used or
passed, which is what a heap can bear.

What a hit saves is not weighed, on purpose: from short to long paths the tokens saved for a byte rise about
as the chance of a next turn falls, and an order that weighs both serves the public traces no better
(`bench.capacity`).  The clock counts requests, so that all ranks of a tensor-parallel group evict alike.

**lru**: both kinds of entries in one list by their last use.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from sglang_hybrid.pools.organization import Checkpoint, Relief
from sglang_hybrid.radix.choices import Choices
from sglang_hybrid.radix.demand import Demand, Kind
from sglang_hybrid.radix.interfaces import EvictionPolicy, Victim
from sglang_hybrid.radix.node import Node
from sglang_hybrid.radix.order import EvictionOrder, Limit, Tier, tier_of
from sglang_hybrid.radix.tree import GridTree


class ByStamp(EvictionPolicy):
    """The checkpoint with the least `stamp` of the lowest tier goes first; dead KV goes before all."""

    def __init__(self, tree: GridTree) -> None:
        # Only separate pools can be short of units alone; then whole leaves go.
        self._separate = len(tree.organization.pools) > 1
        super().__init__(tree)

    def reset(self) -> None:
        self._idle = self.order(is_idle)
        self._leaves = self.order(is_idle_leaf)

    def order(self, usable: Callable[[Checkpoint], bool]) -> EvictionOrder:
        """Those that `usable` lets go, in the order in which they go."""
        return EvictionOrder(usable)

    def stamp(self, checkpoint: Checkpoint, stamp: int) -> None:
        """Its place in the order, from now on."""
        before, checkpoint.stamp = checkpoint.stamp, stamp
        if stamp < before:
            self.let_go(checkpoint)

    def may_go(self, checkpoint: Checkpoint) -> bool:
        """Asked when its turn has come; when it may not, it must have a later stamp now."""
        return True

    def idle(self, checkpoint: Checkpoint) -> None:
        self._idle.file(checkpoint)
        self._idle.trim(self.organization.checkpoints_cached)
        self._file_leaf(checkpoint)

    def leaf(self, node: Node) -> None:
        if node.checkpoint is not None:
            self._file_leaf(node.checkpoint)

    def _file_leaf(self, checkpoint: Checkpoint) -> None:
        if self._separate and is_idle_leaf(checkpoint):
            self._leaves.file(checkpoint)
            self._leaves.trim(self.organization.checkpoints_cached)

    def let_go(self, checkpoint: Checkpoint) -> None:
        self._idle.refile(checkpoint)
        self._leaves.refile(checkpoint)

    def next(self, relief: Relief, limit: Limit) -> Victim | None:
        if relief.checkpoints:
            return self._take(self._idle, limit)
        leaf = self._take(self._leaves, limit)
        return None if leaf is None else node_of(leaf)

    def _take(self, order: EvictionOrder, limit: Limit) -> Checkpoint | None:
        while (checkpoint := order.take(*limit)) is not None:
            if self.may_go(checkpoint):
                return checkpoint
            order.file(checkpoint)
        return None


class DemandEviction(ByStamp):
    """By what `Demand` expects of a checkpoint."""

    def reset(self) -> None:
        super().reset()
        self._clock = 0
        self.demand = Demand(self.organization.unit_pool.size)

    def touched(self, node: Node) -> None:
        """Only this one is refreshed: its ancestors did not serve."""
        assert node.checkpoint is not None
        if node.kind is Kind.INNER:
            node.kind = Kind.PROMPT_END  # somebody's prompt branches off here
        self._stamp(node.checkpoint, node)

    def offered(self, node: Node, kind: Kind) -> None:
        assert node.checkpoint is not None
        # Where several paths go on, another may: as good as an end.
        node.kind = Kind.PROMPT_END if kind is Kind.INNER and node.is_branch else kind
        self._stamp(node.checkpoint, node)

    def passed(self, node: Node) -> None:
        """The conversation has moved on with the path, unless it branches."""
        if node.checkpoint is not None and node.kind is not Kind.INNER and not node.is_branch:
            node.kind = Kind.INNER
            self._stamp(node.checkpoint, node)

    def finished(self, prompt_end: Node | None, answer_end: Node | None) -> None:
        self._clock += 1
        if prompt_end is None:
            return
        for node in (prompt_end, answer_end):
            if node is not None and node.checkpoint is not None:
                self._rate(node.checkpoint, node)  # before its own end is remembered
        self.demand.finished(prompt_end, answer_end)

    @property
    def inner_limit(self) -> Limit:
        """Only what is worth less than itself."""
        return Limit(Tier.USEFUL, self._clock + self.demand.worth(Kind.INNER, 0))

    def may_go(self, checkpoint: Checkpoint) -> bool:
        """Only now it is asked what it inherits: most never come this far."""
        node = checkpoint.owner
        return not isinstance(node, Node) or not self._rate(checkpoint, node)

    def _stamp(self, checkpoint: Checkpoint, node: Node) -> None:
        self.stamp(checkpoint, self._clock + self.demand.worth(node.kind, node.uses))

    def _rate(self, checkpoint: Checkpoint, node: Node) -> bool:
        """Look up, once, what the path inherits; says whether the checkpoint is worth more now."""
        if node.rated or node.kind is Kind.INNER:
            return False
        node.rated = True
        uses = self.demand.uses(node)
        if uses <= node.uses:
            return False
        node.uses = uses
        self._stamp(checkpoint, node)
        return True


class Lru(EvictionPolicy):
    """A hit, and a publication, refreshes its whole path; what was used longest ago goes first.

    Of entries last used together the deepest go first, a checkpoint before its block: what is left of
    a path can still be matched.  A block goes only as a leaf.
    """

    dead_first = False  # blocks wait for their turn like everything else

    def reset(self) -> None:
        self._now = 1
        self._heap: list[tuple[int, int, int, int, Node]] = []
        self._filed: dict[Node, int] = {}
        """Sequence number of the valid entry; others are left over."""
        self._sequence = 0

    def __len__(self) -> int:
        """Entries, those included that are of no use any more."""
        return len(self._heap)

    def touched(self, node: Node) -> None:
        self._now += 1
        above: Node | None = node
        while above is not None and not above.is_root:
            above.used = self._now
            above = above.parent

    def offered(self, node: Node, kind: Kind) -> None:
        self.touched(node)

    def leaf(self, node: Node) -> None:
        self._file(node)

    def idle(self, checkpoint: Checkpoint) -> None:
        self._file(node_of(checkpoint))

    def let_go(self, checkpoint: Checkpoint) -> None:
        if isinstance(checkpoint.owner, Node) and checkpoint.owner in self._filed:
            self._file(checkpoint.owner)

    def next(self, relief: Relief, limit: Limit) -> Victim | None:
        node = self._next(limit.tier, leaves_only=not relief.checkpoints)
        if node is not None and relief.checkpoints and _has_idle_state(node):
            return node.checkpoint
        return node

    def _file(self, node: Node) -> None:
        self._sequence += 1
        self._filed[node] = self._sequence
        node.used = node.used or self._now
        heapq.heappush(self._heap, (_tier(node), node.used, -node.depth, self._sequence, node))
        if len(self._heap) > 2 * self.tree.blocks + 64:
            self._trim()

    def _next(self, last: Tier, leaves_only: bool) -> Node | None:
        aside = []
        found = None
        while self._heap and found is None:
            tier, used, _, sequence, node = self._heap[0]
            current = self._filed.get(node) == sequence
            if current and tier > last:
                break
            heapq.heappop(self._heap)
            if not current:
                continue
            del self._filed[node]
            if not self._can_go(node):
                continue  # it is filed again when it can
            if leaves_only and not is_free_leaf(node):
                aside.append(node)
            elif (tier, used) != (_tier(node), node.used):
                self._file(node)
            else:
                found = node
        for node in aside:
            self._file(node)
        return found

    def _can_go(self, node: Node) -> bool:
        return self.tree.is_linked(node) and (is_free_leaf(node) or _has_idle_state(node))

    def _trim(self) -> None:
        """Throw out what is of no use: no more than one entry a node is left."""
        self._heap = [entry for entry in self._heap if self._filed.get(entry[4]) == entry[3]]
        self._heap = [entry for entry in self._heap if self._can_go(entry[4])]
        self._filed = {node: sequence for _, _, _, sequence, node in self._heap}
        heapq.heapify(self._heap)


EVICTIONS: Choices[Callable[[GridTree], EvictionPolicy]] = Choices(
    "sglang_hybrid.evictions", {"demand": DemandEviction, "lru": Lru}
)
"""By their names in `--hybrid-eviction`."""


def node_of(checkpoint: Checkpoint) -> Node:
    """Where it stands."""
    assert isinstance(checkpoint.owner, Node)
    return checkpoint.owner


def is_idle(checkpoint: Checkpoint) -> bool:
    """It may go: it is in the lookup, and nobody executes on it."""
    return checkpoint.owner is not None and not checkpoint.references


def is_free_leaf(node: Node) -> bool:
    """Its block may go."""
    return not node.has_children and not node.locks


def is_idle_leaf(checkpoint: Checkpoint) -> bool:
    """It may go together with its block."""
    node = checkpoint.owner
    return is_idle(checkpoint) and isinstance(node, Node) and is_free_leaf(node)


def _has_idle_state(node: Node) -> bool:
    return node.checkpoint is not None and not node.checkpoint.references


def _tier(node: Node) -> Tier:
    return Tier.USEFUL if node.checkpoint is None else tier_of(node.checkpoint)
