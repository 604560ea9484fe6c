"""Which cached state goes first (docs/architecture.md).

Dead halves go before anything useful: KV that no checkpoint at or below it can use.  Then the
checkpoint that is least likely to be used again; its block becomes a dead half when nothing below
needs it.  Retained checkpoints yield next.  Pinned ones (a preempted request's) come last, and each
one given up is counted.

The chance of a use halves with every `HALF_LIFE` requests in which there was none, so its logarithm
falls by one step for all checkpoints alike, and their order stays as it was.  A checkpoint's stamp is
the time of its last use, put forward by HALF_LIFE for each doubling of what `Demand` expects of it.
It changes only when the checkpoint is used or passed, which is what a heap can bear.

What a hit saves is not weighed, on purpose: from short to long paths the tokens saved for a byte rise
about as the chance of a next turn falls, and an order that weighs both serves the public traces no
better (`bench.capacity`).  The clock counts requests, so that all ranks of a tensor-parallel group
evict alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sglang_hybrid.pools.organization import Checkpoint, Need
from sglang_hybrid.pools.pages import IntegrityError
from sglang_hybrid.radix.demand import Demand, Kind
from sglang_hybrid.radix.node import Node
from sglang_hybrid.radix.order import EvictionOrder, Limit, Tier
from sglang_hybrid.radix.tree import GridTree


class EvictionCounts(NamedTuple):
    """Since start."""

    dead_blocks: int
    leaf_blocks: int
    checkpoints: int
    pins_given_up: int
    retained_given_up: int


class Lifetime:
    """Keeps a tree's entries in the order of eviction and makes room."""

    def __init__(self, tree: GridTree) -> None:
        self.tree = tree
        self.organization = tree.organization
        self.dead_blocks_evicted = 0
        self.leaf_blocks_evicted = 0
        self.checkpoints_evicted = 0
        self.pins_given_up = 0
        self.retained_given_up = 0
        self.on_given_up: Callable[[Checkpoint], None] | None = None
        """Called with a pinned checkpoint that nothing else could make room for, before it goes."""
        tree.on_leaf = self._on_leaf
        self.organization.on_idle = self._on_idle
        # Only separate pools can be short of units alone; then whole leaves go.
        self._separate = len(self.organization.pools) > 1
        self.reset()

    def reset(self) -> None:
        self._clock = 0
        self._demand = Demand(self.organization.unit_pool.size)
        self._idle = self._order(_is_idle)
        self._leaves = self._order(_is_idle_leaf)
        self._dead: list[Node] = []
        self._kept: dict[Checkpoint, None] = {}
        """Those with pins or retained; some may have left the lookup since."""

    # -- what requests do -------------------------------------------------------------------

    def touch(self, checkpoint: Checkpoint) -> None:
        """A request starts from it.  Only this one is refreshed: its ancestors did not serve."""
        node = checkpoint.owner
        if isinstance(node, Node):
            node.uses += 1
            if node.kind is Kind.INNER:
                node.kind = Kind.PROMPT_END  # somebody's prompt branches off here
            self._stamp(checkpoint, node)

    def offered(self, node: Node, kind: Kind) -> None:
        """The node has gained a checkpoint."""
        assert node.checkpoint is not None
        # Where several paths go on, another may: as good as an end.
        node.kind = Kind.PROMPT_END if kind is Kind.INNER and node.is_branch else kind
        self._stamp(node.checkpoint, node)

    def passed(self, node: Node) -> None:
        """A path goes on below the node.  The conversation has moved on with it, unless it branches."""
        if node.checkpoint is not None and node.kind is not Kind.INNER and not node.is_branch:
            node.kind = Kind.INNER
            self._stamp(node.checkpoint, node)

    def finished(self, prompt_end: Node | None, answer_end: Node | None) -> None:
        """A request is gone: where the whole blocks of its prompt and of its answer ended, if anywhere."""
        self._clock += 1
        if prompt_end is None:
            return
        for node in (prompt_end, answer_end):
            if node is not None and node.checkpoint is not None:
                self._rate(node.checkpoint, node)  # before its own end is remembered
        self._demand.finished(prompt_end, answer_end)

    @property
    def inner_limit(self) -> Limit:
        """What a new checkpoint that no end needs may push out: only what is worth less than itself."""
        return Limit(Tier.USEFUL, self._clock + self._demand.worth(Kind.INNER, 0))

    def _stamp(self, checkpoint: Checkpoint, node: Node) -> None:
        before, checkpoint.stamp = checkpoint.stamp, self._clock + self._demand.worth(node.kind, node.uses)
        if checkpoint.stamp < before:
            self._sunk(checkpoint)

    def pin(self, checkpoint: Checkpoint) -> None:
        """Keep it for a preempted request until `unpin`, or until nothing else can make room."""
        checkpoint.pins += 1
        self._kept[checkpoint] = None

    def unpin(self, checkpoint: Checkpoint) -> None:
        if checkpoint.pins < 1:
            raise IntegrityError(f"checkpoint on pages {checkpoint.pages} is unpinned but has no pin")
        checkpoint.pins -= 1
        self._let_go(checkpoint)

    def retain(self, checkpoint: Checkpoint) -> None:
        """Keep it longer because it may be reused, until `unretain`; it yields before any pin."""
        checkpoint.retained += 1
        self._kept[checkpoint] = None

    def unretain(self, checkpoint: Checkpoint) -> None:
        if checkpoint.retained < 1:
            raise IntegrityError(f"checkpoint on pages {checkpoint.pages} is not retained")
        checkpoint.retained -= 1
        self._let_go(checkpoint)

    def _let_go(self, checkpoint: Checkpoint) -> None:
        if not checkpoint.pins and not checkpoint.retained:
            self._kept.pop(checkpoint, None)
        self._sunk(checkpoint)

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

    def _rate(self, checkpoint: Checkpoint, node: Node) -> bool:
        """Look up, once, what the path inherits; says whether the checkpoint is worth more now."""
        if node.rated or node.kind is Kind.INNER:
            return False
        node.rated = True
        uses = self._demand.uses(node)
        if uses <= node.uses:
            return False
        node.uses = uses
        self._stamp(checkpoint, node)
        return True

    # -- room -------------------------------------------------------------------------------

    def make_room(self, need: Need, limit: Limit = Limit()) -> bool:  # noqa: B008 - it is immutable
        """Evict, in order and up to the limit, until the need fits.

        False when it cannot: then everything left is executed on or stands above the limit.  A need
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
            if relief.checkpoints and self._evict_checkpoint(limit):
                continue
            if relief.units and not relief.checkpoints and self._evict_leaf(limit):
                continue
            return False
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

    # -- order ------------------------------------------------------------------------------

    def _order(self, usable: Callable[[Checkpoint], bool]) -> EvictionOrder:
        """Those that `usable` lets go, in the order in which they go."""
        return EvictionOrder(usable)

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
            alive = node.has_children or node.locks or node.checkpoint is not None
            if alive or not self.tree.is_linked(node):
                continue  # came back to life, or left, since it was filed
            self.tree.evict_leaf(node)
            self.dead_blocks_evicted += node.blocks
            return True
        return False

    def _take(self, order: EvictionOrder, limit: Limit) -> Checkpoint | None:
        """The next to evict.  Only now it is asked what it inherits: most never come this far."""
        while (checkpoint := order.take(*limit)) is not None:
            node = checkpoint.owner
            if not isinstance(node, Node) or not self._rate(checkpoint, node):
                return checkpoint
            order.file(checkpoint)
        return None

    def _evict_checkpoint(self, limit: Limit) -> bool:
        checkpoint = self._take(self._idle, limit)
        if checkpoint is None:
            return False
        self.give_up(checkpoint)
        self.tree.evict_checkpoint(checkpoint)
        self.checkpoints_evicted += 1
        return True

    def _evict_leaf(self, limit: Limit) -> bool:
        """D0 short of units alone: the leaf whose checkpoint is worth least goes whole."""
        checkpoint = self._take(self._leaves, limit)
        if checkpoint is None:
            return False
        self.give_up(checkpoint)
        node = checkpoint.owner
        assert isinstance(node, Node)
        self.tree.evict_leaf(node)
        self.leaf_blocks_evicted += node.blocks
        return True


def _is_idle(checkpoint: Checkpoint) -> bool:
    return checkpoint.owner is not None and not checkpoint.references


def _is_idle_leaf(checkpoint: Checkpoint) -> bool:
    node = checkpoint.owner
    return _is_idle(checkpoint) and isinstance(node, Node) and not node.has_children and not node.locks
