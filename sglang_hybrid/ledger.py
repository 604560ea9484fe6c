"""What a demand costs in each organization, where the bytes go, and what a budget holds (docs/paper.md).

Bytes are those of one arena of one rank (docs/architecture.md, Page format; Falcon-H1: one layer), except in
`Capacity`, whose bytes are those of all arenas of the rank, as `--hybrid-budget-bytes` is.  Page
sizes, members, slots and splits come from `geometry`, where the pools take them from too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from sglang_hybrid.geometry import (
    CONV_SLOTS,
    DEFAULT_ATTENTION_SHARE,
    LEAST_PIECES,
    UNIT_TOKENS,
    ModelGeometry,
    PageGeometry,
    arena_pages,
    block_bytes,
    ceil_div,
    check_unit_grid,
    coarse_page_bytes,
    conv_slot_bytes,
    dual_pages,
    dual_starts,
    whole_rows_bytes,
)


class Demand(NamedTuple):
    """Attention tokens, the blocks that hold them at one grid, and checkpoints, all wanted together."""

    tokens: int
    blocks: int
    checkpoints: int

    @classmethod
    def of_blocks(cls, blocks: int, checkpoints: int, grid: int) -> Demand:
        """Full blocks."""
        return cls(blocks * grid, blocks, checkpoints)

    @classmethod
    def of_tokens(cls, tokens: int, grid: int) -> Demand:
        """One sequence with a checkpoint at every boundary that it reaches."""
        return cls(tokens, ceil_div(tokens, grid), tokens // grid)


class Waste(NamedTuple):
    """Bytes paid and not used, by kind."""

    attention_padding: int = 0
    """What pages are larger than their block."""
    attention_tail: int = 0
    """Tokens that the last block has room for and the demand does not fill."""
    member_rounding: int = 0
    """What the pages of a state are larger than it, conv apart."""
    conv_page: int = 0
    """What dedicated conv pages are larger than their line."""
    conv_slab: int = 0
    """What slabs, counted whole, are larger than their lines."""

    @property
    def checkpoint_rounding(self) -> int:
        """The paper's figure: members and conv page together."""
        return self.member_rounding + self.conv_page


class Cost(NamedTuple):
    """Bytes of a demand in an empty pool.  For D0 `attention` and `state` are its two demands."""

    attention: int
    state: int
    useful: int
    waste: Waste
    slabs: int = 0

    @property
    def total(self) -> int:
        return self.attention + self.state


class Capacity(NamedTuple):
    """What a budget becomes.  `pages` (D0: units) and D0's `checkpoints` leave the sinks out.

    `fits`: the demand, at once.  `holds`: how many times, at once.
    """

    budget_bytes: int
    used_bytes: int
    sink_bytes: int
    pages: int
    checkpoints: int | None
    fits: bool
    holds: int

    @property
    def lost_bytes(self) -> int:
        """Bytes of the budget that make no whole page."""
        return self.budget_bytes - self.used_bytes


def most(fits: Callable[[int], bool]) -> int:
    """Largest n with `fits(n)`, 0 when `fits(1)` is false already; once false it stays false."""
    high = 1
    while fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class Account(ABC):
    """Prices of one organization for one model and grid; its class names them (`Organization.prices`).

    Construction raises `GeometryError`, as the pool's does, when they do not go together, and takes the
    organization's own options by the same keywords.
    """

    page_bytes: int
    """An attention page: a block's, D0: a unit's."""
    conv_slot_bytes: int | None = None
    """Of a packed conv line; None where lines are not packed."""

    def __init__(self, model: ModelGeometry, grid: int) -> None:
        self.model = model
        self.grid = grid
        self.block_bytes = block_bytes(model, grid)

    @abstractmethod
    def cost(self, demand: Demand) -> Cost:
        """Bytes of the demand and where they go."""

    @abstractmethod
    def capacity(self, demand: Demand, budget_bytes: int) -> Capacity:
        """What the budget for all arenas becomes, and whether it holds the demand, which wants something."""

    def split(self, demand: Demand, capacity: Capacity) -> dict[str, Any]:
        """What a report adds where the budget is split between kinds; empty where it is not."""
        return {}

    def useful(self, demand: Demand) -> int:
        """Bytes that the demand would take if everything fitted exactly."""
        return demand.tokens * self.model.kv_row_bytes + demand.checkpoints * self.model.checkpoint_bytes

    def tail(self, demand: Demand) -> int:
        """Unfilled bytes of the last block."""
        return demand.blocks * self.block_bytes - demand.tokens * self.model.kv_row_bytes


