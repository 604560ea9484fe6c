"""What can be chosen for a memory, and what the ledger says of it before anything is simulated."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from sglang_hybrid.geometry import (
    DEFAULT_ATTENTION_SHARE,
    DEFAULT_GRID,
    UNIT_TOKENS,
    GeometryError,
    ModelGeometry,
    PageGeometry,
    block_bytes,
    conv_slot_bytes,
    native_grid,
)
from sglang_hybrid.pools.factory import default_grid, make_organization
from sglang_hybrid.radix.placement import PLACEMENTS
from sglang_hybrid.radix.policy import DEFAULT_POLICY, Policy
from sglang_hybrid.simulator.cost import StepCost
from sglang_hybrid.simulator.setting import ENGINE, Setting

GRIDS = (256, 512, 1024)
SHARES = (0.35, 0.5, 0.65)
HEADROOMS = (0.0, 0.1, 0.25, 0.45)


class Candidate(NamedTuple):
    """One choice of everything that is recommended; the defaults are the plugin's."""

    memory: str
    grid: int
    tight: bool = False
    share: float = DEFAULT_ATTENTION_SHARE
    headroom: float = DEFAULT_POLICY.headroom
    checkpoints: str = DEFAULT_POLICY.checkpoints

    @property
    def options(self) -> dict[str, Any]:
        """Of the organization."""
        if self.memory == "D0":
            return {"attention_share": self.share}
        return {"tight": self.tight} if self.memory == "S2" else {}

    @property
    def policy(self) -> Policy:
        return Policy(headroom=self.headroom, checkpoints=self.checkpoints)

    def flags(self, grid: int) -> int:
        """How many of the plugin's defaults it leaves; `grid` is that of its memory."""
        policy = (self.headroom != DEFAULT_POLICY.headroom) + (self.checkpoints != DEFAULT_POLICY.checkpoints)
        return policy + (self.grid != grid) + (self.share != DEFAULT_ATTENTION_SHARE)


class Machine(NamedTuple):
    """One rank: what its model keeps and costs, the bytes for state, and the scheduler's limits."""

    model: ModelGeometry
    chunk: int
    """Tokens of a chunk of the model's scan."""
    budget: int
    cost: StepCost
    most_running: int
    prefill_tokens: int
    eviction: str = DEFAULT_POLICY.eviction
    """`--hybrid-eviction` of every candidate."""

    @property
    def native(self) -> int:
        """D0's own grid."""
        return native_grid(self.model, UNIT_TOKENS, self.chunk)

    def default_grid(self, candidate: Candidate) -> int:
        """What a start takes for this memory when nobody names a grid."""
        tight = {"tight": candidate.tight} if candidate.memory == "S2" else {}
        return default_grid(candidate.memory, self.model, self.chunk, **tight)

    def setting(self, candidate: Candidate) -> Setting:
        """What is simulated."""
        return Setting(
            organization=partial(
                make_organization,
                candidate.memory,
                self.model,
                candidate.grid,
                self.budget,
                **candidate.options,
            ),
            cost=self.cost,
            policy=candidate.policy._replace(eviction=self.eviction),
            serving=ENGINE,
            most_running=self.most_running,
            prefill_tokens=self.prefill_tokens,
        )


class Choice(NamedTuple):
    """Candidates that a memory can be, and what was left out, in words."""

    candidates: list[Candidate]
    left_out: list[str]


def choices(machine: Machine) -> Choice:
    """All that start on this machine.  What the ledger settles is settled: conv slots."""
    found: list[Candidate] = []
    left_out: list[str] = []
    for layout in _layouts(machine):
        try:
            machine.setting(layout).organization()
        except GeometryError as refusal:
            left_out.append(f"{layout.memory}, grid {layout.grid}: {refusal}")
            continue
        for headroom in HEADROOMS:
            found += [layout._replace(headroom=headroom, checkpoints=one) for one in PLACEMENTS]
    return Choice(found, left_out)


def _layouts(machine: Machine) -> Iterator[Candidate]:
    for memory in ("S0", "S1", "S2"):
        default = machine.default_grid(Candidate(memory, DEFAULT_GRID))
        for grid in sorted({*GRIDS, default}):
            yield Candidate(memory, grid, tight=memory == "S2" and packs_more(machine.model, grid))
    for grid in sorted({DEFAULT_GRID, machine.native}):
        for share in SHARES:
            yield Candidate("D0", grid, share=share)


def slots(model: ModelGeometry, grid: int, tight: bool) -> int:
    """Conv slots of one of S2's slab pages; 0 where it is refused."""
    page = PageGeometry(model, block_bytes(model, grid))
    try:
        return page.slots_per_page(conv_slot_bytes(model, tight=tight))
    except GeometryError:
        return 0


def packs_more(model: ModelGeometry, grid: int) -> bool:
    """Whether tight slots put more conv states on a slab page: the same bytes, nothing to lose."""
    return slots(model, grid, True) > slots(model, grid, False)
