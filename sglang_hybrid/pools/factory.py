"""The organizations by name; a further one is one class and one line here."""

from __future__ import annotations

from functools import cache
from typing import Any

from sglang_hybrid.geometry import (
    DEFAULT_GRID,
    GRID_STEP,
    LARGEST_DEFAULT_GRID,
    UNIT_TOKENS,
    GeometryError,
    ModelGeometry,
    block_bytes,
    native_grid,
)
from sglang_hybrid.pools.dual import DualPools
from sglang_hybrid.pools.organization import Organization
from sglang_hybrid.pools.shared import CoarsePages, PackedConv, PagedCheckpoints

ORGANIZATIONS: dict[str, type[CoarsePages | PagedCheckpoints | PackedConv | DualPools]] = {
    kind.name: kind for kind in (CoarsePages, PagedCheckpoints, PackedConv, DualPools)
}


def make_organization(
    name: str, model: ModelGeometry, grid: int, budget_bytes: int, **options: Any
) -> Organization:
    """The organization called `name` over a byte budget for all arenas of one rank.

    `options` are keyword arguments of that class, such as D0's `attention_share`.
    Raises `GeometryError` when grid, model and budget do not go together; the message names a
    legal choice.
    """
    return ORGANIZATIONS[name](model, grid, budget_bytes, **options)


@cache
def default_grid(name: str, model: ModelGeometry, chunk: int, **options: Any) -> int:
    """Tokens of a grid step when nobody names them: D0's native grid, else the smallest legal one from
    `DEFAULT_GRID` up, in steps of `GRID_STEP`; `DEFAULT_GRID` where none is legal, whose refusal says why.

    `chunk`: tokens of a chunk of the model's scan.  `options` as in `make_organization`.
    """
    if name == "D0":
        return native_grid(model, UNIT_TOKENS, chunk)
    for grid in range(DEFAULT_GRID, LARGEST_DEFAULT_GRID + 1, GRID_STEP):
        try:
            smallest_budget(name, model, grid, **options)
        except GeometryError:
            continue
        return grid
    return DEFAULT_GRID


def smallest_budget(name: str, model: ModelGeometry, grid: int, **options: Any) -> int:
    """Bytes of the smallest legal budget: the least that serves a hit (`geometry.LEAST_PIECES`).

    Raises `GeometryError` when grid and model do not go together at any budget.
    """
    low, high = 0, block_bytes(model, grid) * model.arenas

    def starts(budget: int) -> bool:
        try:
            make_organization(name, model, grid, budget, **options)
        except GeometryError as refusal:
            if "--hybrid-budget-bytes" not in str(refusal):
                raise
            return False
        return True

    while not starts(high):
        low, high = high, 2 * high
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if starts(middle) else (middle, high)
    return high
