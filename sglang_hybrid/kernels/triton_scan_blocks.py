"""The three launches of a long Mamba2 prefill: own states, states, outputs (see `triton_paged_scan`)."""

# Tuples grow in unrolled loops; Triton has no starred expressions.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, var-annotated"
from __future__ import annotations

import triton
import triton.language as tl

from sglang_hybrid.kernels.state_access import read_state, write_state
from sglang_hybrid.kernels.triton_parts import PIECE_TABLES, operand
from sglang_hybrid.kernels.triton_rows import row_offsets
from sglang_hybrid.kernels.triton_ssd import decays, outputs, own_state, state_after


@triton.jit(
    do_not_specialize=["first_row", "sequences", "blocks", "tokens"],
    do_not_specialize_on_alignment=["src_map", "dst_map", "dt_bias", *PIECE_TABLES],
)
def own_states_kernel(
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
    block_start: tl.tensor,
    block_length: tl.tensor,
    scratch: tl.tensor,
    tokens: tl.tensor,
    own: tl.tensor,
    totals: tl.tensor,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    RATIO: tl.constexpr,
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
    """`own` [blocks, H, DIM, SIZE] of every block, `totals` [blocks, H], and steps and logs in `scratch`."""
    BLOCKS: tl.constexpr = (DIM + BLOCK - 1) // BLOCK
    PARTS_OF_ROW: tl.constexpr = (SIZE + WIDTH - 1) // WIDTH
    TILES_OF_HEAD: tl.constexpr = BLOCKS * PARTS_OF_ROW
    HEADS = tl.num_programs(0) // TILES_OF_HEAD
    head, tile = tl.program_id(0) // TILES_OF_HEAD, tl.program_id(0) % TILES_OF_HEAD
    block = tl.program_id(1)
    m = (tile // PARTS_OF_ROW) * BLOCK + tl.arange(0, BLOCK)
    n = (tile % PARTS_OF_ROW) * WIDTH + tl.arange(0, WIDTH)
    token = tl.load(block_start + block)
    count = tl.load(block_length + block).to(tl.int32)
    rate = tl.load(a + head * a_head).to(tl.float32)
    if dt_bias is not None:
        dt_bias += head * dt_bias_head
    # A program reads its own copy of steps and logs; the outputs read those of tile 0.
    steps = scratch + ((tile * HEADS + head).to(tl.int64) * 2) * tokens + token
    logs = steps + tokens
    total = decays(
        dt + token * dt_stride + head * dt_head, dt_stride, dt_bias, rate, dt_low, dt_high, count,
        steps, logs, SPAN, SOFTPLUS, LIMIT,
    )  # fmt: skip
    tl.debug_barrier()
    added = own_state(
        x + head * x_head, x_stride, x_dim, b + (head // RATIO) * b_group, b_stride, b_size, token, count,
        steps, logs, total, m, n, DIM, SIZE, BLOCK, WIDTH, CHUNK, OPERAND, CARRIER, PRECISION,
    )  # fmt: skip
    place = (block * HEADS + head).to(tl.int64)
    at = own + place * (DIM * SIZE) + m[:, None] * SIZE + n[None, :]
    write_state(at, added, (m < DIM)[:, None] & (n < SIZE)[None, :])
    if tile == 0:
        tl.store(totals + place, total)



@triton.jit(
    do_not_specialize=["first_row", "sequences", "blocks", "tokens"],
    do_not_specialize_on_alignment=["src_map", "dst_map", "dt_bias", *PIECE_TABLES],
)
def states_kernel(
    rows: tl.tensor,
    src_map: tl.tensor,
    dst_map: tl.tensor,
    first_row: tl.tensor,
    page_units: tl.tensor,
    src_stride: tl.tensor,
    src_member: tl.tensor,
    dst_stride: tl.tensor,
    dst_member: tl.tensor,
    own: tl.tensor,
    totals: tl.tensor,
    entries: tl.tensor,
    block_emission: tl.tensor,
    first_block: tl.tensor,
    sequences: tl.tensor,
    blocks: tl.tensor,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    PER_PAGE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """`entries` [blocks, H, DIM, SIZE]: the state before every block, rounded as an operand."""
    BLOCKS: tl.constexpr = (DIM + BLOCK - 1) // BLOCK
    HEADS = tl.num_programs(0) // BLOCKS
    head = tl.program_id(0) // BLOCKS
    first = (tl.program_id(0) % BLOCKS) * BLOCK
    sequence = tl.program_id(1)
    m, n = first + tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    inside = (m < DIM)[:, None] & (n < SIZE)[None, :]
    start, left = first_row + head * DIM + first, DIM - first
    src_map += sequence.to(tl.int64) * src_stride
    src = row_offsets(src_map, src_member, start, left, page_units, PER_PAGE, ONE_PAGE, SIZE, UNIT, BLOCK)
    held = inside & (tl.load(src_map) > 0)
    state = read_state(rows + src[:, None] + n[None, :], held).to(tl.float32)

    begin = tl.load(first_block + sequence).to(tl.int32)
    end = tl.load(first_block + sequence + 1, mask=sequence + 1 < sequences, other=blocks).to(tl.int32)
    place = (begin * HEADS + head).to(tl.int64)
    cell = place * (DIM * SIZE) + m[:, None] * SIZE + n[None, :]
    # Loaded a block ahead: only the sum waits for the state.
    added = tl.load(own + cell, mask=inside, other=0.0)
    total = tl.load(totals + place)
    emission = tl.load(block_emission + begin)
    for block in range(begin, end):
        more = block + 1 < end
        tl.store(entries + cell, state.to(entries.dtype.element_ty), mask=inside)
        cell += HEADS.to(tl.int64) * (DIM * SIZE)
        place += HEADS
        next_added = tl.load(own + cell, mask=inside & more, other=0.0)
        next_total = tl.load(totals + place, mask=more, other=0.0)
        next_emission = tl.load(block_emission + block + 1, mask=more, other=-1)
        state = state_after(state, added, total)
        if emission >= 0:
            to = dst_map + emission * dst_stride
            dst = row_offsets(to, dst_member, start, left, page_units, PER_PAGE, ONE_PAGE, SIZE, UNIT, BLOCK)
            stored = state.to(rows.dtype.element_ty)
            write_state(rows + dst[:, None] + n[None, :], stored, inside & (tl.load(to) > 0))
            state = stored.to(tl.float32)
        added, total, emission = next_added, next_total, next_emission



@triton.jit(
    do_not_specialize=["first_row", "sequences", "blocks", "tokens"],
    do_not_specialize_on_alignment=["src_map", "dst_map", "dt_bias", *PIECE_TABLES],
)
def outputs_kernel(
    x: tl.tensor,
    x_stride: tl.tensor,
    x_head: tl.tensor,
    x_dim: tl.tensor,
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
    entries: tl.tensor,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    RATIO: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    OPERAND: tl.constexpr,
    CARRIER: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """y of every token, from the states before the blocks."""
    BLOCKS: tl.constexpr = (DIM + BLOCK - 1) // BLOCK
    HELD: tl.constexpr = x.dtype.element_ty.primitive_bitwidth == 16
    STEPS: tl.constexpr = (SPAN + CHUNK - 1) // CHUNK
    PARTS_OF_ROW: tl.constexpr = (SIZE + WIDTH - 1) // WIDTH
    HEADS = tl.num_programs(0) // BLOCKS
    head = tl.program_id(0) // BLOCKS
    m = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, WIDTH)
    block = tl.program_id(1) // STEPS
    first = (STEPS - 1 - tl.program_id(1) % STEPS) * CHUNK  # those with most work come first
    count = tl.load(block_length + block).to(tl.int32)
    if first >= count:
        return
    token = tl.load(block_start + block)
    steps = scratch + (head.to(tl.int64) * 2) * tokens + token
    at = entries + (block * HEADS + head).to(tl.int64) * (DIM * SIZE) + m[:, None] * SIZE
    states = ()
    for i in tl.static_range(PARTS_OF_ROW):
        columns = i * WIDTH + n
        held = (m < DIM)[:, None] & (columns < SIZE)[None, :]
        states = states + (operand(tl.load(at + columns[None, :], mask=held, other=0.0), OPERAND, CARRIER),)
    if d is not None:
        d += head * d_head
    if z is not None:
        z += head * z_head
    outputs(
        x + head * x_head, x_stride, x_dim, b + (head // RATIO) * b_group, b_stride, b_size,
        c + (head // RATIO) * c_group, c_stride, c_size, d, d_dim, z, z_stride, z_dim,
        y + head * DIM, y_stride, token, count, first, steps, steps + tokens, states, m,
        DIM, SIZE, BLOCK, WIDTH, CHUNK, HELD, OPERAND, CARRIER, PRECISION,
    )  # fmt: skip
