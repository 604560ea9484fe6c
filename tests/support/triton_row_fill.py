"""Cases of the Triton fill of KV rows; `python -m tests.support.triton_row_fill` runs them."""

from __future__ import annotations

from functools import partial

import torch

from sglang_hybrid.kernels.checkpoint_io import FILLS, ArenaTable
from sglang_hybrid.kernels.checks import KernelError
from sglang_hybrid.kernels.row_fill import Runs
from tests.support.guarded import allow
from tests.support.interpreted import Check, main, same_bytes

ROWS = 64
RUNS: Runs = ((3, 5), (8, 1), (10, 0), (40, 24))
"""Two that touch, one of no rows, one that ends with the arena."""


def arenas(row_bytes: int, count: int, device: str, rows: int = ROWS) -> list[torch.Tensor]:
    """Random bytes; what lies behind each arena belongs to nobody, and a launch that goes there is caught."""
    torch.manual_seed(5)
    made = [torch.randint(0, 256, (rows * row_bytes,), dtype=torch.uint8).to(device) for _ in range(count)]
    allow(made)
    return made


def fills(row_bytes: int, count: int, fill: str, device: str) -> None:
    """Every byte of the runs is the fill's, in all arenas; all others stay.  Both routes do the same."""
    from sglang_hybrid.kernels import row_fill, triton_row_fill

    for route in (row_fill, triton_row_fill):
        buffers = arenas(row_bytes, count, device)
        want = [buffer.cpu().clone() for buffer in buffers]
        for arena in want:
            for first, rows in RUNS:
                arena[first * row_bytes : (first + rows) * row_bytes] = FILLS[fill]
        numbers = [number for run in RUNS for number in run]
        placed = torch.tensor(numbers, device=device) if count == 2 else None
        route.fill_rows(ArenaTable(buffers), RUNS, row_bytes, fill, placed)
        for arena, expected in zip(buffers, want, strict=True):
            assert same_bytes(arena.cpu(), expected)


def several_programs(device: str) -> None:
    """A run longer than what one program fills, beside one of a single row."""
    from sglang_hybrid.kernels.triton_row_fill import CHUNK_BYTES, fill_rows

    row_bytes, rows = 1024, 3 * CHUNK_BYTES // 1024
    (buffer,) = arenas(row_bytes, 1, device, rows)
    want = buffer.cpu().clone()
    want[row_bytes : (rows - 2) * row_bytes] = 0
    want[-row_bytes:] = 0
    fill_rows(ArenaTable([buffer]), [(1, rows - 3), (rows - 1, 1)], row_bytes, "zero")
    assert same_bytes(buffer.cpu(), want)


def refuses(device: str) -> None:
    """A run that leaves the arena, and an unknown fill; no run at all is no launch."""
    from sglang_hybrid.kernels.triton_row_fill import fill_rows

    table = ArenaTable(arenas(64, 2, device))
    before = [buffer.cpu().clone() for buffer in table.buffers]
    fill_rows(table, [], 64, "zero")
    for runs, fill in ((((ROWS - 1, 2),), "zero"), (((-1, 1),), "zero"), (((0, 1),), "nan")):
        try:
            fill_rows(table, runs, 64, fill)
        except KernelError:
            continue
        raise AssertionError(f"{runs} of {fill} were filled")
    for buffer, expected in zip(table.buffers, before, strict=True):
        assert same_bytes(buffer.cpu(), expected)


def cases() -> dict[str, Check]:
    """All cases by name."""
    table: dict[str, Check] = {
        f"rows of {size} bytes, {count} arenas, {fill}": partial(fills, size, count, fill)
        for size, count, fill in (
            (1024, 3, "zero"), (1024, 1, "poison"), (64, 2, "loud"), (24, 2, "zero"), (6, 1, "zero"),
            (1, 2, "poison"), (9, 1, "loud"),
        )
    }  # fmt: skip
    return table | {"several programs": several_programs, "refusals": refuses}


if __name__ == "__main__":
    main(cases())
