"""Prefill of the Mamba2 recurrence in Triton: one launch reads initial states from pages, scans the ragged
batch and writes the state of every emission straight into its pages.

A program owns some rows of one head of one sequence and walks the sequence's pieces in order, the state in
registers: it never leaves them but at an emission, where it is rounded to the stored dtype as a resume
would read it.  Pieces begin where absolute positions say, so a resumed scan repeats a cold one bit for bit.
"""

# Tuples grow in unrolled loops; Triton has no starred expressions.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, var-annotated"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_hybrid.kernels.checks import KernelError, need_dtype, need_shape
from sglang_hybrid.kernels.launch import Launch, power_of_two
from sglang_hybrid.kernels.segments import Segments
from sglang_hybrid.kernels.ssd_scan import NO_LIMIT, check_scan
from sglang_hybrid.kernels.state_access import read_state, write_state
from sglang_hybrid.kernels.state_io import need_map
from sglang_hybrid.kernels.triton_args import layer_args, scan_args
from sglang_hybrid.kernels.triton_math import silu, softplus
from sglang_hybrid.kernels.triton_parts import LEAST_DOT, OPERANDS, PIECE_TABLES, inputs, operand
from sglang_hybrid.kernels.triton_rows import row_offsets
from sglang_hybrid.pools.views import StateView

TILES = {2: (32, 32, 128), 4: (16, 16, 64)}
"""By bytes of an input: rows, tokens and columns of a tile.  The largest that spill no registers."""
MOST_COLUMNS = 256


