"""S0, S1 and S2: one pool of equal pages for attention and recurrent state (docs/paper.md)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from math import gcd
from typing import Any

from sglang_hybrid.geometry import (
    CONV_SLOTS,
    LEAST_PIECES,
    GeometryError,
    ModelGeometry,
    PageGeometry,
    arena_pages,
    block_bytes,
    ceil_div,
    coarse_page_bytes,
    conv_slot_bytes,
)
from sglang_hybrid.ledger import CoarseAccount, PackedAccount, PagedAccount
from sglang_hybrid.pools.option import Option, among
from sglang_hybrid.pools.organization import (
    EITHER,
    ONE_CHECKPOINT,
    Checkpoint,
    Layout,
    Need,
    Organization,
    Relief,
    counted,
    part_of,
)
from sglang_hybrid.pools.pages import IntegrityError, PagePool, PageState
from sglang_hybrid.pools.slabs import NO_LINE, SlabLines


class SharedPool(Organization):
    """One pool of pages; an attention block is one page, a checkpoint one or several."""

    page_bytes: int

    def __init__(self, model: ModelGeometry, grid: int, budget_bytes: int, page_bytes: int) -> None:
        super().__init__(model, grid, budget_bytes)
        self.unit_tokens = grid
        self.page_bytes = page_bytes
        self.slots_per_unit = page_bytes // model.kv_row_bytes
        pages = arena_pages(model, page_bytes, budget_bytes) - 1
        smallest = 1 + self.pages_for(SMALLEST)
        if pages + 1 < smallest:
            raise GeometryError(
                f"--hybrid-budget-bytes {budget_bytes} gives {max(pages + 1, 0)} pages of {page_bytes} bytes "
                f"in {model.arenas} arenas; {self.name} at grid {grid} needs at least {smallest}: use "
                f"{smallest * page_bytes * model.arenas} or more"
            )
        self._pool = PagePool(pages)

    def pages_for(self, need: Need) -> int:
        """Pages that the need takes from an empty pool."""
        return need.units + self.unit_equivalent(need.checkpoints)

    @property
    def unit_pool(self) -> PagePool:
        return self._pool

    @property
    def state_pool(self) -> PagePool:
        return self._pool

    @property
    def checkpoint_bytes(self) -> int:
        return self.unit_equivalent(1) * self.page_bytes

    def fits(self, need: Need) -> bool:
        return self.pages_for(need) <= self._pool.free

    def could_fit(self, need: Need) -> bool:
        return self.pages_for(need) <= self._pool.reclaimable

    def could_fit_after(self, need: Need, returned: Need) -> bool:
        return self.pages_for(need) <= self._pool.reclaimable + self.pages_for(returned)

    def capacity_fits(self, need: Need) -> bool:
        return self.pages_for(need) <= self._pool.size

    def relief(self, need: Need) -> Relief:
        return EITHER

    def token_capacity(self) -> int:
        return self._pool.size * self.unit_tokens

    def share(self, part: float) -> Need:
        return Need(units=part_of(part, self._pool.size))

    def displaced(self, checkpoints: int) -> Need:
        # In pages: asked for as checkpoints, each could cost S2 a slab, and these have theirs.
        return Need(units=self.unit_equivalent(checkpoints))

    def units_free(self) -> int:
        return self._pool.free

    def units_reclaimable(self) -> int:
        return self._pool.reclaimable

    def checkpoint_place(self) -> str:
        return counted(self.unit_equivalent(1), "page")

    def block_place(self) -> str:
        return counted(self.units_per_block, "page")

    def layout(self) -> Layout:
        pages = self._pool.size + 1
        lines, line_bytes, line_offset = self.conv_lines(pages)
        return Layout(
            kv_pages=pages,
            kv_page_bytes=self.page_bytes,
            state_pages=pages,
            state_page_bytes=self.page_bytes,
            members=self.members,
            lines=lines,
            line_bytes=line_bytes,
            line_offset=line_offset,
            shared=True,
        )

    @abstractmethod
    def conv_lines(self, pages: int) -> tuple[int, int, int]:
        """(number of conv lines, bytes between two, offset of the first) in an arena."""


SMALLEST = Need(units=LEAST_PIECES, checkpoints=LEAST_PIECES)
"""Least that serves a hit: two blocks, the live state and the checkpoint that it starts from."""


class CoarsePages(SharedPool):
    """S0: every object takes one page of checkpoint size, rounded up to whole KV rows."""

    name = "S0"
    summary = "a page holds a whole checkpoint of a layer"
    prices = CoarseAccount
    dense_slots = False
    """A page holds more rows than the block on it."""
    members = 1

    def __init__(self, model: ModelGeometry, grid: int, budget_bytes: int) -> None:
        super().__init__(model, grid, budget_bytes, coarse_page_bytes(model, grid))

    def unit_equivalent(self, checkpoints: int) -> int:
        return checkpoints

    def take_checkpoint(self) -> Checkpoint | None:
        pages = self._pool.allocate(1)
        return None if pages is None else Checkpoint(tuple(pages), pages[0], tuple(pages))

    def conv_lines(self, pages: int) -> tuple[int, int, int]:
        return pages, self.page_bytes, self.model.stripes * self.model.ssm_bytes


class PagedCheckpoints(SharedPool):
    """S1: paging inside the checkpoint, with one dedicated conv page."""

    name = "S1"
    summary = "a page is one attention block, a checkpoint takes several"
    prices = PagedAccount

    def __init__(self, model: ModelGeometry, grid: int, budget_bytes: int) -> None:
        page_bytes = block_bytes(model, grid)
        pages = PageGeometry(model, page_bytes)
        self.members, self.conv_pages = pages.members, pages.conv_pages
        super().__init__(model, grid, budget_bytes, page_bytes)

    def unit_equivalent(self, checkpoints: int) -> int:
        return checkpoints * (self.members + self.conv_pages)

    def take_checkpoint(self) -> Checkpoint | None:
        pages = self._pool.allocate(self.members + self.conv_pages)
        if pages is None:
            return None
        line = pages[-1] if self.conv_pages else NO_LINE
        return Checkpoint(tuple(pages[: self.members]), line, tuple(pages))

    def conv_lines(self, pages: int) -> tuple[int, int, int]:
        return pages, self.page_bytes, 0


class PackedConv(SharedPool):
    """S2: as S1, but conv lines share slab pages (`pools.slabs`), of which `tight` slots waste less."""

    name = "S2"
    summary = "like S1, with conv states packed in slabs"
    prices = PackedAccount
    options = (Option("conv_slots", CONV_SLOTS[0], among(CONV_SLOTS), elsewhere="only S2 packs conv states"),)

    @classmethod
    def settled(cls, model: ModelGeometry, grid: int) -> dict[str, tuple[Any, str]]:
        """Tight slots where more of them go on a page: the same bytes, nothing to lose."""
        page = PageGeometry(model, block_bytes(model, grid))

        def count(slots: str) -> int:
            try:
                return page.slots_per_page(conv_slot_bytes(model, slots))
            except GeometryError:
                return 0

        whole, tight = map(count, CONV_SLOTS)
        why = (
            f"a slab page takes {tight} conv lines of {model.conv_line_bytes / 1024:g} KiB in tight slots "
            f"and {whole} in slots of a power of two (ledger)"
        )
        return {"conv_slots": (CONV_SLOTS[tight > whole], why)}

    def __init__(
        self, model: ModelGeometry, grid: int, budget_bytes: int, *, conv_slots: str = CONV_SLOTS[0]
    ) -> None:
        page_bytes = block_bytes(model, grid)
        pages = PageGeometry(model, page_bytes)
        self.slot_bytes = conv_slot_bytes(model, conv_slots)
        self._line_bytes = gcd(self.slot_bytes, page_bytes)
        self.slabs = SlabLines(
            pages.slots_per_page(self.slot_bytes),
            page_units=page_bytes // self._line_bytes,
            slot_units=self.slot_bytes // self._line_bytes,
        )
        self.members = pages.members
        super().__init__(model, grid, budget_bytes, page_bytes)

    def unit_equivalent(self, checkpoints: int) -> int:
        # One slab counted whole: what is left of it is charged, never promised.
        return checkpoints * self.members + ceil_div(checkpoints, self.slabs.slots_per_page)

    @property
    def checkpoint_bytes(self) -> int:
        return self.members * self.page_bytes + self.slot_bytes

    @property
    def idle_slab_bytes(self) -> int:
        return self.slabs.slabs * self.page_bytes - self.slabs.lines * self.slot_bytes

    @property
    def line_room(self) -> int:
        return self.slabs.room

    @property
    def slab_occupancy(self) -> float:
        return self.slabs.occupancy()

    def watch_lines(self, freed: Callable[[int], None]) -> None:
        self.slabs.on_line_free = freed

    def checkpoint_place(self) -> str:
        slots = self.slabs.slots_per_page
        return f"{counted(self.members, 'page')} and one of the {slots} conv slots of another"

    def fits(self, need: Need) -> bool:
        units, checkpoints = need
        if not checkpoints:
            return units <= self._pool.free
        room = self.slabs.room
        if self._pool.reclaims:
            # A slab under reclaim takes no more lines: it would never empty.
            room -= sum(self.slabs.free_slots(page) for page in self._pool.reclaims)
        slabs = ceil_div(checkpoints - room, self.slabs.slots_per_page) if checkpoints > room else 0
        return units + checkpoints * self.members + slabs <= self._pool.free

    def could_fit(self, need: Need) -> bool:
        if self.fits(need):
            return True
        # The fullest slab may be one that eviction would have dissolved, so each checkpoint can cost a
        # page beside its members; only the last needs no more than a line that is there or idle.
        spare = self._pool.reclaimable - need.units - need.checkpoints * self.members
        if spare >= need.checkpoints:
            return True
        return 0 <= spare == need.checkpoints - 1 and self._has_lines(need.checkpoints)

    def could_fit_after(self, need: Need, returned: Need) -> bool:
        # Lines that are let go may lie in slabs that others keep: no page comes of them.
        pages = self._pool.reclaimable + returned.units + returned.checkpoints * self.members
        return need.units + need.checkpoints * (self.members + 1) <= pages

    def _has_lines(self, count: int) -> bool:
        """Whether executed slabs have this many lines that are free, or would be after eviction."""
        for page in self.slabs.pages():
            if self._pool.state(page) is PageState.HELD:
                idle = sum(not entry.references for entry in self._entries(page))
                count -= self.slabs.free_slots(page) + idle
                if count <= 0:
                    return True
        return False

    def _entries(self, page: int) -> Iterator[Checkpoint]:
        return (entry for entry in self._pool.dependents(page) if isinstance(entry, Checkpoint))

    def take_checkpoint(self) -> Checkpoint | None:
        if not self.fits(ONE_CHECKPOINT):
            return None
        line = self.slabs.take(self._pool.reclaims)
        if line is None:
            (slab,) = self._pool.allocate(1) or [0]
            self.slabs.add_slab(slab)
            line = self.slabs.take(self._pool.reclaims)
            assert line is not None
        else:
            slab = self.slabs.page_of(line)
            self._pool.hold((slab,))
        members = self._pool.allocate(self.members)
        assert members is not None
        return Checkpoint(tuple(members), line, (*members, slab))

    def dispose(self, checkpoint: Checkpoint) -> None:
        self.slabs.give_back(checkpoint.line)

    def details(self) -> dict[str, int | float]:
        """Packing: allocation history leaves slabs half full, so their occupancy is a figure of its own."""
        return {
            "slot_bytes": self.slot_bytes,
            "slots_per_page": self.slabs.slots_per_page,
            "slabs": self.slabs.slabs,
            "slab_occupancy": self.slab_occupancy,
        }

    def conv_lines(self, pages: int) -> tuple[int, int, int]:
        # The last line ends with the last slot, not with the last unit.
        return pages * self.slabs.page_units - self.slabs.slot_units + 1, self._line_bytes, 0

    def reset(self) -> None:
        super().reset()
        self.slabs.reset()

    def check_integrity(self) -> None:
        super().check_integrity()
        self.slabs.check_integrity()
        if self.slabs.lines != self.checkpoints_allocated:
            raise IntegrityError(
                f"{self.slabs.lines} conv lines are in use by {self.checkpoints_allocated} checkpoints"
            )
        for page in self.slabs.pages():
            if not self._pool.references(page) and not self._pool.wanted(page):
                raise IntegrityError(f"slab {page} has lines in use, but nobody holds or wants the page")
