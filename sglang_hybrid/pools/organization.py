"""What every memory organization offers: units of attention KV, checkpoints, and honest capacity.

A *unit* is the smallest piece of attention KV that is handed out: one attention block for S0, S1
and S2, 16 tokens for D0.  One organization is one class; everything above talks to this interface,
and asks it what it would otherwise ask of a name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sglang_hybrid.geometry import ModelGeometry
from sglang_hybrid.pools.checkpoint import Checkpoint, CheckpointOwner
from sglang_hybrid.pools.description import Description
from sglang_hybrid.pools.integrity import check_checkpoints
from sglang_hybrid.pools.layout import Layout
from sglang_hybrid.pools.leftovers import Leftovers
from sglang_hybrid.pools.need import EITHER, ONE_CHECKPOINT, Need, Relief, part_of
from sglang_hybrid.pools.option import Option
from sglang_hybrid.pools.pages import Entry, IntegrityError, PagePool
from sglang_hybrid.pools.reclaim import Reclaim

__all__ = [
    "EITHER",
    "ONE_CHECKPOINT",
    "Checkpoint",
    "Layout",
    "Need",
    "Option",
    "Organization",
    "Relief",
    "Usage",
    "part_of",
]


def counted(count: int, what: str) -> str:
    """`1 page`, `2 pages`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


class Usage(NamedTuple):
    """Pages (D0: of both pools together) and pieces in use."""

    pages_total: int
    pages_free: int
    pages_held: int
    pages_cached: int
    pages_reclaiming: int
    units_allocated: int
    checkpoints_allocated: int
    checkpoints_cached: int
    checkpoints_shared: int


