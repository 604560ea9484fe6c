"""What a unit holds of a state is cleared before a forward can read it: bytes, bookkeeping, and cost.

How such units come about in a server's life is the business of `tests/core` (every history and organization)
and of `tests/engine/test_unit_tails.py`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_hybrid.engine.tokens import GridTokens
from sglang_hybrid.engine.unit_tails import Poison, UnitTails
from sglang_hybrid.kernels import Route, choose, write_states, write_windows
from sglang_hybrid.pools.arena import Arenas, StateShape
from sglang_hybrid.pools.factory import make_organization, smallest_budget
from sglang_hybrid.pools.organization import Organization
from sglang_hybrid.radix.memory import Memory
from tests.support.planted.whole_page_backend import attend

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TORCH = choose("torch", "cpu")
GRID = 256
WRITTEN = 20


class World:
    """Falcon-H1-7B's shapes on one rank of four, two arenas, and states of ordinary magnitudes everywhere."""

    def __init__(self, name: str, kv: torch.dtype = BF16, ssm: torch.dtype = FP32) -> None:
        shape = StateShape(1, 128, kv, 6, 128, 256, ssm, 1280, 3, BF16)
        model = shape.geometry((0, 1), (0, 1))
        budget = 2 * smallest_budget(name, model, GRID)
        self.organization: Organization = make_organization(name, model, GRID, budget)
        self.arenas = Arenas(self.organization.layout(), shape, model, "cpu")
        self.tails = UnitTails(self.organization, self.arenas)

    def churn(self) -> None:
        """States take all memory, are computed, and go again."""
        torch.manual_seed(0)
        taken = []
        while (checkpoint := self.organization.allocate_checkpoint()) is not None:
            taken.append(checkpoint)
        members = torch.tensor([checkpoint.members for checkpoint in taken])
        lines = torch.tensor([checkpoint.line for checkpoint in taken])
        for layer in range(2):
            states = torch.randn(len(taken), 6, 128, 256) * torch.randn(len(taken), 6, 128, 1).exp()
            write_states(self.arenas.state(layer), members, states)
            write_windows(self.arenas.conv(layer), lines, torch.randn(len(taken), 1280, 3))
        for checkpoint in taken:
            self.organization.release(checkpoint)

    def begin(self, route: Route) -> None:
        """What metadata preparation does."""
        self.tails.clear(route, self.tails.due(route))

    def take(self, count: int) -> list[int]:
        units = self.organization.allocate_units(count)
        assert units is not None
        return units

    def rows(self, unit: int) -> list[torch.Tensor]:
        """`[unit_tokens, 2, heads, dim]` of every arena."""
        first = unit * self.organization.slots_per_unit
        size = self.organization.unit_tokens
        return [self.arenas.kv(arena)[first : first + size] for arena in range(2)]

    def attention(self, unit: int, written: int) -> torch.Tensor:
        """A decode step's output in the first arena, the whole unit read."""
        (kv, _) = self.rows(unit)
        kv[:written] = torch.randn(written, *kv.shape[1:]).to(kv.dtype)
        q = torch.randn(1, 1, 2, kv.shape[-1])
        return attend(q, kv[None, :, 0].float(), kv[None, :, 1].float(), torch.tensor([[written]]), 0.1)


@pytest.mark.parametrize("name", ["S0", "S1", "S2"])
@pytest.mark.parametrize(
    ("kv", "ssm"), [(BF16, FP32), (FP16, FP32), (torch.float8_e4m3fn, BF16), (torch.float8_e5m2, BF16)]
)
def test_state_bits_make_attention_nan_and_cleared_ones_do_not(
    name: str, kv: torch.dtype, ssm: torch.dtype
) -> None:
    """Of all units that held states at least one spoils the output of a whole-page kernel; cleared, none."""
    spoiled = []
    for clear in (False, True):
        world = World(name, kv, ssm)
        world.churn()
        units = world.take(world.organization.units_free())
        for unit in units:
            world.organization.leftovers.will_write(unit, WRITTEN)
        if clear:
            world.begin(TORCH)
        spoiled.append(sum(not world.attention(unit, WRITTEN).isfinite().all() for unit in units))
    assert spoiled[0] and not spoiled[1]


@pytest.mark.parametrize("name", ["S0", "S1", "S2"])
def test_only_the_rows_behind_the_tokens_are_cleared(name: str) -> None:
    """In all arenas; what will be written, other units and the bytes between two units stay."""
    world = World(name)
    world.churn()
    unit, other = world.take(2)
    world.organization.leftovers.will_write(unit, WRITTEN)
    world.organization.leftovers.will_write(other, GRID)
    want = [buffer.clone() for buffer in world.arenas.kv_buffers]
    row_bytes = world.organization.model.kv_row_bytes
    first = unit * world.organization.slots_per_unit
    for buffer in want:
        buffer[(first + WRITTEN) * row_bytes : (first + GRID) * row_bytes] = 0
    world.begin(TORCH)
    for buffer, expected in zip(world.arenas.kv_buffers, want, strict=True):
        assert torch.equal(buffer, expected)


