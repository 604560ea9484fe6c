"""The grid tree: attention blocks and checkpoints by prefix (docs/architecture.md).

A node stands for a run of attention blocks and may carry the checkpoint of the boundary at its end.
The joint match asks for both: KV of the whole path, which every node has by construction, and a
complete checkpoint at the boundary where the match ends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

from sglang_hybrid.pools.organization import Checkpoint, Organization
from sglang_hybrid.pools.pages import IntegrityError
from sglang_hybrid.radix.integrity import check_index, check_nodes
from sglang_hybrid.radix.node import Node as Node


class Match(NamedTuple):
    """Result of a joint match, in blocks.

    `node` is the deepest boundary with both halves (a root when there is none) and `depth` its
    depth; `attention_depth` is how far KV alone would have reached.
    """

    node: Node
    depth: int
    attention_depth: int


class Grown(NamedTuple):
    """A path of nodes, top down; to depth `known`, in blocks, they were there already."""

    path: list[Node]
    known: int


class GridTree:
    """Prefix tree on the grid.  Keys are token ids as bytes, `block_bytes` of them a block."""

    def __init__(
        self, organization: Organization, token_bytes: int = 8, *, digest_bytes: int | None = None
    ) -> None:
        """With `digest_bytes`, a key has so many bytes for a whole block (`simulator.keys`)."""
        self.organization = organization
        self.has_digests = digest_bytes is not None
        self.block_bytes = organization.grid * token_bytes if digest_bytes is None else digest_bytes
        self.on_leaf: Callable[[Node], None] | None = None
        """Called with a node that has become an unlocked leaf, or lost its checkpoint as one: dead KV."""
        self.reset()

    def reset(self) -> None:
        """Forget all nodes.  The organization must be reset with it."""
        self._roots: dict[Hashable, Node] = {}
        self.blocks = 0
        self.blocks_locked = 0
        self.blocks_dead = 0
        """Neither locked nor of use to any checkpoint: dead halves."""

    # -- lookup -----------------------------------------------------------------------------

    def match(self, namespace: Hashable, tokens: bytes | memoryview, limit_blocks: int) -> Match:
        """Deepest boundary within `limit_blocks` where both halves are valid.  No side effects.

        A view, of bytes, spares a long prompt's copy.
        """
        root = self._roots.get(namespace)
        if root is None:
            # Not registered: a request that is only looked up leaves no trace.
            return Match(self._new_root(namespace), 0, 0)
        node = best = root
        view, size = memoryview(tokens), len(tokens)
        offset = 0
        while True:
            child = node.last
            end = offset + (0 if child is None else len(child.key))
            whole = child is not None and end <= size and child.key.startswith(view[offset:end])
            if not whole:
                child = node.child(bytes(view[offset : offset + self.block_bytes]))
                if child is None:
                    break
                node.last = child
                end = offset + len(child.key)
                whole = end <= size and child.key.startswith(view[offset:end])
            if child is None or child.frozen:
                break
            if child.depth > limit_blocks or not whole:
                common = min(self._common(child, view[offset:]), limit_blocks - node.depth)
                return Match(best, best.depth, node.depth + common)
            node, offset = child, end
            if node.checkpoint is not None and not node.checkpoint.frozen:
                best = node
        return Match(best, best.depth, node.depth)

    def _common(self, node: Node, tokens: memoryview) -> int:
        """Blocks that the run has in common with the beginning of `tokens`."""
        size = self.block_bytes
        most = min(node.blocks, len(tokens) // size)
        for block in range(most):
            start = block * size
            if not node.key.startswith(tokens[start : start + size], start):
                return block
        return most

    def parted(self, node: Node, tokens: bytes, blocks: int) -> list[int]:
        """Depths below `node` and above `blocks` on the path of `tokens` that requests came to or part at,
        and that have no checkpoint."""
        depths: list[int] = []
        while True:
            offset = node.depth * self.block_bytes
            child = node.child(tokens[offset : offset + self.block_bytes])
            if child is None or child.depth >= blocks or not tokens.startswith(child.key, offset):
                return depths
            if child.checkpoint is None and (child.is_branch or child.wants > 1):
                depths.append(child.depth)
            node = child

    def _new_root(self, namespace: Hashable) -> Node:
        return Node(self, None, namespace, (), 0)

    def is_linked(self, node: Node) -> bool:
        """Whether the node is still part of the tree (an unregistered root is not)."""
        if node.parent is None:
            return self._roots.get(node.key) is node
        return node.parent.child(node.first) is node

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
            self.blocks_locked += node.blocks
            self.blocks_dead -= 0 if node.alive else node.blocks
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
            self.blocks_locked -= node.blocks
            self.blocks_dead += 0 if node.alive else node.blocks
            self._check_leaf(node)
            node = parent

    # -- growth -----------------------------------------------------------------------------

    def add(self, parent: Node, key: bytes, units: Sequence[int]) -> Node:
        """New blocks below `parent`, which must be locked.  The caller keeps its own references."""
        blocks, rest = divmod(len(key), self.block_bytes)
        if rest or not blocks or len(units) != blocks * self.organization.units_per_block:
            raise ValueError(
                f"a block has a key of {self.block_bytes} bytes and {self.organization.units_per_block} "
                f"units, got {len(key)} and {len(units)}"
            )
        first = key[: self.block_bytes]
        if parent.child(first) is not None:
            raise IntegrityError(f"a block at depth {parent.depth + 1} is added twice")
        return self._add(parent, first, key, units)

    def _add(self, parent: Node, first: bytes, key: bytes, units: Sequence[int]) -> Node:
        blocks = len(key) // self.block_bytes
        node = Node(self, parent, key, units, blocks)
        parent.gain(first, node)
        self.organization.cache_units(units, node)
        self.blocks += blocks
        self.blocks_dead += blocks
        return node

    def grow(self, node: Node, tokens: bytes, units: Sequence[int], ends: Sequence[int]) -> Grown:
        """The path of `tokens` below `node`, a node ending at each depth of `ends` (ascending, in blocks).

        What is not there yet is added, with these units of the whole path; a run that the path leaves
        in the middle, or that an end falls into, is split.
        """
        size, per_block = self.block_bytes, self.organization.units_per_block
        path: list[Node] = []
        known = node.depth
        for end in ends:
            while node.depth < end:
                start = node.depth
                first, child = b"", None
                if known == start:  # otherwise there is nothing below that was not added just now
                    first = tokens[start * size : (start + 1) * size]
                    child = node.child(first)
                if child is None:
                    key = tokens[start * size : end * size]
                    child = self._add(node, first, key, units[start * per_block : end * per_block])
                else:
                    child = self._cut(child, tokens, end)
                    known = child.depth
                path.append(child)
                node = child
        return Grown(path, known)

    def _cut(self, node: Node, tokens: bytes, end: int) -> Node:
        """The run as far as the path of `tokens` has it in common, and no deeper than `end`."""
        rest = memoryview(tokens)[node.start * self.block_bytes :]
        common = min(self._common(node, rest), end - node.start)
        return node if common == node.blocks else self._split(node, common)

    def _split(self, node: Node, blocks: int) -> Node:
        """The run's first blocks as a node of their own, which is returned; holders keep the rest."""
        parent, pool = node.parent, self.organization.unit_pool
        assert parent is not None
        size, count = blocks * self.block_bytes, blocks * self.organization.units_per_block
        upper = Node(self, parent, node.key[:size], node.units[:count], blocks)
        parent.gain(upper.first, upper)
        node.parent = upper
        node.key, node.units = node.key[size:], node.units[count:]
        node.blocks -= blocks
        node._fingerprints = None
        upper.gain(node.first, node)
        upper.locks = int(node.locks > 0)
        upper.alive = int(node.alive > 0)
        pool.pass_on(upper.units, node, upper)
        for half in (upper, node):
            half.frozen = any(unit in pool.reclaims for unit in half.units)
        return upper

    def offer(self, node: Node, checkpoint: Checkpoint) -> None:
        """The node's boundary gains a checkpoint, which the caller still holds."""
        if node.parent is None or node.checkpoint is not None:
            raise IntegrityError(f"the boundary at block {node.depth} cannot take a checkpoint")
        node.checkpoint = checkpoint
        self.organization.cache(checkpoint, node)
        self._revive(node)

    def _revive(self, node: Node) -> None:
        """KV on the way to this node has become of use to one thing more."""
        while node.parent is not None:
            node.alive += 1
            if node.alive > 1:
                return
            self.blocks_dead -= 0 if node.locks else node.blocks
            node = node.parent

    def _wither(self, node: Node) -> None:
        """Undo one `_revive`."""
        while node.parent is not None:
            node.alive -= 1
            if node.alive:
                return
            self.blocks_dead += 0 if node.locks else node.blocks
            node = node.parent

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
        if parent is None or not self.is_linked(node):
            return
        if node.locks:
            raise IntegrityError(f"the block at depth {node.depth} leaves the tree with {node.locks} locks")
        self._drop_below(node)
        if node.checkpoint is not None:
            # A checkpoint whose KV path is broken can never be matched: take it along.
            self.organization.uncache(node.checkpoint)
        parent.lose(node)
        self.blocks -= node.blocks
        self.blocks_dead -= node.blocks  # without a lock, a checkpoint or anything below
        if parent.parent is None:
            self._prune_root(parent)
        else:
            self._check_leaf(parent)

    def _drop_below(self, node: Node) -> None:
        """KV below a lost block can never be matched: it goes first, leaf by leaf."""
        below = [node]
        for parent in below:
            below += parent.children.values()
        for leaf in reversed(below[1:]):
            leaf.detach()
            self.organization.uncache_units(leaf.units, leaf)

    def _lost_checkpoint(self, node: Node) -> None:
        self._wither(node)
        self._check_leaf(node)

    def _check_leaf(self, node: Node) -> None:
        if self.on_leaf is not None and node.parent is not None and not node.has_children and not node.locks:
            self.on_leaf(node)

    def _prune_root(self, root: Node) -> None:
        # Isolated requests bring a namespace each: an empty root must not stay behind.
        if not root.has_children and not root.locks and self._roots.get(root.key) is root:
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
            if not root.has_children and not root.locks:
                raise IntegrityError(f"an empty root stayed behind for {root.key!r}")
