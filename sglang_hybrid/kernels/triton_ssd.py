"""The Mamba2 recurrence inside a block of tokens: what its kernels share, so that all compute the same bits.

A block straddles no boundary of the grid (`segments.block_bounds`).  Over its tokens t, with `log_t` the sum
of the steps' log decays from the block's first token to t and `total` the sum over all:

    own state      L = sum_t exp(total - log_t) step_t x_t B_t^T             (`own_state`)
    state after    S' = exp(total) S + L                                     (`state_after`)
    outputs        y_t = exp(log_t) S C_t + sum_(s <= t) exp(log_t - log_s) step_s (C_t . B_s) x_s

Only S' needs the state before the block.
"""

# mypy: disable-error-code="assignment, var-annotated"
from __future__ import annotations

import triton
import triton.language as tl

from sglang_hybrid.kernels.triton_math import silu, softplus
from sglang_hybrid.kernels.triton_parts import inputs, operand


@triton.jit
def decays(
    dt: tl.tensor,
    dt_stride: tl.tensor,
    dt_bias: tl.tensor,
    rate: tl.tensor,
    dt_low: tl.tensor,
    dt_high: tl.tensor,
    count: tl.tensor,
    steps: tl.tensor,
    logs: tl.tensor,
    SPAN: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    LIMIT: tl.constexpr,
) -> tl.tensor:
    """`total` of a block whose first token `dt` points to; its steps and logs go to `steps` and `logs`."""
    slot = tl.arange(0, SPAN)
    there = slot < count
    step = tl.load(dt + slot * dt_stride, mask=there, other=0.0).to(tl.float32)
    if dt_bias is not None:
        step += tl.load(dt_bias).to(tl.float32)
    if SOFTPLUS:
        step = softplus(step)
    if LIMIT:
        step = tl.minimum(tl.maximum(step, dt_low), dt_high)
    # A padding slot has step 0: it neither decays the state nor adds to it.
    step = tl.where(there, step, 0.0)
    tl.store(steps + slot, step, mask=there)
    tl.store(logs + slot, tl.cumsum(step * rate), mask=there)
    return tl.sum(step * rate)


@triton.jit
def own_state(
    x: tl.tensor,
    x_stride: tl.tensor,
    x_dim: tl.tensor,
    b: tl.tensor,
    b_stride: tl.tensor,
    b_size: tl.tensor,
    token: tl.tensor,
    count: tl.tensor,
    steps: tl.tensor,
    logs: tl.tensor,
    total: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    OPERAND: tl.constexpr,
    CARRIER: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """[BLOCK, WIDTH] rows `m` and columns `n` of what a block adds to the state."""
    slot = tl.arange(0, CHUNK)
    # Columns first: a product of 64 rows or more takes the same instructions for any BLOCK.
    own = tl.zeros([WIDTH, BLOCK], tl.float32)
    for low in range(0, count, CHUNK):
        there = low + slot < count
        step = tl.load(steps + low + slot, mask=there, other=0.0)
        log = tl.load(logs + low + slot, mask=there, other=0.0)
        xs = inputs(x, token + low, x_stride, x_dim, there, m, DIM, CHUNK).to(tl.float32)
        added = operand(xs * (step * tl.exp(total - log))[:, None], OPERAND, CARRIER)
        bs = operand(inputs(b, token + low, b_stride, b_size, there, n, SIZE, CHUNK), OPERAND, CARRIER)
        own = tl.dot(tl.trans(bs), added, own, input_precision=PRECISION)
    return tl.trans(own)


@triton.jit
def state_after(state: tl.tensor, own: tl.tensor, total: tl.tensor) -> tl.tensor:
    """The state after a block from the state before it; one rounding an element, in every kernel."""
    return tl.fma(state, tl.exp(total), own)


@triton.jit
def outputs(
    x: tl.tensor,
    x_stride: tl.tensor,
    x_dim: tl.tensor,
    b: tl.tensor,
    b_stride: tl.tensor,
    b_size: tl.tensor,
    c: tl.tensor,
    c_stride: tl.tensor,
    c_size: tl.tensor,
    d: tl.tensor,
    d_dim: tl.tensor,
    z: tl.tensor,
    z_stride: tl.tensor,
    z_dim: tl.tensor,
    y: tl.tensor,
    y_stride: tl.tensor,
    token: tl.tensor,
    count: tl.tensor,
    first: tl.tensor,
    steps: tl.tensor,
    logs: tl.tensor,
    states: tl.tuple,
    m: tl.tensor,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    HELD: tl.constexpr,
    OPERAND: tl.constexpr,
    CARRIER: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Write y of the tokens `first` to `first + CHUNK` of a block, rows `m`.

    `states`: the state before the block as operands, [BLOCK, WIDTH] a part of its columns.  `HELD`: C is read
    once, where there is room for it.
    """
    PARTS_OF_ROW: tl.constexpr = (SIZE + WIDTH - 1) // WIDTH
    slot, n = tl.arange(0, CHUNK), tl.arange(0, WIDTH)
    there = first + slot < count
    log = tl.load(logs + first + slot, mask=there, other=0.0)
    answers = ()
    out = tl.zeros([CHUNK, BLOCK], tl.float32)
    for i in tl.static_range(PARTS_OF_ROW):
        columns = i * WIDTH + n
        cs = inputs(c, token + first, c_stride, c_size, there, columns, SIZE, CHUNK)
        cs = operand(cs, OPERAND, CARRIER)
        out = tl.dot(cs, tl.trans(states[i]), out, input_precision=PRECISION)
        answers = answers + (cs,)  # noqa: RUF005
    out *= tl.exp(log)[:, None]
    for low in range(0, first + CHUNK, CHUNK):
        known = low + slot < count
        step = tl.load(steps + low + slot, mask=known, other=0.0)
        before = tl.load(logs + low + slot, mask=known, other=0.0)
        scores = tl.zeros([CHUNK, CHUNK], tl.float32)
        for i in tl.static_range(PARTS_OF_ROW):
            columns = i * WIDTH + n
            bs = inputs(b, token + low, b_stride, b_size, known, columns, SIZE, CHUNK)
            if HELD:
                cs = answers[i]
            else:
                cs = inputs(c, token + first, c_stride, c_size, there, columns, SIZE, CHUNK)
                cs = operand(cs, OPERAND, CARRIER)
            bs = operand(bs, OPERAND, CARRIER)
            scores = tl.dot(cs, tl.trans(bs), scores, input_precision=PRECISION)
        causal = there[:, None] & ((first + slot)[:, None] >= (low + slot)[None, :])
        span = tl.where(causal, log[:, None] - before[None, :], 0.0)
        weights = tl.where(causal, scores * tl.exp(span) * step[None, :], 0.0)
        xs = operand(inputs(x, token + low, x_stride, x_dim, known, m, DIM, CHUNK), OPERAND, CARRIER)
        out = tl.dot(operand(weights, OPERAND, CARRIER), xs, out, input_precision=PRECISION)
    inside = m < DIM
    if d is not None:
        skip = tl.load(d + m * d_dim, mask=inside, other=0.0).to(tl.float32)
        xs = inputs(x, token + first, x_stride, x_dim, there, m, DIM, CHUNK).to(tl.float32)
        out += xs * skip[None, :]
    if z is not None:
        gate = inputs(z, token + first, z_stride, z_dim, there, m, DIM, CHUNK)
        out *= silu(gate.to(tl.float32))
    at = y + (token + first) * y_stride + slot[:, None] * y_stride + m[None, :]
    tl.store(at, out.to(y.dtype.element_ty), mask=there[:, None] & inside[None, :])
