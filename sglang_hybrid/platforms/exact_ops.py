"""Exact mode on the CPU: torch's own operations, replaced by those of `kernels.invariant`.

Replaced at the dispatcher, for the CPU alone and for the whole process, so that whatever module asks
for a product, a mean or a softmax gets one whose rows do not depend on each other.  SGLang does the
same on CUDA with `--enable-deterministic-inference` (`sglang.srt.batch_invariant_ops`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from sglang_hybrid.kernels import invariant
from sglang_hybrid.kernels.elementwise import silu, softplus
from sglang_hybrid.kernels.invariant import widen

_Library: Any = torch.library.Library  # without types
_library: Any = None


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return invariant.matmul_rows(a, b) if a.is_floating_point() else torch.mm(a, b, out=_like_mm(a, b))


def _like_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _addmm(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """Product, then bias: two roundings, in bf16 too."""
    product = invariant.matmul_rows(a, b)
    return (product if alpha == 1 else product * alpha) + (bias if beta == 1 else bias * beta)


def _is_last(x: torch.Tensor, dims: Sequence[int] | None) -> bool:
    return x.is_floating_point() and dims is not None and [d % x.dim() for d in dims] == [x.dim() - 1]


def _reduced_shape(x: torch.Tensor, dims: Sequence[int] | None, keepdim: bool) -> list[int]:
    gone = range(x.dim()) if not dims else [d % x.dim() for d in dims]
    return [1 if i in gone else n for i, n in enumerate(x.shape) if keepdim or i not in gone]


def _sum(
    x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Over the last dim in fp32 at least; other sums are torch's: they mix rows by intention."""
    kind = dtype or (x.dtype if x.is_floating_point() else torch.int64)
    if not _is_last(x, dim):
        out = torch.empty(_reduced_shape(x, dim, keepdim), dtype=kind)
        return torch.ops.aten.sum.IntList_out(x, dim, keepdim, dtype=dtype, out=out)
    total = invariant.tree_sum(widen(x.to(kind))).to(kind)
    return total.unsqueeze(-1) if keepdim else total


def _mean(
    x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    kind = dtype or x.dtype
    if not _is_last(x, dim):
        out = torch.empty(_reduced_shape(x, dim, keepdim), dtype=kind)
        return torch.ops.aten.mean.out(x, dim, keepdim, dtype=dtype, out=out)
    mean = invariant.tree_mean(widen(x.to(kind))).to(kind)
    return mean.unsqueeze(-1) if keepdim else mean


def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    return invariant.softmax(x.transpose(dim, -1)).transpose(dim, -1)


def _log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    return invariant.log_softmax(x.transpose(dim, -1)).transpose(dim, -1)


def _silu(x: torch.Tensor) -> torch.Tensor:
    return silu(widen(x)).to(x.dtype)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    result = 1 / (1 + torch.exp(-widen(x)))
    return result.to(x.dtype) if x.is_floating_point() else result


def _softplus(x: torch.Tensor, beta: float = 1, threshold: float = 20) -> torch.Tensor:
    return (softplus(widen(x) * beta) / beta).to(x.dtype)


def _rsqrt(x: torch.Tensor) -> torch.Tensor:
    result = 1 / torch.sqrt(widen(x))
    return result.to(x.dtype) if x.is_floating_point() else result


OPERATIONS = {
    "mm": _mm,
    "addmm": _addmm,
    "sum.dim_IntList": _sum,
    "mean.dim": _mean,
    "_softmax": _softmax,
    "_log_softmax": _log_softmax,
    "silu": _silu,
    "sigmoid": _sigmoid,
    "softplus": _softplus,
    "rsqrt": _rsqrt,
}
"""aten operation -> the one that runs on CPU tensors in exact mode."""


def install() -> None:
    """Replace `OPERATIONS` in this process, for CPU tensors.  Idempotent; `remove` undoes it.

    Raises:
        KernelError: this machine's exp is not a function of its argument alone.
    """
    global _library
    if _library is not None:
        return
    invariant.check_exp()
    _library = _Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is overridden is the point
        for name, function in OPERATIONS.items():
            _library.impl(name, function, "CPU")


def remove() -> None:
    """torch's own operations again."""
    global _library
    if _library is not None:
        _library._destroy()
        _library = None
