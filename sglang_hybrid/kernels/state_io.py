"""Gather and scatter of recurrent state between pages, conv lines and dense tensors.

A checkpoint's rows lie end to end over its member pages, and a layer's rows begin anywhere in
them, so a layer is a few runs of rows, one a member page (`member_runs`).  Pages are found by
index, rows by slice: no alignment is assumed.

Freed pages are poisoned with NaN and the sink page holds anything.  So "no source" is a fill, never
a product with zero, and a skipped row is written to the sink instead of being filtered out:
filtering would make the host wait for the device.
"""

from __future__ import annotations

import torch

from sglang_hybrid.kernels.checks import KernelError, need_index, need_shape
from sglang_hybrid.pools.views import NO_LINE, SINK_PAGE, ConvView, StateView


def member_runs(view: StateView) -> list[tuple[int, int, int]]:
    """(member, first row in its page, row past the last) of a layer's rows, in row order."""
    runs = []
    row, end, per_page = view.first_row, view.first_row + view.heads * view.head_dim, view.rows_per_page
    while row < end:
        member, low = divmod(row, per_page)
        high = min(per_page, low + end - row)
        runs.append((member, low, high))
        row += high - low
    return runs


def need_map(
    view: StateView, page_map: torch.Tensor, batch: int | None = None
) -> list[tuple[int, int, int]]:
    """Raise `KernelError` unless `page_map` is [batch, members] ints that reach all rows; `member_runs`."""
    need_shape("rows", view.rows, (None, None, None))
    need_index("page_map", page_map, (batch, None))
    runs = member_runs(view)
    if runs and page_map.shape[1] <= runs[-1][0]:
        raise KernelError(
            f"page_map has shape {list(page_map.shape)}, needs [*, {runs[-1][0] + 1}] or more members: "
            f"{view.heads * view.head_dim} rows from row {view.first_row} at {view.rows_per_page} a page"
        )
    return runs


def read_states(view: StateView, page_map: torch.Tensor) -> torch.Tensor:
    """State of every batch row -> [B, H, P, N] in fp32.

    `page_map` [B, members] int32 or int64.  A row whose column 0 is negative has no source and
    reads zeros; its other columns are not looked at.
    """
    runs = need_map(view, page_map)
    batch = page_map.shape[0]
    shape = (batch, view.heads, view.head_dim, view.state_size)
    if not runs or view.state_size == 0:
        return view.rows.new_zeros(shape, dtype=torch.float32)
    present = page_map[:, :1] >= 0
    pages = torch.where(present, page_map, SINK_PAGE).long()
    # index_select copies whole runs; indexing with brackets would go element by element on a CPU.
    parts = [view.rows[:, low:high].index_select(0, pages[:, member]) for member, low, high in runs]
    rows = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return rows.float().masked_fill_(~present[..., None], 0.0).view(shape)


def write_states(view: StateView, page_map: torch.Tensor, states: torch.Tensor) -> None:
    """Scatter `states` [B, H, P, N] into the pages, rounded to the pages' dtype, in place.

    `page_map` [B, members]; a row whose column 0 is negative is skipped (it goes to the sink
    page).  Two rows must not name the same page, the sink apart.
    """
    runs = need_map(view, page_map, states.shape[0])
    need_shape("states", states, (None, view.heads, view.head_dim, view.state_size))
    if view.state_size == 0:
        return
    pages = torch.where(page_map[:, :1] >= 0, page_map, SINK_PAGE).long()
    rows = states.reshape(states.shape[0], view.heads * view.head_dim, view.state_size).to(view.rows.dtype)
    done = 0
    for member, low, high in runs:
        view.rows[:, low:high].index_copy_(0, pages[:, member], rows[:, done : done + high - low])
        done += high - low


def need_lines(view: ConvView, lines: torch.Tensor, batch: int | None = None) -> None:
    """Raise `KernelError` unless `lines` is [batch] ints over three-dimensional conv lines."""
    need_shape("conv lines", view.lines, (None, None, None))
    need_index("lines", lines, (batch,))


def read_windows(view: ConvView, lines: torch.Tensor) -> torch.Tensor:
    """Conv windows of every batch row -> [B, C, W - 1] in the stored dtype, oldest tap first.

    `lines` [B] int32 or int64; the invalid line (`NO_LINE`) reads zeros.
    """
    need_lines(view, lines)
    present = lines > NO_LINE
    windows = view.lines.index_select(0, torch.where(present, lines, SINK_PAGE).long())
    return windows.masked_fill_(~present[:, None, None], 0)


def write_windows(view: ConvView, lines: torch.Tensor, windows: torch.Tensor) -> None:
    """Scatter `windows` [B, C, W - 1] into the conv lines, in place.

    `lines` [B]; the invalid line (`NO_LINE`) is skipped (it goes to line 0, the sink page's).
    """
    need_lines(view, lines, windows.shape[0])
    need_shape("windows", windows, (None, *view.lines.shape[1:]))
    targets = torch.where(lines > NO_LINE, lines, SINK_PAGE).long()
    view.lines.index_copy_(0, targets, windows.to(view.lines.dtype))
