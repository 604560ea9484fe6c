"""`--hybrid-eviction`: which of two prefixes survives when memory runs short."""

import pytest

from sglang_hybrid.radix.eviction import EVICTIONS
from tests.support.configs import CONFIGS
from tests.support.park import on
from tests.support.tokens import T
from tests.support.witness import Witness

SURVIVES = {"tight": 4, "lru": 0}
"""Grid steps that are left of a prefix that was asked for twice, by configuration."""

MEMORY = 20
"""Prompts of four blocks and as many checkpoints: three times what the memory holds."""


@on(*SURVIVES)
def test_an_order_decides_which_prefix_survives(witness: Witness) -> None:
    """demand keeps what was asked for before, lru what came last; both answer as cold."""
    witness.flush()
    asked = T(900, 4 * witness.G + 1)
    for hit in (0, 4):
        witness.hit_is(witness.ask(asked, exact=False), hit * witness.G)
    others = [T(901 + number, 4 * witness.G + 1) for number in range(MEMORY)]
    for other in others:
        witness.ask(other, exact=False)
    witness.evicted()
    steps = SURVIVES[witness.config.name]
    witness.hit_is(witness.ask(asked, exact=False), steps * witness.G)
    witness.hit_is(witness.ask(others[-1], exact=False), 4 * witness.G)


def test_each_order_has_a_server() -> None:
    named = {name: " ".join(CONFIGS[name].flags).partition("--hybrid-eviction ")[2] for name in SURVIVES}
    assert {name or "demand" for name in named.values()} == set(EVICTIONS)


@on("lru")
@pytest.mark.parametrize("seed", [1])
def test_requests_that_run_together(witness: Witness, seed: int) -> None:
    """They outgrow the memory: some are retracted, and their states are kept for their return."""
    shared = T(950 + seed, 3 * witness.G + 2)
    for wave in range(3):
        prompts = [shared + T(960 + 10 * wave + i, 1 + 7 * i) for i in range(8)]
        witness.together(prompts, 6 * witness.G)
    witness.evicted()
