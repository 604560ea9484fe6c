"""Conv lines in slots of slab pages: `line = slots_per_page * page + slot` (docs/paper.md, S2).

That is where a slot divides its page.  A tight slot, or one of a page that is no power of two, does not, and
lines of two pages are no whole slots apart: they are counted in the largest unit of bytes that divides both,
`line = page_units * page + slot_units * slot`.  A kernel finds any line by one product and knows no slots.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from sglang_hybrid.pools.pages import IntegrityError

NO_LINE = -1
"""No conv state.  Tested before use, so that a missing entry never aliases page 0."""


class SlabLines:
    """Which slots of which slab pages are taken.  Pages come from and go back to the caller.

    The fullest slab that has room is filled first, so that slabs empty out and can be given back.
    """

    def __init__(self, slots_per_page: int, *, page_units: int | None = None, slot_units: int = 1) -> None:
        self.slots_per_page = slots_per_page
        self.page_units = slots_per_page if page_units is None else page_units
        self.slot_units = slot_units
        self.on_line_free: Callable[[int], None] | None = None
        """Called with each line that becomes free though its slab may stay; tests poison its bytes."""
        self.reset()

    def reset(self) -> None:
        self._free: dict[int, list[int]] = {}
        """Slab page -> its free slots; a full slab stays in with an empty list."""
        self._by_room: list[dict[int, None]] = [{} for _ in range(self.slots_per_page + 1)]
        """Free slot count -> slabs, in order of arrival: deterministic across ranks."""
        self._room = 0

    @property
    def slabs(self) -> int:
        return len(self._free)

    @property
    def lines(self) -> int:
        """Lines in use."""
        return self.slabs * self.slots_per_page - self.room

    @property
    def room(self) -> int:
        """Lines that fit without a further slab."""
        return self._room

    def pages(self) -> Iterable[int]:
        """All slab pages."""
        return self._free.keys()

    def occupancy(self) -> float:
        """Share of the slots of all slabs that hold a conv state; 1.0 when there is no slab."""
        return self.lines / (self.slabs * self.slots_per_page) if self._free else 1.0

    def page_of(self, line: int) -> int:
        """The slab page that a line lies on."""
        return line // self.page_units

    def free_slots(self, page: int) -> int:
        """Free slots of a slab page; 0 when the page is no slab."""
        return len(self._free.get(page, ()))

    def take(self, closed: Container[int] = ()) -> int | None:
        """A line of the fullest slab with room that is not closed; None when a new slab is needed."""
        for count in range(1, self.slots_per_page + 1):
            for page in self._by_room[count]:
                if page in closed:
                    continue
                slot = self._free[page].pop()
                self._moved(page, count, count - 1)
                self._room -= 1
                return page * self.page_units + slot * self.slot_units
        return None

    def add_slab(self, page: int) -> None:
        if page in self._free:
            raise IntegrityError(f"page {page} is a slab already")
        self._free[page] = list(range(self.slots_per_page - 1, -1, -1))
        self._by_room[self.slots_per_page][page] = None
        self._room += self.slots_per_page

    def give_back(self, line: int) -> int | None:
        """Free a line; returns the slab page when that was its last one and the slab is gone."""
        page = self.page_of(line)
        slot, between = divmod(line - page * self.page_units, self.slot_units)
        slots = self._free.get(page)
        if between or slots is None or slot in slots or slot >= self.slots_per_page:
            raise IntegrityError(f"conv line {line} (page {page}, slot {slot}) is not in use")
        slots.append(slot)
        self._moved(page, len(slots) - 1, len(slots))
        self._room += 1
        if self.on_line_free is not None:
            self.on_line_free(line)
        if len(slots) < self.slots_per_page:
            return None
        del self._by_room[self.slots_per_page][page]
        del self._free[page]
        self._room -= self.slots_per_page
        return page

    def _moved(self, page: int, before: int, after: int) -> None:
        del self._by_room[before][page]
        self._by_room[after][page] = None

    def check_integrity(self) -> None:
        for page, slots in self._free.items():
            if len(set(slots)) != len(slots):
                raise IntegrityError(f"slab {page} has a slot twice in its free list: {slots}")
            if page not in self._by_room[len(slots)]:
                raise IntegrityError(f"slab {page} has {len(slots)} free slots but is filed elsewhere")
            if len(slots) == self.slots_per_page:
                raise IntegrityError(f"slab {page} has no line left and was not given back")
        if sum(len(slabs) for slabs in self._by_room) != len(self._free):
            raise IntegrityError("a slab is filed twice")
        free = sum(len(slots) for slots in self._free.values())
        if free != self._room:
            raise IntegrityError(f"{free} slots are free in all slabs, the counter says {self._room}")
