"""The FlashInfer route calls FlashInfer as its own checks want it, one launch a head-aligned page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sglang_hybrid.kernels import KernelError, choose
from sglang_hybrid.kernels.flashinfer_state_update import algorithm, state_update
from tests.support.flashinfer_stand_in import stand_in
from tests.support.interpreted import norm_error, tolerance
from tests.support.paged_state import Case, Pages, state_of
from tests.support.recurrence import MixerInputs, scan
from tests.support.triton_state_update import inputs_of, on, untouched

BASE = Case(batch=3, heads=4, groups=2, dim=64, size=64, rows_per_page=128)
BF16 = torch.bfloat16
TABLE = {
    "S1: two members of two heads": (BASE, 2),
    "S0 and D0: one member": (replace(BASE, rows_per_page=256), 1),
    "one member with rows to spare": (replace(BASE, rows_per_page=300), 1),
    "a group over two members": (replace(BASE, groups=1), 2),
    "a member a head": (replace(BASE, rows_per_page=64), 4),
    "three members, the last half full": (replace(BASE, heads=5, groups=1), 3),
    "second stripe, aligned": (replace(BASE, first_row=192, groups=1), 3),
    "bare": (replace(BASE, extras=False), 2),
    "bf16": (replace(BASE, stored=BF16), 2),
    "int64 maps": (replace(BASE, index=torch.int64), 2),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of every call of the stand-in."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr("flashinfer.mamba.selective_state_update", stand_in(found))
    return found


def step(pages: Pages, source: torch.Tensor, target: torch.Tensor, inputs: MixerInputs) -> torch.Tensor:
    """The route on the device of `inputs`; pages and maps go there and back."""
    device = inputs.x.device
    arena = pages.arena.to(device)
    y = state_update(
        pages.view._replace(rows=arena[:, : pages.case.rows_per_page]), source.to(device), target.to(device),
        inputs.x, inputs.dt, inputs.a, inputs.b, inputs.c,
        d=inputs.d, z=inputs.z, dt_bias=inputs.dt_bias, dt_softplus=True,
    )  # fmt: skip
    pages.arena.copy_(arena)
    return y.cpu()


def equals_the_recurrence(case: Case, device: str) -> None:
    """Forked, in place, and a padding row."""
    pages, inputs = Pages(case), inputs_of(case, device)
    states = [state_of(case) for _ in range(2)]
    source, target = pages.maps[:3].clone(), pages.maps[3:].clone()
    target[1] = source[1]
    source[2], target[2] = -1, 0
    for page_map, state in zip(source, states):
        pages.put(page_map, state)
    before = pages.arena.clone()
    y = step(pages, source, target, inputs)
    for row, state in enumerate(states):
        want_y, want = scan(on("cpu", inputs).part(row, row + 1), state, case.stored)
        assert norm_error(y[row], want_y[0]) < tolerance(case.stored)
        assert norm_error(pages.get(target[row]), want[0]) < tolerance(case.stored)
    assert bool(y.isfinite().all()), "a padding row must stay finite"
    assert untouched(pages, before, [target[0], target[1]])


@pytest.mark.parametrize("name", TABLE)
def test_equals_the_recurrence(name: str, calls: list[dict[str, Any]]) -> None:
    """One call a member."""
    case, launches = TABLE[name]
    equals_the_recurrence(case, "cpu")
    assert len(calls) == launches


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")
@pytest.mark.parametrize("name", TABLE if torch.cuda.is_available() else [*TABLE][:1])
def test_on_the_gpu(name: str) -> None:
    """FlashInfer itself."""
    equals_the_recurrence(TABLE[name][0], "cuda")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (replace(BASE, rows_per_page=96), "page of 96 rows cuts a head of 64 rows .*, needs whole heads"),
        (replace(BASE, first_row=32), "this layer begins at row 32.*use 'triton'"),
        (replace(BASE, heads=6, rows_per_page=192, groups=3), "heads 0 to 2, which cuts a group of 2 heads"),
        (replace(BASE, size=32), "heads hold 64 rows of 32 elements, needs 64 or 128 rows of 64, 128, 256"),
        (replace(BASE, dim=80, rows_per_page=160), "heads hold 80 rows of 64 elements"),
    ],
)
def test_what_does_not_align_is_refused(case: Case, message: str, calls: list[dict[str, Any]]) -> None:
    pages = Pages(case)
    with pytest.raises(KernelError, match=message):
        step(pages, pages.maps[:3], pages.maps[3:], inputs_of(case, "cpu"))
    assert not calls


def test_limits_on_the_step_are_refused() -> None:
    pages, inputs = Pages(BASE), inputs_of(BASE, "cpu")
    with pytest.raises(KernelError, match=r"dt_limit is \(0.1, 1.0\), needs .*use 'triton'"):
        state_update(
            pages.view, pages.maps[:3], pages.maps[3:], inputs.x, inputs.dt, inputs.a, inputs.b, inputs.c,
            dt_limit=(0.1, 1.0),
        )  # fmt: skip


def test_the_route_takes_only_the_state_update_from_flashinfer() -> None:
    route, triton = choose("flashinfer", "cuda"), choose("triton", "cuda")
    assert route.name == "flashinfer" and route.state_update is state_update
    others = dict(route.table) | {"state_update": triton.state_update}
    assert others == triton.table


def test_blackwell_gets_no_horizontal_kernel_for_odd_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    cuda = torch.device("cuda")
    assert [algorithm(ratio, cuda) for ratio in (1, 8, 24, 64, 128)] == [
        "auto", "auto", "vertical", "auto", "vertical",
    ]  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert algorithm(24, cuda) == "auto"
