"""What one running request holds of the memory, and what happens to it when it publishes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from sglang_hybrid.pools.organization import Checkpoint
from sglang_hybrid.radix.history import Trail
from sglang_hybrid.radix.node import Node


class OutOfState(RuntimeError):
    """A live state that admission promised cannot be allocated."""


class Boundary(NamedTuple):
    """A checkpoint that the coming forward writes when it passes token `depth`."""

    depth: int
    checkpoint: Checkpoint


class Duplicate(NamedTuple):
    """Block `block` of a request was in the tree already: its row must point at `units`."""

    block: int
    units: Sequence[int]


class Published(NamedTuple):
    """`node` is where the request's path in the tree ends now; `own_units` are no longer its own."""

    node: Node
    duplicates: list[Duplicate]
    own_units: list[int]


class Lease:
    """What a request keeps of the tree: a locked path, and the checkpoint that it starts from at its end."""

    __slots__ = ("adopted", "node")

    def __init__(self, node: Node, adopted: Checkpoint | None) -> None:
        self.node = node
        self.adopted = adopted


class LiveState:
    """What one running request holds."""

    __slots__ = (
        "answer_end",
        "boundaries",
        "branch",
        "covered",
        "kept",
        "key",
        "lease",
        "live",
        "made",
        "newcomer",
        "parted",
        "passing",
        "prefilled",
        "private",
        "prompt_end",
        "source",
        "superseded",
        "trail",
        "units",
    )

    lease: Lease
    """Its path in the tree, from its admission on."""
    key: Hashable
    """By which the caller knows the request."""

    def __init__(self, private: bool = False, newcomer: bool = True) -> None:
        self.private = private
        """The request may not publish: it keeps no checkpoints."""
        self.newcomer = newcomer
        """What it wants is still to be counted; a preempted request that resumes has been."""
        self.made: list[Checkpoint] = []
        """What it has given the tree, for `Retention`."""
        self.passing: Checkpoint | None = None
        """The last of these, while no deeper one stands."""
        self.superseded: Checkpoint | None = None
        """The one before it, when the placement does not keep it for itself."""
        self.covered = 0
        """Token depth of the live state when the tree has a checkpoint of its own there."""
        self.units: list[int] = []
        """Attention units of the request's row, tree-owned prefix included, in order."""
        self.live: Checkpoint | None = None
        """Where the last prepared forward writes the state; a reference is held."""
        self.source: Checkpoint | None = None
        """Where it reads it from, when that is not `live`; a reference of its own is held."""
        self.kept: dict[int, Checkpoint] = {}
        """Complete states at boundaries that are not published yet, by token depth."""
        self.boundaries: list[Boundary] = []
        """Checkpoints that the prepared forward will write; kept once it is launched."""
        self.prefilled = 0
        """Tokens of the prompt that forwards have been prepared for."""
        self.branch = 0
        """Token depth to which the tree had KV when the request came: here its prompt branches off."""
        self.parted: Sequence[int] = ()
        """Token depths before it that others came to or part at, and where no checkpoint is left."""
        self.prompt_end: Node | None = None
        self.answer_end: Node | None = None
        """Where the whole blocks of what is published end."""
        self.trail: Trail | None = None
        """Its text in the history, when its admission was recorded."""

    def keep_boundaries(self) -> None:
        """The forward that writes the planned boundaries has been launched."""
        for depth, checkpoint in self.boundaries:
            self.kept[depth] = checkpoint
        self.boundaries.clear()


class StateCounts(NamedTuple):
    """Since start."""

    forks: int
    settled_in_place: int
    checkpoints_skipped: int
    checkpoints_published: int
    checkpoints_superseded: int
    duplicates: int
    prefix_waits: int
