"""Views of an arena: none touches another's bytes, and each begins on its dtype or a refusal names what would
do."""

import re

import pytest
import torch

from sglang_hybrid.engine.unit_tails import Poison
from sglang_hybrid.geometry import GeometryError
from sglang_hybrid.kernels import choose, read_states, read_windows, write_states, write_windows
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


@pytest.mark.parametrize("name", ["S0", "S1", "S2", "D0"])
def test_every_layer_of_every_checkpoint_has_bytes_of_its_own(name: str) -> None:
    """Two arenas of three stripes, one of them not full: what all layers, checkpoints and KV rows were given
    is there when all have written; what is freed takes its bytes along and no others."""
    shape = StateShape(1, 8, torch.float32, 3, 5, 8, torch.float32, 6, 3, torch.float32)
    model = shape.geometry((0, 4), (1, 2, 3, 5, 6))
    assert [model.place(layer) for layer in range(5)] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]  # dealt
    organization = make_organization(name, model, 16, 1 << 17)
    memory = Arenas(organization.layout(), shape, model, "cpu")
    poison = Poison(organization, memory)
    poison.spread(choose("torch", "cpu"))
    taken = [organization.allocate_checkpoint() for _ in range(3)]
    units = organization.allocate_units(2)
    assert units is not None
    pages = torch.tensor([checkpoint.members for checkpoint in taken if checkpoint])
    lines = torch.tensor([checkpoint.line for checkpoint in taken if checkpoint])
    unit_rows = memory.layout.kv_page_bytes // model.kv_row_bytes
    slots = [unit * unit_rows + offset for unit in units for offset in range(min(16, unit_rows))]

    torch.manual_seed(1)
    states, windows = torch.randn(5, 3, 3, 5, 8), torch.randn(5, 3, 6, 3)
    rows = torch.randn(model.arenas, len(slots), 2, 1, 8)
    for layer in range(5):
        write_states(memory.state(layer), pages, states[layer])
        write_windows(memory.conv(layer), lines, windows[layer])
    for arena in range(model.arenas):
        memory.kv(arena)[slots] = rows[arena]

    def kept(checkpoints: list[int]) -> None:
        for layer in range(5):
            assert torch.equal(
                read_states(memory.state(layer), pages)[checkpoints], states[layer, checkpoints]
            )
            assert torch.equal(
                read_windows(memory.conv(layer), lines)[checkpoints], windows[layer, checkpoints]
            )
        for arena in range(model.arenas):
            assert torch.equal(memory.kv(arena)[slots], rows[arena])

    kept([0, 1, 2])
    assert taken[1] is not None
    organization.release(taken[1])
    poison.spread(choose("torch", "cpu"))
    kept([0, 2])
    for layer in range(5):
        assert read_states(memory.state(layer), pages[1:2]).isnan().all()
        assert read_windows(memory.conv(layer), lines[1:2]).isnan().all()
