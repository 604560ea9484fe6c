"""Running requests: their live state, forks at boundaries, and what they publish (DESIGN.md).

A forward reads a request's state from *source* pages and writes it to *live* pages.  Leaving a
boundary, or starting from a hit, the two differ and the old pages stay behind as the checkpoint;
nothing is copied.  Everything here is bookkeeping: `engine/` copies the maps to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sglang_hybrid.pools.organization import Checkpoint, Need, Organization
from sglang_hybrid.pools.pages import IntegrityError
from sglang_hybrid.radix.lifetime import Lifetime
from sglang_hybrid.radix.order import Tier
from sglang_hybrid.radix.tree import GridTree, Node


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


class LiveState:
    """What one running request holds beside its lock on the tree."""

    __slots__ = ("boundaries", "covered", "kept", "live", "private", "source", "units")

    def __init__(self, private: bool = False) -> None:
        self.private = private
        """The request may not publish: it keeps no checkpoints."""
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


class StateCounts(NamedTuple):
    """Since start."""

    forks: int
    settled_in_place: int
    checkpoints_skipped: int
    checkpoints_published: int
    duplicates: int


class LiveStates:
    """Forks and publishes running requests' states, over one tree and one organization."""

    def __init__(self, tree: GridTree, lifetime: Lifetime) -> None:
        self.tree = tree
        self.lifetime = lifetime
        self.organization: Organization = tree.organization
        self.running = 0
        """Admitted requests; each may need one unit in its next step."""
        self._alive = 0
        """Of these, the ones that have their live state."""
        self._offered: dict[LiveState, None] = {}
        """Those whose live state is in the lookup at this moment."""
        self.forks = 0
        self.settled_in_place = 0
        self.checkpoints_skipped = 0
        self.checkpoints_published = 0
        self.duplicates = 0

    # -- what is promised -------------------------------------------------------------------

    @property
    def due(self) -> int:
        """Live states that may have to be found whatever else happens.

        Requests that were admitted and have none yet, and running ones whose live state is
        published: once somebody adopts it, they cannot go on in place.  Admission leaves room for
        them, and optional checkpoints do.
        """
        return self.running - self._alive + len(self._offered)

    @property
    def forced(self) -> int:
        """Published live states that somebody has adopted: their next step must find new pages."""
        return sum(_live_of(state).references > 1 for state in self._offered)

    # -- before a forward -------------------------------------------------------------------

    def begin(self, state: LiveState, start: int, adopted: Checkpoint | None) -> None:
        """Give the forward that begins at token `start` a place to write its state.

        `adopted` is the checkpoint of the hit that a fresh request starts from; the caller keeps
        its own reference until the forward is launched.  Publish before, so that a state that
        the tree has already is not kept twice.  Raises `OutOfState` when a live state cannot be
        had; a checkpoint that finds no memory is skipped and counted.
        """
        self.settle(state)
        live = state.live
        if live is None:
            if start and adopted is None:
                raise IntegrityError(f"a request begins at token {start} without the state of that boundary")
            state.live = self._take_live()
            self._alive += 1
            if adopted is not None:
                self._read_from(state, adopted)
            return
        if start % self.organization.grid or start == state.covered or state.private:
            return  # off grid, or nothing would be kept: the state is updated where it is
        shared = live.owner is not None
        self._offered.pop(state, None)
        fresh = self._take_optional()
        if fresh is None and shared:
            fresh = self._go_on(live)
        if fresh is None:
            self.settled_in_place += 1
            return
        self._read_from(state, live)
        state.live = fresh
        if shared:
            self.organization.release(live)
        else:
            state.kept[start] = live

    def extend(self, state: LiveState, start: int, end: int) -> None:
        """Take checkpoints for the boundaries strictly inside tokens `start..end`, deepest first.

        Memory that lasts for some only goes to the deepest: they save most when they are hit.
        """
        if state.private:
            return
        grid = self.organization.grid
        first = (start // grid + 1) * grid
        last = (end - 1) // grid * grid
        for depth in range(last, first - 1, -grid):
            checkpoint = self._take_optional()
            if checkpoint is None:
                self.checkpoints_skipped += (depth - first) // grid
                break
            state.boundaries.append(Boundary(depth, checkpoint))
        state.boundaries.reverse()

    def settle(self, state: LiveState) -> None:
        """The previous forward is on its way: what it read may go, what it wrote is complete."""
        if state.source is not None:
            self.organization.release(state.source)
            state.source = None
        self.keep_boundaries(state)

    @staticmethod
    def keep_boundaries(state: LiveState) -> None:
        """The forward that writes the planned boundaries has been launched."""
        for depth, checkpoint in state.boundaries:
            state.kept[depth] = checkpoint
        state.boundaries.clear()

    def _read_from(self, state: LiveState, source: Checkpoint) -> None:
        self.organization.hold(source)
        state.source = source
        self.forks += 1

    def _take_live(self) -> Checkpoint:
        if not self.lifetime.make_room(Need(checkpoints=1)):
            raise OutOfState("no pages for the live state of an admitted request")
        checkpoint = self.organization.allocate_checkpoint()
        assert checkpoint is not None
        return checkpoint

    def _take_optional(self) -> Checkpoint | None:
        checkpoint = self._take_spare(Tier.USEFUL)
        self.checkpoints_skipped += checkpoint is None
        return checkpoint

    def _take_spare(self, last: Tier) -> Checkpoint | None:
        # Running requests come first: each keeps its next unit, and the state it may have to take.
        if not self.organization.could_fit(Need(units=self.running, checkpoints=1 + self.due)):
            return None
        if not self.lifetime.make_room(Need(checkpoints=1), last):
            return None
        checkpoint = self.organization.allocate_checkpoint()
        assert checkpoint is not None
        if not self.organization.could_fit(Need(units=self.running, checkpoints=self.due)):
            self.organization.release(checkpoint)  # it has cost more than it might: S2 opened a slab
            return None
        return checkpoint

    def _go_on(self, live: Checkpoint) -> Checkpoint | None:
        """Memory is short and the live state published: new pages, or its own, taken from the lookup."""
        if live.references > 1:
            return self._take_live()
        if live.pins or live.retained:
            fresh = self._take_spare(Tier.PINNED)
            if fresh is not None:
                return fresh
            self.lifetime.give_up(live)
        self.organization.uncache(live)
        return None

    # -- publish and release ----------------------------------------------------------------

    def publish(self, state: LiveState, node: Node, tokens: bytes, length: int, position: int) -> Published:
        """Hand whole blocks of `tokens[..length]` below `node` to the tree, with their checkpoints.

        `node` must be locked; the caller moves the lock to the returned node and then calls
        `handed_over`.  `length` must not pass what launched forwards have written, nor the token
        ids that are known.  `position` is the token depth of the live state.
        """
        self.keep_boundaries(state)
        grid, per_block = self.organization.grid, self.organization.units_per_block
        size = self.tree.block_bytes
        duplicates: list[Duplicate] = []
        own_units: list[int] = []
        for index in range(node.depth, length // grid):
            key = tokens[index * size : (index + 1) * size]
            row = slice(index * per_block, (index + 1) * per_block)
            own = state.units[row]
            own_units += own
            child = node.children.get(key)
            if child is None:
                child = self.tree.add(node, key, own)
            else:
                duplicates.append(Duplicate(index, child.units))
                state.units[row] = child.units
            node = child
            self._offer(state, node, (index + 1) * grid, position)
        self.duplicates += len(duplicates)
        return Published(node, duplicates, own_units)

    def _offer(self, state: LiveState, node: Node, depth: int, position: int) -> None:
        checkpoint = state.kept.pop(depth, None)
        is_live = checkpoint is None and depth == position and not state.private
        if is_live:
            checkpoint = state.live
        if checkpoint is None:
            return
        if node.checkpoint is None:
            self.tree.offer(node, checkpoint)
            self.lifetime.touch(checkpoint)
            self.checkpoints_published += 1
            if is_live:
                self._offered[state] = None
        elif is_live:
            state.covered = depth
        if not is_live:
            self.organization.release(checkpoint)

    def handed_over(self, published: Published) -> None:
        """Drop the request's own references on the units of the published blocks."""
        self.organization.release_units(published.own_units)

    def release(self, state: LiveState) -> None:
        """The request ends or is preempted: everything it holds beside its units and its lock."""
        self.settle(state)
        for checkpoint in state.kept.values():
            self.organization.release(checkpoint)
        state.kept.clear()
        if state.live is not None:
            self._offered.pop(state, None)
            self._alive -= 1
            self.organization.release(state.live)
            state.live = None

    @property
    def counts(self) -> StateCounts:
        return StateCounts(
            self.forks,
            self.settled_in_place,
            self.checkpoints_skipped,
            self.checkpoints_published,
            self.duplicates,
        )


def _live_of(state: LiveState) -> Checkpoint:
    assert state.live is not None
    return state.live