@triton.jit(
    do_not_specialize=["first_row", "sequences", "pieces"],
    do_not_specialize_on_alignment=["src_map", "dst_map", *PIECE_TABLES],
)
def paged_scan_kernel(
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
    piece_start: tl.tensor,
    piece_length: tl.tensor,
    piece_emission: tl.tensor,
    first_piece: tl.tensor,
    sequences: tl.tensor,
    pieces: tl.tensor,
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
    LENGTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    OPERAND: tl.constexpr,
    CARRIER: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    BLOCKS: tl.constexpr = (DIM + BLOCK - 1) // BLOCK
    PARTS: tl.constexpr = (LENGTH + CHUNK - 1) // CHUNK
    PARTS_OF_ROW: tl.constexpr = (SIZE + WIDTH - 1) // WIDTH
    head = tl.program_id(0) // BLOCKS
    first = (tl.program_id(0) % BLOCKS) * BLOCK
    sequence = tl.program_id(1)
    m = first + tl.arange(0, BLOCK)
    n = tl.arange(0, WIDTH)
    slot = tl.arange(0, CHUNK)
    inside = m < DIM
    start, left = first_row + head * DIM + first, DIM - first

    src_map += sequence.to(tl.int64) * src_stride
    src = row_offsets(src_map, src_member, start, left, page_units, PER_PAGE, ONE_PAGE, SIZE, UNIT, BLOCK)
    has_src = tl.load(src_map) > 0
    # Transposed, columns first: so a matrix product divides it among all warps.
    states = ()
    for i in tl.static_range(PARTS_OF_ROW):
        held = inside[None, :] & (i * WIDTH + n < SIZE)[:, None] & has_src
        loaded = read_state(rows + src[None, :] + (i * WIDTH + n)[:, None], held)
        states = states + (loaded.to(tl.float32),)

    rate = tl.load(a + head * a_head).to(tl.float32)
    if dt_bias is not None:
        bias = tl.load(dt_bias + head * dt_bias_head).to(tl.float32)
    if d is not None:
        skip = tl.load(d + head * d_head + m * d_dim, mask=inside, other=0.0).to(tl.float32)
    x += head * x_head
    dt += head * dt_head
    b += (head // RATIO) * b_group
    c += (head // RATIO) * c_group
    begin = tl.load(first_piece + sequence).to(tl.int32)
    end = tl.load(first_piece + sequence + 1, mask=sequence + 1 < sequences, other=pieces).to(tl.int32)
    part = begin * PARTS
    while part < end * PARTS:
        piece = part // PARTS
        low = (part % PARTS) * CHUNK
        token = tl.load(piece_start + piece) + low
        count = tl.load(piece_length + piece).to(tl.int32)
        there = slot < count - low
        step = tl.load(dt + token * dt_stride + slot * dt_stride, mask=there, other=0.0).to(tl.float32)
        if dt_bias is not None:
            step += bias
        if SOFTPLUS:
            step = softplus(step)
        if LIMIT:
            step = tl.minimum(tl.maximum(step, dt_low), dt_high)
        # A padding slot has step 0: it neither decays the state nor adds to it.
        step = tl.where(there, step, 0.0)
        log = tl.cumsum(step * rate)
        total = tl.sum(step * rate)

        xs = inputs(x, token, x_stride, x_dim, there, m, DIM, CHUNK).to(tl.float32)
        weighted = xs * step[:, None]

        # What these tokens give each other; then what the state before them gives, and they to it.
        causal = slot[:, None] >= slot[None, :]
        span = tl.where(causal, log[:, None] - log[None, :], 0.0)
        scores = tl.zeros([CHUNK, CHUNK], tl.float32)
        for k in range(0, SIZE, WIDTH):
            bs = operand(inputs(b, token, b_stride, b_size, there, k + n, SIZE, CHUNK), OPERAND, CARRIER)
            cs = operand(inputs(c, token, c_stride, c_size, there, k + n, SIZE, CHUNK), OPERAND, CARRIER)
            scores = tl.dot(cs, tl.trans(bs), scores, input_precision=PRECISION)
        weights = operand(tl.where(causal, scores * tl.exp(span), 0.0), OPERAND, CARRIER)
        out = tl.dot(weights, operand(weighted, OPERAND, CARRIER), input_precision=PRECISION)
        added = operand(weighted * tl.exp(total - log)[:, None], OPERAND, CARRIER)
        seen = tl.zeros([CHUNK, BLOCK], tl.float32)
        after = ()
        for i in tl.static_range(PARTS_OF_ROW):
            columns = i * WIDTH + n
            c_part = inputs(c, token, c_stride, c_size, there, columns, SIZE, CHUNK)
            c_part = operand(c_part, OPERAND, CARRIER)
            seen = tl.dot(c_part, operand(states[i], OPERAND, CARRIER), seen, input_precision=PRECISION)
            b_part = tl.trans(inputs(b, token, b_stride, b_size, there, columns, SIZE, CHUNK))
            b_part = operand(b_part, OPERAND, CARRIER)
            left_over = states[i] * tl.exp(total)
            after = after + (tl.dot(b_part, added, left_over, input_precision=PRECISION),)
        states = after
        out += seen * tl.exp(log)[:, None]
        if d is not None:
            out += xs * skip[None, :]
        if z is not None:
            gate = inputs(z + head * z_head, token, z_stride, z_dim, there, m, DIM, CHUNK)
            out *= silu(gate.to(tl.float32))
        at = y + token * y_stride + slot[:, None] * y_stride + head * DIM + m[None, :]
        tl.store(at, out.to(y.dtype.element_ty), mask=there[:, None] & inside[None, :])
        done = low + CHUNK >= count  # parts without tokens are passed over
        emission = tl.load(piece_emission + piece, mask=done, other=-1)
        if emission >= 0:
            to = dst_map + emission * dst_stride
            dst = row_offsets(to, dst_member, start, left, page_units, PER_PAGE, ONE_PAGE, SIZE, UNIT, BLOCK)
            carried = ()
            for i in tl.static_range(PARTS_OF_ROW):
                cell = inside[None, :] & (i * WIDTH + n < SIZE)[:, None] & (tl.load(to) > 0)
                stored = states[i].to(rows.dtype.element_ty)
                write_state(rows + dst[None, :] + (i * WIDTH + n)[:, None], stored, cell)
                carried = carried + (stored.to(tl.float32),)
            states = carried
        part = tl.where(done, (piece + 1) * PARTS, part + 1)


def plan_paged_scan(
    view: StateView,
    src_map: torch.Tensor,
    dst_map: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    segments: Segments,
    y: torch.Tensor,
    *,
    d: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
) -> Launch:
    """The launch of `paged_scan` into a contiguous `y` [T, H, P]; T is at least 1."""
    check_scan(x, dt, a, b, c, segments, d, z)
    need_shape("x", x, (None, view.heads, view.head_dim))
    need_shape("B", b, (None, None, view.state_size))
    need_map(view, src_map, segments.sequences)
    need_map(view, dst_map, len(segments.emissions))
    need_dtype("x", x, tuple(OPERANDS))
    if view.state_size > MOST_COLUMNS:
        raise KernelError(f"rows hold {view.state_size} elements, needs {MOST_COLUMNS} or less: use 'torch'")
    heads, dim = x.shape[1:]
    block, chunk, width = (
        max(LEAST_DOT, min(most, power_of_two(size)))
        for most, size in zip(TILES[x.element_size()], (dim, segments.chunk, view.state_size))
    )
    args = layer_args(
        view, block, src_map, dst_map, x, dt, a, b, c, y,
        d=d, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit,
    )  # fmt: skip
    args |= scan_args(segments, x.dtype) | {"CHUNK": chunk, "WIDTH": width}
    grid = (heads * -(-dim // block), segments.sequences)
    return Launch(paged_scan_kernel, grid, args, warps=8, stages=1)


def paged_scan(
    view: StateView,
    src_map: torch.Tensor,
    dst_map: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    segments: Segments,
    *,
    d: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
) -> torch.Tensor:
    """`kernels.paged_scan.paged_scan` as one Triton launch: same arguments, result and errors.

    Sequences run at once: a page that one sequence writes may be read by that sequence alone, and an
    emission other than the last may not go where its sequence's initial state came from.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        plan_paged_scan(
            view, src_map, dst_map, x, dt, a, b, c, segments, y,
            d=d, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit,
        ).run()  # fmt: skip
    return y
