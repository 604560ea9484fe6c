"""The gated delta rule equals its recurrence, hands out boundary states, and resumes bit for bit."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from sglang_hybrid.kernels import (
    KernelError,
    Segments,
    delta_scan,
    delta_update,
    gates,
    paged_delta_scan,
    plan_segments,
)
from sglang_hybrid.pools.views import StateView
from tests.support.delta import Decays, DeltaInputs, recur
from tests.support.paged_state import BASE as PAGED_BASE
from tests.support.paged_state import CASES as PAGED
from tests.support.paged_state import Pages, state_of
from tests.support.recurrence import relative_error


@dataclass(frozen=True)
class Case:
    """One scan; every other case varies one field of `BASE`."""

    lengths: tuple[int, ...] = (19, 25, 37)
    begins: tuple[int, ...] = (0, 16, 24)
    heads: int = 4
    groups: int = 2
    dim: int = 6
    size: int = 16
    grid: int | None = 8
    dtype: torch.dtype = torch.float32
    stored: torch.dtype = torch.float32
    decays: Decays = "head"


BASE = Case()
CASES = {
    "base": BASE,
    "one sequence": replace(BASE, lengths=(43,), begins=(0,)),
    "one token each": replace(BASE, lengths=(1, 1, 1, 1), begins=(0, 7, 8, 100)),
    "begins off the grid": replace(BASE, begins=(3, 5, 31)),
    "very uneven": replace(BASE, lengths=(1, 150, 2), begins=(9, 0, 7)),
    "one head": replace(BASE, heads=1, groups=1),
    "one group": replace(BASE, groups=1),
    "a group a head": replace(BASE, groups=4),
    "key size 1": replace(BASE, size=1),
    "key size 100": replace(BASE, size=100),
    "one value a head": replace(BASE, dim=1),
    "no grid": replace(BASE, grid=None),
    "grid 1": replace(BASE, grid=1),
    "grid 96": replace(BASE, grid=96, lengths=(200, 25, 37), begins=(96, 16, 24)),
    "bf16 inputs": replace(BASE, dtype=torch.bfloat16),
    "bf16 state": replace(BASE, stored=torch.bfloat16),
    "fp16 state": replace(BASE, stored=torch.float16),
}
KDA = replace(BASE, decays="channel", groups=4)
CASES |= {
    "KDA": KDA,
    "KDA, one token each": replace(KDA, lengths=(1, 1, 1, 1), begins=(0, 7, 8, 100)),
    "KDA, begins off the grid": replace(KDA, begins=(3, 5, 31)),
    "KDA, two heads a group": replace(KDA, groups=2),
    "KDA, key size 1": replace(KDA, size=1),
    "KDA, key size 100": replace(KDA, size=100),
    "KDA, grid 96": replace(KDA, grid=96, lengths=(200, 25, 37), begins=(96, 16, 24)),
    "KDA, bf16 inputs": replace(KDA, dtype=torch.bfloat16),
    "KDA, bf16 state": replace(KDA, stored=torch.bfloat16),
    "KDA with a lower bound": replace(KDA, decays="bounded"),
    "KDA with a lower bound, grid 96": replace(KDA, decays="bounded", grid=96, lengths=(200,), begins=(40,)),
}


DECAYS: tuple[Decays, ...] = ("head", "channel", "bounded")


def starts_of(lengths: tuple[int, ...]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def run(
    inputs: DeltaInputs, cut: Segments, initial: torch.Tensor | None, stored: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    g, beta = inputs.gates()
    return delta_scan(inputs.q, inputs.k, inputs.v, g, beta, cut, initial_states=initial, state_dtype=stored)


@pytest.mark.parametrize("fresh", [False, True], ids=["resumed", "fresh"])
@pytest.mark.parametrize("name", CASES)
def test_scan_equals_the_recurrence(name: str, fresh: bool) -> None:
    case = CASES[name]
    torch.manual_seed(1)
    starts = starts_of(case.lengths)
    inputs = DeltaInputs.random(
        starts[-1], case.heads, case.groups, case.dim, case.size, case.dtype, case.decays
    )
    shape = (len(case.lengths), case.heads, case.dim, case.size)
    initial = torch.zeros(shape) if fresh else torch.randn(shape).to(case.stored).float()
    cut = plan_segments(starts, case.begins, case.grid)
    y, states = run(inputs, cut, None if fresh else initial, case.stored)
    assert y.dtype == case.dtype and states.dtype == case.stored
    want_y, want_states = [], {}
    for seq, begin in enumerate(case.begins):
        ends = [end - begin for s, end in cut.emissions if s == seq]
        part = inputs.part(starts[seq], starts[seq + 1])
        one_y, one_states = recur(part, initial[seq], case.stored, round_at=ends)
        want_y.append(one_y)
        want_states |= {(seq, begin + end): one_states[end - 1] for end in ends}
    # One rounding may fall the other way at a tie; it then shows at the size of the stored dtype.
    bound = 2e-5 if case.dtype == case.stored == torch.float32 else 1e-2
    assert relative_error(y, torch.cat(want_y)) < bound
    assert len(want_states) == len(cut.emissions)
    for index, key in enumerate(cut.emissions):
        assert relative_error(states[index], want_states[key]) < bound, key


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grid", [8, 48, 64])
@pytest.mark.parametrize("decays", DECAYS)
def test_resume_at_a_boundary_is_bit_identical(decays: Decays, grid: int, stored: torch.dtype) -> None:
    torch.manual_seed(2)
    tokens = 3 * grid + 5
    inputs = DeltaInputs.random(tokens, 6, 2, 16, 32, decays=decays)
    cold_cut = plan_segments([0, tokens], [0], grid)
    cold_y, cold_states = run(inputs, cold_cut, None, stored)
    for hit in (grid, 2 * grid, 3 * grid):
        saved = cold_states[cold_cut.emission_index[0, hit]][None].float()
        cut = plan_segments([0, tokens - hit], [hit], grid)
        y, states = run(inputs.part(hit, tokens), cut, saved, stored)
        assert torch.equal(y, cold_y[hit:])
        for index, key in enumerate(cut.emissions):
            assert torch.equal(states[index], cold_states[cold_cut.emission_index[key]])


@pytest.mark.parametrize("decays", DECAYS)
def test_neighbours_in_the_batch_change_nothing(decays: Decays) -> None:
    torch.manual_seed(4)
    bounds, begins = [0, 19, 44, 174], (0, 16, 8)
    inputs = DeltaInputs.random(bounds[-1], 4, 2, 8, 16, decays=decays)
    initial = torch.randn(3, 4, 8, 16)
    y, states = run(inputs, plan_segments(bounds, begins, 8), initial)
    done = 0
    for seq, begin in enumerate(begins):
        low, high = bounds[seq], bounds[seq + 1]
        cut = plan_segments([0, high - low], [begin], 8)
        alone_y, alone_states = run(inputs.part(low, high), cut, initial[seq : seq + 1])
        assert torch.equal(y[low:high], alone_y)
        assert torch.equal(states[done : done + len(cut.emissions)], alone_states)
        done += len(cut.emissions)
    assert done == states.shape[0]


@pytest.mark.parametrize("decays", DECAYS)
def test_padding_slots_do_not_mix(decays: Decays) -> None:
    """Padding slots point at the batch's first token; a poisoned one must stay where it is."""
    torch.manual_seed(5)
    inputs = DeltaInputs.random(20, 2, 1, 4, 8, decays=decays)
    for tensor in (inputs.q, inputs.k, inputs.v, inputs.a, inputs.b):
        tensor[0] = float("nan")
    y, states = run(inputs, plan_segments([0, 7, 20], [0, 0], 8), None)
    assert torch.isfinite(y[7:]).all() and torch.isfinite(states[1:]).all()