@pytest.mark.parametrize("name", ["S0", "S1", "S2", "D0"])
def test_units_that_held_kv_cost_nothing(name: str) -> None:
    """One launch for all units of a forward and all arenas, none for a unit that comes back as KV; D0's pool
    of units never holds a state."""
    world = World(name)
    world.churn()
    launches = []
    route = Route("counts", {"fill_rows": lambda table, runs, *rest: launches.append(list(runs))})
    units = world.take(2)
    world.begin(route)
    world.organization.release_units(units)
    assert sorted(world.take(2)) == sorted(units)
    world.begin(route)
    world.begin(route)
    stride, size = world.organization.slots_per_unit, world.organization.unit_tokens
    assert launches == ([] if name == "D0" else [[(unit * stride, size) for unit in units]])


def test_a_unit_is_a_states_until_a_forward_begins() -> None:
    """Given back before its forward ran, taken by a state before it ran, and after a flush."""
    world = World("S1")
    world.churn()
    leftovers = world.organization.leftovers
    (unit,) = world.take(1)
    world.organization.release_units([unit])
    assert leftovers.take() == {} and unit in leftovers
    assert world.take(1) == [unit] and leftovers.take() == {unit: 0} and unit not in leftovers
    world.organization.release_units([unit])
    checkpoint = world.organization.allocate_checkpoint()
    assert checkpoint is not None and unit in checkpoint.pages and unit in leftovers
    world.organization.release(checkpoint)
    assert unit in world.take(world.organization.units_free())
    world.organization.reset()
    assert leftovers.take() == {} and unit in leftovers


@pytest.mark.parametrize("name", ["S1", "D0"])
def test_a_flush_heals_kv_that_a_model_made_nan(name: str) -> None:
    """Units that never held a state, whose KV overflowed: after the flush the next owner reads none of it."""
    world = World(name)
    units = world.take(2)
    world.begin(TORCH)
    spoiled = [rows for unit in units for rows in world.rows(unit)]
    for rows in spoiled:
        rows.fill_(float("nan"))
    world.organization.release_units(units)
    world.organization.reset()
    assert sorted(world.take(2)) == sorted(units)
    world.begin(TORCH)
    assert all(rows.isfinite().all() for rows in spoiled)


def tokens_over(world: World, states: list[Any]) -> Any:
    """SGLang's allocator over the world, for requests with these live states."""
    requests = SimpleNamespace(batch=[], preparing_states=lambda: states)
    tokens = GridTokens(world.organization, requests, BF16, "cpu", None)  # type: ignore[arg-type]
    tokens.connect(SimpleNamespace(memory=Memory(world.organization)))  # type: ignore[arg-type]
    return tokens


def test_a_prefill_clears_its_last_block_alone() -> None:
    """A prompt of two blocks and a bit, one that ends on a boundary, a chunk that goes on in its block, and a
    decode step that crosses into a fresh unit."""
    world = World("S1")
    world.churn()
    ended = SimpleNamespace(units=world.take(1))
    world.organization.leftovers.take()
    states = [SimpleNamespace(units=[]), SimpleNamespace(units=[]), ended]
    tokens = tokens_over(world, states)
    starts, ends = torch.tensor([0, 0, 10]), torch.tensor([2 * GRID + 7, GRID, 30])
    tokens.alloc_extend(starts, starts, ends, ends, None, int((ends - starts).sum()))
    a, b, c = states[0].units
    assert world.organization.leftovers.take() == {a: GRID, b: GRID, c: 7, states[1].units[0]: GRID}
    lengths = torch.tensor([GRID + 1, 31])
    tokens.alloc_decode(lengths, lengths, torch.tensor([5, 6]))
    (unit,) = tokens.memory._step_units
    assert world.organization.leftovers.take() == {unit: 1}


def test_poison_waits_for_the_next_forward() -> None:
    """Freed memory keeps its bytes until then: a forward in flight may read it.  Then freed states are NaN,
    freed KV is finite and loud, and what was handed out again meanwhile is cleared after that."""
    world = World("S1")
    world.tails.poison = Poison(world.organization, world.arenas)
    world.begin(TORCH)
    (unit,) = world.take(1)
    checkpoint = world.organization.allocate_checkpoint()
    assert checkpoint is not None
    world.begin(TORCH)
    for rows in world.rows(unit):
        rows.fill_(1)
    before = [buffer.clone() for buffer in world.arenas.kv_buffers]
    world.organization.release(checkpoint)
    world.organization.release_units([unit])
    again = world.take(2)
    assert set(again) & {unit} and set(again) & set(checkpoint.pages)
    assert all(map(torch.equal, world.arenas.kv_buffers, before))
    world.begin(TORCH)
    for page in checkpoint.pages:
        for rows in world.rows(page):
            assert rows.eq(0).all() if page in again else rows.isnan().all()
    for rows in world.rows(unit):
        assert rows.isfinite().all() and rows.abs().min() > 1e30
