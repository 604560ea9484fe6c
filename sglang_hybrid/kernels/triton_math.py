"""softplus and silu for Triton kernels, in fp32, that agree with `kernels.elementwise` to rounding."""

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
