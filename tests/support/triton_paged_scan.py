"""Cases of the Triton prefill scan; `python -m tests.support.triton_paged_scan` runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from sglang_hybrid.kernels.segments import Segments, plan_segments
from tests.support import paged_state
from tests.support.interpreted import LONG, Check, main, norm_error, poisoned_outputs, same_bytes, tolerance
from tests.support.paged_state import Pages
from tests.support.recurrence import MixerInputs, scan
from tests.support.triton_state_update import on, untouched

BF16 = torch.bfloat16
STATE = paged_state.Case(heads=2, groups=1, dim=8, size=16, rows_per_page=16)


@dataclass(frozen=True)
class Case:
    """A ragged batch and the layer it runs through; every other case varies one field of `BASE`."""

    lengths: tuple[int, ...] = (13, 6)
    begins: tuple[int, ...] = (0, 12)
    grid: int | None = 8
    state: paged_state.Case = field(default=STATE)
    inputs: torch.dtype | None = None
    """Dtype of the inputs; None: the pages'."""

    def segments(self, device: str = "cpu") -> Segments:
        starts = [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]
        return plan_segments(starts, self.begins, self.grid, device=device)


BASE = Case()
TABLE = {
    "base: two sequences, four emissions": BASE,
    "one sequence": replace(BASE, lengths=(27,), begins=(0,)),
    "one token each": replace(BASE, lengths=(1, 1, 1), begins=(0, 7, 8)),
    "begins and ends on boundaries": replace(BASE, lengths=(16, 8), begins=(8, 16)),
    "chunks of 64": replace(BASE, lengths=(150,), begins=(40,), grid=128),
    "no grid": replace(BASE, grid=None),
    "grid 1": replace(BASE, lengths=(5, 3), grid=1),
    "grid 24, chunk no power of two": replace(BASE, lengths=(40,), begins=(5,), grid=24),
    "three heads": replace(BASE, state=replace(STATE, heads=3)),
    "a group a head": replace(BASE, state=replace(STATE, groups=2)),
    "dim 6": replace(BASE, state=replace(STATE, dim=6)),
    "dim 80 in blocks": replace(BASE, state=replace(STATE, dim=80, heads=1, rows_per_page=80)),
    "state size 33": replace(BASE, state=replace(STATE, size=33)),
    "state size 256": replace(BASE, state=replace(STATE, size=256)),
    "rows cut by members": replace(BASE, state=replace(STATE, rows_per_page=7)),
    "second stripe, unaligned": replace(BASE, state=replace(STATE, first_row=19, rows_per_page=10)),
    "int64 maps": replace(BASE, state=replace(STATE, index=torch.int64)),
    "bare": replace(BASE, state=replace(STATE, extras=False)),
    "bf16": replace(BASE, state=replace(STATE, stored=BF16)),
    "bf16, state size 256": replace(BASE, state=replace(STATE, stored=BF16, size=256)),
    "bf16 inputs, fp32 state": replace(BASE, inputs=BF16),
}
if LONG:
    TABLE |= {f"{k}; bf16": replace(c, state=replace(c.state, stored=BF16)) for k, c in TABLE.items()}
    TABLE |= {
        f"{name}; 33 sequences": replace(case, lengths=(9,) * 33, begins=tuple(range(33)), grid=8)
        for name, case in TABLE.items()
        if case.state.size < 100
    }


