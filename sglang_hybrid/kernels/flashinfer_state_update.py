"""One decode step of the Mamba2 recurrence through FlashInfer, one launch a member page.

Source symbol: `flashinfer.mamba.selective_state_update` of FlashInfer 0.7.2.  It reads a slot and writes
another (`dst_state_batch_indices`), and takes any stride from slot to slot: so a checkpoint in one page is
its slot as is, and of a checkpoint in several pages every page that holds whole heads is one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_hybrid.geometry import PageGeometry
from sglang_hybrid.kernels.checks import KernelError
from sglang_hybrid.kernels.launch import WORD_BYTES
from sglang_hybrid.kernels.ssd_scan import NO_LIMIT
from sglang_hybrid.kernels.state_io import member_runs, need_map
from sglang_hybrid.kernels.state_update import check_update
from sglang_hybrid.pools.arena import StateShape
from sglang_hybrid.pools.organization import Organization
from sglang_hybrid.pools.views import NO_LINE, StateView

DIMS, SIZES = (64, 128), (64, 128, 256)
"""What all its kernels take: each is compiled for the sizes at hand, whichever of them is then launched."""


class Part(NamedTuple):
    """Heads `first` to `end` of a layer: from `row` on in the pages of `member`; the groups they use."""

    member: int
    row: int
    first: int
    end: int
    groups: slice


def parts_of(view: StateView, groups: int) -> list[Part]:
    """One launch each.

    Raises `KernelError` where a page cuts a head or a group of B and C, and for sizes that FlashInfer's
    kernels do not take.
    """
    heads, dim, size = view.heads, view.head_dim, view.state_size
    page_bytes = view.rows.stride(0) * view.rows.element_size()
    if page_bytes % WORD_BYTES:
        raise KernelError(f"pages lie {page_bytes} bytes apart, needs whole {WORD_BYTES}; use 'triton'")
    if dim not in DIMS or size not in SIZES:
        raise KernelError(
            f"heads hold {dim} rows of {size} elements, needs {' or '.join(map(str, DIMS))} rows of "
            f"{', '.join(map(str, SIZES))}; use 'triton'"
        )
    ratio, parts, done = heads // groups, [], 0
    for member, low, high in member_runs(view):
        first, end = done // dim, (done + high - low) // dim
        if done % dim or (high - low) % dim:
            raise KernelError(
                f"a page of {view.rows_per_page} rows cuts a head of {dim} rows (this layer begins at row "
                f"{view.first_row}), needs whole heads a page; use 'triton'"
            )
        served = slice(first // ratio, (end - 1) // ratio + 1)
        if served.stop - served.start > 1 and (first % ratio or end % ratio):
            raise KernelError(
                f"a page holds heads {first} to {end - 1}, which cuts a group of {ratio} heads; use 'triton'"
            )
        parts.append(Part(member, low, first, end, served))
        done += high - low
    return parts


def need_whole_heads(shape: StateShape, organization: Organization) -> None:
    """Raise `KernelError` where this organization's state pages cannot be FlashInfer's slots."""
    model, page = organization.model, organization.layout().state_page_bytes
    per_page = PageGeometry(model, page).rows_per_page
    rows = torch.empty_strided(
        (1, per_page, shape.state_size), (page // shape.ssm_dtype.itemsize, shape.state_size, 1),
        dtype=shape.ssm_dtype, device="meta",
    )  # fmt: skip
    groups = (shape.channels - shape.heads * shape.head_dim) // (2 * shape.state_size)
    for stripe in range(model.stripes):
        parts_of(StateView(rows, stripe * model.ssm_rows, shape.heads, shape.head_dim), groups)


def state_update(
    view: StateView,
    src_map: torch.Tensor,
    dst_map: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    *,
    d: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
) -> torch.Tensor:
    """`kernels.state_update.state_update` by FlashInfer: same arguments, result and errors, but for padding.

    A row without a source (all columns `NO_LINE`) is padding: nothing is written for it.  Every other row
    has a destination.  Weights are converted to dt's dtype, which FlashInfer wants.
    """
    from flashinfer.mamba import selective_state_update

    check_update(view, src_map, x, dt, a, b, c, d, z)
    need_map(view, src_map)
    need_map(view, dst_map, x.shape[0])
    if dt_limit != NO_LIMIT:
        raise KernelError(f"dt_limit is {dt_limit}, needs {NO_LIMIT} for FlashInfer; use 'triton'")
    if d is not None and d.dim() == 2:
        raise KernelError(f"D has shape {list(d.shape)}, needs [{view.heads}] for FlashInfer; use 'triton'")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0] == 0:
        return y
    dim, size = view.head_dim, view.state_size
    skip = torch.zeros(view.heads, dtype=dt.dtype, device=x.device) if d is None else d.to(dt.dtype)
    bias = None if dt_bias is None else dt_bias.to(dt.dtype)
    rate = a.float()
    parts = parts_of(view, b.shape[1])
    for member, row, first, end, groups in parts:
        heads = slice(first, end)
        rows = view.rows[:, row : row + (end - first) * dim]
        out = selective_state_update(
            rows.view(rows.shape[0], end - first, dim, size),
            x[:, heads],
            dt[:, heads, None].expand(-1, -1, dim),
            rate[heads, None, None].expand(-1, dim, size),
            b[:, groups],
            c[:, groups],
            skip[heads, None].expand(-1, dim),
            z=None if z is None else z[:, heads],
            dt_bias=None if bias is None else bias[heads, None].expand(-1, dim),
            dt_softplus=dt_softplus,
            state_batch_indices=src_map[:, member],
            dst_state_batch_indices=dst_map[:, member],
            pad_slot_id=NO_LINE,
            out=y if len(parts) == 1 else None,
            algorithm=algorithm((end - first) // (groups.stop - groups.start), x.device),
        )
        if len(parts) > 1:
            y[:, heads] = out
    return y


def algorithm(ratio: int, device: torch.device) -> str:
    """FlashInfer's choice, but for heads a group that its horizontal kernel (compute capability 10) lacks."""
    listed = ratio <= 64 and ratio & (ratio - 1) == 0
    if listed or device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 10:
        return "auto"
    return "vertical"
