"""Cases of the byte count; `python -m tests.support.triton_traffic` runs them, in the interpreter only."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from sglang_hybrid.kernels.launch import Launch
from sglang_hybrid.kernels.traffic import Traffic, traffic
from tests.support.interpreted import Check, main


@triton.jit  # type: ignore[untyped-decorator]
def shift(state: tl.tensor, weights: tl.tensor, STEP: tl.constexpr, READS: tl.constexpr) -> None:
    """Every program adds a weight to 64 elements `STEP` apart, after reading them `READS` times."""
    at = state + tl.program_id(0) * 64 * STEP + tl.arange(0, 64) * STEP
    value = tl.load(weights + tl.arange(0, 64))
    for _ in tl.static_range(READS):
        value += tl.load(at)
    tl.store(at, value, mask=tl.arange(0, 64) < 32)


def moved(step: int, reads: int) -> Traffic:
    """Two programs over 512 fp32 elements."""
    state, weights = torch.zeros(512), torch.ones(64)
    args = {"state": state, "weights": weights, "STEP": step, "READS": reads}
    return traffic(Launch(shift, (2,), args, warps=1), (state,))


def counts_each_byte_once(device: str) -> None:
    """128 elements read, the unmasked half written; weights are no state."""
    assert moved(1, 1) == Traffic(state=128 * 4 + 64 * 4, other=2 * 64 * 4)


def counts_a_second_read(device: str) -> None:
    assert moved(1, 2).state == 2 * 128 * 4 + 64 * 4


def counts_whole_sectors(device: str) -> None:
    """Elements 16 bytes apart: half of every 32-byte sector is fetched for nothing, twice the reads."""
    assert moved(4, 1).state == 128 * 16 + 64 * 16


def cases() -> dict[str, Check]:
    """All cases by name."""
    table: dict[str, Callable[[str], None]] = {
        "each byte once": counts_each_byte_once,
        "a second read": counts_a_second_read,
        "whole sectors": counts_whole_sectors,
    }
    return table


if __name__ == "__main__":
    main(cases())
