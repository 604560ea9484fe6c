"""Cases of the Triton prefill scan; `python -m tests.support.triton_paged_scan` runs them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch

from sglang_hybrid.kernels import triton_paged_scan, triton_scan_blocks
from sglang_hybrid.kernels.checks import KernelError
from sglang_hybrid.kernels.segments import Segments, plan_segments
from tests.support import paged_state
from tests.support.interpreted import LONG, Check, main, norm_error, poisoned_outputs, same_bytes, tolerance
from tests.support.paged_state import Pages
from tests.support.rules import LIGHTNING, MAMBA2, Rule, on
from tests.support.triton_state_update import untouched

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
    "bf16, an extend that is not walked": replace(
        BASE, lengths=(9, 150), begins=(3, 8), grid=32, state=replace(STATE, stored=BF16)
    ),
    "blocks of 256": replace(BASE, lengths=(300, 7), begins=(400, 0), grid=512, inputs=BF16),
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

    def __init__(self, rule: Rule, case: Case) -> None:
        self.rule, self.case, self.segments = rule, case, case.segments()
        self.count = len(self.segments.emissions)
        sequences, state = self.segments.sequences, case.state
        self.pages = Pages(replace(state, batch=sequences + self.count))
        self.inputs = rule.draw(state, self.segments.tokens, case.inputs or state.stored)
        self.states = [paged_state.state_of(state) for _ in range(sequences)]
        self.src_map = self.pages.maps[:sequences].clone()
        self.dst_map = self.pages.maps[sequences : sequences + self.count].clone()
        for page_map, initial in zip(self.src_map, self.states, strict=True):
            self.pages.put(page_map, initial)

    def run(self, device: str) -> torch.Tensor:
        """The kernel over poisoned memory; pages go to the device and back."""
        arena, inputs = self.pages.arena.to(device), on(device, self.inputs)
        view = self.pages.view._replace(rows=arena[:, : self.case.state.rows_per_page])
        with poisoned_outputs():
            y = self.rule.scan(
                view, self.src_map.to(device), self.dst_map.to(device), inputs, self.case.segments(device)
            )
        self.pages.arena.copy_(arena)
        return y.cpu()

    def expect(self, y: torch.Tensor, written: set[int]) -> None:
        """y and the states at `written` emissions are the recurrence's, which rounds at each emission."""
        case, done = self.case, 0
        limit = tolerance(case.state.stored, case.inputs or case.state.stored)
        for sequence, (length, begin) in enumerate(zip(case.lengths, case.begins, strict=True)):
            ends = {end: k for k, (s, end) in enumerate(self.segments.emissions) if s == sequence}
            part = self.inputs.part(done, done + length)
            rounded = [end - begin for end in ends]
            want, states = self.rule.recur(part, self.states[sequence], case.state.stored, rounded)
            assert norm_error(y[done : done + length], want) < limit, f"y of sequence {sequence}"
            for end, emission in ends.items():
                if emission in written:
                    got = self.pages.get(self.dst_map[emission])
                    assert norm_error(got, states[end - begin - 1]) < limit, f"state at {sequence}, {end}"
            done += length


def equals_the_recurrence(rule: Rule, case: Case, device: str) -> None:
    world = World(rule, case)
    before = world.pages.arena.clone()
    world.expect(world.run(device), set(range(world.count)))
    assert untouched(world.pages, before, list(world.dst_map)), "bytes outside the emissions changed"


def skips_what_is_nowhere(rule: Rule, device: str) -> None:
    """A fresh sequence, one whose source is the sink (poisoned), emissions to nowhere and to the sink."""
    world = World(rule, BASE)
    world.src_map[0], world.src_map[1] = -1, 0
    world.states = [torch.zeros_like(state) for state in world.states]
    world.dst_map[1], world.dst_map[2] = -1, 0
    before = world.pages.arena.clone()
    written = set(range(world.count)) - {1, 2}
    world.expect(world.run(device), written)
    assert untouched(world.pages, before, [world.dst_map[k] for k in written])


