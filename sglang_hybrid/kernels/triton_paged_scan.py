"""Prefill of the Mamba2 recurrence in Triton: initial states are read from pages, the ragged batch is scanned
and the state of every emission is written straight into its pages.

The batch is cut into blocks of at most 256 tokens (`Segments.block_start`).  A batch of short extends takes
one launch, in which a program owns some rows of one head of one sequence and walks its blocks.  A longer one
takes three:

    own states   of all blocks at once, what each adds to the state
    states       a program owns rows of one sequence and passes over its blocks, element by element: the state
                 before each, and the emissions
    outputs      of all blocks at once

Both do the same arithmetic, in `triton_ssd`.  The state is rounded to the stored dtype at an emission, as a
resume would read it, and blocks begin where absolute positions say: so a resumed scan repeats a cold one bit
for bit, whichever way each of them takes.
"""

# Tuples grow in unrolled loops; Triton has no starred expressions.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, var-annotated"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sglang_hybrid.kernels.checks import KernelError, need_dtype, need_shape
from sglang_hybrid.kernels.launch import Launch, power_of_two, taken
from sglang_hybrid.kernels.segments import Segments
from sglang_hybrid.kernels.ssd_scan import NO_LIMIT, check_scan
from sglang_hybrid.kernels.state_access import read_state, write_state
from sglang_hybrid.kernels.state_io import need_map
from sglang_hybrid.kernels.triton_args import layer_args, scan_args, state_args
from sglang_hybrid.kernels.triton_parts import LEAST_DOT, OPERANDS, PIECE_TABLES, operand
from sglang_hybrid.kernels.triton_rows import row_offsets
from sglang_hybrid.kernels.triton_scan_blocks import outputs_kernel, own_states_kernel, states_kernel
from sglang_hybrid.kernels.triton_ssd import decays, outputs, own_state, state_after
from sglang_hybrid.pools.views import StateView

TILES = {2: (64, 32, 128), 4: (16, 16, 64)}
"""By bytes of an input: rows, tokens and columns of a tile.  The largest that spill no registers."""
MOST_COLUMNS = 256
WALKED_TOKENS = 128
"""Longest extend that one launch walks.  It issues about 9,000 instructions a warp there, the three launches
3,000 together: the difference is what two more launches cost."""
PASSED = 1024
"""State elements of a program that passes over blocks: 8 a thread, 16 bytes of the narrowest stored dtype."""


