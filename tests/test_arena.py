"""Views of an arena begin on their dtype, or the refusal names what would do."""

import re

import pytest
import torch

from sglang_hybrid.geometry import GeometryError
from sglang_hybrid.pools.arena import Arenas, StateShape
from sglang_hybrid.pools.factory import make_organization

GRID = 9
BUDGET = 1 << 16


def arenas(name: str, grid: int, shape: StateShape) -> Arenas:
    model = shape.geometry((0,), (0,))
    return Arenas(make_organization(name, model, grid, BUDGET).layout(), shape, model, "cpu")


@pytest.mark.parametrize("ssm", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("conv", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dim", [1, 2, 3])
@pytest.mark.parametrize("name", ["S0", "S1", "S2", "D0"])
def test_what_is_misaligned_names_what_would_do(
    name: str, kv_dim: int, conv: torch.dtype, ssm: torch.dtype
) -> None:
    """Rows of 2 to 6 bytes of fp8 KV, three SSM elements a row: odd on purpose."""
    shape = StateShape(1, kv_dim, torch.float8_e4m3fn, 1, 3, 3, ssm, 1, 3, conv)
    grid = 16 if name == "D0" else GRID
    for _ in range(2):
        try:
            arenas(name, grid, shape).state(0)
            return
        except GeometryError as refusal:
            other = re.search(r"--hybrid-mem (S\d)", str(refusal))
            finer = re.search(r"use .*--hybrid-grid (\d+)", str(refusal))
            assert other or finer, f"no choice in: {refusal}"
            name = other[1] if other else name
            grid = int(finer[1]) if finer else grid
    arenas(name, grid, shape).conv(0)