def the_last_emission_may_be_in_place(rule: Rule, device: str) -> None:
    """A chunk that goes on with a live state reads and writes the same pages."""
    world = World(rule, BASE)
    last = world.segments.last_emission.tolist()
    for sequence, emission in enumerate(last):
        world.dst_map[emission] = world.src_map[sequence]
    world.expect(world.run(device), set(range(world.count)))


def resumes_bit_for_bit(
    rule: Rule, stored: torch.dtype, device: str, inputs: torch.dtype | None = None
) -> None:
    """From every boundary of a cold scan: the same y, the same bytes at every later emission."""
    case = replace(BASE, lengths=(29,), begins=(0,), state=replace(STATE, stored=stored), inputs=inputs)
    cold = World(rule, case)
    cold.src_map[:] = -1
    y = cold.run(device)
    for emission, (_, end) in enumerate(cold.segments.emissions[:-1]):
        warm = World(rule, replace(case, lengths=(29 - end,), begins=(end,)))
        warm.inputs = cold.inputs.part(end, 29)
        warm.pages.put(warm.src_map[0], cold.pages.get(cold.dst_map[emission]))
        assert same_bytes(warm.run(device), y[end:]), f"y after {end}"
        for later, key in enumerate(warm.segments.emissions):
            want = cold.pages.get(cold.dst_map[cold.segments.emission_index[key]])
            assert same_bytes(warm.pages.get(warm.dst_map[later]), want), f"state at {key}"


def walked_or_not(rule: Rule, device: str) -> None:
    """The one launch and the three agree to the bit, in outputs and in pages."""
    # Boundaries at 8, 16, ... and at 512; blocks end there, and at 256.
    for lengths, grid in (((29, 5), 8), ((265, 20), 512)):
        case = replace(
            BASE, lengths=lengths, begins=(3, 250), grid=grid, state=replace(STATE, stored=BF16, heads=1)
        )
        agree_to_the_bit(rule, case, device)


def agree_to_the_bit(rule: Rule, case: Case, device: str) -> None:
    """Both ways through one batch."""
    with mock.patch.object(triton_paged_scan, "WALKED_TOKENS", 1024):
        walked = World(rule, case)
        y = walked.run(device)
    with mock.patch.object(triton_paged_scan, "WALKED_TOKENS", 0):
        split = World(rule, case)
        split.inputs = walked.inputs
        for mine, its in zip(split.src_map, walked.src_map, strict=True):
            split.pages.put(mine, walked.pages.get(its))
        assert same_bytes(split.run(device), y), "y"
    for emission, (mine, its) in enumerate(zip(split.dst_map, walked.dst_map, strict=True)):
        assert same_bytes(split.pages.get(mine), walked.pages.get(its)), f"state at emission {emission}"


def resumes_walked(rule: Rule, stored: torch.dtype, device: str) -> None:
    """A cold scan in three launches, some of its resumes in one."""
    with mock.patch.object(triton_paged_scan, "WALKED_TOKENS", 14):
        resumes_bit_for_bit(rule, stored, device, BF16)


FAULTS: dict[str, tuple[tuple[str, str], ...]] = {
    "the decay is dropped at a boundary": (
        ("        state = state_after(state, added, total)\n", "        state = state + added\n"),
    ),
    "a block gets the state after it": (
        ("        tl.store(entries + cell, state.to(entries.dtype.element_ty), mask=inside)\n", ""),
        (
            "        added, total, emission = next_added, next_total, next_emission\n",
            "        tl.store(entries + cell - HEADS.to(tl.int64) * (DIM * SIZE), "
            "state.to(entries.dtype.element_ty), mask=inside)\n"
            "        added, total, emission = next_added, next_total, next_emission\n",
        ),
    ),
    "the state passes an emission unrounded": (
        ("            state = stored.to(tl.float32)\n", "            state = state + 0.0\n"),
    ),
    "the walk's state passes an emission unrounded": (
        ("tl.where(emits, stored.to(tl.float32), state)", "state"),
    ),
    "states are rounded where nothing is emitted": (
        (
            "        if emission >= 0:\n",
            "        state = state.to(rows.dtype.element_ty).to(tl.float32)\n        if emission >= 0:\n",
        ),
    ),
}
"""Text of the kernels, and what stands in its place."""
PLANTED = (triton_scan_blocks, triton_paged_scan)


