"""Chains of instructions, read from machine code, and those of the stock kernels beside them."""

from __future__ import annotations

from math import prod

import pytest

from sglang_hybrid.kernels.check import chain_line
from sglang_hybrid.kernels.checks import KernelError
from sglang_hybrid.kernels.compiled import Chain, Compiled, chain_of, compile_for
from sglang_hybrid.kernels.prefills import PREFILLS, prefill_launches

STOCK = {"Falcon-H1-0.5B TP8": 8864, "Falcon-H1-7B TP8": 9182, "Nemotron-3-Nano-30B TP8": 8864}
"""What `python -m bench.chains` found for SGLang's kernels; the long test finds it again."""
MOST = 1.2


def code(instructions: int, barriers: set[int], *loops: tuple[int, int]) -> Compiled:
    return Compiled(32, 0, 0, (), (), tuple(i in barriers for i in range(instructions)), loops)


def test_a_chain_counts_instructions_as_often_as_their_loops_come_by() -> None:
    """100 instructions; 10 of them 8 times, 20 of them in a loop of 3 around one of 5 that has 4 of them."""
    assert chain_of(code(100, {12, 40}, (10, 19), (30, 49), (40, 43)), (8, 3, 5)) == Chain(
        steps=8 + 15, step=10, barriers=1, instructions=70 + 10 * 8 + 16 * 3 + 4 * 15
    )
    assert chain_of(code(7, set()), ()) == Chain(0, 0, 0, 7)


def test_a_loop_that_the_compiler_unrolled_is_named() -> None:
    with pytest.raises(KernelError, match="has 2 loops, needs 1"):
        chain_of(code(100, set(), (10, 19), (30, 49)), (8,))


@pytest.mark.parametrize("name", STOCK)
def test_a_prefill_is_as_parallel_as_the_stock_kernels(name: str) -> None:
    """Three launches; the serial pass over states is one step a block of 256 tokens."""
    launches = prefill_launches(PREFILLS[name])
    chains = [chain_of(compile_for(launch, 90), launch.trips) for launch in launches]
    assert [chain.steps for chain in chains] == [8, 8192 // 256, 8]
    assert all(prod(launch.grid) >= 96 for launch in (launches[0], launches[2]))
    assert sum(chain.instructions for chain in chains) <= MOST * STOCK[name]
    assert f"{chains[0].instructions:>8}" in chain_line(name, 1, chains[0])


@pytest.mark.long
@pytest.mark.parametrize("name", STOCK)
def test_the_stock_kernels_chains_are_what_they_were(name: str) -> None:
    pytest.importorskip("sglang")
    from bench.chains import compare, total

    ours, theirs = compare(name)
    assert total(theirs) == STOCK[name]
    assert total(ours) <= MOST * total(theirs)
