"""Prefill of the gated delta rule in Triton: initial states are read from pages, the ragged batch is scanned
and the state of every emission is written straight into its pages.

A token reads the state before it writes, so the tokens of a part of a piece are a triangular system.  One
launch takes all parts at once and inverts their systems; it touches no state.  In the next a program owns
some rows of one head of one sequence and walks the sequence's parts in order, the state in registers, as
`triton_paged_scan` does.  With one decay a head, keys and queries enter the products as they are, their
lengths and decays are factors of the results: nothing is rounded for them.  With a decay a key channel
(KDA) that cannot be: the first launch also writes them as they enter the part and leave it, decayed.
"""

# Tuples grow in unrolled loops; Triton has no starred expressions.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, var-annotated"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_hybrid.kernels.checks import KernelError, need_dtype
from sglang_hybrid.kernels.delta_rule import DeltaInputs
from sglang_hybrid.kernels.launch import WORD_BYTES, Launch, power_of_two, taken
from sglang_hybrid.kernels.segments import Segments
from sglang_hybrid.kernels.state_access import read_state, write_state
from sglang_hybrid.kernels.state_io import need_map
from sglang_hybrid.kernels.triton_args import delta_args, scan_args, strided
from sglang_hybrid.kernels.triton_math import inverse_length, inverse_of_unit_lower, log_decay, sigmoid
from sglang_hybrid.kernels.triton_parts import LEAST_DOT, OPERANDS, PIECE_TABLES, inputs, operand
from sglang_hybrid.kernels.triton_rows import row_offsets
from sglang_hybrid.pools.views import StateView

TILES = {2: (32, 32, 128), 4: (16, 16, 64)}
"""By bytes of an input: rows, tokens and columns of a tile (half the columns where systems are built).  The
largest that spill no registers."""
MOST_COLUMNS = 256
FACTORS: tl.constexpr = tl.constexpr(5)
"""Vectors over the tokens of a part that scale its products, see `delta_parts_kernel`."""


