"""`row_fill.fill_rows` in Triton: one launch for all runs and all arenas.

A program fills one chunk of one run in one arena.  Words are as wide as rows and arenas are aligned, 16 bytes
a thread on real geometries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_hybrid.geometry import ceil_div
from sglang_hybrid.kernels.checkpoint_io import ArenaTable, fill_word
from sglang_hybrid.kernels.launch import Launch, vector
from sglang_hybrid.kernels.row_fill import Runs, check_runs
from sglang_hybrid.kernels.state_access import write_state
from sglang_hybrid.kernels.upload import upload

CHUNK_BYTES = 16384
"""Bytes of a program: 128 a thread at 4 warps."""


@triton.jit(do_not_specialize_on_alignment=["runs"])
def fill_kernel(
    targets: tl.tensor,
    runs: tl.tensor,
    ROW: tl.constexpr,
    WORD: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
    FILL: tl.constexpr,
) -> None:
    """`ROW` in units of `UNIT` words; `CHUNK` in words."""
    chunk = tl.program_id(0)
    run = tl.program_id(1)
    arena = tl.program_id(2)
    first = tl.load(runs + 2 * run).to(tl.int64) * ROW * UNIT
    units = tl.load(runs + 2 * run + 1).to(tl.int64) * ROW
    word = chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    pointer: tl.constexpr = tl.pointer_type(WORD)
    # An address read from memory says nothing of its alignment; the plan checked it.
    target = tl.multiple_of(tl.load(targets + arena).to(pointer), ALIGN)
    write_state(target + first + word, tl.full([CHUNK], FILL, WORD), word // UNIT < units)


def plan_fill(target: ArenaTable, runs: torch.Tensor, longest: int, row_bytes: int, fill: str) -> Launch:
    """The launch over `runs` [n, 2], n > 0, on the arenas' device, the longest of `longest` rows."""
    align = vector(1, row_bytes, *(buffer.data_ptr() for buffer in target.buffers))
    word_bytes = min(align, 4)
    args = {
        "targets": target.bases, "runs": runs, "ROW": row_bytes // align,
        "WORD": {1: tl.int8, 2: tl.int16, 4: tl.int32}[word_bytes], "UNIT": align // word_bytes,
        "CHUNK": CHUNK_BYTES // word_bytes, "ALIGN": align, "FILL": fill_word(fill, word_bytes),
    }  # fmt: skip
    chunks = max(1, ceil_div(longest * row_bytes, CHUNK_BYTES))
    return Launch(fill_kernel, (chunks, runs.shape[0], len(target.buffers)), args, warps=4)


def fill_rows(
    target: ArenaTable, runs: Runs, row_bytes: int, fill: str, placed: torch.Tensor | None = None
) -> None:
    """`row_fill.fill_rows` as one Triton launch."""
    check_runs(target, runs, row_bytes, fill)
    if runs:
        longest = max(count for _, count in runs)
        if placed is None:
            placed = upload(torch.tensor(runs, dtype=torch.int64), target.bases.device)
        plan_fill(target, placed.view(-1, 2), longest, row_bytes, fill).run()
