"""SGLang's own Triton kernels over our arenas: right in the interpreter, and compiled for each architecture.

Compiled are the launches of the same cases, with the strides and alignments that our views have for the KV
rows of real models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("sglang")

from triton.runtime.jit import KernelInterface

from sglang_hybrid.kernels.compiled import compile_for
from sglang_hybrid.kernels.launch import Launch
from tests.support import sglang_kernels
from tests.support.interpreted import PASSED, verdicts

ROWS = {"Falcon-H1-7B": (2, 128), "Granite-4-H": (8, 64), "Qwen3.5 TP2": (2, 256)}
"""KV heads and their dim; each serves four query heads."""
SPILLS = {("_fwd_kernel", "Qwen3.5 TP2", 100): 8}
"""Bytes that SGLang's own block sizes spill, with dense strides as well as with ours; none elsewhere."""
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl", "waves_per_eu")


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """What would run on a GPU, kept instead."""
    kept: list[Launch] = []

    def instead(kernel: Any, grid: Any) -> Any:
        def keep(*args: Any, **kwargs: Any) -> None:
            options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
            named = {**{param.name: param.default for param in kernel.params}, **kwargs}
            named.update(zip((param.name for param in kernel.params), args))
            kept.append(
                Launch(kernel, (1,), named, options.get("num_warps", 4), options.get("num_stages", 3))
            )

        return keep

    with mock.patch.object(KernelInterface, "__getitem__", instead):
        yield kept


def launches_of(memory: str, dtype: torch.dtype, heads: int, dim: int) -> dict[str, Launch]:
    """Decode, extend, the KV store and the tables over KV rows of this kind, by kernel name."""
    arena = sglang_kernels.make_arena(memory, dtype, "cpu", heads, dim, grid=512)
    given = torch.bfloat16 if dtype.itemsize == 1 else dtype
    with launches() as kept:
        sglang_kernels.fill_table(arena, "cpu")
        if dtype == given:  # SGLang casts before it stores
            sglang_kernels.store(arena, dtype, "cpu")
        indptr, found = sglang_kernels.indices_of(arena, list(sglang_kernels.LENGTHS), "cpu")
        q, k = torch.zeros(3, 4 * heads, dim, dtype=given), torch.zeros(3, heads, dim, dtype=given)
        page = arena.organization.unit_tokens
        sglang_kernels.decode(arena, q, indptr, found, page)
        sglang_kernels.extend(arena, q, k, k, [1, 1, 1], indptr, found, page)
        sglang_kernels.build_tables(arena, 4, "cpu")
    return {launch.kernel.__name__: launch for launch in kept}


@pytest.mark.parametrize("name", sglang_kernels.cases())
def test_in_the_interpreter(name: str) -> None:
    verdict = verdicts("tests.support.sglang_kernels")[name]
    assert verdict == PASSED, verdict


def test_a_captured_page_table_needs_a_power_of_two() -> None:
    """Why `input_rules` refuses fa3 with other grids: SGLang's own assertion, before any launch."""
    from sglang.kernels.ops.attention.metadata import normal_decode_set_metadata

    some = torch.zeros(1, dtype=torch.int32)
    with launches(), pytest.raises(AssertionError, match="power of two"):
        normal_decode_set_metadata(some, some, some[None], some[None], some, 1, some, 0, 640)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("shape", "memory", "dtype"),
    [
        ("Falcon-H1-7B", "S1", torch.bfloat16),
        ("Falcon-H1-7B", "S0", torch.float16),
        ("Granite-4-H", "S2", torch.bfloat16),
        ("Qwen3.5 TP2", "D0", torch.bfloat16),
        ("Falcon-H1-7B", "S1", torch.float8_e4m3fn),
    ],
)
def test_compiled_with_our_strides(shape: str, memory: str, dtype: torch.dtype, capability: int) -> None:
    """A server's kernels compile, and our strides make none keep its registers in memory."""
    if dtype == torch.float8_e4m3fn and capability < 89:
        pytest.skip("no such conversion on sm_80; SGLang's flashinfer serves it")
    found = launches_of(memory, dtype, *ROWS[shape])
    attention = {"_fwd_grouped_kernel_stage1", "_fwd_kernel_stage2", "_fwd_kernel"}
    assert attention < found.keys() and len(found) == 9 - (dtype.itemsize == 1), found.keys()
    for name, launch in found.items():
        if name not in attention and (shape, dtype) != ("Falcon-H1-7B", torch.bfloat16):
            continue  # these know rows and slots alone
        code = compile_for(launch, capability)
        expected = SPILLS.get((name, shape, capability), 0)
        assert code.registers and code.spills == expected, f"{name}: {code.spills} spills"
