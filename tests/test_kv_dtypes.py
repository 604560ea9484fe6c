"""Every `--kv-cache-dtype` that is accepted is stored and read as SGLang's own pool does, on a CPU and by the
checks of its CUDA kernel."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("sglang")

import sglang
import sglang.srt.mem_cache.memory_pool as memory_pool
from sglang.srt.mem_cache.layout.paged_view import paged_kv_view

from sglang_hybrid.engine.build import GridKVPool
from sglang_hybrid.engine.input_rules import KV_DTYPES
from sglang_hybrid.pools.arena import Arenas, StateShape
from sglang_hybrid.pools.factory import make_organization, smallest_budget

GRID = 512
WIDEST = 16
"""Bytes of the widest access of `store_cache`, which rows, strides and addresses have to divide."""
ROWS = {"Falcon-H1-7B": (2, 128), "Falcon-H1-7B TP2": (1, 128), "Granite-4-H": (8, 64), "Qwen3.5": (4, 256)}
"""KV heads and their dim."""


def pool_of(memory: str, dtype: torch.dtype, heads: int = 2, dim: int = 128) -> GridKVPool:
    """The KV pool of two attention layers over small arenas."""
    shape = StateShape(heads, dim, dtype, 8, 64, 128, torch.bfloat16, 1024, 3, torch.bfloat16)
    model = shape.geometry((0, 1), (0, 1))
    organization = make_organization(memory, model, GRID, smallest_budget(memory, model, GRID))
    arenas = Arenas(organization.layout(), shape, model, "cpu")
    return GridKVPool(
        arenas=arenas, size=arenas.slots - organization.unit_tokens, page_size=organization.unit_tokens,
        dtype=dtype, head_num=heads, head_dim=dim, layer_num=2, device="cpu", enable_memory_saver=False,
    )  # fmt: skip


DTYPES = {name: dtype or torch.float16 for name, dtype in KV_DTYPES.items()}


@pytest.mark.parametrize("scale", [None, 4.0])
@pytest.mark.parametrize("memory", ["S0", "S1", "S2", "D0"])
@pytest.mark.parametrize("name", DTYPES)
def test_what_is_written_is_read_back(name: str, memory: str, scale: float | None) -> None:
    """Rounded to the dtype as torch does, after division by the layer's scale; other rows and layers stay."""
    dtype = DTYPES[name]
    pool = pool_of(memory, dtype)
    # A stock model computes in the dtype of an unquantized cache; only others are divided and rounded.
    computed = torch.bfloat16 if dtype.itemsize == 1 else dtype
    k, v = torch.randn(2, 5, 2, 128).to(computed)
    slots = torch.tensor([3, GRID + 7, GRID, 8, 21])
    before = [buffer.clone() for buffer in pool.arenas.kv_buffers]
    pool.set_kv_buffer(SimpleNamespace(layer_id=1), slots, k.clone(), v.clone(), scale, scale)
    factor = scale if scale and dtype != computed else 1
    for buffer, given in ((pool.get_key_buffer(1), k), (pool.get_value_buffer(1), v)):
        assert buffer.dtype == dtype
        stored = buffer.view(torch.uint8)[slots].view(dtype)
        assert torch.equal(stored.float(), (given / factor).to(dtype).float())
    assert torch.equal(pool.arenas.kv_buffers[0], before[0])
    rows = pool.arenas.kv_buffers[1].view(-1, pool.arenas.model.kv_row_bytes)
    others = torch.ones(len(rows), dtype=torch.bool)
    others[slots] = False
    assert torch.equal(rows[others], before[1].view_as(rows)[others])


def stored_by_cuda(pool: GridKVPool, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> dict[str, Any]:
    """What the CUDA path of `set_kv_buffer` gives to `store_cache`, by name."""
    given: list[dict[str, Any]] = []

    def store_cache(k: Any, v: Any, k_cache: Any, v_cache: Any, indices: Any, **sizes: Any) -> None:
        given.append({"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "indices": indices, **sizes})

    with (
        mock.patch.object(memory_pool, "_is_cuda", True),
        mock.patch.object(memory_pool, "can_use_store_cache", lambda *widths: True),
        mock.patch.object(memory_pool, "store_cache", store_cache),
    ):
        pool.set_kv_buffer(SimpleNamespace(layer_id=0), slots, k, v)
    (one,) = given
    return one


@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("memory", ["S0", "S1", "S2", "D0"])
@pytest.mark.parametrize("name", DTYPES)
def test_store_cache_takes_our_views(name: str, memory: str, shape: str) -> None:
    """The checks of `StoreKVCacheKernel::run`: one dtype, unit inner stride, rows of one width, everything a
    multiple of the widest access, and all slots of the arena below the limit."""
    heads, dim = ROWS[shape]
    dtype = DTYPES[name]
    pool = pool_of(memory, dtype, heads, dim)
    computed = torch.bfloat16 if dtype.itemsize == 1 else dtype
    k, v = torch.zeros(2, 3, heads, dim, dtype=computed)
    given = stored_by_cuda(pool, k, v, torch.tensor([1, 2, 3]))
    tensors = [given[key] for key in ("k", "v", "k_cache", "v_cache")]
    assert len({tensor.dtype for tensor in tensors}) == 1
    for tensor, width in zip(tensors, ["row_bytes", "v_row_bytes"] * 2, strict=True):
        assert tensor.dim() == 2 and tensor.stride(1) == 1
        assert tensor.shape[1] * tensor.itemsize == given[width]
        assert tensor.stride(0) * tensor.itemsize % WIDEST == 0 and tensor.data_ptr() % WIDEST == 0
    assert given["size_limit"] == pool.arenas.slots == tensors[2].shape[0]
    if memory != "S0":
        # fa3 reads pages: [pages, page, heads, dim] without a copy, strides that TMA takes.
        for buffer in (pool.get_key_buffer(0), pool.get_value_buffer(0)):
            pages = paged_kv_view(buffer, pool.page_size, heads, dim)
            assert pages.data_ptr() == buffer.data_ptr() and pages.stride(-1) == 1
            assert all(stride * pages.itemsize % WIDEST == 0 for stride in pages.stride()[:-1])


def test_the_checks_are_those_of_the_kernel() -> None:
    """Read from the installed source: what the test above asks is what the host code asks."""
    source = (Path(sglang.__file__).parent / "kernels/jit/csrc/elementwise/kvcache.cuh").read_text()
    matched = re.findall(
        r"TensorMatcher\(\{(\w+|-1), (\w+)\}\)[\s/]*\.with_strides\(\{-1, 1\}\)\s*\.with_dtype\((\w+)\)\s*"
        r"\.with_device\(device_\)\s*\.ensure_alignment\((\w+)\)\s*\.verify\((\w+)\)",
        source,
    )
    assert matched == [
        ("B", "DK", "dtype", "kAlignK", "k"), ("B", "DV", "dtype", "kAlignV", "v"),
        ("-1", "DK", "dtype", "kAlignK", "k_cache"), ("-1", "DV", "dtype", "kAlignV", "v_cache"),
    ]  # fmt: skip
    assert "WARP_UNIFORM_16B>()" in source
