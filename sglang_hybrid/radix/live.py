"""Running requests: their live state, forks at boundaries, and what they publish (docs/architecture.md).

A forward reads a request's state from *source* pages and writes it to *live* pages.  Leaving a
boundary, or starting from a hit, the two differ and the old pages stay behind as the checkpoint;
nothing is copied.  Everything here is bookkeeping: `engine/` copies the maps to the device.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from sglang_hybrid.pools.organization import ONE_CHECKPOINT, Checkpoint, Need
from sglang_hybrid.pools.pages import IntegrityError
from sglang_hybrid.radix.coming import Coming
from sglang_hybrid.radix.history import Reuse, Trail
from sglang_hybrid.radix.interfaces import Placement
from sglang_hybrid.radix.lifetime import Lifetime
from sglang_hybrid.radix.live_state import Boundary, LiveState, OutOfState, StateCounts
from sglang_hybrid.radix.node import Node
from sglang_hybrid.radix.order import LIKELY, Limit
from sglang_hybrid.radix.publishing import Publishing
from sglang_hybrid.radix.retention import Retention
from sglang_hybrid.radix.tree import GridTree, Match


class LiveStates(Publishing):
    """Forks and publishes running requests' states, over one tree and one organization."""

    def __init__(
        self,
        tree: GridTree,
        lifetime: Lifetime,
        placement: Placement | None = None,
        retention: Retention | None = None,
        waits: bool = True,
    ) -> None:
        """`waits`: `awaits` may answer that a request should."""
        placement = placement or Placement(tree.organization)
        super().__init__(tree, lifetime, placement, retention or Retention(lifetime))
        self.running = 0
        """Admitted requests; each may need one unit in its next step."""
        self._alive = 0
        """Of these, the ones that have their live state."""
        self.waits = waits
        self.prefix_waits = 0
        """Requests that waited for what running prefills were computing."""
        self.forks = 0
        self.settled_in_place = 0
        self.checkpoints_skipped = 0

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

    def returned(self, states: Iterable[LiveState]) -> Need:
        """What these requests hold alone: it comes back when they are preempted."""
        units = checkpoints = 0
        for state in states:
            units += len(state.units) - state.lease.node.depth * self.organization.units_per_block
            checkpoints += state.live is not None and state.live.references == 1
        return Need(units, checkpoints)

    def admitted(
        self,
        state: LiveState,
        namespace: Hashable,
        tokens: bytes,
        prompt: int,
        usable: int,
        found: Match,
        trail: Trail | None = None,
    ) -> Reuse:
        """Record a request's admission and what it could have reused (`History.admit`)."""
        reuse, state.trail = self.history.admit(namespace, tokens, prompt, usable, found, trail)
        if self.waits and not state.private:
            self.history.extend(state.trail, tokens, prompt)
            likely = (state.branch, *state.parted)
            self.expect(self.coming, state.trail, found.depth, prompt, likely)
        return reuse

    def awaits(self, trail: Trail, first: int, last: int, promised: Coming) -> bool:
        """Whether a waiting request should let a running prefill, or one in `promised`, go ahead.

        It starts from block `first` now and could from one up to `last`; the trail must reach there.
        """
        if not any(coming.deepest(trail, first, last) for coming in (self.coming, promised)):
            return False
        self.prefix_waits += not trail.waited
        trail.waited = True
        return True

    def expect(
        self, coming: Coming, trail: Trail, first: int, prompt: int, likely: Sequence[int] = ()
    ) -> None:
        """Enter a prefill of `prompt` tokens that starts from block `first`, and what it means to leave."""
        grid = self.organization.grid
        last = prompt // grid
        leaves = self.placement.planned(first * grid, prompt, (last * grid, *likely))
        coming.begin(trail, first, last, {last, *[depth // grid for depth in leaves]})

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
        wanted = self.placement.planned(start, end, likely)
        for done, depth in enumerate(wanted):
            limit = LIKELY if depth in likely else self.policy.inner_limit
            checkpoint = self._take_optional(limit)
            if checkpoint is None:
                self.checkpoints_skipped += len(wanted) - done - 1
                for lost in wanted[done:]:
                    self._refused(state, lost)
                break
            state.boundaries.append(Boundary(depth, checkpoint))
        state.boundaries.sort(key=lambda boundary: boundary.depth)

    def settle(self, state: LiveState) -> None:
        """The previous forward is on its way: what it read may go, what it wrote is complete."""
        if state.source is not None:
            self.organization.release(state.source)
            state.source = None
        state.keep_boundaries()
        if state.superseded is not None:
            if isinstance(state.superseded.owner, Node):
                self._drop(state, state.superseded.owner)
            state.superseded = None

    def _refused(self, state: LiveState, depth: int) -> None:
        if state.trail is not None:
            self.history.refused(state.trail, depth)

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

    # -- the end ----------------------------------------------------------------------------

    def release(self, state: LiveState) -> None:
        """The request ends or is preempted: everything it holds beside its units and its lock."""
        self.settle(state)
        if state.trail is not None:
            self.coming.end(state.trail)
        for checkpoint in state.kept.values():
            self.organization.release(checkpoint)
        state.kept.clear()
        self.retention.ended(state)
        self.policy.finished(state.prompt_end, state.answer_end)
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
            self.prefix_waits,
        )


def _live_of(state: LiveState) -> Checkpoint:
    assert state.live is not None
    return state.live