@triton.jit(
    do_not_specialize_on_alignment=[*PIECE_TABLES, "a", "b", "a_log", "dt_bias"],
)
def delta_parts_kernel(
    q: tl.tensor,
    k: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    systems: tl.tensor,
    factors: tl.tensor,
    decayed: tl.tensor,
    remains: tl.tensor,
    piece_start: tl.tensor,
    piece_length: tl.tensor,
    q_stride: tl.tensor,
    q_group: tl.tensor,
    q_size: tl.tensor,
    k_stride: tl.tensor,
    k_group: tl.tensor,
    k_size: tl.tensor,
    a_stride: tl.tensor,
    a_head: tl.tensor,
    a_size: tl.tensor,
    b_stride: tl.tensor,
    b_head: tl.tensor,
    a_log_head: tl.tensor,
    dt_bias_head: tl.tensor,
    dt_bias_size: tl.tensor,
    decayed_kind: tl.tensor,
    decayed_stride: tl.tensor,
    SIZE: tl.constexpr,
    RATIO: tl.constexpr,
    LENGTH: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    OPERAND: tl.constexpr,
    CARRIER: tl.constexpr,
    PRECISION: tl.constexpr,
    CHANNELS: tl.constexpr,
    BOUND: tl.constexpr,
) -> None:
    """`systems` [parts, H, 2, CHUNK, CHUNK]: what is written of what is wanted, what is answered of what is
    written.  `factors` [parts, H, 5, CHUNK]: of values and of known values in what is wanted, of what the
    state answers, of what is written in the state after the part, and of the state before in it.

    With CHANNELS, `decayed` [3, T, H, SIZE]: keys and queries as they meet the state before the part, keys as
    they enter the state after it; `remains` [parts, H, SIZE]: what that has of the state before."""
    PARTS: tl.constexpr = (LENGTH + CHUNK - 1) // CHUNK
    part, head = tl.program_id(0), tl.program_id(1)
    slot, n = tl.arange(0, CHUNK), tl.arange(0, WIDTH)
    low = (part % PARTS) * CHUNK
    count = tl.load(piece_length + part // PARTS).to(tl.int32)
    if low >= count:
        return
    token = tl.load(piece_start + part // PARTS) + low
    there = slot < count - low
    rate = tl.exp(tl.load(a_log + head * a_log_head).to(tl.float32))
    a += head * a_head
    dt_bias += head * dt_bias_head
    at = b + token * b_stride + slot * b_stride + head * b_head
    strength = tl.where(there, sigmoid(tl.load(at, mask=there, other=0.0).to(tl.float32)), 0.0)

    q += (head // RATIO) * q_group
    k += (head // RATIO) * k_group
    place = (part * tl.num_programs(1) + head).to(tl.int64)
    alike = tl.zeros([CHUNK, CHUNK], tl.float32)
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    key_squares = tl.zeros([CHUNK], tl.float32)
    query_squares = tl.zeros([CHUNK], tl.float32)
    for column in range(0, SIZE, WIDTH):
        ks = inputs(k, token, k_stride, k_size, there, column + n, SIZE, CHUNK)
        qs = inputs(q, token, q_stride, q_size, there, column + n, SIZE, CHUNK)
        key_squares += tl.sum(ks.to(tl.float32) * ks.to(tl.float32), axis=1)
        query_squares += tl.sum(qs.to(tl.float32) * qs.to(tl.float32), axis=1)
        if not CHANNELS:
            ks, qs = operand(ks, OPERAND, CARRIER), operand(qs, OPERAND, CARRIER)
            alike = tl.dot(ks, tl.trans(ks), alike, input_precision=PRECISION)
            scores = tl.dot(qs, tl.trans(ks), scores, input_precision=PRECISION)
    keys = inverse_length(key_squares)
    queries = inverse_length(query_squares) * (SIZE**-0.5)

    row, column = slot[:, None], slot[None, :]
    factors += place * (FACTORS * CHUNK) + slot
    tl.store(factors, strength)
    if CHANNELS:
        for first in range(0, SIZE, WIDTH):
            c = first + n
            whole = there[:, None] & (c < SIZE)[None, :]
            bias = tl.load(dt_bias + c * dt_bias_size, mask=c < SIZE, other=0.0).to(tl.float32)
            step = inputs(a, token, a_stride, a_size, there, c, SIZE, CHUNK).to(tl.float32) + bias[None, :]
            # A padding slot neither decays the state nor writes.
            step = tl.where(whole, log_decay(step, rate, BOUND), 0.0)
            log, total = tl.cumsum(step, axis=0), tl.sum(step, axis=0)
            ks = inputs(k, token, k_stride, k_size, there, c, SIZE, CHUNK).to(tl.float32)
            qs = inputs(q, token, q_stride, q_size, there, c, SIZE, CHUNK).to(tl.float32)
            # Column by column: a product of exp(log) and exp(-log) would pass what fp32 holds.
            since = tl.zeros([WIDTH], tl.float32)
            for j in range(CHUNK):
                here = (c < SIZE) & (low + j < count)
                mine = tl.load(a + (token + j) * a_stride + c * a_size, mask=here, other=0.0).to(tl.float32)
                since += tl.where(here, log_decay(mine + bias, rate, BOUND), 0.0)
                key = tl.load(k + (token + j) * k_stride + c * k_size, mask=here, other=0.0).to(tl.float32)
                seen = tl.exp(tl.minimum(log - since[None, :], 0.0)) * key[None, :]
                alike += tl.where(column == j, tl.sum(ks * seen, axis=1)[:, None], 0.0)
                scores += tl.where(column == j, tl.sum(qs * seen, axis=1)[:, None], 0.0)
            to = decayed + (token + row) * decayed_stride + head * SIZE + c[None, :]
            met = tl.exp(log)
            tl.store(to, (ks * met * keys[:, None]).to(decayed.dtype.element_ty), mask=whole)
            to += decayed_kind
            tl.store(to, (qs * met * queries[:, None]).to(decayed.dtype.element_ty), mask=whole)
            to += decayed_kind
            leaving = ks * tl.exp(total[None, :] - log) * keys[:, None]
            tl.store(to, leaving.to(decayed.dtype.element_ty), mask=whole)
            tl.store(remains + place * SIZE + c, tl.exp(total), mask=c < SIZE)
        span = tl.zeros([CHUNK, CHUNK], tl.float32) + keys[None, :]
        tl.store(factors + CHUNK, strength)
        tl.store(factors + 2 * CHUNK, tl.zeros([CHUNK], tl.float32) + 1.0)
        tl.store(factors + 3 * CHUNK, tl.zeros([CHUNK], tl.float32) + 1.0)
    else:
        at = a + token * a_stride + slot * a_stride
        step = tl.load(at, mask=there, other=0.0).to(tl.float32) + tl.load(dt_bias).to(tl.float32)
        step = tl.where(there, log_decay(step, rate, BOUND), 0.0)
        log, total = tl.cumsum(step), tl.sum(step)
        span = tl.exp(tl.where(row >= column, log[:, None] - log[None, :], 0.0)) * keys[None, :]
        entered = tl.exp(log)
        tl.store(factors + CHUNK, strength * keys * entered)
        tl.store(factors + 2 * CHUNK, queries * entered)
        tl.store(factors + 3 * CHUNK, keys * tl.exp(total - log))
        tl.store(factors + 4 * CHUNK, tl.exp(total) + tl.zeros([CHUNK], tl.float32))
    below = tl.where(row > column, alike * span * (strength * keys)[:, None], 0.0)
    answers = tl.where(row >= column, scores * span * queries[:, None], 0.0)
    at = systems + place * (2 * CHUNK * CHUNK) + row * CHUNK + column
    write_state(at, inverse_of_unit_lower(below, CHUNK).to(systems.dtype.element_ty), row < CHUNK)
    write_state(at + CHUNK * CHUNK, answers.to(systems.dtype.element_ty), row < CHUNK)


@triton.jit(
    do_not_specialize=["first_row", "sequences", "pieces"],
    do_not_specialize_on_alignment=["src_map", "dst_map", *PIECE_TABLES],
)
def paged_delta_scan_kernel(
    rows: tl.tensor,
    src_map: tl.tensor,
    dst_map: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    leaving: tl.tensor,
    remains: tl.tensor,
    systems: tl.tensor,
    factors: tl.tensor,
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
    q_stride: tl.tensor,
    q_group: tl.tensor,
    q_size: tl.tensor,
    k_stride: tl.tensor,
    k_group: tl.tensor,
    k_size: tl.tensor,
    v_stride: tl.tensor,
    v_head: tl.tensor,
    v_dim: tl.tensor,
    leaving_stride: tl.tensor,
    leaving_group: tl.tensor,
    leaving_size: tl.tensor,
    y_stride: tl.tensor,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    RATIO: tl.constexpr,
    PER_PAGE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    LENGTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    OPERAND: tl.constexpr,
    CARRIER: tl.constexpr,
    PRECISION: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    BLOCKS: tl.constexpr = (DIM + BLOCK - 1) // BLOCK
    PARTS: tl.constexpr = (LENGTH + CHUNK - 1) // CHUNK
    PARTS_OF_ROW: tl.constexpr = (SIZE + WIDTH - 1) // WIDTH
    HEADS = tl.num_programs(0) // BLOCKS
    head = tl.program_id(0) // BLOCKS
    first = (tl.program_id(0) % BLOCKS) * BLOCK
    sequence = tl.program_id(1)
    m = first + tl.arange(0, BLOCK)
    n = tl.arange(0, WIDTH)
    slot = tl.arange(0, CHUNK)
    square = slot[:, None] * CHUNK + slot[None, :]
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

    q += (head // RATIO) * q_group
    k += (head // RATIO) * k_group
    leaving += (head // RATIO) * leaving_group
    begin = tl.load(first_piece + sequence).to(tl.int32)
    end = tl.load(first_piece + sequence + 1, mask=sequence + 1 < sequences, other=pieces).to(tl.int32)
    part = begin * PARTS
    while part < end * PARTS:
        piece = part // PARTS
        low = (part % PARTS) * CHUNK
        token = tl.load(piece_start + piece) + low
        count = tl.load(piece_length + piece).to(tl.int32)
        there = slot < count - low
        place = (part * HEADS + head).to(tl.int64)
        system = systems + place * (2 * CHUNK * CHUNK) + square
        factor = factors + place * (FACTORS * CHUNK) + slot

        # What the tokens know from the state before them, and what it answers them.
        known = tl.zeros([CHUNK, BLOCK], tl.float32)
        seen = tl.zeros([CHUNK, BLOCK], tl.float32)
        for i in tl.static_range(PARTS_OF_ROW):
            before = operand(states[i], OPERAND, CARRIER)
            ks = inputs(k, token, k_stride, k_size, there, i * WIDTH + n, SIZE, CHUNK)
            known = tl.dot(operand(ks, OPERAND, CARRIER), before, known, input_precision=PRECISION)
            qs = inputs(q, token, q_stride, q_size, there, i * WIDTH + n, SIZE, CHUNK)
            seen = tl.dot(operand(qs, OPERAND, CARRIER), before, seen, input_precision=PRECISION)

        vs = inputs(v + head * v_head, token, v_stride, v_dim, there, m, DIM, CHUNK).to(tl.float32)
        wanted = vs * tl.load(factor)[:, None] - known * tl.load(factor + CHUNK)[:, None]
        solved = operand(tl.load(system), OPERAND, CARRIER)
        written = tl.dot(solved, operand(wanted, OPERAND, CARRIER), input_precision=PRECISION)
        answers = operand(tl.load(system + CHUNK * CHUNK), OPERAND, CARRIER)
        out = seen * tl.load(factor + 2 * CHUNK)[:, None]
        out = tl.dot(answers, operand(written, OPERAND, CARRIER), out, input_precision=PRECISION)
        added = operand(written * tl.load(factor + 3 * CHUNK)[:, None], OPERAND, CARRIER)
        decay = tl.load(factors + place * (FACTORS * CHUNK) + 4 * CHUNK)
        after = ()
        for i in tl.static_range(PARTS_OF_ROW):
            c = i * WIDTH + n
            ks = inputs(leaving, token, leaving_stride, leaving_size, there, c, SIZE, CHUNK)
            ks = operand(tl.trans(ks), OPERAND, CARRIER)
            if CHANNELS:
                kept = states[i] * tl.load(remains + place * SIZE + c, mask=c < SIZE, other=0.0)[:, None]
            else:
                kept = states[i] * decay
            after = after + (tl.dot(ks, added, kept, input_precision=PRECISION),)
        states = after
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


def plan_paged_delta_scan(
    view: StateView,
    src_map: torch.Tensor,
    dst_map: torch.Tensor,
    inputs: DeltaInputs,
    segments: Segments,
    y: torch.Tensor,
) -> tuple[Launch, Launch]:
    """The launches of `paged_delta_scan` into a contiguous `y` [T, H, V], in order; T is at least 1."""
    v = inputs.v
    inputs.check(view, segments.tokens)
    need_map(view, src_map, segments.sequences)
    need_map(view, dst_map, len(segments.emissions))
    need_dtype("v", v, tuple(OPERANDS))
    if view.state_size > MOST_COLUMNS:
        raise KernelError(f"rows hold {view.state_size} elements, needs {MOST_COLUMNS} or less: use 'torch'")
    block, chunk, width = (
        max(LEAST_DOT, min(most, power_of_two(size)))
        for most, size in zip(TILES[v.element_size()], (view.head_dim, segments.chunk, view.state_size))
    )
    args = delta_args(view, block, src_map, dst_map, inputs, y)
    args |= scan_args(segments, v.dtype) | {"CHUNK": chunk, "WIDTH": width}
    parts = segments.pieces * -(-segments.chunk // chunk)
    places = (parts, view.heads)
    args["systems"] = torch.empty((*places, 2, chunk, chunk), dtype=v.dtype, device=v.device)
    args["factors"] = torch.empty((*places, FACTORS, chunk), dtype=torch.float32, device=v.device)
    size, by_channel = view.state_size, inputs.by_channel
    decayed = v.new_empty((3, v.shape[0], view.heads, size)) if by_channel else None
    args |= strided("decayed", decayed, "kind", "stride", "head", "size")
    args["remains"] = v.new_empty((*places, size), dtype=torch.float32) if by_channel else None
    parts_args = taken(delta_parts_kernel, args) | {"WIDTH": max(LEAST_DOT, width // 2)}
    words = chunk * chunk * v.element_size() // WORD_BYTES
    grid = (view.heads * -(-view.head_dim // block), segments.sequences)
    if decayed is None:
        args |= strided("leaving", inputs.k, "stride", "group", "size")
    else:
        for name, tensor in zip(("k", "q", "leaving"), decayed):
            args |= strided(name, tensor, "stride", "group", "size")
        args["RATIO"] = 1  # they are a value head's, where a group of these shares a key
    return (
        Launch(delta_parts_kernel, places, parts_args, warps=max(1, words // 32), stages=1),
        Launch(paged_delta_scan_kernel, grid, taken(paged_delta_scan_kernel, args), warps=8, stages=1),
    )


def paged_delta_scan(
    view: StateView,
    src_map: torch.Tensor,
    dst_map: torch.Tensor,
    inputs: DeltaInputs,
    segments: Segments,
) -> torch.Tensor:
    """`kernels.paged_delta_scan.paged_delta_scan` as two Triton launches: same arguments, result and errors.

    Sequences run at once: a page that one sequence writes may be read by that sequence alone, and an
    emission other than the last may not go where its sequence's initial state came from.
    """
    v = inputs.v
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if v.shape[0]:
        for launch in plan_paged_delta_scan(view, src_map, dst_map, inputs, segments, y):
            launch.run()
    return y
