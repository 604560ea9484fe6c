"""One decode step of the gated delta rule in Triton: one launch for all heads, members and requests.

A program advances a few rows of one head of one request, as `triton_state_update` does: pages are looked up
once, by row, every byte of the state is read once and written once, 16 bytes an access, and rows without a
source or destination touch no state.  A row needs its whole width at once: what it knows of the key decides
what is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_hybrid.kernels.delta_rule import DeltaInputs
from sglang_hybrid.kernels.launch import Launch, power_of_two
from sglang_hybrid.kernels.state_access import read_state, write_state
from sglang_hybrid.kernels.state_io import need_map
from sglang_hybrid.kernels.triton_args import delta_args
from sglang_hybrid.kernels.triton_math import inverse_length, log_decay, sigmoid
from sglang_hybrid.kernels.triton_rows import block_rows, row_offsets
from sglang_hybrid.pools.views import StateView


# Nothing is gained from how these are aligned, and a captured graph must not meet a new variant.
@triton.jit(
    do_not_specialize=["first_row"],
    do_not_specialize_on_alignment=["src_map", "dst_map", "a", "b", "a_log", "dt_bias"],
)
def delta_update_kernel(
    rows: tl.tensor,
    src_map: tl.tensor,
    dst_map: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    y: tl.tensor,
    first_row: tl.tensor,
    page_units: tl.tensor,
    src_stride: tl.tensor,
    src_member: tl.tensor,
    dst_stride: tl.tensor,
    dst_member: tl.tensor,
    q_stride: tl.tensor,
    q_group: tl.tensor,
    q_size: tl.tensor,
    k_stride: tl.tensor,
    k_group: tl.tensor,
    k_size: tl.tensor,
    v_stride: tl.tensor,
    v_head: tl.tensor,
    v_dim: tl.tensor,
    a_stride: tl.tensor,
    a_head: tl.tensor,
    a_size: tl.tensor,
    b_stride: tl.tensor,
    b_head: tl.tensor,
    a_log_head: tl.tensor,
    dt_bias_head: tl.tensor,
    dt_bias_size: tl.tensor,
    y_stride: tl.tensor,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    RATIO: tl.constexpr,
    PER_PAGE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BOUND: tl.constexpr,
) -> None:
    BLOCKS: tl.constexpr = (DIM + BLOCK - 1) // BLOCK
    head = tl.program_id(0) // BLOCKS
    first = (tl.program_id(0) % BLOCKS) * BLOCK
    request = tl.program_id(1).to(tl.int64)
    m = first + tl.arange(0, BLOCK)
    n = tl.arange(0, COLUMNS)
    inside, within = m < DIM, n < SIZE

    # Where this program's rows lie: the only use of the maps.
    src_map += request * src_stride
    dst_map += request * dst_stride
    has_src = tl.load(src_map) > 0
    has_dst = tl.load(dst_map) > 0
    start = first_row + head * DIM + first
    left = DIM - first
    src = row_offsets(src_map, src_member, start, left, page_units, PER_PAGE, ONE_PAGE, SIZE, UNIT, BLOCK)
    dst = row_offsets(dst_map, dst_member, start, left, page_units, PER_PAGE, ONE_PAGE, SIZE, UNIT, BLOCK)
    held = inside[:, None] & within[None, :]
    state = read_state(rows + src[:, None] + n[None, :], held & has_src).to(tl.float32)

    group = head // RATIO
    ks = tl.load(k + request * k_stride + group * k_group + n * k_size, mask=within, other=0.0).to(tl.float32)
    qs = tl.load(q + request * q_stride + group * q_group + n * q_size, mask=within, other=0.0).to(tl.float32)
    vs = tl.load(v + request * v_stride + head * v_head + m * v_dim, mask=inside, other=0.0).to(tl.float32)
    ks *= inverse_length(tl.sum(ks * ks))
    qs *= inverse_length(tl.sum(qs * qs)) * (SIZE**-0.5)
    a += request * a_stride + head * a_head
    dt_bias += head * dt_bias_head
    rate = tl.exp(tl.load(a_log + head * a_log_head).to(tl.float32))
    if CHANNELS:
        step = tl.load(a + n * a_size, mask=within, other=0.0).to(tl.float32)
        step += tl.load(dt_bias + n * dt_bias_size, mask=within, other=0.0).to(tl.float32)
        state *= tl.exp(log_decay(step, rate, BOUND))[None, :]
    else:
        step = tl.load(a).to(tl.float32) + tl.load(dt_bias).to(tl.float32)
        state *= tl.exp(log_decay(step, rate, BOUND))
    strength = sigmoid(tl.load(b + request * b_stride + head * b_head).to(tl.float32))

    known = tl.sum(state * ks[None, :], axis=1)
    state += ((vs - known) * strength)[:, None] * ks[None, :]
    write_state(rows + dst[:, None] + n[None, :], state.to(rows.dtype.element_ty), held & has_dst)
    out = tl.sum(state * qs[None, :], axis=1)
    tl.store(y + request * y_stride + head * DIM + m, out.to(y.dtype.element_ty), mask=inside)


def plan_delta_update(
    view: StateView,
    src_map: torch.Tensor,
    dst_map: torch.Tensor,
    inputs: DeltaInputs,
    y: torch.Tensor,
) -> Launch:
    """The launch of `delta_update` into a contiguous `y` [B, H, V]; B is at least 1."""
    inputs.check(view, src_map.shape[0])
    need_map(view, src_map)
    batch = inputs.v.shape[0]
    need_map(view, dst_map, batch)
    width = power_of_two(view.state_size)
    block = block_rows(view.head_dim, width)
    args = delta_args(view, block, src_map, dst_map, inputs, y)
    args["COLUMNS"] = width
    warps = max(1, min(4, block * width // 1024))
    grid = (view.heads * -(-view.head_dim // block), batch)
    return Launch(delta_update_kernel, grid, args, warps)


def delta_update(
    view: StateView,
    src_map: torch.Tensor,
    dst_map: torch.Tensor,
    inputs: DeltaInputs,
) -> torch.Tensor:
    """`kernels.delta_update.delta_update` as one Triton launch: same arguments, result and errors.

    Requests run at once: a page that one request writes may be read by that request alone.  Every row of y
    is written, padding rows too.
    """
    v = inputs.v
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if v.shape[0]:
        plan_delta_update(view, src_map, dst_map, inputs, y).run()
    return y
