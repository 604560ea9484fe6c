"""Conv lines in slots that do not divide their page, through arenas and kernels."""

import pytest
import torch

from sglang_hybrid.engine.unit_tails import Poison
from sglang_hybrid.kernels import choose, conv_update, read_windows, write_windows
from sglang_hybrid.pools.arena import Arenas, StateShape
from sglang_hybrid.pools.shared import PackedConv

SHAPE = StateShape(
    kv_heads=1, kv_dim=16, kv_dtype=torch.float32, heads=2, head_dim=4, state_size=8, ssm_dtype=torch.float32,
    channels=8, window=3, conv_dtype=torch.float32,
)  # fmt: skip
"""Rows of 128 bytes; two stripes make a line of 192 bytes: a slot of 256, or a tight one of 192."""

GRID = 11


@pytest.mark.parametrize(("kind", "slots"), [("pow2", 5), ("tight", 7)])
def test_lines_are_apart(kind: str, slots: int) -> None:
    """Every line of every slab keeps what was written to it, and writes nowhere else."""
    model = SHAPE.geometry((0,), (0, 1))
    pool = PackedConv(model, GRID, 30 * GRID * 128, conv_slots=kind)
    arenas = Arenas(pool.layout(), SHAPE, model, "cpu")
    poison = Poison(pool, arenas)
    poison.spread(choose("torch", "cpu"))
    assert pool.slabs.slots_per_page == slots and GRID * 128 % pool.slot_bytes
    taken = []
    while (checkpoint := pool.allocate_checkpoint()) is not None:
        taken.append(checkpoint)
    assert pool.slabs.slabs > 1
    lines = torch.tensor([checkpoint.line for checkpoint in taken], dtype=torch.int32)
    windows = [torch.randn(len(taken), 8, 3) for _ in range(2)]
    arenas.kv_buffers[0].fill_(0)
    for index, values in enumerate(windows):
        write_windows(arenas.conv(index), lines, values)
    for index, values in enumerate(windows):
        assert torch.equal(read_windows(arenas.conv(index), lines), values)
    slabs = {checkpoint.pages[-1] for checkpoint in taken}
    pages = arenas.kv_buffers[0].view(-1, GRID * 128)
    assert not any(pages[page].any() for page in range(len(pages)) if page not in slabs)

    ones = torch.ones(len(taken), 8)
    conv_update(arenas.conv(0), lines, lines.flip(0), ones, torch.ones(8, 4), None)
    shifted = torch.cat([windows[0][:, :, 1:], ones[:, :, None]], dim=2).flip(0)
    assert torch.equal(read_windows(arenas.conv(0), lines), shifted)

    pool.release(taken[1])
    poison.spread(choose("torch", "cpu"))
    assert read_windows(arenas.conv(1), lines).isnan().flatten(1).any(1).nonzero().tolist() == [[1]]
