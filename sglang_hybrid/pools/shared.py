"""S0, S1 and S2: one pool of equal pages for attention and recurrent state (PAPER.md)."""

from __future__ import annotations

from abc import abstractmethod

from sglang_hybrid.geometry import (
    GeometryError,
    ModelGeometry,
    PageGeometry,
    block_bytes,
    ceil_div,
    conv_slot_bytes,
    packs_conv,
)
from sglang_hybrid.pools.organization import Checkpoint, Layout, Need, Organization, Relief
from sglang_hybrid.pools.pages import PagePool, PageState
from sglang_hybrid.pools.slabs import SlabLines


class SharedPool(Organization):
    """One pool of pages; an attention block is one page, a checkpoint one or several."""

    page_bytes: int

    def __init__(self, model: ModelGeometry, grid: int, budget_bytes: int, page_bytes: int) -> None:
        super().__init__(model, budget_bytes)
        self.grid = grid
        self.unit_tokens = grid
        self.page_bytes = page_bytes
        self.slots_per_unit = page_bytes // model.kv_row_bytes
        # The sink page is paid from the budget: it is memory like any other.
        pages = budget_bytes // (page_bytes * model.arenas) - 1
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

    def fits(self, need: Need) -> bool:
        return self.pages_for(need) <= self._pool.free

    def could_fit(self, need: Need) -> bool:
        return self.pages_for(need) <= self._pool.reclaimable

    def capacity_fits(self, need: Need) -> bool:
        return self.pages_for(need) <= self._pool.size

    def relief(self, need: Need) -> Relief:
        return Relief(units=True, checkpoints=True)

    def token_capacity(self) -> int:
        return self._pool.size * self.unit_tokens

    def units_free(self) -> int:
        return self._pool.free

    def units_reclaimable(self) -> int:
        return self._pool.reclaimable

    def layout(self) -> Layout:
        pages = self._pool.size + 1
        lines, line_bytes, line_offset = self._lines(pages)
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
    def _lines(self, pages: int) -> tuple[int, int, int]:
        """(number of conv lines, bytes between two, offset of the first) in an arena."""


SMALLEST = Need(units=2, checkpoints=2)
"""Least that serves a request: its block and one for rounding, its live state and a hit's checkpoint."""


class CoarsePages(SharedPool):
    """S0: every object takes one page of checkpoint size, rounded up to whole KV rows."""

    name = "S0"
    members = 1

    def __init__(self, model: ModelGeometry, grid: int, budget_bytes: int) -> None:
        # A checkpoint smaller than a block cannot shrink the page: it must hold either.
        rows = max(grid, ceil_div(model.checkpoint_bytes, model.kv_row_bytes))
        super().__init__(model, grid, budget_bytes, rows * model.kv_row_bytes)

    def unit_equivalent(self, checkpoints: int) -> int:
        return checkpoints

    def _take_checkpoint(self) -> Checkpoint | None:
        pages = self._pool.allocate(1)
        return None if pages is None else Checkpoint(tuple(pages), pages[0], tuple(pages))

    def _lines(self, pages: int) -> tuple[int, int, int]:
        return pages, self.page_bytes, self.model.stripes * self.model.ssm_bytes


class PagedCheckpoints(SharedPool):
    """S1: paging inside the checkpoint, with one dedicated conv page."""

    name = "S1"

    def __init__(self, model: ModelGeometry, grid: int, budget_bytes: int) -> None:
        page_bytes = block_bytes(model, grid)
        self.members = PageGeometry(model, page_bytes).members
        if model.conv_line_bytes > page_bytes:
            rows = ceil_div(model.conv_line_bytes, model.kv_row_bytes)
            raise GeometryError(
                f"a conv line of {model.conv_line_bytes} bytes does not fit a page of {page_bytes} "
                f"(--hybrid-grid {grid}): use --hybrid-grid {rows} or larger"
            )
        super().__init__(model, grid, budget_bytes, page_bytes)

    def unit_equivalent(self, checkpoints: int) -> int:
        return checkpoints * (self.members + 1)

    def _take_checkpoint(self) -> Checkpoint | None:
        pages = self._pool.allocate(self.members + 1)
        return None if pages is None else Checkpoint(tuple(pages[:-1]), pages[-1], tuple(pages))

    def _lines(self, pages: int) -> tuple[int, int, int]:
        return pages, self.page_bytes, 0


class PackedConv(SharedPool):
    """S2: as S1, but conv lines share slab pages: line = slots_per_page * page + slot."""

    name = "S2"

    def __init__(self, model: ModelGeometry, grid: int, budget_bytes: int, *, tight: bool = False) -> None:
        page_bytes = block_bytes(model, grid)
        self.members = PageGeometry(model, page_bytes).members
        self.slot_bytes = conv_slot_bytes(model, tight=tight)
        if not packs_conv(self.slot_bytes, page_bytes):
            rows = ceil_div(4 * self.slot_bytes, model.kv_row_bytes)
            raise GeometryError(
                f"S2 does not pack a conv line of {model.conv_line_bytes} bytes: its slot of "
                f"{self.slot_bytes} is more than a quarter of a page of {page_bytes} (--hybrid-grid {grid}); "
                f"use --hybrid-mem S1, or --hybrid-grid {rows} or larger"
            )
        self.slabs = SlabLines(page_bytes // self.slot_bytes)
        super().__init__(model, grid, budget_bytes, page_bytes)

    def unit_equivalent(self, checkpoints: int) -> int:
        # One slab counted whole: what is left of it is charged, never promised.
        return checkpoints * self.members + ceil_div(checkpoints, self.slabs.slots_per_page)

    def _pages_beside(self, need: Need, room: int) -> int:
        """Pages for the need when `room` lines are there already."""
        slabs = ceil_div(max(0, need.checkpoints - room), self.slabs.slots_per_page)
        return need.units + need.checkpoints * self.members + slabs

    def fits(self, need: Need) -> bool:
        return self._pages_beside(need, self.slabs.room) <= self._pool.free

    def could_fit(self, need: Need) -> bool:
        # Room on a slab that eviction would dissolve is counted as its page, not as lines too.
        held = self._pool.state
        room = sum(count for page, count in self.slabs.pages_with_room() if held(page) is PageState.HELD)
        return self._pages_beside(need, room) <= self._pool.reclaimable

    def _take_checkpoint(self) -> Checkpoint | None:
        if not self.fits(Need(checkpoints=1)):
            return None
        line = self.slabs.take()
        if line is None:
            (slab,) = self._pool.allocate(1) or [0]
            self.slabs.add_slab(slab)
            line = self.slabs.take()
            assert line is not None
        else:
            slab = line // self.slabs.slots_per_page
            self._pool.hold((slab,))
        members = self._pool.allocate(self.members)
        assert members is not None
        return Checkpoint(tuple(members), line, (*members, slab))

    def _dispose(self, checkpoint: Checkpoint) -> None:
        self.slabs.give_back(checkpoint.line)

    def _lines(self, pages: int) -> tuple[int, int, int]:
        return pages * self.slabs.slots_per_page, self.slot_bytes, 0

    def reset(self) -> None:
        super().reset()
        self.slabs.reset()

    def check_integrity(self) -> None:
        super().check_integrity()
        self.slabs.check_integrity()
