"""Functions of fp32 for Triton kernels, that agree with those of the torch route to rounding."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + exp(x)), also where exp(x) is far below 1: Triton has no log1p and small steps would vanish."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    # log(u) (e / (u - 1)) makes good for the rounding of u.
    lost = u == 1.0
    return tl.maximum(x, 0.0) + tl.where(lost, e, tl.log(u) * (e / tl.where(lost, 1.0, u - 1.0)))


@triton.jit
def silu(x: tl.tensor) -> tl.tensor:
    """x sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def log_decay(step: tl.tensor, rate: tl.tensor, BOUND: tl.constexpr) -> tl.tensor:
    """`delta_rule.gates` of a step (projection and bias) and a rate, exp(A_log); BOUND may be None."""
    if BOUND is None:
        return -rate * softplus(step)
    else:
        return BOUND * sigmoid(rate * step)


@triton.jit
def inverse_length(squares: tl.tensor) -> tl.tensor:
    """1 / |x| from the sum of the squares of x, as in `delta_rule.unit`."""
    return tl.rsqrt(squares + 1e-6)


@triton.jit
def inverse_of_unit_lower(below: tl.tensor, SIDE: tl.constexpr) -> tl.tensor:
    """Inverse of I + `below` [SIDE, SIDE], which is zero on and above the diagonal; SIDE is 16, 32 or 64.

    Blocks on the diagonal double from step to step: [[A, 0], [L, B]] has the inverse
    [[A', 0], [-B' L A', B']].  Unlike a series in `below`, nothing in it grows beyond what inverses are.
    """
    row, column = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    halves = (row // 2 == column // 2) & (row > column)
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(halves, below, 0.0)
    for level in tl.static_range(1, 6):
        if 2 << level <= SIDE:
            together = row // (2 << level) == column // (2 << level)
            corner = tl.where(together & (row // (1 << level) > column // (1 << level)), below, 0.0)
            step = tl.dot(corner, inverse, input_precision="tf32x3")
            inverse -= tl.dot(inverse, step, input_precision="tf32x3")
    return inverse
