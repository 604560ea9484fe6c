"""Cases of the Triton prefill convolution; `python -m tests.support.triton_paged_conv` runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from sglang_hybrid.kernels.segments import Segments, plan_segments
from sglang_hybrid.pools.views import ConvView
from tests.support import triton_conv_update
from tests.support.interpreted import LONG, Check, main, norm_error, poisoned_outputs, same_bytes, tolerance
from tests.support.recurrence import convolve
from tests.support.triton_conv_update import BF16, Lines

LINE = replace(triton_conv_update.BASE, channels=12, stride=48)


@dataclass(frozen=True)
class Case:
    """A ragged batch and the layer it runs through; every other case varies one field of `BASE`."""

    lengths: tuple[int, ...] = (13, 6)
    begins: tuple[int, ...] = (0, 12)
    grid: int | None = 8
    line: triton_conv_update.Case = field(default=LINE)

    def segments(self, device: str = "cpu") -> Segments:
        starts = [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]
        return plan_segments(starts, self.begins, self.grid, device=device)


BASE = Case()
TABLE = {
    "base: two sequences, four emissions": BASE,
    "one sequence": replace(BASE, lengths=(27,), begins=(0,)),
    "one token each": replace(BASE, lengths=(1, 1, 1), begins=(0, 7, 8)),
    "begins and ends on boundaries": replace(BASE, lengths=(16, 8), begins=(8, 16)),
    "pieces shorter than the window": replace(BASE, lengths=(9, 4), begins=(7, 6)),
    "chunks of 64": replace(BASE, lengths=(150,), begins=(40,), grid=128),
    "no grid": replace(BASE, grid=None),
    "grid 1": replace(BASE, lengths=(5, 3), grid=1),
    "grid 67, pieces of a token": replace(BASE, lengths=(9,), begins=(63,), grid=67),
    "33 sequences": replace(BASE, lengths=(2,) * 33, begins=tuple(range(33))),
    "one channel": replace(BASE, line=replace(LINE, channels=1)),
    "channels 13, no whole word": replace(BASE, line=replace(LINE, channels=13)),
    "channels 300, three programs": replace(BASE, line=replace(LINE, channels=300, stride=1024)),
    "width 2": replace(BASE, line=replace(LINE, width=2)),
    "width 6": replace(BASE, line=replace(LINE, width=6, stride=96)),
    "lines of S0 and D0, behind a checkpoint": replace(BASE, line=replace(LINE, stride=1500, offset=1200)),
    "time first": replace(BASE, line=replace(LINE, inner=(1, 12))),
    "int64 lines": replace(BASE, line=replace(LINE, index=torch.int64)),
    "no bias": replace(BASE, line=replace(LINE, bias=False)),
    "no activation": replace(BASE, line=replace(LINE, activation=None)),
    "bf16": replace(BASE, line=replace(LINE, stored=BF16, dtype=BF16)),
    "bf16 lines, fp32 input": replace(BASE, line=replace(LINE, stored=BF16)),
    "fp32 lines, bf16 input": replace(BASE, line=replace(LINE, dtype=BF16)),
}
if LONG:
    TABLE |= {
        f"{name}; bf16": replace(case, line=replace(case.line, stored=BF16, dtype=BF16))
        for name, case in TABLE.items()
    }


class World:
    """Poisoned lines, inputs, and maps for every sequence and every emission of a case."""

    def __init__(self, case: Case) -> None:
        self.case, self.segments = case, case.segments()
        self.count = len(self.segments.emissions)
        line = replace(case.line, batch=self.segments.sequences + self.count)
        self.lines = Lines(line)
        self.src = self.lines.source[: self.segments.sequences].clone()
        self.dst = self.lines.fresh[: self.count].clone()
        self.x = torch.randn(self.segments.tokens, line.channels).to(line.dtype)
        self.weight = torch.randn(line.channels, line.width).to(line.dtype)
        self.bias = torch.randn(line.channels).to(line.dtype) if line.bias else None

    def run(self, device: str) -> torch.Tensor:
        """The kernels over poisoned memory, x a slice of a wider row; lines go to the device and back."""
        from sglang_hybrid.kernels.triton_paged_conv import paged_conv

        wide = torch.zeros(self.x.shape[0], self.x.shape[1] + 48, dtype=self.x.dtype, device=device)
        x = wide[:, 16 : 16 + self.x.shape[1]]
        x.copy_(self.x)
        arena = self.lines.arena.to(device)
        with poisoned_outputs():
            y = paged_conv(
                ConvView(self.lines.on(arena)), self.src.to(device), self.dst.to(device), x,
                self.weight.to(device), None if self.bias is None else self.bias.to(device),
                self.case.segments(device), activation=self.case.line.activation,
            )  # fmt: skip
        self.lines.arena.copy_(arena)
        return y.cpu()

    def expect(self, y: torch.Tensor, before: torch.Tensor, written: set[int], fresh: set[int]) -> None:
        """y is the convolution's, windows at `written` emissions are exact, all other bytes stay."""
        case, done = self.case, 0
        silu, limit = case.line.activation is not None, tolerance(case.line.stored, case.line.dtype)
        for sequence, (length, begin) in enumerate(zip(case.lengths, case.begins, strict=True)):
            window = self.lines.on(before)[self.src[sequence]]
            if sequence in fresh:
                window = torch.zeros_like(window)
            want, after = convolve(self.x[done : done + length], self.weight, self.bias, silu, window)
            assert norm_error(y[done : done + length], want) < limit, f"y of sequence {sequence}"
            for emission, (owner, end) in enumerate(self.segments.emissions):
                if owner == sequence and emission in written:
                    got = self.lines.on(self.lines.arena)[self.dst[emission]]
                    assert torch.equal(got, after[end - begin - 1]), f"window at {sequence}, {end}"
            done += length
        targets = [int(self.dst[emission]) for emission in written]
        assert self.lines.untouched(before, targets), "bytes outside the emissions changed"