def test_gates() -> None:
    torch.manual_seed(6)
    a, b = 20 * torch.randn(5, 3), 20 * torch.randn(5, 3)
    a_log, dt_bias = torch.randn(3), torch.randn(3)
    g, beta = gates(a, b, a_log, dt_bias)
    step = torch.nn.functional.softplus(a.double() + dt_bias.double())
    assert relative_error(g, -a_log.double().exp() * step) < 1e-6
    assert relative_error(beta, b.double().sigmoid()) < 1e-6


def test_gates_by_channel() -> None:
    """As `kda_gate_chunk_cumsum` of the source defines them, before it sums: -exp(A) softplus(a + bias), or
    the bound times sigmoid(exp(A) (a + bias)); the rate is a head's, the bias a channel's."""
    torch.manual_seed(7)
    a, b, a_log, dt_bias = 9 * torch.randn(5, 3, 4), torch.randn(5, 3), torch.randn(3), torch.randn(3, 4)
    for head in range(3):
        for channel in range(4):
            step = a[:, head, channel].double() + dt_bias[head, channel].double()
            rate = a_log[head].double().exp()
            free, _ = gates(a, b, a_log, dt_bias)
            assert relative_error(free[:, head, channel], -rate * step.exp().log1p()) < 1e-6
            bounded, _ = gates(a, b, a_log, dt_bias, -5.0)
            assert relative_error(bounded[:, head, channel], -5 / (1 + (-rate * step).exp())) < 1e-6