class Organization(Description):
    """Bookkeeping of one byte budget.  Single threaded; nothing here touches a tensor."""

    unit_tokens: int
    """Tokens of a unit; SGLang's page size."""
    slots_per_unit: int
    """Distance of two units' first slots: slot id = unit * slots_per_unit + offset."""
    members: int
    """SSM pages of a checkpoint."""

    def __init__(self, model: ModelGeometry, grid: int, budget_bytes: int) -> None:
        super().__init__(model, grid, budget_bytes)
        self.units_allocated = 0
        self.checkpoints_allocated = 0
        self.checkpoints_cached = 0
        """In the lookup, nobody executes on them: evictable."""
        self.checkpoints_shared = 0
        """In the lookup and executed on."""
        self.on_idle: Callable[[Checkpoint], None] | None = None
        """Called when a cached checkpoint loses its last execution reference."""
        self.leftovers = Leftovers()
        """Pages of the unit pool whose bytes are a state's."""

    # -- capacity ---------------------------------------------------------------------------

    @abstractmethod
    def fits(self, need: Need) -> bool:
        """Whether the need can be allocated now, without evicting."""

    @abstractmethod
    def could_fit(self, need: Need) -> bool:
        """Whether it could after evicting everything that nobody executes on.  Never optimistic."""

    @abstractmethod
    def could_fit_after(self, need: Need, returned: Need) -> bool:
        """`could_fit`, once what `returned` counts is let go by those that hold it alone."""

    @abstractmethod
    def capacity_fits(self, need: Need) -> bool:
        """Whether it fits an empty budget: otherwise it can never be served."""

    @abstractmethod
    def relief(self, need: Need) -> Relief:
        """What to evict while `fits(need)` is false."""

    @abstractmethod
    def token_capacity(self) -> int:
        """Attention tokens that fit beside no checkpoint at all."""

    @abstractmethod
    def unit_equivalent(self, checkpoints: int) -> int:
        """Units that this many checkpoints displace; 0 where they have a pool of their own."""

    @abstractmethod
    def share(self, part: float) -> Need:
        """This part of all blocks, rounded down; where there are two pools, of each."""

    @abstractmethod
    def displaced(self, checkpoints: int) -> Need:
        """What could be had instead of so many checkpoints that stay where they are."""

    @abstractmethod
    def units_free(self) -> int:
        """Units that can be allocated now."""

    @abstractmethod
    def units_reclaimable(self) -> int:
        """Units that could be allocated after evicting everything that nobody executes on."""

    @property
    @abstractmethod
    def checkpoint_bytes(self) -> int:
        """Bytes of an arena that one checkpoint has to itself, rounding included."""

    @property
    def idle_slab_bytes(self) -> int:
        """Bytes of an arena's slabs that hold no conv line."""
        return 0

    @property
    def line_room(self) -> int:
        """Conv lines that fit without a further page."""
        return 0

    @property
    def slab_occupancy(self) -> float:
        """Share of the conv slots of all slabs that hold a line; 1.0 where there are no slabs."""
        return 1.0

    @property
    def units_per_block(self) -> int:
        return self.grid // self.unit_tokens

    # -- pools ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def unit_pool(self) -> PagePool: ...

    @property
    @abstractmethod
    def state_pool(self) -> PagePool: ...

    @property
    def pools(self) -> tuple[PagePool, ...]:
        """Distinct pools."""
        if self.unit_pool is self.state_pool:
            return (self.unit_pool,)
        return (self.unit_pool, self.state_pool)

    @abstractmethod
    def layout(self) -> Layout:
        """What `pools.arena` allocates for each attention layer."""

    def watch_lines(self, freed: Callable[[int], None]) -> None:
        """Call `freed` with each conv line that becomes free while its page stays; where there are such."""

    # -- units ------------------------------------------------------------------------------

    def allocate_units(self, count: int) -> list[int] | None:
        """`count` units with one execution reference each; all or nothing."""
        units = self.unit_pool.allocate(count)
        if units is not None:
            self.units_allocated += count
            self.leftovers.became_unit(units)
        return units

    def hold_units(self, units: Sequence[int]) -> None:
        self.unit_pool.hold(units)

    def release_units(self, units: Sequence[int]) -> None:
        """Drop one execution reference from each; what nobody wants is free."""
        self.unit_pool.release(units)
        self._forget_free(units)

    def cache_units(self, units: Sequence[int], entry: Entry) -> None:
        self.unit_pool.want(units, entry)

    def uncache_units(self, units: Sequence[int], entry: Entry) -> None:
        wanted = [unit for unit in units if entry in self.unit_pool.dependents(unit)]
        self.unit_pool.unwant(wanted, entry)
        self._forget_free(wanted)

    def _forget_free(self, units: Sequence[int]) -> None:
        # By counts, not by state: a unit under reclaim is nobody's, though not FREE yet.
        self.units_allocated -= self.unit_pool.nobodys(units)
        self.leftovers.given_back(unit for unit in units if self.unit_pool.nobodys((unit,)))

    # -- checkpoints ------------------------------------------------------------------------

    def allocate_checkpoint(self) -> Checkpoint | None:
        """A checkpoint with one execution reference, every piece or none."""
        checkpoint = self.take_checkpoint()
        if checkpoint is not None:
            self.checkpoints_allocated += 1
            if self.state_pool is self.unit_pool:
                self.leftovers.became_state(checkpoint.pages)
        return checkpoint

    @abstractmethod
    def take_checkpoint(self) -> Checkpoint | None:
        """Its pages from the pool and its conv line, or nothing at all; `allocate_checkpoint` counts it."""

    def dispose(self, checkpoint: Checkpoint) -> None:
        """The checkpoint's pieces are about to become free; give back what is not a page."""

    def hold(self, checkpoint: Checkpoint) -> None:
        """Add an execution reference, counted on every member page."""
        if not checkpoint.references and (checkpoint.frozen or checkpoint.owner is None):
            raise IntegrityError(f"checkpoint on pages {checkpoint.pages} is adopted, but left the lookup")
        self.state_pool.hold(checkpoint.pages)
        checkpoint.references += 1
        if checkpoint.references == 1 and checkpoint.owner is not None:
            self.checkpoints_cached -= 1
            self.checkpoints_shared += 1

    def release(self, checkpoint: Checkpoint) -> None:
        """Drop an execution reference; a checkpoint that the lookup does not want is freed."""
        if checkpoint.references < 1:
            raise IntegrityError(f"checkpoint on pages {checkpoint.pages} is released but not held")
        checkpoint.references -= 1
        last = checkpoint.references == 0
        if last and checkpoint.owner is None:
            self._end(checkpoint)
        self.state_pool.release(checkpoint.pages)
        if last and checkpoint.owner is not None:
            self.checkpoints_shared -= 1
            self.checkpoints_cached += 1
            if self.on_idle is not None:
                self.on_idle(checkpoint)

    def cache(self, checkpoint: Checkpoint, owner: CheckpointOwner) -> None:
        """The lookup offers the checkpoint from now on; the caller still holds its reference."""
        if checkpoint.references < 1 or checkpoint.owner is not None:
            raise IntegrityError(f"checkpoint on pages {checkpoint.pages} cannot be cached twice or unheld")
        checkpoint.owner = owner
        self.state_pool.want(checkpoint.pages, checkpoint)
        self.checkpoints_shared += 1

    def uncache(self, checkpoint: Checkpoint) -> None:
        """Take it out of the lookup and clear the reverse index; idempotent."""
        if checkpoint.owner is not None:
            checkpoint.detach()
        if checkpoint not in self.state_pool.dependents(checkpoint.pages[0]):
            return
        if checkpoint.references:
            self.checkpoints_shared -= 1
        else:
            self.checkpoints_cached -= 1
            self._end(checkpoint)
        checkpoint.frozen = False
        self.state_pool.unwant(checkpoint.pages, checkpoint)

    def _end(self, checkpoint: Checkpoint) -> None:
        self.checkpoints_allocated -= 1
        self.dispose(checkpoint)

    # -- reclaim ----------------------------------------------------------------------------

    def reclaim_state(self, page: int) -> Reclaim:
        """Transaction that takes a state page from every checkpoint with a piece on it.

        An open one of that page is returned as it stands, to be resumed.
        """
        return self.state_pool.reclaims.get(page) or Reclaim(self.state_pool, page, self._unindex)

    def reclaim_unit(self, unit: int) -> Reclaim:
        """Transaction that takes a unit from the attention block on it, and all blocks below that."""
        return self.unit_pool.reclaims.get(unit) or Reclaim(self.unit_pool, unit, self._unindex)

    def resume_reclaims(self) -> None:
        """Bring interrupted transactions to their end; those of executed pages go on waiting."""
        for pool in self.pools:
            for reclaim in list(pool.reclaims.values()):
                reclaim.run()

    def _unindex(self, entry: Entry) -> None:
        if isinstance(entry, Checkpoint):
            self.uncache(entry)
        else:
            self.uncache_units(entry.units, entry)  # type: ignore[attr-defined]

    # -- reports ----------------------------------------------------------------------------

    @abstractmethod
    def checkpoint_place(self) -> str:
        """What a checkpoint takes, in words: `3 pages`."""

    @abstractmethod
    def block_place(self) -> str:
        """What a block takes, in words."""

    def usage(self) -> Usage:
        counts = [pool.counts for pool in self.pools]
        return Usage(
            sum(pool.size for pool in self.pools),
            sum(count.free for count in counts),
            sum(count.held for count in counts),
            sum(count.cached for count in counts),
            sum(count.reclaiming for count in counts),
            self.units_allocated,
            self.checkpoints_allocated,
            self.checkpoints_cached,
            self.checkpoints_shared,
        )

    def used_bytes(self) -> int:
        """Bytes of all arenas of one rank that the organization made of its budget, sink included."""
        return self.model.arenas * self.layout().arena_bytes

    def details(self) -> dict[str, int | float]:
        """What only this organization has to report."""
        return {}

    def reset(self) -> None:
        """Forget everything; holders must be gone."""
        for pool in self.pools:
            pool.reset()
        self.leftovers.reset(range(1, self.unit_pool.size + 1))
        self.units_allocated = self.checkpoints_allocated = 0
        self.checkpoints_cached = self.checkpoints_shared = 0

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless pages, reverse index and counters agree."""
        for pool in self.pools:
            pool.check_integrity()
        check_checkpoints(self.state_pool, self.checkpoints_cached, self.checkpoints_shared)