class World:
    """Poisoned pages, inputs, and maps for every sequence and every emission of a case."""

    def __init__(self, case: Case) -> None:
        self.case, self.segments = case, case.segments()
        self.count = len(self.segments.emissions)
        sequences, state = self.segments.sequences, case.state
        self.pages = Pages(replace(state, batch=sequences + self.count))
        self.inputs = MixerInputs.random(
            self.segments.tokens, state.heads, state.groups, state.dim, state.size,
            case.inputs or state.stored, state.extras,
        )  # fmt: skip
        self.states = [paged_state.state_of(state) for _ in range(sequences)]
        self.src_map = self.pages.maps[:sequences].clone()
        self.dst_map = self.pages.maps[sequences : sequences + self.count].clone()
        for page_map, initial in zip(self.src_map, self.states, strict=True):
            self.pages.put(page_map, initial)

    def run(self, device: str) -> torch.Tensor:
        """The kernel over poisoned memory; pages go to the device and back."""
        from sglang_hybrid.kernels.triton_paged_scan import paged_scan

        arena, inputs = self.pages.arena.to(device), on(device, self.inputs)
        view = self.pages.view._replace(rows=arena[:, : self.case.state.rows_per_page])
        with poisoned_outputs():
            y = paged_scan(
                view, self.src_map.to(device), self.dst_map.to(device),
                inputs.x, inputs.dt, inputs.a, inputs.b, inputs.c, self.case.segments(device),
                d=inputs.d, z=inputs.z, dt_bias=inputs.dt_bias, dt_softplus=True,
            )  # fmt: skip
        self.pages.arena.copy_(arena)
        return y.cpu()

    def expect(self, y: torch.Tensor, written: set[int]) -> None:
        """y and the states at `written` emissions are the recurrence's, which rounds at each emission."""
        case, done = self.case, 0
        limit = tolerance(case.state.stored, case.inputs or case.state.stored)
        for sequence, (length, begin) in enumerate(zip(case.lengths, case.begins, strict=True)):
            ends = {end: k for k, (s, end) in enumerate(self.segments.emissions) if s == sequence}
            part = self.inputs.part(done, done + length)
            want, states = scan(part, self.states[sequence], case.state.stored, [end - begin for end in ends])
            assert norm_error(y[done : done + length], want) < limit, f"y of sequence {sequence}"
            for end, emission in ends.items():
                if emission in written:
                    got = self.pages.get(self.dst_map[emission])
                    assert norm_error(got, states[end - begin - 1]) < limit, f"state at {sequence}, {end}"
            done += length


def equals_the_recurrence(case: Case, device: str) -> None:
    world = World(case)
    before = world.pages.arena.clone()
    world.expect(world.run(device), set(range(world.count)))
    assert untouched(world.pages, before, list(world.dst_map)), "bytes outside the emissions changed"


def skips_what_is_nowhere(device: str) -> None:
    """A fresh sequence, one whose source is the sink (poisoned), emissions to nowhere and to the sink."""
    world = World(BASE)
    world.src_map[0], world.src_map[1] = -1, 0
    world.states = [torch.zeros_like(state) for state in world.states]
    world.dst_map[1], world.dst_map[2] = -1, 0
    before = world.pages.arena.clone()
    written = set(range(world.count)) - {1, 2}
    world.expect(world.run(device), written)
    assert untouched(world.pages, before, [world.dst_map[k] for k in written])


def the_last_emission_may_be_in_place(device: str) -> None:
    """A chunk that goes on with a live state reads and writes the same pages."""
    world = World(BASE)
    last = world.segments.last_emission.tolist()
    for sequence, emission in enumerate(last):
        world.dst_map[emission] = world.src_map[sequence]
    world.expect(world.run(device), set(range(world.count)))


def resumes_bit_for_bit(stored: torch.dtype, device: str) -> None:
    """From every boundary of a cold scan: the same y, the same bytes at every later emission."""
    case = replace(BASE, lengths=(29,), begins=(0,), state=replace(STATE, stored=stored))
    cold = World(case)
    cold.src_map[:] = -1
    y = cold.run(device)
    for emission, (_, end) in enumerate(cold.segments.emissions[:-1]):
        warm = World(replace(case, lengths=(29 - end,), begins=(end,)))
        warm.inputs = cold.inputs.part(end, 29)
        warm.pages.put(warm.src_map[0], cold.pages.get(cold.dst_map[emission]))
        assert same_bytes(warm.run(device), y[end:]), f"y after {end}"
        for later, key in enumerate(warm.segments.emissions):
            want = cold.pages.get(cold.dst_map[cold.segments.emission_index[key]])
            assert same_bytes(warm.pages.get(warm.dst_map[later]), want), f"state at {key}"


def cases() -> dict[str, Check]:
    """All cases by name."""
    table: dict[str, Callable[[str], None]] = {
        name: partial(equals_the_recurrence, case) for name, case in TABLE.items()
    }
    table["sentinels and sink"] = skips_what_is_nowhere
    table["last emission in place"] = the_last_emission_may_be_in_place
    table["resume"] = partial(resumes_bit_for_bit, torch.float32)
    table["resume, bf16"] = partial(resumes_bit_for_bit, BF16)
    return table


if __name__ == "__main__":
    main(cases())