class SharedAccount(Account):
    """One pool of equal pages."""

    @abstractmethod
    def state_pages(self, checkpoints: int) -> int:
        """Pages of this many checkpoints, taken together."""

    def priced(self, demand: Demand, waste: Waste, slabs: int = 0) -> Cost:
        state = self.state_pages(demand.checkpoints) * self.page_bytes
        return Cost(demand.blocks * self.page_bytes, state, self.useful(demand), waste, slabs)

    def capacity(self, demand: Demand, budget_bytes: int) -> Capacity:
        pages = arena_pages(self.model, self.page_bytes, budget_bytes)
        size = max(0, pages - 1)
        starts = LEAST_PIECES + self.state_pages(LEAST_PIECES) <= size

        def fits(times: int) -> bool:
            return starts and times * demand.blocks + self.state_pages(times * demand.checkpoints) <= size

        page = self.page_bytes * self.model.arenas
        return Capacity(budget_bytes, pages * page, min(1, pages) * page, size, None, fits(1), most(fits))


class CoarseAccount(SharedAccount):
    """S0: every object takes one page of checkpoint size."""

    def __init__(self, model: ModelGeometry, grid: int) -> None:
        super().__init__(model, grid)
        self.page_bytes = coarse_page_bytes(model, grid)

    def state_pages(self, checkpoints: int) -> int:
        return checkpoints

    def cost(self, demand: Demand) -> Cost:
        padding = demand.blocks * (self.page_bytes - self.block_bytes)
        rounding = demand.checkpoints * (self.page_bytes - self.model.checkpoint_bytes)
        return self.priced(demand, Waste(padding, self.tail(demand), rounding))


class MemberAccount(SharedAccount):
    """Pages of one attention block; a state takes several of them."""

    def __init__(self, model: ModelGeometry, grid: int) -> None:
        super().__init__(model, grid)
        self.page_bytes = self.block_bytes
        self.pages = PageGeometry(model, self.page_bytes)
        self.members = self.pages.members

    def _rounding(self, demand: Demand) -> int:
        """Unused bytes of the member pages."""
        states = self.model.stripes * self.model.ssm_bytes
        return demand.checkpoints * (self.members * self.page_bytes - states)


class PagedAccount(MemberAccount):
    """S1: member pages and a dedicated conv page."""

    def __init__(self, model: ModelGeometry, grid: int) -> None:
        super().__init__(model, grid)
        self.conv_pages = self.pages.conv_pages

    def state_pages(self, checkpoints: int) -> int:
        return checkpoints * (self.members + self.conv_pages)

    def cost(self, demand: Demand) -> Cost:
        conv = demand.checkpoints * (self.conv_pages * self.page_bytes - self.model.conv_line_bytes)
        return self.priced(demand, Waste(0, self.tail(demand), self._rounding(demand), conv_page=conv))


