"""D0: native dual pools, 16-token attention units and whole checkpoints (PAPER.md)."""

from __future__ import annotations

from sglang_hybrid.geometry import GeometryError, ModelGeometry, ceil_div
from sglang_hybrid.pools.organization import Checkpoint, Layout, Need, Organization, Relief
from sglang_hybrid.pools.pages import PagePool
from sglang_hybrid.pools.shared import SMALLEST

UNIT_TOKENS = 16
"""Tokens of an attention unit."""

DEFAULT_ATTENTION_SHARE = 0.5
"""Part of the budget that attention gets when nobody says otherwise."""


class DualPools(Organization):
    """Two pools sized at start; free space on one side cannot serve the other."""

    name = "D0"
    members = 1

    def __init__(
        self,
        model: ModelGeometry,
        grid: int,
        budget_bytes: int,
        *,
        attention_share: float = DEFAULT_ATTENTION_SHARE,
    ) -> None:
        super().__init__(model, budget_bytes)
        if grid % UNIT_TOKENS:
            raise GeometryError(
                f"--hybrid-grid {grid} is no multiple of D0's unit of {UNIT_TOKENS} tokens: use "
                f"{ceil_div(grid, UNIT_TOKENS) * UNIT_TOKENS}"
            )
        if not 0.0 < attention_share < 1.0:
            raise GeometryError(
                f"--hybrid-attention-share {attention_share} leaves one pool empty: "
                "use a value between 0 and 1"
            )
        self.grid = grid
        self.unit_tokens = self.slots_per_unit = UNIT_TOKENS
        self.attention_share = attention_share
        self._unit_bytes = UNIT_TOKENS * model.kv_row_bytes
        # Whole KV rows, so that both kinds of buffers are aligned alike.
        self._state_bytes = ceil_div(model.checkpoint_bytes, model.kv_row_bytes) * model.kv_row_bytes
        arena = budget_bytes // model.arenas
        units = int(arena * attention_share) // self._unit_bytes - 1
        checkpoints = (arena - (units + 1) * self._unit_bytes) // self._state_bytes - 1
        if units < SMALLEST.units or checkpoints < SMALLEST.checkpoints:
            least_units = (SMALLEST.units + 1) * self._unit_bytes / attention_share
            least_states = (SMALLEST.checkpoints + 1) * self._state_bytes / (1 - attention_share)
            raise GeometryError(
                f"--hybrid-budget-bytes {budget_bytes} at --hybrid-attention-share {attention_share} "
                f"gives D0 {max(units, 0)} units and {max(checkpoints, 0)} checkpoints; it needs at least "
                f"{SMALLEST.units} and {SMALLEST.checkpoints}: use "
                f"{model.arenas * (1 + int(max(least_units, least_states)))} or more"
            )
        self._units = PagePool(units)
        self._states = PagePool(checkpoints)

    @property
    def unit_pool(self) -> PagePool:
        return self._units

    @property
    def state_pool(self) -> PagePool:
        return self._states

    def fits(self, need: Need) -> bool:
        return need.units <= self._units.free and need.checkpoints <= self._states.free

    def could_fit(self, need: Need) -> bool:
        return need.units <= self._units.reclaimable and need.checkpoints <= self._states.reclaimable

    def capacity_fits(self, need: Need) -> bool:
        return need.units <= self._units.size and need.checkpoints <= self._states.size

    def relief(self, need: Need) -> Relief:
        return Relief(units=need.units > self._units.free, checkpoints=need.checkpoints > self._states.free)

    def token_capacity(self) -> int:
        return self._units.size * self.unit_tokens

    def unit_equivalent(self, checkpoints: int) -> int:
        return 0

    def units_free(self) -> int:
        return self._units.free

    def units_reclaimable(self) -> int:
        return self._units.reclaimable

    def _take_checkpoint(self) -> Checkpoint | None:
        pages = self._states.allocate(1)
        return None if pages is None else Checkpoint(tuple(pages), pages[0], tuple(pages))

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
