"""Where rows of a state lie: page lookup inside a Triton kernel, and what it may assume of a view."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_hybrid.kernels.checks import KernelError
from sglang_hybrid.kernels.launch import power_of_two
from sglang_hybrid.pools.views import StateView

TILE = 4096
"""State elements of a program: 32 a thread at 4 warps, so 64 (bf16) or 128 (fp32) bytes in flight each."""


@triton.jit
def row_offsets(
    page_map: tl.tensor,
    member_stride: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    page_units: tl.tensor,
    PER_PAGE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Element offsets [BLOCK], int64, of a request's state rows from row `start` of its checkpoint on.

    With `ONE_PAGE` there is one lookup for all of them, else one a row.  The last of `count` rows stands in
    for rows past it: there may be no member for those.
    """
    low = tl.arange(0, BLOCK)
    if ONE_PAGE:
        page = tl.load(page_map + (start // PER_PAGE) * member_stride).to(tl.int64)
        return page * page_units * UNIT + (start % PER_PAGE) * SIZE + low * SIZE
    else:
        row = start + tl.minimum(low, count - 1)
        page = tl.load(page_map + (row // PER_PAGE) * member_stride).to(tl.int64)
        return page * page_units * UNIT + (row % PER_PAGE) * SIZE


def block_rows(dim: int, width: int) -> int:
    """Rows of a program that holds `width` columns of each: a power of two, a divisor of `dim` where that
    costs no more than half."""
    most = max(1, min(TILE // width, power_of_two(dim)))
    divisor = dim & -dim
    return min(most, divisor) if 2 * min(most, divisor) >= most else most


def in_one_page(view: StateView, block: int) -> bool:
    """Whether no program's rows straddle two pages."""
    if view.first_row % view.rows_per_page + view.heads * view.head_dim <= view.rows_per_page:
        return True
    return view.head_dim % block == view.rows_per_page % block == view.first_row % block == 0


def need_packed_rows(view: StateView) -> None:
    """Raise `KernelError` unless the elements of a row and the rows of a page lie end to end."""
    rows = view.rows
    if view.state_size == 0 or rows.stride()[1:] != (view.state_size, 1):
        raise KernelError(
            f"rows has shape {list(rows.shape)} and strides {list(rows.stride())}, "
            f"needs at least 1 element a row and strides [*, {view.state_size}, 1]"
        )
