"""What a policy is told and asked: `EvictionPolicy` (which goes first), `Placement` (which is there at all).

`Lifetime` and `LiveStates` are mechanism: they count, protect and evict, the same on a server and in the
simulator.  Whatever a policy answers, a token is never wrong: what is executed on cannot be evicted, and what
cannot be matched is computed again.  All ranks of a tensor-parallel group ask their own copy, so an answer
may hang on nothing but what the policy was told: no clock, no `hash` of text, no chance.

CONTRIBUTING.md says how to add one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from sglang_hybrid.pools.organization import Checkpoint, Need, Organization, Relief
from sglang_hybrid.radix.demand import Kind
from sglang_hybrid.radix.node import Node
from sglang_hybrid.radix.order import LIKELY, Limit

if TYPE_CHECKING:
    from sglang_hybrid.radix.live_state import LiveState
    from sglang_hybrid.radix.tree import GridTree

Victim = Checkpoint | Node
"""A checkpoint, whose block stays, or an unlocked leaf, whose checkpoint goes along."""


class EvictionPolicy(ABC):
    """One for a tree.  It must answer in about the same time however much is cached."""

    dead_first = True
    """KV that no checkpoint can use goes before `next` is asked; otherwise `leaf` tells of it."""

    def __init__(self, tree: GridTree) -> None:
        self.tree = tree
        self.organization: Organization = tree.organization
        self.reset()

    @abstractmethod
    def reset(self) -> None:
        """The cache is empty (again)."""

    # -- told: what requests do -------------------------------------------------------------

    def touched(self, node: Node) -> None:
        """A request starts from the node's checkpoint."""

    def offered(self, node: Node, kind: Kind) -> None:
        """The node has gained a checkpoint."""

    def passed(self, node: Node) -> None:
        """A path goes on below the node."""

    def finished(self, prompt_end: Node | None, answer_end: Node | None) -> None:
        """A request is gone: where the whole blocks of its prompt and of its answer ended, if anywhere."""

    # -- told: what may go ------------------------------------------------------------------

    def idle(self, checkpoint: Checkpoint) -> None:
        """Nobody executes on it any more.  That this changes again is not told: look before you answer."""

    def leaf(self, node: Node) -> None:
        """The node has become an unlocked leaf, or lost its checkpoint as one."""

    def kept(self, checkpoint: Checkpoint) -> None:
        """It has gained a pin or is retained once more (`order.tier_of`)."""

    def let_go(self, checkpoint: Checkpoint) -> None:
        """It has one of them less."""

    # -- asked ------------------------------------------------------------------------------

    @abstractmethod
    def next(self, relief: Relief, limit: Limit) -> Victim | None:
        """What to evict now; None when all that is left is executed on or stands above the limit.

        Only what `relief` names brings the need closer.  What is answered is evicted at once.
        """

    def ahead(self, need: Need) -> Iterable[Victim]:
        """What goes too, one by one, though the need fits already."""
        return ()

    @property
    def inner_limit(self) -> Limit:
        """Up to where a new checkpoint that no end needs may push others out."""
        return LIKELY


class Placement:
    """At which boundaries a request leaves a checkpoint, and which it gives up later; this one keeps all.

    Whatever it says, the deepest boundary of a prompt has a checkpoint, and so has the place where the prompt
    leaves what the tree knew.  Depths of nodes are grid steps from the root, those of requests tokens.
    """

    def __init__(self, organization: Organization) -> None:
        self.organization = organization
        self.grid = organization.grid

    def keeps(self, depth: int) -> bool:
        """Whether a boundary at this depth, in grid steps, has a checkpoint though a deeper one stands."""
        return True

    def planned(self, start: int, end: int, likely: Collection[int] = ()) -> list[int]:
        """Token depths inside `start..end` where a prefill leaves checkpoints, the most wanted first.

        `likely` are those where a later prompt is likely to begin.  Memory may be short for the last ones.
        """
        grid = self.grid
        likely = likely or (end // grid * grid,)
        inside = range((end - 1) // grid * grid, start // grid * grid, -grid)
        first = [depth for depth in inside if depth in likely]
        return first + [d for d in inside if d not in likely and self.keeps(d // grid)]

    def gives_up(self, node: Node, before: Node | None) -> Iterable[Node]:
        """The node has gained a checkpoint of a request that left its last one at `before`: which go?"""
        return () if before is None or self.keeps(before.depth) else (before,)

    def spares(self, state: LiveState, node: Node) -> bool:
        """Whether one that was given up stays after all: asked when no forward reads it any more."""
        grid = self.grid
        return (
            node.depth in (state.prefilled // grid, state.branch // grid)
            or node.is_branch
            or node.uses > 0
            or node.wants > 1
        )

    def came(self, node: Node) -> None:
        """A new request's prompt leaves at this node what the tree knew."""

    def published(self, prompt_end: Node | None, answer_end: Node | None) -> None:
        """Where the whole blocks of a running request's prompt and of its answer end now."""