class PackedAccount(MemberAccount):
    """S2: conv lines in slots of slab pages."""

    def __init__(self, model: ModelGeometry, grid: int, *, conv_slots: str = CONV_SLOTS[0]) -> None:
        super().__init__(model, grid)
        self.conv_slot_bytes = conv_slot_bytes(model, conv_slots)
        self.slots = self.pages.slots_per_page(self.conv_slot_bytes)

    def slabs(self, checkpoints: int) -> int:
        """Least slab pages: allocation history can leave more, half full."""
        return ceil_div(checkpoints, self.slots)

    def state_pages(self, checkpoints: int) -> int:
        return checkpoints * self.members + self.slabs(checkpoints)

    def cost(self, demand: Demand) -> Cost:
        slabs = self.slabs(demand.checkpoints)
        conv = slabs * self.page_bytes - demand.checkpoints * self.model.conv_line_bytes
        waste = Waste(0, self.tail(demand), self._rounding(demand), conv_slab=conv)
        return self.priced(demand, waste, slabs)


class DualAccount(Account):
    """D0: units and whole checkpoints from two pools; feasible only when both sides are."""

    def __init__(
        self, model: ModelGeometry, grid: int, *, attention_share: float = DEFAULT_ATTENTION_SHARE
    ) -> None:
        super().__init__(model, grid)
        check_unit_grid(grid)
        self.attention_share = attention_share
        self.page_bytes = block_bytes(model, UNIT_TOKENS)
        self.state_bytes = whole_rows_bytes(model, model.checkpoint_bytes)

    def units(self, demand: Demand) -> int:
        return ceil_div(demand.tokens, UNIT_TOKENS)

    def cost(self, demand: Demand) -> Cost:
        attention, state = self.units(demand) * self.page_bytes, demand.checkpoints * self.state_bytes
        tail = attention - demand.tokens * self.model.kv_row_bytes
        rounding = state - demand.checkpoints * self.model.checkpoint_bytes
        return Cost(attention, state, self.useful(demand), Waste(0, tail, rounding))

    def capacity(self, demand: Demand, budget_bytes: int) -> Capacity:
        return self._capacity(demand, budget_bytes, self.attention_share)

    def _capacity(self, demand: Demand, budget_bytes: int, share: float) -> Capacity:
        units, states = dual_pages(self.model, budget_bytes, share)
        starts = dual_starts(self.model, self.grid, budget_bytes, share)

        def fits(times: int) -> bool:
            attention = times * self.units(demand) < units
            return starts and attention and times * demand.checkpoints < states

        def weigh(count: int, checkpoints: int) -> int:
            return self.model.arenas * (count * self.page_bytes + checkpoints * self.state_bytes)

        used, sink = weigh(units, states), weigh(min(1, units), min(1, states))
        free = max(0, units - 1), max(0, states - 1)
        return Capacity(budget_bytes, used, sink, *free, fits(1), most(fits))

    def split(self, demand: Demand, capacity: Capacity) -> dict[str, Any]:
        return {
            "checkpoints": capacity.checkpoints,
            "attention_share": self.attention_share,
            "feasible_shares": self.shares(demand, capacity.budget_bytes),
        }

    def shares(self, demand: Demand, budget_bytes: int) -> tuple[float, float] | None:
        """Least and largest attention share, in thousandths, at which the demand fits; None: at no share."""
        tried = [share / 1000 for share in range(1, 1000)]
        found = [share for share in tried if self._capacity(demand, budget_bytes, share).fits]
        return (found[0], found[-1]) if found else None


class BreakEven(NamedTuple):
    """S0 - S1 = `saved_per_block` x_A - `extra_per_checkpoint` x_R, in bytes."""

    saved_per_block: int
    extra_per_checkpoint: int

    @property
    def ratio(self) -> float | None:
        """S1 is cheaper when x_A / x_R is above this; None when blocks save nothing, so that it never is."""
        return self.extra_per_checkpoint / self.saved_per_block if self.saved_per_block else None


def break_even(model: ModelGeometry, grid: int) -> BreakEven:
    """Raises `GeometryError` when model and grid do not go together in S1."""
    coarse, paged = CoarseAccount(model, grid), PagedAccount(model, grid)
    extra = paged.state_pages(1) * paged.page_bytes - coarse.page_bytes
    return BreakEven(coarse.page_bytes - paged.page_bytes, extra)
