"""What fits an organization after a real history of allocation: composites of blocks and checkpoints."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from sglang_hybrid.pools.organization import Checkpoint, Need, Organization

BLOCK_TOKENS = 512
"""A composite's attention block, whatever the organization's own grid."""

COMPOSITE = Need(units=16, checkpoints=4)
"""The source's example: 16 attention blocks and 4 checkpoints (docs/paper.md, Allocation arithmetic)."""


class Holding:
    """Pieces of one request: they come one by one and go together."""

    def __init__(self) -> None:
        self.units: list[int] = []
        self.checkpoints: list[Checkpoint] = []


class Churned(NamedTuple):
    """`occupancy` is S2's share of slab slots in use (1.0 elsewhere): on average while requests of all
    sizes came and went, and at the end, with nothing but composites."""

    composites: int
    occupancy_in_churn: float
    occupancy_at_end: float


class Churn:
    """Requests of random sizes grow block by block and end at random, in a memory that is always full."""

    def __init__(self, organization: Organization, seed: int) -> None:
        self.organization = organization
        self.chance = random.Random(seed)
        self.holdings: list[Holding] = []
        self.units_a_block = BLOCK_TOKENS // organization.unit_tokens

    def run(self, steps: int, each: Callable[[], None] = lambda: None) -> Churned:
        """`steps` pieces are handed out; `each` is called after every one."""
        occupied = 0.0
        for _ in range(steps):
            self._grow()
            occupied += self.organization.slab_occupancy
            each()
        composites = self._fill_with_composites()
        self.organization.check_integrity()
        return Churned(composites, occupied / max(steps, 1), self.organization.slab_occupancy)

    def _grow(self) -> None:
        """One more piece for somebody: a checkpoint for about every fourth block."""
        need = Need(checkpoints=1) if self.chance.random() < 0.2 else Need(units=self.units_a_block)
        while not self.organization.fits(need):
            self._end(self.holdings.pop(self.chance.randrange(len(self.holdings))))
        if not self.holdings or self.chance.random() < 0.1:
            self.holdings.append(Holding())
        self._take(self.chance.choice(self.holdings), need)

    def _take(self, holding: Holding, need: Need) -> None:
        units = self.organization.allocate_units(need.units)
        assert units is not None
        holding.units += units
        for _ in range(need.checkpoints):
            checkpoint = self.organization.allocate_checkpoint()
            assert checkpoint is not None
            holding.checkpoints.append(checkpoint)

    def _end(self, holding: Holding) -> None:
        self.organization.release_units(holding.units)
        for checkpoint in holding.checkpoints:
            self.organization.release(checkpoint)

    def _fill_with_composites(self) -> int:
        """Old holdings end one by one, each time as many composites begin as fit; none ever moves."""
        need = Need(COMPOSITE.units * self.units_a_block, COMPOSITE.checkpoints)
        self.chance.shuffle(self.holdings)
        composites = 0
        while True:
            while self.organization.fits(need):
                self._take(Holding(), need)
                composites += 1
            if not self.holdings:
                return composites
            self._end(self.holdings.pop())