def is_seen(fault: str, rule: Rule, device: str) -> None:
    """With the fault in the kernels some case fails."""
    texts = {module.__name__: Path(str(module.__file__)).read_text() for module in PLANTED}
    for old, new in FAULTS[fault]:
        places = [name for name, text in texts.items() if old in text]
        assert len(places) == 1 and texts[places[0]].count(old) == 1, f"{old!r} stands in {places}"
        texts[places[0]] = texts[places[0]].replace(old, new)
    checks = [
        partial(equals_the_recurrence, rule, TABLE["one sequence"]),
        partial(resumes_walked, rule, BF16),
        partial(walked_or_not, rule),
    ]
    with TemporaryDirectory() as folder, mock.patch.dict(sys.modules):
        for name, text in texts.items():
            planted = Path(folder) / f"{name}.py"
            planted.write_text(text)
            spec = spec_from_file_location(name, planted)
            assert spec is not None and spec.loader is not None
            sys.modules[name] = module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        with mock.patch.dict(globals(), {"triton_paged_scan": sys.modules[triton_paged_scan.__name__]}):
            for check in checks:
                try:
                    check(device)
                except AssertionError:
                    return
    raise AssertionError(f"not seen: {fault}")


def refuses_what_it_cannot_hold(rule: Rule, device: str) -> None:
    """Rows wider than a program's registers, and inputs that no matrix product takes."""
    for case, sentence in (
        (replace(BASE, state=replace(STATE, size=257)), "rows hold 257 elements, needs 256 or less"),
        (replace(BASE, inputs=torch.float64), "is float64, needs bfloat16 or float16 or float32"),
    ):
        world = World(rule, case)
        before = world.pages.arena.clone()
        try:
            world.run(device)
        except KernelError as error:
            assert sentence in str(error), error
        else:
            raise AssertionError(f"not refused: {sentence}")
        assert same_bytes(world.pages.arena, before)


LIGHTNING_TOO = ("base: two sequences, four emissions", "rows cut by members", "bf16")
"""Those that lightning attention repeats, as in `triton_state_update`."""


def cases_of(rule: Rule, table: Mapping[str, Case]) -> dict[str, Check]:
    """Cases of a prefill by name."""
    checks: dict[str, Callable[[str], None]] = {
        name: partial(equals_the_recurrence, rule, case) for name, case in table.items()
    }
    checks["sentinels and sink"] = partial(skips_what_is_nowhere, rule)
    checks["last emission in place"] = partial(the_last_emission_may_be_in_place, rule)
    checks["what it cannot hold"] = partial(refuses_what_it_cannot_hold, rule)
    checks["resume"] = partial(resumes_bit_for_bit, rule, torch.float32)
    checks["resume, bf16"] = partial(resumes_bit_for_bit, rule, BF16)
    return checks


def cases() -> dict[str, Check]:
    """All cases by name."""
    more: dict[str, Callable[[str], None]] = {
        "one launch or three": partial(walked_or_not, MAMBA2),
        "resume, walked": partial(resumes_walked, MAMBA2, torch.float32),
        "resume, walked, bf16": partial(resumes_walked, MAMBA2, BF16),
        **{f"planted: {fault}": partial(is_seen, fault, MAMBA2) for fault in FAULTS},
    }
    repeated = TABLE if LONG else {name: TABLE[name] for name in LIGHTNING_TOO}
    more |= {f"lightning: {name}": check for name, check in cases_of(LIGHTNING, repeated).items()}
    return cases_of(MAMBA2, TABLE) | more


if __name__ == "__main__":
    main(cases())
