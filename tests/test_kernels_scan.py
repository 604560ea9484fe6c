"""The scan equals the recurrence, hands out the state at every boundary, and resumes bit for bit."""

from dataclasses import dataclass, replace

import pytest
import torch

from sglang_hybrid.kernels import KernelError, Segments, plan_segments, ssd_scan
from tests.support.recurrence import MixerInputs, relative_error, scan


@dataclass(frozen=True)
class Case:
    """One scan; every other case varies one field of `BASE`."""

    lengths: tuple[int, ...] = (19, 25, 37)
    begins: tuple[int, ...] = (0, 16, 24)
    heads: int = 4
    groups: int = 2
    dim: int = 8
    size: int = 16
    grid: int | None = 8
    dtype: torch.dtype = torch.float32
    stored: torch.dtype = torch.float32
    extras: bool = True
    fresh: bool = False


BASE = Case()
CASES = {
    "base": BASE,
    "one sequence": replace(BASE, lengths=(43,), begins=(0,)),
    "one token each": replace(BASE, lengths=(1, 1, 1, 1), begins=(0, 7, 8, 100)),
    "begins off the grid": replace(BASE, begins=(3, 5, 31)),
    "very uneven": replace(BASE, lengths=(1, 150, 2), begins=(9, 0, 7)),
    "one head": replace(BASE, heads=1, groups=1),
    "many heads": replace(BASE, heads=12),
    "one group": replace(BASE, groups=1),
    "a group a head": replace(BASE, groups=4),
    "small state": replace(BASE, size=1),
    "large state": replace(BASE, size=128),
    "one row a head": replace(BASE, dim=1),
    "no grid": replace(BASE, grid=None),
    "grid 1": replace(BASE, grid=1),
    "grid 64": replace(BASE, grid=64),
    "grid 96": replace(BASE, grid=96, lengths=(200, 25, 37), begins=(96, 16, 24)),
    "bf16 inputs": replace(BASE, dtype=torch.bfloat16),
    "bf16 state": replace(BASE, stored=torch.bfloat16),
    "fp16 state": replace(BASE, stored=torch.float16),
    "bare": replace(BASE, extras=False),
    "fresh": replace(BASE, fresh=True, begins=(0, 0, 0)),
}


def starts_of(case: Case) -> list[int]:
    return [sum(case.lengths[:i]) for i in range(len(case.lengths) + 1)]


