"""Pages of one pool: who holds them, who wants them, what depends on them (docs/architecture.md).

Two counts decide a page's state.  *References* are execution references: a running forward may
read or write the page.  *Wanted* counts the lookup's entries on it.  A page with neither is free.
`dependents` is the reverse index: page -> the lookup entries that are lost with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from sglang_hybrid.pools.reclaim import Reclaim

SINK_PAGE = 0
"""Page 0 is never allocated: padding rows write there and nothing is read from it."""


class IntegrityError(AssertionError):
    """Bookkeeping contradicts itself; the message names the page or entry and both sides."""


class PageState(IntEnum):
    FREE = 0
    HELD = 1
    CACHED = 2
    RECLAIMING = 3


FREE, HELD, CACHED, RECLAIMING = PageState
"""Bound here: to find a member in its class takes longer than to look at a page."""


class PageCounts(NamedTuple):
    free: int
    held: int
    cached: int
    reclaiming: int


class Entry(Protocol):
    """What the lookup keeps on pages: an attention block or a checkpoint."""

    frozen: bool

    def detach(self) -> None:
        """Leave the lookup.  Idempotent: a reclaim that was interrupted calls it again."""


class PagePool:
    """Bookkeeping of pages 1..size; page ids index an arena, which this class never sees."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one page, got {size}")
        self.size = size
        self.on_free: Callable[[int], None] | None = None
        """Called with each page that becomes free; engine tests poison its bytes."""
        self.reset()

    def reset(self) -> None:
        """Forget everything: all pages free."""
        self._free = list(range(self.size, 0, -1))
        self._references = [0] * (self.size + 1)
        self._wanted = [0] * (self.size + 1)
        self.reclaims: dict[int, Reclaim] = {}
        """Open transactions by page: none is lost, and no page is under two."""
        self._dependents: list[tuple[Entry, ...]] = [()] * (self.size + 1)
        self._counts = [self.size, 0, 0, 0]

    @property
    def counts(self) -> PageCounts:
        return PageCounts(*self._counts)

    @property
    def free(self) -> int:
        return self._counts[FREE]

    @property
    def reclaimable(self) -> int:
        """Pages that are free or would be after evicting all that nobody executes on."""
        ready = self._counts[FREE] + self._counts[CACHED]
        if self.reclaims:
            ready += sum(not self._references[page] for page in self.reclaims)
        return ready

    def state(self, page: int) -> PageState:
        if page in self.reclaims:
            return RECLAIMING
        if self._references[page]:
            return HELD
        return CACHED if self._wanted[page] else FREE

    def references(self, page: int) -> int:
        return self._references[page]

    def wanted(self, page: int) -> int:
        return self._wanted[page]

    def nobodys(self, pages: Iterable[int]) -> int:
        """How many of these have neither references nor entries."""
        references, wanted = self._references, self._wanted
        return sum([not references[page] and not wanted[page] for page in pages])

    def dependents(self, page: int) -> Sequence[Entry]:
        """Lookup entries that are lost when this page is reassigned."""
        return self._dependents[page]

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one execution reference each; all or nothing."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        for page in pages:
            self._references[page] = 1
        self._counts[FREE] -= count
        self._counts[HELD] += count
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Add an execution reference to each page; they must be held or wanted already."""
        references = self._references
        for page in pages:
            if references[page]:
                references[page] += 1  # held, or under reclaim and executed on: that does not change
                continue
            if page not in self.reclaims:
                if not self._wanted[page]:
                    raise IntegrityError(f"page {page} is free and cannot be held")
                self._counts[CACHED] -= 1
                self._counts[HELD] += 1
            references[page] = 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop an execution reference from each page; a page that nobody wants becomes free."""
        references = self._references
        for page in pages:
            count = references[page]
            if count > 1:
                references[page] = count - 1
                continue
            if count < 1:
                raise IntegrityError(f"page {page} is released but has no execution reference")
            references[page] = 0
            if page not in self.reclaims:
                self._counts[HELD] -= 1
                if self._wanted[page]:
                    self._counts[CACHED] += 1
                else:
                    self._freed(page)

    def want(self, pages: Sequence[int], entry: Entry) -> None:
        """The lookup gains `entry` on these pages; on a page under reclaim it is frozen from the start."""
        references, wanted, dependents = self._references, self._wanted, self._dependents
        if self.reclaims and not self.reclaims.keys().isdisjoint(pages):
            entry.frozen = True
        alone = (entry,)
        for page in pages:
            if wanted[page]:
                dependents[page] += alone
            elif references[page] or page in self.reclaims:
                dependents[page] = alone
            else:
                raise IntegrityError(f"page {page} is free and cannot be cached")
            wanted[page] += 1  # its state stays: held, cached or under reclaim

    def pass_on(self, pages: Iterable[int], before: Entry, after: Entry) -> None:
        """`after` takes the place of `before` in the reverse index."""
        for page in pages:
            entries = self._dependents[page]
            self._dependents[page] = tuple([after if entry is before else entry for entry in entries])

    def unwant(self, pages: Iterable[int], entry: Entry) -> None:
        """The lookup has lost `entry`: clear the reverse relation, free what nobody else has."""
        dependents, wanted, references = self._dependents, self._wanted, self._references
        for page in pages:
            entries = dependents[page]
            if entry not in entries:
                continue  # already cleared by the reclaim that this call resumes
            left = wanted[page] = wanted[page] - 1
            dependents[page] = tuple([other for other in entries if other is not entry]) if left else ()
            # Held, or under reclaim: that does not change.
            if not left and not references[page] and page not in self.reclaims:
                self._counts[CACHED] -= 1
                self._freed(page)

    def open_reclaim(self, page: int, reclaim: Reclaim) -> None:
        """Enter RECLAIMING; a page never becomes free while it is in that state."""
        before = self.state(page)
        if before in (FREE, RECLAIMING):
            raise IntegrityError(f"page {page} is {before.name} and cannot be reclaimed")
        self.reclaims[page] = reclaim
        self._moved(page, before)

    def close_reclaim(self, page: int) -> None:
        """Leave RECLAIMING: what nobody executes on or wants becomes free."""
        before = self.state(page)
        del self.reclaims[page]
        self._moved(page, before)

    def _moved(self, page: int, before: PageState) -> None:
        after = self.state(page)
        if after is before:
            return
        self._counts[before] -= 1
        if after is FREE:
            self._freed(page)
        else:
            self._counts[after] += 1

    def _freed(self, page: int) -> None:
        self._counts[FREE] += 1
        self._free.append(page)
        if self.on_free is not None:
            self.on_free(page)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless counts, free list and reverse index agree."""
        tally = [0, 0, 0, 0]
        for page in range(1, self.size + 1):
            tally[self.state(page)] += 1
            if len(self._dependents[page]) != self._wanted[page]:
                raise IntegrityError(
                    f"page {page} is wanted {self._wanted[page]} times but "
                    f"{len(self._dependents[page])} entries depend on it"
                )
        if tally != self._counts:
            raise IntegrityError(f"page states {tally} do not match the counts {self._counts}")
        if sum(tally) != self.size:
            raise IntegrityError(f"{sum(tally)} pages counted, the pool has {self.size}")
        free = set(self._free)
        if len(free) != len(self._free):
            raise IntegrityError("a page is twice in the free list")
        if len(free) != tally[FREE]:
            raise IntegrityError(f"{len(free)} pages in the free list, {tally[0]} are free")
        for page in free:
            if self.state(page) is not FREE:
                raise IntegrityError(f"page {page} is in the free list and {self.state(page).name}")