@triton.jit(
    do_not_specialize=["first_row", "sequences", "blocks", "tokens"],
    do_not_specialize_on_alignment=["src_map", "dst_map", "dt_bias", *PIECE_TABLES],
)
def paged_scan_kernel(
    rows: tl.tensor,
    src_map: tl.tensor,
    dst_map: tl.tensor,
    first_row: tl.tensor,
    page_units: tl.tensor,
    src_stride: tl.tensor,
    src_member: tl.tensor,
    dst_stride: tl.tensor,
    dst_member: tl.tensor,
    x: tl.tensor,
    x_stride: tl.tensor,
    x_head: tl.tensor,
    x_dim: tl.tensor,
    dt: tl.tensor,
    dt_stride: tl.tensor,
    dt_head: tl.tensor,
    a: tl.tensor,
    a_head: tl.tensor,
    dt_bias: tl.tensor,
    dt_bias_head: tl.tensor,
    dt_low: tl.tensor,
    dt_high: tl.tensor,
    b: tl.tensor,
    b_stride: tl.tensor,
    b_group: tl.tensor,
    b_size: tl.tensor,
    c: tl.tensor,
    c_stride: tl.tensor,
    c_group: tl.tensor,
    c_size: tl.tensor,
    d: tl.tensor,
    d_head: tl.tensor,
    d_dim: tl.tensor,
    z: tl.tensor,
    z_stride: tl.tensor,
    z_head: tl.tensor,
    z_dim: tl.tensor,
    y: tl.tensor,
    y_stride: tl.tensor,
    block_start: tl.tensor,
    block_length: tl.tensor,
    scratch: tl.tensor,
    tokens: tl.tensor,
    carried: tl.tensor,
    block_emission: tl.tensor,
    first_block: tl.tensor,
    sequences: tl.tensor,
    blocks: tl.tensor,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    RATIO: tl.constexpr,
    PER_PAGE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    SPAN: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    OPERAND: tl.constexpr,
    CARRIER: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """All of it: outputs, and the state from block to block."""
    BLOCKS: tl.constexpr = (DIM + BLOCK - 1) // BLOCK
    PARTS_OF_ROW: tl.constexpr = (SIZE + WIDTH - 1) // WIDTH
    HEADS = tl.num_programs(0) // BLOCKS
    head, tile = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    first = tile * BLOCK
    sequence = tl.program_id(1)
    m, n = first + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    inside = (m < DIM)[:, None]
    start, left = first_row + head * DIM + first, DIM - first
    src_map += sequence.to(tl.int64) * src_stride
    has_src = tl.load(src_map) > 0

    if dt_bias is not None:
        dt_bias += head * dt_bias_head
    begin = tl.load(first_block + sequence).to(tl.int32)
    src = row_offsets(src_map, src_member, start, left, page_units, PER_PAGE, ONE_PAGE, SIZE, UNIT, BLOCK)
    held = carried + ((begin * HEADS + head).to(tl.int64) * DIM + m[:, None]) * SIZE
    for i in tl.static_range(PARTS_OF_ROW):
        columns = (i * WIDTH + n)[None, :]
        cell = inside & (columns < SIZE)
        initial = read_state(rows + src[:, None] + columns, cell & has_src)
        tl.store(held + columns, initial.to(tl.float32), mask=cell)
    tl.debug_barrier()
    end = tl.load(first_block + sequence + 1, mask=sequence + 1 < sequences, other=blocks).to(tl.int32)
    for block in tl.range(begin, end, disable_licm=True):
        token = tl.load(block_start + block)
        count = tl.load(block_length + block).to(tl.int32)
        steps = scratch + ((tile * HEADS + head).to(tl.int64) * 2) * tokens + token
        logs = steps + tokens
        rate = tl.load(a + head * a_head).to(tl.float32)
        total = decays(
            dt + token * dt_stride + head * dt_head, dt_stride, dt_bias, rate, dt_low, dt_high, count,
            steps, logs, SPAN, SOFTPLUS, LIMIT,
        )  # fmt: skip
        tl.debug_barrier()
        for low in tl.range(0, count, CHUNK, disable_licm=True):
            # Read again for every tile, at addresses that the compiler cannot hoist: what waits in registers
            # over a tile would spill.  A length is never negative, which only we know.
            own_head = head + tl.minimum(tl.load(block_length + block), 0).to(tl.int32)
            rows_of_tile = m + (own_head - head)
            before = ()
            for i in tl.static_range(PARTS_OF_ROW):
                columns = (i * WIDTH + n)[None, :]
                at = carried + ((block * HEADS + own_head).to(tl.int64) * DIM + m[:, None]) * SIZE + columns
                state = tl.load(at, mask=inside & (columns < SIZE), other=0.0)
                before = before + (operand(state, OPERAND, CARRIER),)
            outputs(
                x + own_head * x_head, x_stride, x_dim, b + (own_head // RATIO) * b_group, b_stride, b_size,
                c + (own_head // RATIO) * c_group, c_stride, c_size,
                None if d is None else d + own_head * d_head, d_dim,
                None if z is None else z + own_head * z_head, z_stride, z_dim,
                y + own_head * DIM, y_stride, token, count, low, steps, logs, before, rows_of_tile,
                DIM, SIZE, BLOCK, WIDTH, CHUNK, False, OPERAND, CARRIER, PRECISION,
            )  # fmt: skip
        emission = tl.load(block_emission + block)
        emits = emission >= 0
        to = dst_map + tl.maximum(emission, 0) * dst_stride
        dst = row_offsets(to, dst_member, start, left, page_units, PER_PAGE, ONE_PAGE, SIZE, UNIT, BLOCK)
        target = emits & (tl.load(to) > 0)
        held = carried + ((block * HEADS + head).to(tl.int64) * DIM + m[:, None]) * SIZE
        following = held + HEADS.to(tl.int64) * (DIM * SIZE)
        for i in tl.static_range(PARTS_OF_ROW):
            own = own_state(
                x + head * x_head, x_stride, x_dim, b + (head // RATIO) * b_group, b_stride, b_size,
                token, count, steps, logs, total, m, i * WIDTH + n,
                DIM, SIZE, BLOCK, WIDTH, CHUNK, OPERAND, CARRIER, PRECISION,
            )  # fmt: skip
            columns = (i * WIDTH + n)[None, :]
            cell = inside & (columns < SIZE)
            state = state_after(tl.load(held + columns, mask=cell, other=0.0), own, total)
            stored = state.to(rows.dtype.element_ty)
            write_state(rows + dst[:, None] + columns, stored, cell & target)
            kept = tl.where(emits, stored.to(tl.float32), state)
            tl.store(following + columns, kept, mask=cell & (block + 1 < end))
        tl.debug_barrier()


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
) -> tuple[Launch, ...]:
    """The launches of `paged_scan` into a contiguous `y` [T, H, P], in order; T is at least 1."""
    check_scan(x, dt, a, b, c, segments, d, z)
    need_shape("x", x, (None, view.heads, view.head_dim))
    need_shape("B", b, (None, None, view.state_size))
    need_map(view, src_map, segments.sequences)
    need_map(view, dst_map, len(segments.emissions))
    need_dtype("x", x, tuple(OPERANDS))
    if view.state_size > MOST_COLUMNS:
        raise KernelError(f"rows hold {view.state_size} elements, needs {MOST_COLUMNS} or less: use 'torch'")
    heads, dim = x.shape[1:]
    size = view.state_size
    block, chunk, width = (
        max(LEAST_DOT, min(most, power_of_two(side)))
        for most, side in zip(TILES[x.element_size()], (dim, segments.block_tokens, size))
    )
    # Operands of 32 bits would spill in the one launch that does all of it.
    walks = segments.longest <= WALKED_TOKENS and x.element_size() == 2
    rows_of_head, parts_of_row = -(-dim // block), -(-size // width)
    copies = rows_of_head * (1 if walks else parts_of_row)
    args = layer_args(
        view, block, src_map, dst_map, x, dt, a, b, c, y,
        d=d, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit,
    )  # fmt: skip
    args |= scan_args(segments, x.dtype) | {
        "CHUNK": chunk, "WIDTH": width, "SPAN": max(chunk, power_of_two(segments.block_tokens)),
        "block_start": segments.block_start, "block_length": segments.block_length,
        "block_emission": segments.block_emission, "first_block": segments.first_block,
        "blocks": segments.blocks, "tokens": segments.tokens,
        "scratch": x.new_empty((copies, heads, 2, segments.tokens), dtype=torch.float32),
    }  # fmt: skip

    steps = args["SPAN"] // chunk

    def launch(kernel: Any, grid: tuple[int, int], trips: tuple[int, ...], stages: int = 2) -> Launch:
        return Launch(kernel, grid, taken(kernel, args), 8, stages, fused=False, trips=trips)

    if walks:
        args["carried"] = x.new_empty((segments.blocks, heads, dim, size), dtype=torch.float32)
        tiles = -(-min(segments.longest, segments.block_tokens) // chunk)
        trips = (segments.most_blocks, tiles, -(-(tiles + 1) // 2), *(tiles,) * parts_of_row)
        return (launch(paged_scan_kernel, (heads * rows_of_head, segments.sequences), trips, 1),)
    shape = (segments.blocks, heads, dim, size)
    args["own"] = x.new_empty(shape, dtype=torch.float32)
    args["totals"] = x.new_empty(shape[:2], dtype=torch.float32)
    args["entries"] = x.new_empty(shape)
    passed = max(1, min(PASSED // power_of_two(size), power_of_two(dim)))
    args["COLUMNS"] = power_of_two(size)
    states = taken(states_kernel, args | state_args(view, passed, src_map, dst_map))
    passing = (heads * -(-dim // passed), segments.sequences)
    stages = 2 if x.element_size() == 2 else 1
    return (
        launch(own_states_kernel, (heads * copies, segments.blocks), (steps,)),
        Launch(states_kernel, passing, states, 4, 1, fused=False, trips=(segments.most_blocks,)),
        launch(outputs_kernel, (heads * rows_of_head, segments.blocks * steps), (steps,), stages),
    )


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
    """`kernels.paged_scan.paged_scan` as one Triton launch or three: same arguments, result and errors.

    Sequences run at once: a page that one sequence writes may be read by that sequence alone, and an
    emission other than the last may not go where its sequence's initial state came from.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        for launch in plan_paged_scan(
            view, src_map, dst_map, x, dt, a, b, c, segments, y,
            d=d, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit,
        ):  # fmt: skip
            launch.run()
    return y