def equals_the_convolution(case: Case, device: str) -> None:
    world = World(case)
    before = world.lines.arena.clone()
    world.expect(world.run(device), before, set(range(world.count)), set())


def skips_what_is_nowhere(device: str) -> None:
    """A fresh sequence, one whose source is the sink's line (poisoned), emissions to nowhere and the sink."""
    world = World(BASE)
    world.src[0], world.src[1] = -1, 0
    world.dst[1], world.dst[2] = -1, 0
    before = world.lines.arena.clone()
    world.expect(world.run(device), before, set(range(world.count)) - {1, 2}, {0, 1})


def the_last_emission_may_be_in_place(device: str) -> None:
    """A chunk that goes on with a live state reads and writes the same line, whichever piece is first."""
    for case in (BASE, TABLE["pieces shorter than the window"], TABLE["one token each"]):
        world = World(case)
        world.dst[world.segments.last_emission] = world.src
        before = world.lines.arena.clone()
        world.expect(world.run(device), before, set(range(world.count)), set())


def resumes_bit_for_bit(stored: torch.dtype, device: str) -> None:
    """From every boundary of a cold prefill: the same y, the same bytes at every later emission."""
    case = replace(BASE, lengths=(29,), begins=(0,), line=replace(LINE, stored=stored))
    cold = World(case)
    cold.src[:] = -1
    y = cold.run(device)
    for emission, (_, end) in enumerate(cold.segments.emissions[:-1]):
        warm = World(replace(case, lengths=(29 - end,), begins=(end,)))
        warm.x, warm.weight, warm.bias = cold.x[end:], cold.weight, cold.bias
        warm.lines.on(warm.lines.arena)[warm.src[0]] = cold.lines.on(cold.lines.arena)[cold.dst[emission]]
        assert same_bytes(warm.run(device), y[end:]), f"y after {end}"
        for later, key in enumerate(warm.segments.emissions):
            want = cold.lines.on(cold.lines.arena)[cold.dst[cold.segments.emission_index[key]]]
            got = warm.lines.on(warm.lines.arena)[warm.dst[later]]
            assert same_bytes(got, want), f"window at {key}"


def cases() -> dict[str, Check]:
    """All cases by name."""
    table: dict[str, Callable[[str], None]] = {
        name: partial(equals_the_convolution, case) for name, case in TABLE.items()
    }
    table["sentinels and sink"] = skips_what_is_nowhere
    table["last emission in place"] = the_last_emission_may_be_in_place
    table["resume"] = partial(resumes_bit_for_bit, torch.float32)
    table["resume, rounded"] = partial(resumes_bit_for_bit, BF16)
    return table


if __name__ == "__main__":
    main(cases())
