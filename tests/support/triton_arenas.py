"""Cases of Triton kernels on real arenas; `python -m tests.support.triton_arenas` runs them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from sglang_hybrid.kernels import choose
from sglang_hybrid.kernels.samples import Mixer, delta_inputs, make_cell
from tests.support.interpreted import Check, main, norm_error
from tests.support.triton_state_update import BASE, inputs_of


def equals_on_arenas(memory: str, device: str) -> None:
    """A layer's state and conv window in the arena of an organization, last of three stripes: both routes
    read the same and leave the same bytes."""
    # 132 rows a page: the last stripe of 64 rows begins four rows before the end of one.
    mixer = Mixer(heads=8, dim=8, size=64, groups=1, kv_heads=1, kv_dim=8, stripes=3)
    results = []
    for route in (choose("torch", device), choose("triton", device)):
        torch.manual_seed(4)
        cell = make_cell(mixer, memory, torch.float32, grid=1056, batch=2, conv_dtype=torch.float32)
        arena = cell.arenas.state_buffers[0]
        arena.view(torch.float32).normal_()
        cell.arenas.state_buffers[0] = arena = arena.to(device)
        src_map, dst_map, src_line, dst_line = (t.to(device) for t in cell[2:6])
        inputs = inputs_of(replace(BASE, heads=8, groups=1, size=64), device)
        conv = route.conv_update(
            cell.arenas.conv(cell.layer), src_line, dst_line,
            torch.randn(2, mixer.channels).to(device), torch.randn(mixer.channels, 4).to(device), None,
        )  # fmt: skip
        y = route.state_update(
            cell.arenas.state(cell.layer), src_map, dst_map, inputs.x, inputs.dt, inputs.a, inputs.b, inputs.c
        )
        # From where that was written to where it was read.
        delta = route.delta_update(
            cell.arenas.state(cell.layer), dst_map, src_map, delta_inputs(mixer, 2, torch.float32, device)
        )
        results.append((conv.cpu(), y.cpu(), delta.cpu(), arena.cpu().view(torch.float32)))
    for reference, got in zip(*results, strict=True):
        assert norm_error(got, reference) < 1e-5
    assert int((results[0][3] != results[1][3]).sum()) <= 4 * mixer.inner * mixer.size


def cases() -> dict[str, Check]:
    """All cases by name."""
    return {memory: partial(equals_on_arenas, memory) for memory in ("S0", "S1", "S2", "D0")}


if __name__ == "__main__":
    main(cases())
