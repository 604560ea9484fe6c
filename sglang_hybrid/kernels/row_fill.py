"""Fill runs of KV rows in all arenas of a rank with zeros, or in tests with poison.

A row is `row_bytes` bytes, K and V of a token in one layer; row r of an arena begins at byte r * row_bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_hybrid.kernels.checkpoint_io import FILLS, ArenaTable, need_fill
from sglang_hybrid.kernels.checks import KernelError

Runs = Sequence[tuple[int, int]]
"""(first row, rows) of each run; on the host, so that no route waits for the device."""


def check_runs(target: ArenaTable, runs: Runs, row_bytes: int, fill: str) -> None:
    """Raise `KernelError` unless every arena holds all of the runs and the fill is known."""
    need_fill(fill)
    rows = target.buffers[0].numel() // row_bytes
    for first, count in runs:
        if first < 0 or count < 0 or first + count > rows:
            raise KernelError(f"{count} rows from row {first} are filled, but an arena has {rows} rows")


def fill_rows(
    target: ArenaTable, runs: Runs, row_bytes: int, fill: str, placed: torch.Tensor | None = None
) -> None:
    """Fill these rows of all arenas; runs do not overlap.  `fill` is a key of `FILLS`.

    `placed`: the runs' numbers in order, int64 on the arenas' device, for a caller that brought them there
    with others.
    """
    check_runs(target, runs, row_bytes, fill)
    for first, count in runs:
        for arena in target.buffers:
            arena[first * row_bytes : (first + count) * row_bytes] = FILLS[fill]
