"""One decode step of the Mamba2 recurrence in Triton: one launch for all heads, members and requests.

A program advances a few rows of one head of one request.  It looks its pages up once, by row, in the
source map and in the destination map; then every byte of the state is read once and written once, 16
bytes an access.  Rows without a source (map at most 0: the sentinel or the sink page) start from
zeros, rows without a destination are not written: neither touches the state's memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_hybrid.kernels.launch import Launch, power_of_two
from sglang_hybrid.kernels.ssd_scan import NO_LIMIT
from sglang_hybrid.kernels.state_access import read_state, write_state
from sglang_hybrid.kernels.state_io import need_map
from sglang_hybrid.kernels.state_update import check_update
from sglang_hybrid.kernels.triton_args import layer_args
from sglang_hybrid.kernels.triton_math import silu, softplus
from sglang_hybrid.kernels.triton_rows import block_rows, row_offsets
from sglang_hybrid.pools.views import StateView

MOST_COLUMNS = 256
"""Elements of a state row that a program holds at once; longer rows are walked."""


# Nothing is gained from how these are aligned, and a captured graph must not meet a new variant.
@triton.jit(
    do_not_specialize=["first_row"],
    do_not_specialize_on_alignment=["src_map", "dst_map", "dt", "a", "d", "dt_bias"],
)
def state_update_kernel(
    rows: tl.tensor,
    src_map: tl.tensor,
    dst_map: tl.tensor,
    x: tl.tensor,
    dt: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    d: tl.tensor,
    z: tl.tensor,
    dt_bias: tl.tensor,
    y: tl.tensor,
    first_row: tl.tensor,
    page_units: tl.tensor,
    src_stride: tl.tensor,
    src_member: tl.tensor,
    dst_stride: tl.tensor,
    dst_member: tl.tensor,
    x_stride: tl.tensor,
    x_head: tl.tensor,
    x_dim: tl.tensor,
    dt_stride: tl.tensor,
    dt_head: tl.tensor,
    a_head: tl.tensor,
    b_stride: tl.tensor,
    b_group: tl.tensor,
    b_size: tl.tensor,
    c_stride: tl.tensor,
    c_group: tl.tensor,
    c_size: tl.tensor,
    d_head: tl.tensor,
    d_dim: tl.tensor,
    z_stride: tl.tensor,
    z_head: tl.tensor,
    z_dim: tl.tensor,
    dt_bias_head: tl.tensor,
    y_stride: tl.tensor,
    dt_low: tl.tensor,
    dt_high: tl.tensor,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    RATIO: tl.constexpr,
    PER_PAGE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    BLOCKS: tl.constexpr = (DIM + BLOCK - 1) // BLOCK
    head = tl.program_id(0) // BLOCKS
    first = (tl.program_id(0) % BLOCKS) * BLOCK
    request = tl.program_id(1).to(tl.int64)
    m = first + tl.arange(0, BLOCK)
    inside = m < DIM

    # Where this program's rows lie: the only use of the maps.
    src_map += request * src_stride
    dst_map += request * dst_stride
    has_src = tl.load(src_map) > 0
    has_dst = tl.load(dst_map) > 0
    start = first_row + head * DIM + first
    left = DIM - first
    src = row_offsets(src_map, src_member, start, left, page_units, PER_PAGE, ONE_PAGE, SIZE, UNIT, BLOCK)
    dst = row_offsets(dst_map, dst_member, start, left, page_units, PER_PAGE, ONE_PAGE, SIZE, UNIT, BLOCK)
    src_rows = rows + src[:, None]
    dst_rows = rows + dst[:, None]
    read = inside[:, None] & has_src
    write = inside[:, None] & has_dst

    step = tl.load(dt + request * dt_stride + head * dt_head).to(tl.float32)
    if dt_bias is not None:
        step += tl.load(dt_bias + head * dt_bias_head).to(tl.float32)
    if SOFTPLUS:
        step = softplus(step)
    if LIMIT:
        step = tl.minimum(tl.maximum(step, dt_low), dt_high)
    decay = tl.exp(step * tl.load(a + head * a_head).to(tl.float32))
    xs = tl.load(x + request * x_stride + head * x_head + m * x_dim, mask=inside, other=0.0).to(tl.float32)
    weighted = (xs * step)[:, None]
    b += request * b_stride + (head // RATIO) * b_group
    c += request * c_stride + (head // RATIO) * c_group

    # Asked for now, used last.
    if d is not None:
        skip = tl.load(d + head * d_head + m * d_dim, mask=inside, other=0.0).to(tl.float32)
    if z is not None:
        gate = tl.load(z + request * z_stride + head * z_head + m * z_dim, mask=inside, other=0.0)

    out = tl.zeros([BLOCK], tl.float32)
    for low in tl.static_range(0, SIZE, COLUMNS):
        n = low + tl.arange(0, COLUMNS)
        reads, writes = read, write
        if SIZE % COLUMNS == 0:
            bs = tl.load(b + n * b_size).to(tl.float32)
            cs = tl.load(c + n * c_size).to(tl.float32)
        else:
            within = n < SIZE
            bs = tl.load(b + n * b_size, mask=within, other=0.0).to(tl.float32)
            cs = tl.load(c + n * c_size, mask=within, other=0.0).to(tl.float32)
            reads, writes = read & within[None, :], write & within[None, :]
        state = read_state(src_rows + n[None, :], reads).to(tl.float32)
        state = state * decay + weighted * bs[None, :]
        write_state(dst_rows + n[None, :], state.to(rows.dtype.element_ty), writes)
        out += tl.sum(state * cs[None, :], axis=1)

    if d is not None:
        out += xs * skip
    if z is not None:
        out *= silu(gate.to(tl.float32))
    tl.store(y + request * y_stride + head * DIM + m, out.to(y.dtype.element_ty), mask=inside)


def plan_state_update(
    view: StateView,
    src_map: torch.Tensor,
    dst_map: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    y: torch.Tensor,
    *,
    d: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
) -> Launch:
    """The launch of `state_update` into a contiguous `y` [B, H, P]; B is at least 1."""
    check_update(view, src_map, x, dt, a, b, c, d, z)
    need_map(view, src_map)
    need_map(view, dst_map, x.shape[0])
    batch, heads, dim = x.shape
    width = min(power_of_two(view.state_size), MOST_COLUMNS)
    block = block_rows(dim, width)
    args = layer_args(
        view, block, src_map, dst_map, x, dt, a, b, c, y,
        d=d, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit,
    )  # fmt: skip
    args["COLUMNS"] = width
    warps = max(1, min(4, block * width // 1024))
    return Launch(state_update_kernel, (heads * -(-dim // block), batch), args, warps)


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
    """`kernels.state_update.state_update` as one Triton launch: same arguments, result and errors.

    Requests run at once: a page that one request writes may be read by that request alone.  Every row of y
    is written, padding rows too.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        plan_state_update(
            view, src_map, dst_map, x, dt, a, b, c, y,
            d=d, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit,
        ).run()  # fmt: skip
    return y
