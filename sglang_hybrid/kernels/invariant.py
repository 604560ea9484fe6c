"""CPU operations whose result for a row depends on that row alone: the arithmetic of exact mode.

On a CPU a row's bits usually depend on its company: a matrix product takes another inner loop for
few rows, a vector loop rounds `sigmoid` unlike the scalar one that does the last elements.  Here

- matrix products run in tiles of a fixed number of rows, padded with zeros, always in the same
  memory layout; that a row's place in the tile does not matter is *proved* on this machine for each
  shape before its first use, and where it does matter a tile is one row;
- sums add halves pairwise (IEEE additions in an order that only the length decides);
- elementwise functions are built from exp, log and exact arithmetic (`elementwise`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from sglang_hybrid.kernels.checks import KernelError, need_shape

TILE_ROWS = (16, 8, 4)
"""Rows of a tile, the first that is proved; a single row needs no proof."""

_rows_of_shape: dict[tuple[object, ...], int] = {}


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dim in x's dtype, `[..., n]` -> `[...]`, by halves."""
    if x.shape[-1] == 0:
        return x.new_zeros(x.shape[:-1])
    while (length := x.shape[-1]) > 1:
        half = length // 2
        paired = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([paired, x[..., 2 * half :]], dim=-1) if length % 2 else paired
    return x[..., 0]


def tree_mean(x: torch.Tensor) -> torch.Tensor:
    """Mean over the last dim in x's dtype."""
    return tree_sum(x) / x.shape[-1]


def widen(x: torch.Tensor) -> torch.Tensor:
    """x in fp32, or in fp64 where it is that: the dtype to compute in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dim, computed in fp32 at least, in x's dtype."""
    wide = widen(x)
    weights = torch.exp(wide - wide.amax(-1, keepdim=True))
    return (weights / tree_sum(weights)[..., None]).to(x.dtype)


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """Log of softmax over the last dim, computed in fp32 at least, in x's dtype."""
    wide = widen(x)
    shifted = wide - wide.amax(-1, keepdim=True)
    return (shifted - torch.log(tree_sum(torch.exp(shifted)))[..., None]).to(x.dtype)


def matmul_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a` [M, K] times `b` [K, N] -> [M, N]; a row's bits depend on that row and on b alone.

    `b` must be a weight: it is laid out alike in every call.
    """
    need_shape("a", a, (None, None))
    need_shape("b", b, (a.shape[1], None))
    rows = tile_rows(b, a.dtype)
    count = a.shape[0]
    padded = -(-count // rows) * rows
    # Own memory: a tile is packed and aligned whatever `a` is a view of.
    tiles = a.new_zeros(padded, a.shape[1])
    tiles[:count] = a
    out = a.new_empty(padded, b.shape[1])
    for low in range(0, padded, rows):
        torch.ops.aten.mm.out(tiles[low : low + rows], b, out=out[low : low + rows])
    return out[:count]


def tile_rows(b: torch.Tensor, dtype: torch.dtype) -> int:
    """Rows of a tile for products with `b` [K, N]: proved on this machine at the first question."""
    key = (tuple(b.shape), b.stride(), dtype, torch.get_num_threads())
    rows = _rows_of_shape.get(key)
    if rows is None:

        def product(tile: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten.mm.out(tile, b, out=tile.new_empty(tile.shape[0], b.shape[1]))

        rows = next((n for n in TILE_ROWS if rows_are_free(product, n, b.shape[0], dtype)), 1)
        _rows_of_shape[key] = rows
    return rows


def rows_are_free(
    product: Callable[[torch.Tensor], torch.Tensor], rows: int, width: int, dtype: torch.dtype
) -> bool:
    """Whether `product` of a tile [rows, width] gives each row the same bits in every place and company."""
    # A generator of its own: the global one belongs to sampling.
    generator = torch.Generator().manual_seed(rows)
    tile = torch.randn(rows, width, generator=generator).to(dtype)
    want = product(tile)
    turned = all(
        torch.equal(product(tile.roll(turn, 0)), want.roll(turn, 0)) for turn in {1, rows // 2, rows - 1}
    )
    alone = torch.zeros_like(tile)
    alone[0] = tile[0]
    return turned and torch.equal(product(alone)[0], want[0])


@lru_cache(maxsize=1)
def check_exp() -> None:
    """Raise `KernelError` unless this machine's exp, log and log1p ignore where an element lies."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(4099, generator=generator) * 20 - 19
    for function, values in ((torch.exp, x), (torch.log, x.abs()), (torch.log1p, x.abs())):
        whole = function(values)
        for start, length in ((0, 1), (1, 3), (3, 16), (5, 31), (7, 64), (11, 1000)):
            part = slice(start, start + length)
            if not torch.equal(function(values[part]), whole[part]):
                raise KernelError(f"torch.{function.__name__} on this CPU depends on an element's place")
