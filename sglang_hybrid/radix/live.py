"""Running requests: their live state, forks at boundaries, and what they publish (DESIGN.md).

A forward reads a request's state from *source* pages and writes it to *live* pages.  Leaving a
boundary, or starting from a hit, the two differ and the old pages stay behind as the checkpoint;
nothing is copied.  Everything here is bookkeeping: `engine/` copies the maps to the device.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from sglang_hybrid.pools.organization import ONE_CHECKPOINT, Checkpoint, Need, Organization
from sglang_hybrid.pools.pages import IntegrityError
from sglang_hybrid.radix.demand import Kind
from sglang_hybrid.radix.history import History, Reuse, Trail
from sglang_hybrid.radix.lifetime import Lifetime
from sglang_hybrid.radix.node import Node
from sglang_hybrid.radix.order import Limit, Tier
from sglang_hybrid.radix.placement import Placement, every
from sglang_hybrid.radix.retention import Retention
from sglang_hybrid.radix.tree import GridTree, Match


class OutOfState(RuntimeError):
    """A live state that admission promised cannot be allocated."""


LIKELY = Limit(Tier.USEFUL)
"""What a checkpoint pushes out that is likely to be used: anything but what policy or a request keeps."""


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

    __slots__ = (
        "answer_end",
        "boundaries",
        "branch",
        "covered",
        "kept",
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


class StateCounts(NamedTuple):
    """Since start."""

    forks: int
    settled_in_place: int
    checkpoints_skipped: int
    checkpoints_published: int
    checkpoints_superseded: int
    duplicates: int


class LiveStates:
    """Forks and publishes running requests' states, over one tree and one organization."""

    def __init__(
        self,
        tree: GridTree,
        lifetime: Lifetime,
        placement: Placement = every,
        retention: Retention | None = None,
    ) -> None:
        self.tree = tree
        self.lifetime = lifetime
        self.placement = placement
        self.retention = retention or Retention(lifetime)
        self.organization: Organization = tree.organization
        self.running = 0
        """Admitted requests; each may need one unit in its next step."""
        self.history = History(tree)
        self._alive = 0
        """Of these, the ones that have their live state."""
        self._offered: dict[LiveState, None] = {}
        """Those whose live state is in the lookup at this moment."""
        self.forks = 0
        self.settled_in_place = 0
        self.checkpoints_skipped = 0
        self.checkpoints_published = 0
        self.checkpoints_superseded = 0
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

    def admitted(
        self, state: LiveState, namespace: Hashable, tokens: bytes, prompt: int, usable: int, found: Match
    ) -> Reuse:
        """Record a request's admission and what it could have reused (`History.admit`)."""
        reuse, state.trail = self.history.admit(namespace, tokens, prompt, usable, found)
        return reuse

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
                state.prompt_end = adopted.owner if isinstance(adopted.owner, Node) else None
                if start == state.branch and state.prompt_end is not None:
                    self._want(state, state.prompt_end)
            return
        if start % self.organization.grid or start == state.covered or state.private:
            return  # off grid, or nothing would be kept: the state is updated where it is
        shared = live.owner is not None
        self._offered.pop(state, None)
        fresh = self._take_optional(LIKELY)
        if fresh is None and shared:
            fresh = self._go_on(live)
        if fresh is None:
            self.settled_in_place += 1
            self._refused(state, start)
            return
        self._read_from(state, live)
        state.live = fresh
        if shared:
            self.organization.release(live)
        else:
            state.kept[start] = live

    def extend(self, state: LiveState, start: int, end: int) -> None:
        """Take checkpoints for the boundaries strictly inside tokens `start..end`, deepest first.

        Memory that lasts for some only goes to the deepest: they save most when they are hit.  Where
        the forward ends or the prompt branches off, a later prompt is likely to begin; the others
        push out only what is worth less.
        """
        state.prefilled = end
        if state.private:
            return
        grid = self.organization.grid
        likely = (end // grid * grid, state.branch, *state.parted)
        wanted = self.planned(start, end, likely)
        for done, depth in enumerate(wanted):
            limit = LIKELY if depth in likely else self.lifetime.inner_limit
            checkpoint = self._take_optional(limit)
            if checkpoint is None:
                self.checkpoints_skipped += len(wanted) - done - 1
                for lost in wanted[done:]:
                    self._refused(state, lost)
                break
            state.boundaries.append(Boundary(depth, checkpoint))
        state.boundaries.sort(key=lambda boundary: boundary.depth)

    def planned(self, start: int, end: int, likely: Sequence[int] = ()) -> list[int]:
        """Token depths inside `start..end` where checkpoints are wanted: the likely ones, then the others,
        the deepest of each first."""
        grid = self.organization.grid
        likely = likely or (end // grid * grid,)
        inside = range((end - 1) // grid * grid, start // grid * grid, -grid)
        first = [depth for depth in inside if depth in likely]
        return first + [d for d in inside if d not in likely and self.placement(d // grid)]

    def settle(self, state: LiveState) -> None:
        """The previous forward is on its way: what it read may go, what it wrote is complete."""
        if state.source is not None:
            self.organization.release(state.source)
            state.source = None
        self.keep_boundaries(state)
        if state.superseded is not None:
            self._drop(state, state.superseded)
            state.superseded = None

    def _refused(self, state: LiveState, depth: int) -> None:
        if state.trail is not None:
            self.history.refused(state.trail, depth)

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
        if not self.lifetime.make_room(ONE_CHECKPOINT):
            raise OutOfState("no pages for the live state of an admitted request")
        checkpoint = self.organization.allocate_checkpoint()
        assert checkpoint is not None
        return checkpoint

    def _take_optional(self, limit: Limit) -> Checkpoint | None:
        checkpoint = self._take_spare(limit)
        self.checkpoints_skipped += checkpoint is None
        return checkpoint

    def _take_spare(self, limit: Limit) -> Checkpoint | None:
        # Running requests come first: each keeps its next unit, and the state it may have to take.
        if not self.organization.could_fit(Need(units=self.running, checkpoints=1 + self.due)):
            return None
        if not self.lifetime.make_room(ONE_CHECKPOINT, limit):
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
            fresh = self._take_spare(Limit() if live.pins else LIKELY)
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
        first, last = node.depth, length // grid
        if last <= first:
            self._record(state, tokens, length, ())
            return Published(node, [], [])
        own_units = state.units[first * per_block : last * per_block]
        path, known = self.tree.grow(node, tokens, state.units, self._ends(state, first, last, position))
        duplicates = []
        for block in path:
            if block.depth > known:
                break
            for index in range(block.blocks):
                units = block.units[index * per_block : (index + 1) * per_block]
                duplicates.append(Duplicate(block.start + index, units))
        for index, units in duplicates:
            state.units[index * per_block : (index + 1) * per_block] = units
        for block in path:
            depth = block.depth * grid
            if depth == state.branch:
                self._want(state, block)
            if depth in state.kept or depth == position:
                self._offer(state, block, depth, last)
        self._note_ends(state, node, path)
        self._record(state, tokens, length, path)
        self.duplicates += len(duplicates)
        return Published(path[-1], duplicates, own_units)

    def _record(self, state: LiveState, tokens: bytes, length: int, path: Sequence[Node]) -> None:
        if state.trail is not None and not state.private:
            taken = {node.depth for node in path if node.checkpoint is not None}
            self.history.computed(state.trail, tokens, length, taken)

    def _ends(self, state: LiveState, first: int, last: int, position: int) -> list[int]:
        """Depths in blocks where a checkpoint may be offered or a later prompt may begin."""
        grid = self.organization.grid
        ends = {last, position // grid, *[depth // grid for depth in state.kept]}
        ends |= {state.prefilled // grid, state.branch // grid}
        return sorted([end for end in ends if first < end <= last])

    def _offer(self, state: LiveState, node: Node, depth: int, last: int) -> None:
        checkpoint = state.kept.pop(depth, None)
        is_live = checkpoint is None and not state.private
        if is_live:
            checkpoint = state.live
        if checkpoint is None:
            return
        if node.checkpoint is None:
            self.tree.offer(node, checkpoint)
            self.lifetime.offered(node, self._kind(state, node.depth, last))
            self.checkpoints_published += 1
            self.retention.made(state, node)
            if is_live:
                self._offered[state] = None
            self._supersede(state, checkpoint)
        elif is_live:
            state.covered = depth
        if not is_live:
            self.organization.release(checkpoint)

    def _want(self, state: LiveState, node: Node) -> None:
        if state.newcomer:
            state.newcomer = False
            self.retention.want(node)

    def _supersede(self, state: LiveState, checkpoint: Checkpoint) -> None:
        """A deeper checkpoint stands: the one before it goes, once the forward that reads it is launched."""
        before, state.passing = state.passing, checkpoint
        if before is None or not isinstance(before.owner, Node) or self.placement(before.owner.depth):
            return
        if before is state.source:
            state.superseded = before
        else:
            self._drop(state, before)

    def _drop(self, state: LiveState, checkpoint: Checkpoint) -> None:
        """Unless there is more to it than that it was the deepest for a while."""
        node, grid = checkpoint.owner, self.organization.grid
        if not isinstance(node, Node) or node.depth in (state.prefilled // grid, state.branch // grid):
            return
        others = checkpoint.references or checkpoint.pins or checkpoint.retained
        if not (others or node.is_branch or node.uses or node.wants > 1):
            self.tree.evict_checkpoint(checkpoint)
            self.checkpoints_superseded += 1
            if state.trail is not None:
                self.history.superseded(state.trail, node.depth * grid)

    def _kind(self, state: LiveState, depth: int, last: int) -> Kind:
        prompt = state.prefilled // self.organization.grid
        if depth == prompt:
            return Kind.PROMPT_END
        return Kind.ANSWER_END if depth == last > prompt else Kind.INNER

    def _note_ends(self, state: LiveState, begun: Node, path: Sequence[Node]) -> None:
        """The request's path in the tree has grown by these nodes below `begun`."""
        prompt = state.prefilled // self.organization.grid
        if begun.depth != prompt:
            self.lifetime.passed(begun)
        if path[-1].depth > prompt:
            state.answer_end = path[-1]
        for node in path:
            if node.depth == prompt:
                state.prompt_end = node

    def handed_over(self, published: Published) -> None:
        """Drop the request's own references on the units of the published blocks."""
        self.organization.release_units(published.own_units)

    def release(self, state: LiveState) -> None:
        """The request ends or is preempted: everything it holds beside its units and its lock."""
        self.settle(state)
        for checkpoint in state.kept.values():
            self.organization.release(checkpoint)
        state.kept.clear()
        self.retention.ended(state)
        self.lifetime.finished(state.prompt_end, state.answer_end)
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
            self.checkpoints_superseded,
            self.duplicates,
        )


def _live_of(state: LiveState) -> Checkpoint:
    assert state.live is not None
    return state.live
