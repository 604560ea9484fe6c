"""The decode step equals the recurrence, in place and forked, and touches nothing but its destination."""

from dataclasses import replace

import pytest
import torch

from sglang_hybrid.kernels import KernelError, conv_update, state_update
from sglang_hybrid.pools.views import ConvView, StateView
from tests.support.paged_state import BASE, CASES, Pages, state_of
from tests.support.recurrence import MixerInputs, relative_error, scan


def step(pages: Pages, source: torch.Tensor, target: torch.Tensor, inputs: MixerInputs) -> torch.Tensor:
    return state_update(
        pages.view,
        source,
        target,
        inputs.x,
        inputs.dt,
        inputs.a,
        inputs.b,
        inputs.c,
        d=inputs.d,
        z=inputs.z,
        dt_bias=inputs.dt_bias,
        dt_softplus=True,
    )


@pytest.mark.parametrize("place", ["in place", "forked"])
@pytest.mark.parametrize("name", CASES)
def test_update_equals_the_recurrence(name: str, place: str) -> None:
    case = CASES[name]
    pages = Pages(case)
    inputs = MixerInputs.random(
        case.batch, case.heads, case.groups, case.dim, case.size, torch.float32, case.extras
    )
    states = [state_of(case) for _ in range(case.batch)]
    source = pages.maps[: case.batch]
    target = source if place == "in place" else pages.maps[case.batch :]
    for page_map, state in zip(source, states, strict=True):
        pages.put(page_map, state)
    before = pages.arena.clone()
    y = step(pages, source, target, inputs)
    for row, state in enumerate(states):
        want_y, want = scan(inputs.part(row, row + 1), state, case.stored)
        assert relative_error(y[row], want_y[0]) < 2e-6
        exact = case.stored == torch.float32
        assert relative_error(pages.get(target[row]), want[0]) < (2e-6 if exact else 4e-3)
    assert pages.unchanged_but(before, list(target))


def test_update_with_fresh_skipped_and_padding_rows() -> None:
    """Rows: forked, fresh, nowhere to write, padding from and to the sink, twice."""
    case = replace(BASE, batch=5)
    pages = Pages(case)
    inputs = MixerInputs.random(5, 4, 2, 6, 8, torch.float32)
    first, third = state_of(case), state_of(case)
    source, target = pages.maps[:5].clone(), pages.maps[5:].clone()
    pages.put(source[0], first)
    pages.put(source[2], third)
    source[1, 0] = -1
    target[2, 0] = -1
    source[3:] = target[3:] = 0
    before = pages.arena.clone()
    y = step(pages, source, target, inputs)
    for row, state in ((0, first), (1, torch.zeros_like(first)), (2, third)):
        want_y, want = scan(inputs.part(row, row + 1), state, torch.float32)
        assert relative_error(y[row], want_y[0]) < 2e-6
        if row != 2:
            assert relative_error(pages.get(target[row]), want[0]) < 2e-6
    assert torch.equal(pages.get(source[0]), first) and torch.equal(pages.get(source[2]), third)
    assert pages.unchanged_but(before, [target[0], target[1]])


def test_update_may_swap_checkpoints() -> None:
    case = replace(BASE, batch=2)
    pages = Pages(case)
    states = [state_of(case), state_of(case)]
    for page_map, state in zip(pages.maps[:2], states, strict=True):
        pages.put(page_map, state)
    inputs = MixerInputs.random(2, 4, 2, 6, 8, torch.float32)
    step(pages, pages.maps[:2], pages.maps[[1, 0]], inputs)
    for row in range(2):
        _, want = scan(inputs.part(row, row + 1), states[row], torch.float32)
        assert relative_error(pages.get(pages.maps[1 - row]), want[0]) < 2e-6


def test_a_row_of_the_batch_does_not_depend_on_the_others() -> None:
    case = replace(BASE, batch=7, size=33)
    pages = Pages(case)
    inputs = MixerInputs.random(7, 4, 2, 6, 33, torch.float32)
    for page_map in pages.maps[:7]:
        pages.put(page_map, state_of(case))
    together = step(pages, pages.maps[:7], pages.maps[7:], inputs)
    after = pages.arena.clone()
    for row in range(7):
        one = slice(row, row + 1)
        alone = step(pages, pages.maps[:7][one], pages.maps[7:][one], inputs.part(row, row + 1))
        assert torch.equal(alone[0], together[row])
    assert torch.equal(pages.arena.nan_to_num(), after.nan_to_num())


def test_decode_never_waits_for_the_device() -> None:
    """Meta tensors have no values: whatever asks for one (item, tolist, a mask as index) raises."""
    case = replace(BASE, extras=True)
    with torch.device("meta"):
        inputs = MixerInputs.random(case.batch, 4, 2, 6, 8, torch.float32)
        view = StateView(torch.zeros(9, 12, 8), 0, 4, 6)
        maps = torch.zeros(case.batch, 2, dtype=torch.int32)
        y = state_update(
            view, maps, maps, inputs.x, inputs.dt, inputs.a, inputs.b, inputs.c,
            d=inputs.d, z=inputs.z, dt_bias=inputs.dt_bias, dt_softplus=True,
        )  # fmt: skip
        assert y.shape == (case.batch, 4, 6)
        lines = torch.zeros(case.batch, dtype=torch.int32)
        x, weight = torch.zeros(case.batch, 5), torch.zeros(5, 4)
        y = conv_update(ConvView(torch.zeros(9, 5, 3)), lines, lines, x, weight, None)
        assert y.shape == (case.batch, 5)


def test_an_empty_batch_gives_nothing() -> None:
    pages = Pages(BASE)
    before = pages.arena.clone()
    inputs = MixerInputs.random(0, 4, 2, 6, 8, torch.float32)
    nothing = torch.zeros(0, BASE.members, dtype=torch.int32)
    assert step(pages, nothing, nothing, inputs).shape == (0, 4, 6)
    assert pages.unchanged_but(before, [])


@pytest.mark.parametrize(
    ("field", "shape", "message"),
    [
        ("x", (3, 4, 5), r"x has shape \[3, 4, 5\], needs \[3, 4, 6\]"),
        ("dt", (3, 4, 6), r"dt has shape \[3, 4, 6\], needs \[3, 4\]"),
        ("a", (4, 6, 8), r"A has shape \[4, 6, 8\], needs \[4\]"),
        ("b", (3, 2, 9), r"B has shape \[3, 2, 9\], needs \[3, \*, 8\]"),
        ("c", (3, 1, 8), r"C has shape \[3, 1, 8\], needs \[3, 2, 8\]"),
        ("d", (6,), r"D has shape \[6\], needs \[4\] or \[4, 6\]"),
        ("z", (3, 24), r"z has shape \[3, 24\], needs \[3, 4, 6\]"),
    ],
)
def test_a_wrong_input_of_the_update_is_named(field: str, shape: tuple[int, ...], message: str) -> None:
    pages = Pages(BASE)
    inputs = replace(MixerInputs.random(3, 4, 2, 6, 8, torch.float32), **{field: torch.zeros(shape)})
    with pytest.raises(KernelError, match=message):
        step(pages, pages.maps[:3], pages.maps[3:], inputs)
