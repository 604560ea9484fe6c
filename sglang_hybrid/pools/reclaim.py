"""Reclaim of a page as a transaction: invalidate first, free last (PAPER.md, Ownership).

Five steps, each idempotent, so that an interrupted reclaim is resumed by `advance` and never
leaves an entry that can be found but not used.  Until it is done its pool keeps it in `reclaims`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

from sglang_hybrid.pools.pages import Entry, PagePool, PageState


class ReclaimStep(IntEnum):
    """The step that `advance` does next."""

    FREEZE = 0
    WAIT = 1
    DETACH = 2
    UNINDEX = 3
    RETURN = 4
    DONE = 5


class Reclaim:
    """Takes one page from the lookup; cost is what depends on that page, not the cache's size.

    `unindex(entry)` clears the reverse relations of a detached entry on *all* its pages: an
    entry that lost one member is useless as a whole.
    """

    def __init__(self, pool: PagePool, page: int, unindex: Callable[[Entry], None]) -> None:
        self.pool = pool
        self.page = page
        self.step = ReclaimStep.FREEZE
        self.entries: tuple[Entry, ...] = ()
        """What depends on the page; what is published on it while the reclaim waits joins at DETACH."""
        self._unindex = unindex
        self._detaching = False

    @property
    def is_frozen(self) -> bool:
        """Entries are still in the lookup, and no match may find them."""
        return self.step in (ReclaimStep.WAIT, ReclaimStep.DETACH)

    def advance(self) -> ReclaimStep:
        """Do the next step and return the one after it; WAIT stays while the page is executed on."""
        if self.step is ReclaimStep.FREEZE:
            if self.pool.state(self.page) is PageState.FREE:
                self.step = ReclaimStep.DONE
                return self.step
            # Frozen entries are skipped by every match: no new adopt can start.
            self.entries = tuple(self.pool.dependents(self.page))
            for entry in self.entries:
                entry.frozen = True
            self.pool.open_reclaim(self.page, self)
            self.step = ReclaimStep.WAIT
        elif self.step is ReclaimStep.WAIT:
            if self.pool.references(self.page) == 0:
                self.step = ReclaimStep.DETACH
        elif self.step is ReclaimStep.DETACH:
            if self.pool.references(self.page):
                # A running request has published through a frozen block since.
                self.step = ReclaimStep.WAIT
                return self.step
            self.entries = tuple(self.pool.dependents(self.page))
            self._detaching = True
            for entry in self.entries:
                entry.detach()
            self.step = ReclaimStep.UNINDEX
        elif self.step is ReclaimStep.UNINDEX:
            for entry in self.entries:
                self._unindex(entry)
            self.step = ReclaimStep.RETURN
        elif self.step is ReclaimStep.RETURN:
            self.entries = ()
            self.step = ReclaimStep.DONE
            self.pool.close_reclaim(self.page)
        return self.step

    def run(self) -> bool:
        """Advance until done; False when the page is still executed on and the reclaim waits."""
        pool, page = self.pool, self.page
        if self.step is ReclaimStep.FREEZE and pool.wanted(page) and not pool.references(page):
            self._run_through()
            return True
        while self.step is not ReclaimStep.DONE:
            before = self.step
            if self.advance() is before:
                return False
        return True

    def _run_through(self) -> None:
        """All steps at once, nothing to wait for: what `advance` does, and most evictions are."""
        self.entries = entries = tuple(self.pool.dependents(self.page))
        for entry in entries:
            entry.frozen = True
        self.pool.open_reclaim(self.page, self)
        self._detaching = True
        self.step = ReclaimStep.DETACH
        for entry in entries:
            entry.detach()
        self.step = ReclaimStep.UNINDEX
        for entry in entries:
            self._unindex(entry)
        self.entries = ()
        self.step = ReclaimStep.DONE
        self.pool.close_reclaim(self.page)

    def abandon(self) -> None:
        """Before anything was detached, go back to the old world; afterwards only forward is legal."""
        if self._detaching:
            raise RuntimeError(f"reclaim of page {self.page} has detached its entries: run it to the end")
        if self.step is ReclaimStep.FREEZE:
            return
        for entry in (*self.entries, *self.pool.dependents(self.page)):
            entry.frozen = False
        self.entries = ()
        self.step = ReclaimStep.FREEZE
        self.pool.close_reclaim(self.page)
        for other in self.pool.reclaims.values():
            for entry in (*other.entries, *self.pool.dependents(other.page)):
                entry.frozen = True  # an entry may lie on two pages under reclaim