def run(
    inputs: MixerInputs, cut: Segments, initial: torch.Tensor | None, stored: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    return ssd_scan(
        inputs.x,
        inputs.dt,
        inputs.a,
        inputs.b,
        inputs.c,
        cut,
        d=inputs.d,
        z=inputs.z,
        dt_bias=inputs.dt_bias,
        dt_softplus=True,
        initial_states=initial,
        state_dtype=stored,
    )


def draw(case: Case) -> tuple[MixerInputs, torch.Tensor, Segments]:
    """Inputs, initial states (in the stored dtype's values) and the plan of a case."""
    torch.manual_seed(1)
    starts = starts_of(case)
    inputs = MixerInputs.random(
        starts[-1], case.heads, case.groups, case.dim, case.size, case.dtype, case.extras
    )
    shape = (len(case.lengths), case.heads, case.dim, case.size)
    initial = torch.zeros(shape) if case.fresh else torch.randn(shape).to(case.stored).float()
    return inputs, initial, plan_segments(starts, case.begins, case.grid)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_recurrence(name: str) -> None:
    case = CASES[name]
    inputs, initial, cut = draw(case)
    y, states = run(inputs, cut, None if case.fresh else initial, case.stored)
    assert y.dtype == case.dtype and states.dtype == case.stored
    starts = starts_of(case)
    want_y, want_states = [], {}
    for seq, begin in enumerate(case.begins):
        ends = [end - begin for s, end in cut.emissions if s == seq]
        one_y, one_states = scan(
            inputs.part(starts[seq], starts[seq + 1]), initial[seq], case.stored, round_at=ends
        )
        want_y.append(one_y)
        want_states |= {(seq, begin + end): one_states[end - 1] for end in ends}
    # One rounding may fall the other way at a tie; it then shows at the size of the stored dtype.
    exact = case.dtype == case.stored == torch.float32
    assert relative_error(y, torch.cat(want_y)) < (2e-5 if exact else 1e-2)
    got = {key: states[index] for index, key in enumerate(cut.emissions)}
    assert got.keys() == want_states.keys()
    for key, state in got.items():
        assert relative_error(state, want_states[key]) < (2e-5 if exact else 1e-2), key


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grid", [8, 48, 64])
def test_resume_at_a_boundary_is_bit_identical(grid: int, stored: torch.dtype) -> None:
    torch.manual_seed(2)
    tokens = 3 * grid + 5
    inputs = MixerInputs.random(tokens, 6, 2, 16, 32, torch.float32)
    cold_cut = plan_segments([0, tokens], [0], grid)
    cold_y, cold_states = run(inputs, cold_cut, None, stored)
    for hit in (grid, 2 * grid, 3 * grid):
        saved = cold_states[cold_cut.emission_index[0, hit]][None].float()
        cut = plan_segments([0, tokens - hit], [hit], grid)
        y, states = run(inputs.part(hit, tokens), cut, saved, stored)
        assert torch.equal(y, cold_y[hit:])
        for index, key in enumerate(cut.emissions):
            assert torch.equal(states[index], cold_states[cold_cut.emission_index[key]])


def test_a_boundary_state_is_the_end_state_of_a_run_cut_there() -> None:
    torch.manual_seed(3)
    inputs = MixerInputs.random(45, 4, 1, 8, 16, torch.float32)
    cut = plan_segments([0, 45], [0], 8)
    _, states = run(inputs, cut, None)
    for index, (_, end) in enumerate(cut.emissions):
        _, alone = run(inputs.part(0, end), plan_segments([0, end], [0], 8), None)
        assert torch.equal(states[index], alone[-1])


def test_neighbours_in_the_batch_change_nothing() -> None:
    torch.manual_seed(4)
    inputs = MixerInputs.random(19 + 25 + 130, 4, 2, 8, 16, torch.float32)
    initial = torch.randn(3, 4, 8, 16)
    bounds = [0, 19, 44, 174]
    begins = (0, 16, 8)
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


def test_first_token_and_padding_slots_do_not_mix() -> None:
    """Padding slots read the batch's first token; a poisoned neighbour must stay where it is."""
    torch.manual_seed(5)
    inputs = MixerInputs.random(20, 2, 1, 4, 8, torch.float32)
    inputs.x[1:7] = float("inf")
    y, states = run(inputs, plan_segments([0, 7, 20], [0, 0], 8), None)
    assert torch.isfinite(y[7:]).all() and torch.isfinite(states[1:]).all()


def test_out_and_dt_limit() -> None:
    torch.manual_seed(6)
    inputs = MixerInputs.random(9, 2, 1, 4, 8, torch.float32, extras=False)
    cut = plan_segments([0, 9], [0], None)
    out = torch.full((9, 2, 4), 7.0)
    y, _ = ssd_scan(inputs.x, inputs.dt, inputs.a, inputs.b, inputs.c, cut, dt_limit=(0.1, 0.2), out=out)
    assert y is out
    clamped, _ = ssd_scan(inputs.x, inputs.dt.clamp(0.1, 0.2), inputs.a, inputs.b, inputs.c, cut)
    assert torch.equal(out, clamped)


def test_an_empty_batch_gives_nothing() -> None:
    inputs = MixerInputs.random(0, 4, 2, 8, 16, torch.float32)
    y, states = run(inputs, plan_segments([0], [], 8), None)
    assert y.shape == (0, 4, 8) and states.shape == (0, 4, 8, 16)


@pytest.mark.parametrize(
    ("field", "shape", "message"),
    [
        ("x", (44, 4, 8), r"x has shape \[44, 4, 8\], needs \[81, \*, \*\]"),
        ("dt", (81, 3), r"dt has shape \[81, 3\], needs \[81, 4\]"),
        ("a", (4, 1), r"A has shape \[4, 1\], needs \[4\]"),
        ("b", (81, 16), r"B has shape \[81, 16\]"),
        ("c", (81, 2, 15), r"C has shape \[81, 2, 15\], needs \[81, 2, 16\]"),
        ("d", (5,), r"D has shape \[5\], needs \[4\] or \[4, 8\]"),
        ("z", (81, 4), r"z has shape \[81, 4\], needs \[81, 4, 8\]"),
    ],
)
def test_a_wrong_tensor_is_named(field: str, shape: tuple[int, ...], message: str) -> None:
    inputs, initial, cut = draw(BASE)
    with pytest.raises(KernelError, match=message):
        run(replace(inputs, **{field: torch.zeros(shape)}), cut, initial)


def test_groups_and_initial_states_are_checked() -> None:
    inputs, initial, cut = draw(BASE)
    odd = torch.zeros(81, 3, 16)
    with pytest.raises(KernelError, match="3 groups, which must divide the 4 heads"):
        run(replace(inputs, b=odd, c=odd), cut, initial)
    with pytest.raises(KernelError, match=r"initial_states has shape \[2, 4, 8, 16\], needs \[3, 4, 8, 16\]"):
        run(inputs, cut, initial[:2])
