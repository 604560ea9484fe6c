"""D0: native dual pools, 16-token attention units and whole checkpoints (docs/paper.md)."""

from __future__ import annotations

from typing import Any

from sglang_hybrid.geometry import DEFAULT_ATTENTION_SHARE as DEFAULT_ATTENTION_SHARE
from sglang_hybrid.geometry import UNIT_TOKENS as UNIT_TOKENS
from sglang_hybrid.geometry import (
    GeometryError,
    ModelGeometry,
    block_bytes,
    check_unit_grid,
    dual_least,
    dual_pages,
    dual_shares,
    dual_starts,
    native_grid,
    whole_rows_bytes,
)
from sglang_hybrid.ledger import DualAccount
from sglang_hybrid.pools.option import Option
from sglang_hybrid.pools.organization import Checkpoint, Layout, Need, Organization, Relief, counted, part_of
from sglang_hybrid.pools.pages import PagePool


def _one_pool(value: Any) -> str | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and 0 < value < 1:
        return None
    return f"{value!r} leaves D0 one pool: use a value between 0 and 1, like 0.5."


class DualPools(Organization):
    """Two pools sized at start; free space on one side cannot serve the other."""

    name = "D0"
    summary = "two pools split at start"
    prices = DualAccount
    options = (
        Option(
            "attention_share",
            DEFAULT_ATTENTION_SHARE,
            _one_pool,
            elsewhere="attention and state share one pool",
            tried=(0.35, 0.5, 0.65),
            splits=True,
        ),
    )
    fixed_page = UNIT_TOKENS
    usual_grid = None
    members = 1

    @classmethod
    def default_grid(cls, model: ModelGeometry, chunk: int, **options: Any) -> int:
        return native_grid(model, UNIT_TOKENS, chunk)

    def __init__(
        self,
        model: ModelGeometry,
        grid: int,
        budget_bytes: int,
        *,
        attention_share: float = DEFAULT_ATTENTION_SHARE,
    ) -> None:
        super().__init__(model, grid, budget_bytes)
        check_unit_grid(grid)
        self.unit_tokens = self.slots_per_unit = UNIT_TOKENS
        self.attention_share = attention_share
        self._unit_bytes = block_bytes(model, UNIT_TOKENS)
        # Whole KV rows, so that both kinds of buffers are aligned alike.
        self._state_bytes = whole_rows_bytes(model, model.checkpoint_bytes)
        units, checkpoints = (pages - 1 for pages in dual_pages(model, budget_bytes, attention_share))
        if not dual_starts(model, grid, budget_bytes, attention_share):
            raise GeometryError(self._too_small(max(units, 0), max(checkpoints, 0)))
        self._units = PagePool(units)
        self._states = PagePool(checkpoints)

    def _too_small(self, units: int, checkpoints: int) -> str:
        """Both sides' numbers, and what would do: a budget at this share, shares at this budget."""
        share, budget = self.attention_share, self.budget_bytes
        least = Need(*dual_least(self.grid))
        least_units = (least.units + 1) * self._unit_bytes / share
        least_states = (least.checkpoints + 1) * self._state_bytes / (1 - share)
        shares = dual_shares(self.model, self.grid, budget)
        other = f", or --hybrid-attention-share from {shares[0]} to {shares[1]}" if shares else ""
        return (
            f"--hybrid-budget-bytes {budget} at --hybrid-attention-share {share} gives D0 {units} units and "
            f"{checkpoints} checkpoints; it needs at least {least.units} and {least.checkpoints}: use "
            f"{self.model.arenas * (1 + int(max(least_units, least_states)))} or more{other}"
        )

    @property
    def unit_pool(self) -> PagePool:
        return self._units

    @property
    def state_pool(self) -> PagePool:
        return self._states

    @property
    def checkpoint_bytes(self) -> int:
        return self._state_bytes

    def fits(self, need: Need) -> bool:
        return need.units <= self._units.free and need.checkpoints <= self._states.free

    def could_fit(self, need: Need) -> bool:
        return need.units <= self._units.reclaimable and need.checkpoints <= self._states.reclaimable

    def could_fit_after(self, need: Need, returned: Need) -> bool:
        return (
            need.units <= self._units.reclaimable + returned.units
            and need.checkpoints <= self._states.reclaimable + returned.checkpoints
        )

    def capacity_fits(self, need: Need) -> bool:
        return need.units <= self._units.size and need.checkpoints <= self._states.size

    def relief(self, need: Need) -> Relief:
        return Relief(units=need.units > self._units.free, checkpoints=need.checkpoints > self._states.free)

    def token_capacity(self) -> int:
        return self._units.size * self.unit_tokens

    def unit_equivalent(self, checkpoints: int) -> int:
        return 0

    def share(self, part: float) -> Need:
        return Need(part_of(part, self._units.size), part_of(part, self._states.size))

    def displaced(self, checkpoints: int) -> Need:
        return Need(checkpoints=checkpoints)

    def units_free(self) -> int:
        return self._units.free

    def units_reclaimable(self) -> int:
        return self._units.reclaimable

    def take_checkpoint(self) -> Checkpoint | None:
        pages = self._states.allocate(1)
        return None if pages is None else Checkpoint(tuple(pages), pages[0], tuple(pages))

    def details(self) -> dict[str, int | float]:
        """The split: of the bytes, and in pieces of both pools."""
        return {
            "attention_share": self.attention_share,
            "units_total": self._units.size,
            "units_free": self._units.free,
            "checkpoints_total": self._states.size,
            "checkpoints_free": self._states.free,
        }

    def checkpoint_place(self) -> str:
        return "1 state page"

    def block_place(self) -> str:
        return counted(self.units_per_block, "unit")

    def layout(self) -> Layout:
        return Layout(
            kv_pages=self._units.size + 1,
            kv_page_bytes=self._unit_bytes,
            state_pages=self._states.size + 1,
            state_page_bytes=self._state_bytes,
            members=1,
            lines=self._states.size + 1,
            line_bytes=self._state_bytes,
            line_offset=self.model.stripes * self.model.ssm_bytes,
            shared=False,
        )
