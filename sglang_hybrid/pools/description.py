"""What the class of an organization says of itself before there is one: nobody asks for its name instead."""

from __future__ import annotations

from abc import ABC
from typing import Any, ClassVar

from sglang_hybrid.geometry import (
    DEFAULT_GRID,
    GRID_STEP,
    LARGEST_DEFAULT_GRID,
    GeometryError,
    ModelGeometry,
    block_bytes,
)
from sglang_hybrid.ledger import Account
from sglang_hybrid.pools.option import Option


class Description(ABC):
    """Name, prices and choices of a kind of organization, and the arguments of its constructor."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """What it is, in half a sentence."""
    prices: ClassVar[type[Account]]
    """What a demand costs in it."""
    options: ClassVar[tuple[Option, ...]] = ()
    """Choices that only this organization has, keywords of the constructor."""
    dense_slots: ClassVar[bool] = True
    """Whether the slots of a unit follow those of the one before, so that slot // page size is a page."""
    fixed_page: ClassVar[int | None] = None
    """Tokens of a unit; None: a grid step."""
    usual_grid: ClassVar[int | None] = DEFAULT_GRID
    """Where `default_grid` begins to look; None: it follows from the model alone."""

    def __init__(self, model: ModelGeometry, grid: int, budget_bytes: int) -> None:
        """`grid`: tokens between two boundaries; `budget_bytes`: of all arenas of one rank."""
        self.model = model
        self.grid = grid
        self.budget_bytes = budget_bytes

    @classmethod
    def page_tokens(cls, grid: int) -> int:
        """Tokens of a unit at this grid."""
        return cls.fixed_page or grid

    @classmethod
    def default_grid(cls, model: ModelGeometry, chunk: int, **options: Any) -> int:
        """Tokens of a grid step when nobody names them: the smallest legal one from `usual_grid` up, in steps
        of `GRID_STEP`; `usual_grid` where none is legal, whose refusal says why.

        `chunk`: tokens of a chunk of the model's scan.  `options`: keywords of the constructor.
        """
        assert cls.usual_grid is not None, f"{cls.name} has no usual grid and must say its own"
        for grid in range(cls.usual_grid, LARGEST_DEFAULT_GRID + 1, GRID_STEP):
            try:
                cls.smallest_budget(model, grid, **options)
            except GeometryError:
                continue
            return grid
        return cls.usual_grid

    @classmethod
    def smallest_budget(cls, model: ModelGeometry, grid: int, **options: Any) -> int:
        """Bytes of the smallest legal budget: the least that serves a hit (`geometry.LEAST_PIECES`).

        Raises `GeometryError` when grid and model do not go together at any budget.
        """
        low, high = 0, block_bytes(model, grid) * model.arenas

        def starts(budget: int) -> bool:
            try:
                cls(model, grid, budget, **options)
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

    @classmethod
    def settled(cls, model: ModelGeometry, grid: int) -> dict[str, tuple[Any, str]]:
        """Options that prices alone decide, by name: the value, and why."""
        return {}
