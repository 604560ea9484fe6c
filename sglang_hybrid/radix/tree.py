"""The grid tree: attention blocks and checkpoints by prefix, one node a block (DESIGN.md, Lookup).

A node stands for the attention block that ends at its depth and may carry the checkpoint of that
boundary.  The joint match asks for both: KV of the whole path, which every node has by
construction, and a complete checkpoint at the boundary where the match ends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

from sglang_hybrid.pools.organization import Checkpoint, Organization
from sglang_hybrid.pools.pages import IntegrityError
from sglang_hybrid.radix.integrity import check_index, check_nodes


class Node:
    """One attention block on a path.  `depth` counts blocks; the root has depth 0 and no units."""

    __slots__ = (
        "checkpoint",
        "children",
        "depth",
        "filed",
        "frozen",
        "key",
        "locks",
        "parent",
        "tree",
        "units",
    )

    def __init__(
        self, tree: GridTree, parent: Node | None, key: Hashable, units: Sequence[int], depth: int
    ) -> None:
        self.tree = tree
        self.parent = parent
        self.key = key
        """The block's token ids as bytes; a root's namespace."""
        self.units = units
        self.depth = depth
        self.children: dict[Hashable, Node] = {}
        self.checkpoint: Checkpoint | None = None
        self.locks = 0
        """Holders of this node plus children with locks: above 0 nothing on the path can be evicted."""
        self.frozen = False
        self.filed = False
        """Already in the lifetime's list of dead blocks."""

    @property
    def is_root(self) -> bool:
        return self.depth == 0

    def detach(self) -> None:
        """Leave the tree (`pools.pages.Entry`), after everything below: a path is never broken."""
        self.tree._unlink(self)

    def lose_checkpoint(self) -> None:
        """The checkpoint has left the lookup (`CheckpointOwner`)."""
        self.checkpoint = None
        self.tree._lost_checkpoint(self)

    def path(self) -> list[Node]:
        """Nodes from the first block down to this one."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


class Match(NamedTuple):
    """Result of a joint match, in blocks.

    `node` is the deepest boundary with both halves (a root when there is none) and `depth` its
    depth; `attention_depth` is how far KV alone would have reached.
    """

    node: Node
    depth: int
    attention_depth: int


class GridTree:
    """Prefix tree on the grid.  Keys are token ids as bytes, `block_bytes` of them a block."""

    def __init__(self, organization: Organization, token_bytes: int = 8) -> None:
        self.organization = organization
        self.block_bytes = organization.grid * token_bytes
        self.on_leaf: Callable[[Node], None] | None = None
        """Called with a node that has become an unlocked leaf, or lost its checkpoint as one: dead KV."""
        self.reset()

    def reset(self) -> None:
        """Forget all nodes.  The organization must be reset with it."""
        self._roots: dict[Hashable, Node] = {}
        self.blocks = 0
        self.blocks_locked = 0

    # -- lookup -----------------------------------------------------------------------------

    def match(self, namespace: Hashable, tokens: bytes, limit_blocks: int) -> Match:
        """Deepest boundary within `limit_blocks` where both halves are valid.  No side effects."""
        root = self._roots.get(namespace)
        if root is None:
            # Not registered: a request that is only looked up leaves no trace.
            return Match(Node(self, None, namespace, (), 0), 0, 0)
        size = self.block_bytes
        node = best = root
        offset = 0
        for _ in range(limit_blocks):
            child = node.children.get(tokens[offset : offset + size])
            if child is None or child.frozen:
                break
            node = child
            offset += size
            if node.checkpoint is not None and not node.checkpoint.frozen:
                best = node
        return Match(best, best.depth, node.depth)

    def is_linked(self, node: Node) -> bool:
        """Whether the node is still part of the tree (an unregistered root is not)."""
        if node.parent is None:
            return self._roots.get(node.key) is node
        return node.parent.children.get(node.key) is node

    def nodes(self) -> Iterator[Node]:
        """All nodes but roots, parents first."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    # -- locks ------------------------------------------------------------------------------

    def lock(self, node: Node) -> Node:
        """Protect the KV of a whole path; returns the node to unlock.

        The returned node differs only for a root that another request registered meanwhile.
        """
        if node.parent is None:
            node = self._roots.setdefault(node.key, node)
        elif not self.is_linked(node):
            raise IntegrityError(f"a block at depth {node.depth} is locked after it was evicted")
        self._lock(node)
        return node

    def _lock(self, node: Node) -> None:
        while True:
            node.locks += 1
            if node.locks > 1 or node.parent is None:
                return
            # First lock here: the block is executed on, and the parent gains a locked child.
            self.organization.hold_units(node.units)
            self.blocks_locked += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        while True:
            if node.locks < 1:
                raise IntegrityError(f"a block at depth {node.depth} is unlocked more often than locked")
            node.locks -= 1
            if node.locks:
                return
            parent = node.parent
            if parent is None:
                self._prune_root(node)
                return
            self.organization.release_units(node.units)
            self.blocks_locked -= 1
            self._check_leaf(node)
            node = parent

    # -- growth -----------------------------------------------------------------------------

    def add(self, parent: Node, key: bytes, units: Sequence[int]) -> Node:
        """A new block below `parent`, which must be locked.  The caller keeps its own references."""
        if len(key) != self.block_bytes:
            raise ValueError(f"a block's key has {self.block_bytes} bytes, got {len(key)}")
        if key in parent.children:
            raise IntegrityError(f"a block at depth {parent.depth + 1} is added twice")
        node = Node(self, parent, key, units, parent.depth + 1)
        parent.children[key] = node
        self.organization.cache_units(units, node)
        self.blocks += 1
        return node

    def offer(self, node: Node, checkpoint: Checkpoint) -> None:
        """The node's boundary gains a checkpoint, which the caller still holds."""
        if node.parent is None or node.checkpoint is not None:
            raise IntegrityError(f"the boundary at block {node.depth} cannot take a checkpoint")
        node.checkpoint = checkpoint
        self.organization.cache(checkpoint, node)

    # -- shrinkage --------------------------------------------------------------------------

    def evict_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Reclaim a checkpoint that nobody executes on; its block stays."""
        page, pool = checkpoint.pages[0], self.organization.state_pool
        if checkpoint.references:
            raise IntegrityError(f"checkpoint on pages {checkpoint.pages} is evicted while executed on")
        if pool.references(page) or len(pool.dependents(page)) > 1:
            # Conv lines only, on a slab that others use: nothing but the line is given back.
            self.organization.uncache(checkpoint)
        else:
            self.organization.reclaim_state(page).run()

    def evict_leaf(self, node: Node) -> None:
        """Reclaim an unlocked leaf: its checkpoint, if any, then its block."""
        if node.checkpoint is not None:
            self.evict_checkpoint(node.checkpoint)
        if self.is_linked(node) and not self.organization.reclaim_unit(node.units[0]).run():
            raise IntegrityError(f"the block at depth {node.depth} is evicted while executed on")

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        if parent is None or parent.children.get(node.key) is not node:
            return
        if node.locks:
            raise IntegrityError(f"the block at depth {node.depth} leaves the tree with {node.locks} locks")
        self._drop_below(node)
        if node.checkpoint is not None:
            # A checkpoint whose KV path is broken can never be matched: take it along.
            self.organization.uncache(node.checkpoint)
        del parent.children[node.key]
        self.blocks -= 1
        if parent.parent is None:
            self._prune_root(parent)
        else:
            self._check_leaf(parent)

    def _drop_below(self, node: Node) -> None:
        """KV below a lost block can never be matched: it goes first, leaf by leaf."""
        below = node
        while node.children:
            while below.children:
                below = next(iter(below.children.values()))
            leaf, parent = below, below.parent
            assert parent is not None
            leaf.detach()
            self.organization.uncache_units(leaf.units, leaf)
            below = parent

    def _lost_checkpoint(self, node: Node) -> None:
        self._check_leaf(node)

    def _check_leaf(self, node: Node) -> None:
        if self.on_leaf is not None and node.parent is not None and not node.children and not node.locks:
            self.on_leaf(node)

    def _prune_root(self, root: Node) -> None:
        # Isolated requests bring a namespace each: an empty root must not stay behind.
        if not root.children and not root.locks and self._roots.get(root.key) is root:
            del self._roots[root.key]

    # -- reports ----------------------------------------------------------------------------

    @property
    def blocks_evictable(self) -> int:
        return self.blocks - self.blocks_locked

    @property
    def namespaces(self) -> int:
        return len(self._roots)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless links, locks, counters and reverse index agree."""
        check_nodes(self)
        check_index(self)
        for root in self._roots.values():
            if not root.children and not root.locks:
                raise IntegrityError(f"an empty root stayed behind for {root.key!r}")
