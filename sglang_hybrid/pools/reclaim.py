"""Reclaim of a page as a transaction: invalidate first, free last (docs/paper.md, Ownership rules).

Five steps, each idempotent, so that an interrupted reclaim is resumed by `advance` and never
leaves an entry that can be found but not used.  Until it is done its pool keeps it in `reclaims`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

from sglang_hybrid.pools.pages import FREE, Entry, PagePool


class ReclaimStep(IntEnum):
    """The step that `advance` does next."""

    FREEZE = 0
    WAIT = 1
    DETACH = 2
    UNINDEX = 3
    RETURN = 4
    DONE = 5


FREEZE, WAIT, DETACH, UNINDEX, RETURN, DONE = ReclaimStep
"""Bound here: to find a member in its class takes longer than most of what a step does."""


class Reclaim:
    """Takes one page from the lookup; cost is what depends on that page, not the cache's size.

    `unindex(entry)` clears the reverse relations of a detached entry on *all* its pages: an
    entry that lost one member is useless as a whole.
    """

    def __init__(self, pool: PagePool, page: int, unindex: Callable[[Entry], None]) -> None:
        self.pool = pool
        self.page = page
        self.step = FREEZE
        self.entries: tuple[Entry, ...] = ()
        """What depends on the page; what is published on it while the reclaim waits joins at DETACH."""
        self._unindex = unindex
        self._detaching = False

    @property
    def is_frozen(self) -> bool:
        """Entries are still in the lookup, and no match may find them."""
        return self.step in (WAIT, DETACH)

    def advance(self) -> ReclaimStep:
        """Do the next step and return the one after it; WAIT stays while the page is executed on."""
        if self.step is FREEZE:
            if self.pool.state(self.page) is FREE:
                self.step = DONE
                return self.step
            # Frozen entries are skipped by every match: no new adopt can start.
            self.entries = tuple(self.pool.dependents(self.page))
            for entry in self.entries:
                entry.frozen = True
            self.pool.open_reclaim(self.page, self)
            self.step = WAIT
        elif self.step is WAIT:
            if self.pool.references(self.page) == 0:
                self.step = DETACH
        elif self.step is DETACH:
            if self.pool.references(self.page):
                # A running request has published through a frozen block since.
                self.step = WAIT
                return self.step
            self.entries = tuple(self.pool.dependents(self.page))
            self._detaching = True
            for entry in self.entries:
                entry.detach()
            self.step = UNINDEX
        elif self.step is UNINDEX:
            for entry in self.entries:
                self._unindex(entry)
            self.step = RETURN
        elif self.step is RETURN:
            self.entries = ()
            self.step = DONE
            self.pool.close_reclaim(self.page)
        return self.step

    def run(self) -> bool:
        """Advance until done; False when the page is still executed on and the reclaim waits."""
        while self.step is not DONE:
            before = self.step
            if self.advance() is before:
                return False
        return True

    def abandon(self) -> None:
        """Before anything was detached, go back to the old world; afterwards only forward is legal."""
        if self._detaching:
            raise RuntimeError(f"reclaim of page {self.page} has detached its entries: run it to the end")
        if self.step is FREEZE:
            return
        for entry in (*self.entries, *self.pool.dependents(self.page)):
            entry.frozen = False
        self.entries = ()
        self.step = FREEZE
        self.pool.close_reclaim(self.page)
        for other in self.pool.reclaims.values():
            for entry in (*other.entries, *self.pool.dependents(other.page)):
                entry.frozen = True  # an entry may lie on two pages under reclaim
