"""A node of the grid tree: a run of attention blocks and the checkpoint at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from zlib import crc32

from sglang_hybrid.pools.organization import Checkpoint
from sglang_hybrid.radix.demand import Kind

if TYPE_CHECKING:
    from sglang_hybrid.radix.tree import GridTree

SAMPLE_BYTES = 64
"""End of each block that goes into a path's fingerprint."""


class Node:
    """Blocks between two places where paths part or a checkpoint stands: neither is ever inside a run.

    `depth` counts blocks from the root to the end of the run; a root has depth 0 and no blocks.
    """

    __slots__ = (
        "_children",
        "_fingerprints",
        "alive",
        "blocks",
        "checkpoint",
        "depth",
        "filed",
        "frozen",
        "key",
        "kind",
        "last",
        "locks",
        "parent",
        "rated",
        "tree",
        "units",
        "used",
        "uses",
        "wants",
    )

    def __init__(
        self, tree: GridTree, parent: Node | None, key: Any, units: Sequence[int], blocks: int
    ) -> None:
        self.tree = tree
        self.parent = parent
        self.key = key
        """Token ids of the blocks as bytes; a root's namespace."""
        self.units = units
        self.blocks = blocks
        self.depth: int = blocks if parent is None else parent.depth + blocks
        self._fingerprints: list[int] | None = None
        self.last: Node | None = None
        """The child that was added or matched last: most paths go on where the one before them went."""
        self._children: dict[bytes, Node] | None = None
        """By first block, once there have been two: the key of an only child is never hashed."""
        self.checkpoint: Checkpoint | None = None
        """At the end of the run."""
        self.locks = 0
        """Holders of this node plus children with locks: above 0 nothing on the path can be evicted."""
        self.alive = 0
        """Its own checkpoint plus children with any below: at 0, and without locks, its KV is dead."""
        self.frozen = False
        self.filed = False
        """Already in the lifetime's list of dead blocks."""
        self.kind = Kind.INNER
        self.uses = 0
        """Hits on the boundary at the end, and turns of the conversation that ends there."""
        self.wants = 0
        """Distinct requests whose prompts left the tree's KV here."""
        self.used = 0
        """When it was used last, for an order of eviction that asks."""
        self.rated = False
        """Whether `uses` has what the path inherits."""

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def start(self) -> int:
        """Blocks above the run."""
        return self.depth - self.blocks

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

    def fingerprints(self) -> Sequence[int]:
        """Of the whole path, at the end of each block of the run.

        From samples, so two may be equal by chance, on all ranks alike: only what a boundary is worth
        hangs on it.
        """
        if self._fingerprints is None:
            size = self.tree.block_bytes
            sample = min(SAMPLE_BYTES, size)
            for node in self.path():  # top down, however long the path is
                if node._fingerprints is None:
                    assert node.parent is not None
                    # Not `hash`: it differs from process to process.
                    last = (node.parent._fingerprints or [crc32(repr(node.parent.key).encode())])[-1]
                    ends = range(size, len(node.key) + 1, size)
                    node._fingerprints = [last := crc32(node.key[end - sample : end], last) for end in ends]
            assert self._fingerprints is not None
        return self._fingerprints

    # -- children ---------------------------------------------------------------------------

    @property
    def first(self) -> bytes:
        """Key of the first block."""
        return self.key[: self.tree.block_bytes]

    @property
    def children(self) -> Mapping[bytes, Node]:
        """By first block.  Made up for an only child: for reports and tests."""
        if self._children is not None:
            return self._children
        return {} if self.last is None else {self.last.first: self.last}

    @property
    def has_children(self) -> bool:
        return self.last is not None or bool(self._children)

    @property
    def is_branch(self) -> bool:
        """Several paths go on from the end."""
        return self._children is not None and len(self._children) > 1

    def child(self, first: bytes) -> Node | None:
        """The child that begins with this block."""
        # Two keys are compared faster than one is hashed.
        if self.last is not None and self.last.key.startswith(first):
            return self.last
        return None if self._children is None else self._children.get(first)

    def gain(self, first: bytes, child: Node) -> None:
        """A child that begins with this block: a further one, or in the place of the one that did."""
        if self._children is not None:
            self._children[first] = child
        elif self.last is not None and not self.last.key.startswith(first):
            self._children = {self.last.first: self.last, first: child}
        self.last = child

    def lose(self, child: Node) -> None:
        if self._children is not None:
            del self._children[child.first]
        if self.last is child:
            self.last = None
