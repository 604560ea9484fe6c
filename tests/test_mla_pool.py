"""Latent KV lies in the arenas' pages: one row a token, written and read by SGLang's own pool."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.runtime_context import get_parallel

from sglang_hybrid.pools.arena import Arenas, StateShape
from sglang_hybrid.pools.factory import make_organization

RANK, ROPE, GRID = 12, 4, 8


def pool(dtype: torch.dtype, memory: str = "S1") -> tuple[Any, Arenas]:
    from sglang_hybrid.engine.mla_pool import GridMLAPool

    shape = StateShape(1, RANK + ROPE, dtype, 2, 4, 4, torch.float32, 6, 3, torch.float32, kv_parts=1)
    model = shape.geometry((1, 3), (0, 2, 4))
    assert model.kv_row_bytes == (RANK + ROPE) * dtype.itemsize
    organization = make_organization(memory, model, 64, 1 << 17)
    arenas = Arenas(organization.layout(), shape, model, "cpu")
    made = GridMLAPool(
        arenas=arenas, size=arenas.slots - organization.unit_tokens, page_size=organization.unit_tokens,
        dtype=dtype, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, layer_num=2, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    return made, arenas


@pytest.mark.parametrize("memory", ["S0", "S1", "D0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_row_is_where_the_arena_says(dtype: torch.dtype, memory: str) -> None:
    """SGLang writes a row by slot; the bytes lie at slot x row of that layer's arena, and nowhere else."""
    made, arenas = pool(dtype, memory)
    rows = torch.randn(2, 1, RANK + ROPE)
    slots = torch.tensor([3, 70])
    with get_parallel().override(dcp_enabled=False):
        made.set_kv_buffer(SimpleNamespace(layer_id=1), slots, rows, rows[..., :RANK])
    keys, values = made.get_key_buffer(1), made.get_value_buffer(1)
    assert keys.dtype == dtype and keys.shape == (arenas.slots, 1, RANK + ROPE)
    assert values.shape == (arenas.slots, 1, RANK)
    size = arenas.model.kv_row_bytes
    for slot, row in zip((3, 70), rows, strict=True):
        assert torch.equal(keys[slot].float(), row.to(dtype).float())
        assert torch.equal(values[slot].float(), row[..., :RANK].to(dtype).float())
        held = arenas.kv_buffers[1][slot * size : (slot + 1) * size]
        assert torch.equal(held, row.to(dtype).flatten().view(torch.uint8))
    written = torch.zeros(arenas.slots, dtype=torch.bool)
    written[slots] = True
    assert not keys[~written].float().any() and not arenas.kv_buffers[0].any()
    assert made.get_kv_size_bytes() == sum(buffer.numel() for buffer in arenas.kv_buffers)


def test_keys_and_values_are_two_parts_of_a_row() -> None:
    shape = StateShape(2, 16, torch.float32, 2, 4, 4, torch.float32, 6, 3, torch.float32)
    model = shape.geometry((1,), (0,))
    assert model.kv_row_bytes == 2 * 2 * 16 * 4
    organization = make_organization("S1", model, GRID, 1 << 17)
    arenas = Arenas(organization.layout(), shape, model, "cpu")
    assert arenas.kv(0).shape == (arenas.slots, 2, 2, 16)
