"""One recurrent layer's state in poisoned pages, laid out by the definition in `StateView` alone."""

from dataclasses import dataclass, replace

import torch

from sglang_hybrid.pools.views import StateView


@dataclass(frozen=True)
class Case:
    """One layer's state in its pages; every other case varies one field of `BASE`."""

    batch: int = 3
    heads: int = 4
    groups: int = 2
    dim: int = 6
    size: int = 8
    rows_per_page: int = 12
    first_row: int = 0
    spare_rows: int = 0
    """Rows of the pages behind this layer's."""
    stored: torch.dtype = torch.float32
    index: torch.dtype = torch.int32
    extras: bool = True

    @property
    def members(self) -> int:
        return -(-(self.first_row + self.heads * self.dim + self.spare_rows) // self.rows_per_page)


BASE = Case()
CASES = {
    "base: two members of two heads": BASE,
    "batch 1": replace(BASE, batch=1),
    "batch 9": replace(BASE, batch=9),
    "one head": replace(BASE, heads=1, groups=1),
    "one group": replace(BASE, groups=1),
    "a group a head": replace(BASE, groups=4),
    "state size 1": replace(BASE, size=1),
    "state size 33": replace(BASE, size=33),
    "one member": replace(BASE, rows_per_page=24),
    "one member with rows to spare": replace(BASE, rows_per_page=100),
    "a member a head": replace(BASE, rows_per_page=6),
    "a member a row": replace(BASE, rows_per_page=1),
    "heads cut by members": replace(BASE, rows_per_page=7),
    "second stripe, aligned": replace(BASE, first_row=24),
    "second stripe, unaligned": replace(BASE, first_row=24, rows_per_page=10),
    "begins in the last row of a page": replace(BASE, first_row=11),
    "stripes before and behind": replace(BASE, first_row=5, spare_rows=20),
    "bf16 pages": replace(BASE, stored=torch.bfloat16),
    "int64 maps": replace(BASE, index=torch.int64),
    "bare": replace(BASE, extras=False),
}


class Pages:
    """An arena of poisoned pages with `2 x batch` checkpoints on shuffled page ids; page 0 is the sink."""

    def __init__(self, case: Case, seed: int = 1) -> None:
        torch.manual_seed(seed)
        count = 1 + (2 * case.batch + 1) * case.members
        # Rows are strided as in an arena: a page has bytes that are not this view's.
        self.arena = torch.full((count, case.rows_per_page + 3, case.size), float("nan")).to(case.stored)
        self.view = StateView(self.arena[:, : case.rows_per_page], case.first_row, case.heads, case.dim)
        ids = (1 + torch.randperm(count - 1)).to(case.index)
        self.maps = ids[: 2 * case.batch * case.members].view(2 * case.batch, case.members)
        self.case = case

    def cells(self, page_map: torch.Tensor) -> list[tuple[int, int]]:
        """(page, row) of every row of the state, by the definition in `StateView`."""
        case = self.case
        rows = range(case.first_row, case.first_row + case.heads * case.dim)
        return [(int(page_map[r // case.rows_per_page]), r % case.rows_per_page) for r in rows]

    def put(self, page_map: torch.Tensor, state: torch.Tensor) -> None:
        """Row by row, independent of the code under test."""
        for (page, row), values in zip(self.cells(page_map), state.reshape(-1, self.case.size), strict=True):
            self.arena[page, row] = values

    def get(self, page_map: torch.Tensor) -> torch.Tensor:
        case = self.case
        rows = [self.arena[page, row] for page, row in self.cells(page_map)]
        return torch.stack(rows).view(case.heads, case.dim, case.size)

    def unchanged_but(self, before: torch.Tensor, maps: list[torch.Tensor]) -> bool:
        """Every element outside the states of `maps` and outside the sink page is bit for bit as before."""
        free = torch.ones(self.arena.shape[:2], dtype=torch.bool)
        free[0] = False
        for page_map in maps:
            for page, row in self.cells(page_map):
                free[page, row] = False
        now, was = self.arena[free], before[free]
        return bool(((now == was) | (now.isnan() & was.isnan())).all())


def state_of(case: Case) -> torch.Tensor:
    return torch.randn(case.heads, case.dim, case.size).to(case.stored)
