"""Causal attention in exact mode: each query sees its keys in the same tiles, whoever asks with it.

Keys are cut into tiles at multiples of `KEY_TILE` of the absolute position, queries are taken
`QUERY_TILE` tokens at a time; every product has one fixed shape.  A query's result is

    sum over tiles (exp(s - m) V)  /  sum over tiles (exp(s - m))

with m the largest score (exact in any order) and tiles added in order.  A tile without a key for a
query adds exact zeros, so neither the length of the batch's contexts nor the cut of its prompts
takes part.
"""

from __future__ import annotations

import torch

from sglang_hybrid.kernels.checks import KernelError, need_shape
from sglang_hybrid.kernels.invariant import rows_are_free, tree_sum

KEY_TILE = 64
QUERY_TILE = 16

_tokens_of_shape: dict[tuple[int, ...], int] = {}


def query_tile(kv_heads: int, ratio: int, dim: int, v_dim: int) -> int:
    """Tokens of a query tile: `QUERY_TILE` if this machine's products are proved free of place, else 1."""
    key = (kv_heads, ratio, dim, v_dim, torch.get_num_threads())
    tokens = _tokens_of_shape.get(key)
    if tokens is None:
        generator = torch.Generator().manual_seed(1)
        keys = torch.randn(kv_heads, KEY_TILE, dim, generator=generator).transpose(1, 2)
        values = torch.randn(kv_heads, KEY_TILE, v_dim, generator=generator)
        rows = QUERY_TILE * ratio

        def scores(tile: torch.Tensor) -> torch.Tensor:
            return torch.bmm(tile.expand(kv_heads, -1, -1).contiguous(), keys).transpose(0, 1)

        def mixed(tile: torch.Tensor) -> torch.Tensor:
            return torch.bmm(tile.expand(kv_heads, -1, -1).contiguous(), values).transpose(0, 1)

        free = rows_are_free(scores, rows, dim, torch.float32) and rows_are_free(
            mixed, rows, KEY_TILE, torch.float32
        )
        tokens = QUERY_TILE if free else 1
        _tokens_of_shape[key] = tokens
    return tokens


def _tiles(rows: torch.Tensor, count: int) -> torch.Tensor:
    """[length, KVH, D] -> fp32 [count, KVH, KEY_TILE, D], zeros behind the end."""
    length, heads, dim = rows.shape
    padded = rows.new_zeros(count * KEY_TILE, heads, dim, dtype=torch.float32)
    padded[:length] = rows
    return padded.view(count, KEY_TILE, heads, dim).transpose(1, 2).contiguous()


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, begin: int, scaling: float
) -> torch.Tensor:
    """One sequence: queries `q` [T, H, D] at positions begin..begin + T - 1 -> [T, H, V] in q's dtype.

    `k` [begin + T, KVH, D] and `v` [begin + T, KVH, V] hold every position up to the last query's.
    Sums are fp32.  Raises `KernelError` for shapes that do not fit.
    """
    tokens, heads, dim = q.shape
    need_shape("k", k, (begin + tokens, None, dim))
    kv_heads, v_dim = k.shape[1], v.shape[2]
    need_shape("v", v, (begin + tokens, kv_heads, None))
    if heads % kv_heads:
        raise KernelError(f"{kv_heads} KV heads do not divide {heads} query heads")
    ratio = heads // kv_heads
    step = query_tile(kv_heads, ratio, dim, v_dim)
    count = -(-(begin + tokens) // KEY_TILE)
    keys, values = _tiles(k, count).transpose(-1, -2), _tiles(v, count)
    scaled = q.float() * scaling
    out = torch.empty(tokens, heads, v_dim)
    for low in range(0, tokens, step):
        high = min(low + step, tokens)
        tile = scaled.new_zeros(step, heads, dim)
        tile[: high - low] = scaled[low:high]
        tile = tile.view(step, kv_heads, ratio, dim).transpose(0, 1).reshape(kv_heads, step * ratio, dim)
        mixed = _query_tile(tile, keys, values, begin + low, begin + high, ratio)
        mixed = mixed.view(kv_heads, step, ratio, v_dim).transpose(0, 1).reshape(step, heads, v_dim)
        out[low:high] = mixed[: high - low]
    return out.to(q.dtype)


def _query_tile(
    tile: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int, end: int, ratio: int
) -> torch.Tensor:
    """[KVH, R, D] queries at positions first.. against the key tiles below `end` -> [KVH, R, V]."""
    kv_heads, rows, _ = tile.shape
    count = -(-end // KEY_TILE)
    scores = tile.new_empty(count, kv_heads, rows, KEY_TILE)
    for index in range(count):
        torch.bmm(tile, keys[index], out=scores[index])
    # Rows behind the last token are padding; they see what the last possible query would.
    positions = (first + torch.arange(rows // ratio)).repeat_interleave(ratio)
    places = torch.arange(count * KEY_TILE).view(count, 1, 1, KEY_TILE)
    scores.masked_fill_(places > positions[:, None], float("-inf"))
    weights = torch.exp(scores - scores.amax(-1, keepdim=True).amax(0, keepdim=True))
    sums = tree_sum(weights)
    parts = tile.new_empty(count, kv_heads, rows, values.shape[-1])
    for index in range(count):
        torch.bmm(weights[index], values[index], out=parts[index])
    mixed, total = parts[0], sums[0]
    for index in range(1, count):
        mixed = mixed + parts[index]
        total = total + sums[index]
    return mixed / total[..., None]
