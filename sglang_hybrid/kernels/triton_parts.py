"""A piece of a ragged batch, part by part, in a Triton scan: which tokens, their inputs, matrix operands."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

OPERANDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
LEAST_DOT = 16
"""Least side of a tile in a matrix product."""
PIECE_TABLES = (
    "piece_start", "piece_length", "piece_position", "piece_seq", "piece_emission", "first_piece",
    "seq_flat_start", "first_block", "block_start", "block_length", "block_emission",
)  # fmt: skip
"""Tables of `Segments` that kernels read an element at a time; they lie anywhere in one buffer."""


@triton.jit
def inputs(
    base: tl.tensor,
    token: tl.tensor,
    token_stride: tl.tensor,
    column_stride: tl.tensor,
    there: tl.tensor,
    columns: tl.tensor,
    width: tl.tensor,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """[CHUNK, columns] of an input from `token` on: one address, then 32-bit offsets; zero past the ends."""
    slot = tl.arange(0, CHUNK)[:, None]
    at = base + token * token_stride + slot * token_stride + (columns * column_stride)[None, :]
    return tl.load(at, mask=there[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def operand(tile: tl.tensor, OPERAND: tl.constexpr, CARRIER: tl.constexpr) -> tl.tensor:
    """A factor of a matrix product, rounded to `OPERAND`; the interpreter needs another dtype to carry it."""
    return tile.to(OPERAND).to(CARRIER)
