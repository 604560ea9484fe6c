"""What can be chosen for a memory, and what the ledger says of it before anything is simulated."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from sglang_hybrid.geometry import DEFAULT_GRID, GeometryError, ModelGeometry
from sglang_hybrid.pools.factory import ORGANIZATIONS, default_grid, make_organization
from sglang_hybrid.pools.option import Option
from sglang_hybrid.radix.placement import PLACEMENTS
from sglang_hybrid.radix.policy import DEFAULT_POLICY, Policy
from sglang_hybrid.simulator.cost import StepCost
from sglang_hybrid.simulator.setting import ENGINE, Setting

GRIDS = (256, 512, 1024)
HEADROOMS = (0.0, 0.1, 0.25, 0.45)


class Candidate(NamedTuple):
    """One choice of everything that is recommended; the defaults are the plugin's."""

    memory: str
    grid: int
    options: tuple[tuple[str, Any], ...] = ()
    """Of the organization, by name."""
    headroom: float = DEFAULT_POLICY.headroom
    checkpoints: str = DEFAULT_POLICY.checkpoints

    @classmethod
    def of(
        cls, memory: str, grid: int, headroom: float = 0.0, checkpoints: str = "all", **options: Any
    ) -> Candidate:
        return cls(memory, grid, tuple(options.items()), headroom, checkpoints)

    @property
    def own(self) -> dict[str, Any]:
        """All options of its organization, defaults included."""
        return {option.name: option.default for option in self._options()} | dict(self.options)

    @property
    def weighed(self) -> dict[str, Any]:
        """Those of them that are searched."""
        own = self.own
        return {option.name: own[option.name] for option in self._options() if option.tried}

    def _options(self) -> tuple[Option, ...]:
        return ORGANIZATIONS[self.memory].options

    @property
    def policy(self) -> Policy:
        return Policy(headroom=self.headroom, checkpoints=self.checkpoints)

    def value(self, choice: str) -> Any:
        """Of a field, or of an option; None where the organization has none of that name."""
        return getattr(self, choice) if choice in self._fields else self.own.get(choice)

    def flags(self, grid: int) -> int:
        """How many of the plugin's defaults it leaves; `grid` is that of its memory."""
        policy = (self.headroom != DEFAULT_POLICY.headroom) + (self.checkpoints != DEFAULT_POLICY.checkpoints)
        own = sum(self.own[option.name] != option.default for option in self._options() if option.tried)
        return policy + (self.grid != grid) + own

    def report(self) -> dict[str, Any]:
        """As data, options beside the rest; `of` takes it back."""
        return {"memory": self.memory, "grid": self.grid, **self.own} | {
            "headroom": self.headroom,
            "checkpoints": self.checkpoints,
        }


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

    def default_grid(self, candidate: Candidate) -> int:
        """What a start takes for this memory when nobody names a grid."""
        return default_grid(candidate.memory, self.model, self.chunk, **candidate.own)

    def setting(self, candidate: Candidate) -> Setting:
        """What is simulated."""
        return Setting(
            organization=partial(
                make_organization,
                candidate.memory,
                self.model,
                candidate.grid,
                self.budget,
                **candidate.own,
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
    """All that start on this machine.  What the ledger settles is settled (`Organization.settled`)."""
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
    for memory, kind in ORGANIZATIONS.items():
        default = machine.default_grid(Candidate(memory, DEFAULT_GRID))
        for grid in sorted({default, *(GRIDS if kind.usual_grid else (DEFAULT_GRID,))}):
            settled = {name: value for name, (value, _) in kind.settled(machine.model, grid).items()}
            tried = [option for option in kind.options if option.tried]
            for values in product(*(option.tried for option in tried)):
                weighed = {option.name: value for option, value in zip(tried, values, strict=True)}
                yield Candidate.of(memory, grid, **settled, **weighed)