def test_a_state_that_forgets_at_once_stays_finite() -> None:
    """A decay of exp(-400) a token: sums over a piece pass what exp can invert in fp32."""
    torch.manual_seed(8)
    inputs = DeltaInputs.random(70, 2, 2, 4, 8, decays="channel")
    inputs.a_log[:], inputs.a[:, :, ::2] = 3.0, 20.0
    cut = plan_segments([0, 70], [0], 64)
    y, states = run(inputs, cut, torch.randn(1, 2, 4, 8))
    want_y, want = recur(inputs, torch.zeros(2, 4, 8), torch.float32)
    assert relative_error(y[1:], want_y[1:]) < 2e-5 and relative_error(states[-1], want[-1]) < 2e-5


@pytest.mark.parametrize("place", ["in place", "forked"])
@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize("name", PAGED)
def test_update_equals_the_recurrence(name: str, decays: Decays, place: str) -> None:
    case = PAGED[name]
    pages = Pages(case)
    inputs = DeltaInputs.random(case.batch, case.heads, case.groups, case.dim, case.size, decays=decays)
    states = [state_of(case) for _ in range(case.batch)]
    source = pages.maps[: case.batch]
    target = source if place == "in place" else pages.maps[case.batch :]
    for page_map, state in zip(source, states, strict=True):
        pages.put(page_map, state)
    before = pages.arena.clone()
    y = delta_update(pages.view, source, target, inputs)
    for row, state in enumerate(states):
        want_y, want = recur(inputs.part(row, row + 1), state, case.stored)
        assert relative_error(y[row], want_y[0]) < 2e-6
        bound = 2e-6 if case.stored == torch.float32 else 4e-3
        assert relative_error(pages.get(target[row]), want[0]) < bound
    assert pages.unchanged_but(before, list(target))


def test_update_with_fresh_skipped_and_padding_rows() -> None:
    """Rows: forked, fresh, nowhere to write, padding from and to the sink, twice."""
    case = replace(PAGED_BASE, batch=5)
    pages = Pages(case)
    inputs = DeltaInputs.random(5, 4, 2, 6, 8)
    first, third = state_of(case), state_of(case)
    source, target = pages.maps[:5].clone(), pages.maps[5:].clone()
    pages.put(source[0], first)
    pages.put(source[2], third)
    source[1, 0] = -1
    target[2, 0] = -1
    source[3:] = target[3:] = 0
    before = pages.arena.clone()
    y = delta_update(pages.view, source, target, inputs)
    for row, state in ((0, first), (1, torch.zeros_like(first)), (2, third)):
        want_y, want = recur(inputs.part(row, row + 1), state, torch.float32)
        assert relative_error(y[row], want_y[0]) < 2e-6
        if row != 2:
            assert relative_error(pages.get(target[row]), want[0]) < 2e-6
    assert pages.unchanged_but(before, [target[0], target[1]])


def test_a_row_of_the_batch_does_not_depend_on_the_others() -> None:
    case = replace(PAGED_BASE, batch=7, size=33)
    pages = Pages(case)
    inputs = DeltaInputs.random(7, 4, 2, 6, 33)
    for page_map in pages.maps[:7]:
        pages.put(page_map, state_of(case))

    def step(rows: slice) -> torch.Tensor:
        some = inputs.part(rows.start, rows.stop)
        return delta_update(pages.view, pages.maps[:7][rows], pages.maps[7:][rows], some)

    together = step(slice(0, 7))
    for row in range(7):
        assert torch.equal(step(slice(row, row + 1))[0], together[row])


def test_update_never_waits_for_the_device() -> None:
    """Meta tensors have no values: whatever asks for one (item, tolist, a mask as index) raises."""
    with torch.device("meta"):
        inputs = DeltaInputs.random(3, 4, 2, 6, 8)
        maps = torch.zeros(3, 2, dtype=torch.int32)
        view = StateView(torch.zeros(9, 12, 8), 0, 4, 6)
        assert delta_update(view, maps, maps, inputs).shape == (3, 4, 6)


