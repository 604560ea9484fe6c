"""Reclaim of a page as a transaction: invalidate first, free last (PAPER.md, Ownership).

Five steps, each idempotent, so that an interrupted reclaim is resumed by `advance` and never
leaves an entry that can be found but not used.
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
        self._unindex = unindex
        self._entries: tuple[Entry, ...] = ()

    def advance(self) -> ReclaimStep:
        """Do the next step and return the one after it; WAIT stays while the page is executed on."""
        if self.step is ReclaimStep.FREEZE:
            # Frozen entries are skipped by every match: no new adopt can start.
            self._entries = tuple(self.pool.dependents(self.page))
            for entry in self._entries:
                entry.frozen = True
            if self.pool.state(self.page) is not PageState.FREE:
                self.pool.mark_reclaiming(self.page, True)
            self.step = ReclaimStep.WAIT
        elif self.step is ReclaimStep.WAIT:
            if self.pool.references(self.page) == 0:
                self.step = ReclaimStep.DETACH
        elif self.step is ReclaimStep.DETACH:
            for entry in self._entries:
                entry.detach()
            self.step = ReclaimStep.UNINDEX
        elif self.step is ReclaimStep.UNINDEX:
            for entry in self._entries:
                self._unindex(entry)
            self.step = ReclaimStep.RETURN
        elif self.step is ReclaimStep.RETURN:
            if self.pool.state(self.page) is PageState.RECLAIMING:
                self.pool.mark_reclaiming(self.page, False)
            self._entries = ()
            self.step = ReclaimStep.DONE
        return self.step

    def run(self) -> bool:
        """Advance until done; False when the page is still executed on and the reclaim waits."""
        while self.step is not ReclaimStep.DONE:
            before = self.step
            if self.advance() is before:
                return False
        return True

    def abandon(self) -> None:
        """Before anything was detached, go back to the old world; afterwards only forward is legal."""
        if self.step > ReclaimStep.DETACH:
            raise RuntimeError(f"reclaim of page {self.page} has detached its entries: run it to the end")
        for entry in self._entries:
            entry.frozen = False
        if self.pool.state(self.page) is PageState.RECLAIMING:
            self.pool.mark_reclaiming(self.page, False)
        self._entries = ()
        self.step = ReclaimStep.FREEZE
