"""Small models and the four organizations over a handful of pages, so that pressure is constant."""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import patch

from sglang_hybrid import geometry
from sglang_hybrid.geometry import ModelGeometry, block_bytes, coarse_page_bytes, whole_rows_bytes
from sglang_hybrid.pools import dual
from sglang_hybrid.pools.dual import DualPools
from sglang_hybrid.pools.factory import make_organization
from sglang_hybrid.pools.organization import Organization

NAMES = ("S0", "S1", "S2", "D0")
GRID = 4
UNIT_TOKENS = 2
"""D0's unit in these tests, so that a block of the small grid still has two."""

SMALL = ModelGeometry((0,), (0,), kv_row_bytes=8, ssm_rows=6, ssm_row_bytes=8, conv_bytes=8)
"""At grid 4 a page has 32 bytes: a checkpoint is two member pages, the second half full, and a conv line;
four lines fill a slab."""

STRIPED = ModelGeometry((1, 3), (0, 2, 4), kv_row_bytes=8, ssm_rows=3, ssm_row_bytes=16, conv_bytes=4)
"""Two arenas of two stripes; a member page ends inside a stripe."""

CONV_ONLY = ModelGeometry((0,), (0, 1), kv_row_bytes=8, ssm_rows=0, ssm_row_bytes=0, conv_bytes=4)
"""A checkpoint is its conv line: no member page at all."""

SSM_ONLY = ModelGeometry((0,), (0,), kv_row_bytes=8, ssm_rows=5, ssm_row_bytes=8, conv_bytes=0)
"""No convolution: S1 needs no conv page, S2 has nothing to pack."""

FALCON_7B = ModelGeometry(
    tuple(range(44)), tuple(range(44)), kv_row_bytes=1024, ssm_rows=3072, ssm_row_bytes=512, conv_bytes=21504
)
"""Falcon-H1-7B-Instruct, bf16: 1536 KiB SSM and 21 KiB conv a layer (docs/paper.md, Geometry)."""


@dataclass(frozen=True)
class World:
    """An organization to build: `pages` of a shared pool; D0 gets `units` and `states` instead."""

    name: str
    pages: int = 24
    units: int = 24
    states: int = 8
    grid: int = GRID
    model: ModelGeometry = SMALL

    def build(self) -> Organization:
        if self.name == "D0":
            return dual_pools(self.model, self.grid, self.units, self.states)
        return make_organization(self.name, self.model, self.grid, self.budget())

    def budget(self) -> int:
        """Bytes that give exactly `pages`, beside the sink."""
        coarse = coarse_page_bytes(self.model, self.grid)
        page = coarse if self.name == "S0" else block_bytes(self.model, self.grid)
        return (self.pages + 1) * page * self.model.arenas


def dual_pools(model: ModelGeometry, grid: int, units: int, states: int) -> DualPools:
    """D0 with exactly these pieces, on the small unit."""
    unit_bytes = block_bytes(model, UNIT_TOKENS)
    state_bytes = whole_rows_bytes(model, model.checkpoint_bytes)
    arena = (units + 1) * unit_bytes + (states + 1) * state_bytes
    share = (units + 1.5) * unit_bytes / arena
    with patch.object(geometry, "UNIT_TOKENS", UNIT_TOKENS), patch.object(dual, "UNIT_TOKENS", UNIT_TOKENS):
        pools = DualPools(model, grid, arena * model.arenas, attention_share=share)
    assert (pools.unit_pool.size, pools.state_pool.size) == (units, states)
    return pools