def test_an_empty_batch_gives_nothing() -> None:
    y, states = run(DeltaInputs.random(0, 4, 2, 6, 16), plan_segments([0], [], 8), None)
    assert y.shape == (0, 4, 6) and states.shape == (0, 4, 6, 16)


@pytest.mark.parametrize(
    ("field", "shape", "message"),
    [
        ("q", (80, 2, 16), r"q has shape \[80, 2, 16\], needs \[81, \*, \*\]"),
        ("k", (81, 2, 15), r"k has shape \[81, 2, 15\], needs \[81, 2, 16\]"),
        ("v", (81, 24), r"v has shape \[81, 24\], needs \[81, \*, \*\]"),
        ("v", (81, 2, 6), r"g has shape \[81, 4\], needs \[81, 2\]"),
        ("a", (81, 3), r"a has shape \[81, 3\], needs \[81, 4\]"),
        ("a", (81, 3, 16), r"a has shape \[81, 3, 16\], needs \[81, 4, \*\]"),
        ("b", (81, 2, 1), r"b has shape \[81, 2, 1\], needs \[\*, \*\]"),
        ("a_log", (4, 1), r"A_log has shape \[4, 1\], needs \[4\]"),
        ("dt_bias", (3,), r"dt_bias has shape \[3\], needs \[4\]"),
    ],
)
def test_a_wrong_tensor_is_named(field: str, shape: tuple[int, ...], message: str) -> None:
    inputs = DeltaInputs.random(81, 4, 2, 6, 16)._replace(**{field: torch.zeros(shape)})
    with pytest.raises(KernelError, match=message):
        run(inputs, plan_segments([0, 81], [0], 8), None)


def test_groups_states_and_views_are_checked() -> None:
    inputs = DeltaInputs.random(3, 4, 3, 6, 8)
    with pytest.raises(KernelError, match="q and k have 3 groups, which must divide the 4 heads of v"):
        run(inputs, plan_segments([0, 3], [0], 8), None)
    inputs = DeltaInputs.random(3, 4, 2, 6, 8)
    with pytest.raises(KernelError, match=r"initial_states has shape \[1, 4, 8, 6\], needs \[1, 4, 6, 8\]"):
        run(inputs, plan_segments([0, 3], [0], 8), torch.zeros(1, 4, 8, 6))


@pytest.mark.parametrize(
    ("field", "shape", "message"),
    [
        ("q", (3, 2, 9), r"k has shape \[3, 2, 8\], needs \[3, 2, 9\]"),
        ("v", (3, 4, 5), r"v has shape \[3, 4, 5\], needs \[3, 4, 6\]"),
        ("a", (3, 2), r"a has shape \[3, 2\], needs \[3, 4\]"),
        ("a", (3, 4, 7), r"a has shape \[3, 4, 7\], needs \[3, 4, 8\]"),
        ("a", (3, 4, 8), r"dt_bias has shape \[4\], needs \[4, 8\]"),
        ("b", (2, 4), r"b has shape \[2, 4\], needs \[3, 4\]"),
        ("a_log", (4, 1), r"A_log has shape \[4, 1\], needs \[4\]"),
        ("dt_bias", (3,), r"dt_bias has shape \[3\], needs \[4\]"),
    ],
)
def test_the_paged_operations_name_a_wrong_tensor(field: str, shape: tuple[int, ...], message: str) -> None:
    """Both check before they touch a page; so do their Triton launches, with the same function."""
    inputs = DeltaInputs.random(3, 4, 2, 6, 8)._replace(**{field: torch.zeros(shape)})
    maps, view = torch.zeros(3, 2, dtype=torch.int32), StateView(torch.zeros(9, 12, 8), 0, 4, 6)
    for run_it in (delta_update, partial(paged_delta_scan, segments=plan_segments([0, 1, 2, 3], [0] * 3, 8))):
        with pytest.raises(KernelError, match=message):
            run_it(view, maps, maps, inputs)


def test_the_state_size_is_that_of_the_keys() -> None:
    maps, view = torch.zeros(3, 2, dtype=torch.int32), StateView(torch.zeros(9, 12, 9), 0, 4, 6)
    with pytest.raises(KernelError, match=r"q has shape \[3, 2, 8\], needs \[3, \*, 9\]"):
        delta_update(view, maps, maps, DeltaInputs.random(3, 4, 2, 6, 8))
