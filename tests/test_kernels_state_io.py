"""State and windows through page maps and lines: at any alignment, touching nothing else."""

from dataclasses import replace

import pytest
import torch

from sglang_hybrid.kernels import (
    KernelError,
    member_runs,
    read_states,
    read_windows,
    write_states,
    write_windows,
)
from sglang_hybrid.pools.views import NO_LINE, ConvView, StateView
from tests.support.paged_state import BASE, CASES, Pages, state_of


@pytest.mark.parametrize("name", CASES)
def test_runs_cover_the_rows_in_order(name: str) -> None:
    pages = Pages(CASES[name])
    page_map = pages.maps[0]
    cells = [(int(page_map[m]), row) for m, low, high in member_runs(pages.view) for row in range(low, high)]
    assert cells == pages.cells(page_map)


@pytest.mark.parametrize("name", CASES)
def test_read_and_write_follow_the_rows(name: str) -> None:
    case = CASES[name]
    pages = Pages(case)
    states = [state_of(case) for _ in range(case.batch)]
    source, target = pages.maps[: case.batch], pages.maps[case.batch :]
    for page_map, state in zip(source, states, strict=True):
        pages.put(page_map, state)
    read = read_states(pages.view, source)
    assert read.dtype == torch.float32 and torch.equal(read, torch.stack(states).float())
    before = pages.arena.clone()
    write_states(pages.view, target, read)
    for page_map, state in zip(target, states, strict=True):
        assert torch.equal(pages.get(page_map), state)
    assert pages.unchanged_but(before, list(target))


def test_no_source_reads_zeros_and_no_target_is_skipped() -> None:
    case = replace(BASE, batch=2)
    pages = Pages(case)
    state = state_of(case)
    pages.put(pages.maps[0], state)
    source = pages.maps[:2].clone()
    source[1] = torch.tensor([-1, 3])  # only column 0 decides
    read = read_states(pages.view, source)
    assert torch.equal(read[0], state) and torch.equal(read[1], torch.zeros_like(state))
    target = pages.maps[2:4].clone()
    target[1, 0] = -1
    before = pages.arena.clone()
    write_states(pages.view, target, torch.randn(2, *state.shape))
    assert pages.unchanged_but(before, [target[0]])
    assert not torch.equal(pages.get(target[0]).nan_to_num(), torch.zeros_like(state))


def test_windows_follow_the_lines() -> None:
    lines = torch.full((6, 5, 3), float("nan"))
    lines[2] = torch.randn(5, 3)
    view, before = ConvView(lines), lines.clone()
    read = read_windows(view, torch.tensor([2, NO_LINE]))
    assert torch.equal(read[0], before[2]) and torch.equal(read[1], torch.zeros(5, 3))
    write_windows(view, torch.tensor([4, NO_LINE, NO_LINE]), torch.ones(3, 5, 3))
    assert torch.equal(lines[4], torch.ones(5, 3)) and torch.equal(lines[2], before[2])
    assert lines[[1, 3, 5]].isnan().all()


def test_a_model_without_temporal_state_reads_and_writes_nothing() -> None:
    view = StateView(torch.zeros(4, 6, 0), 0, 1, 6)
    maps = torch.tensor([[1], [2]])
    assert read_states(view, maps).shape == (2, 1, 6, 0)
    write_states(view, maps, torch.zeros(2, 1, 6, 0))


def test_wrong_maps_and_states_are_named() -> None:
    pages = Pages(BASE)
    with pytest.raises(
        KernelError, match=r"page_map has shape \[3, 1\], needs \[\*, 2\] or more members: 24 rows"
    ):
        read_states(pages.view, pages.maps[:3, :1])
    with pytest.raises(KernelError, match="page_map is float32, needs int32 or int64"):
        read_states(pages.view, pages.maps.float())
    with pytest.raises(KernelError, match=r"page_map has shape \[2\], needs \[\*, \*\]"):
        read_states(pages.view, pages.maps[0])
    with pytest.raises(KernelError, match=r"page_map has shape \[3, 2\], needs \[2, \*\]"):
        write_states(pages.view, pages.maps[:3], torch.zeros(2, 4, 6, 8))
    with pytest.raises(KernelError, match=r"states has shape \[3, 4, 6, 9\], needs \[\*, 4, 6, 8\]"):
        write_states(pages.view, pages.maps[:3], torch.zeros(3, 4, 6, 9))
    with pytest.raises(KernelError, match=r"windows has shape \[1, 5, 2\], needs \[\*, 5, 3\]"):
        write_windows(ConvView(torch.zeros(6, 5, 3)), torch.tensor([1]), torch.zeros(1, 5, 2))
