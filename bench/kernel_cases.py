"""What `bench.kernels` times: layers of real shapes on shuffled pages, and one step of each route."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from sglang_hybrid.kernels import ArenaTable, CheckpointSpans, DeltaInputs, Route, Segments, plan_segments
from sglang_hybrid.kernels.samples import Cell, Mixer, delta_inputs, make_cell

BF16 = torch.bfloat16
WORK_BYTES = 512 << 20
"""State that a graph's launches touch together; several times any L2."""
ARENA_BYTES = 32 << 30
PREFILL_TOKENS = 512
"""Tokens of a request's prefill: one grid step, one state written."""


class Case(NamedTuple):
    """A layer's arenas and inputs for `sets` launches of `batch` requests each."""

    mixer: Mixer
    cell: Cell
    batch: int
    sets: int
    x: torch.Tensor
    dt: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    a: torch.Tensor
    weights: torch.Tensor
    """[2, H] in dt's dtype, which FlashInfer insists on: D, bias of dt."""
    conv_x: torch.Tensor
    conv_weight: torch.Tensor
    conv_bias: torch.Tensor
    delta: DeltaInputs
    segments: Segments | None
    """Of a prefill; its inputs have a row a token, those of a decode step one a request."""
    table: ArenaTable

    def maps(self, index: int, forked: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Source and destination pages, source and destination lines of a launch."""
        part = slice(index * self.batch, (index + 1) * self.batch)
        cell = self.cell
        if forked:
            return cell.src_map[part], cell.dst_map[part], cell.src_line[part], cell.dst_line[part]
        return cell.src_map[part], cell.src_map[part], cell.src_line[part], cell.src_line[part]


def shuffled(cell: Cell) -> Cell:
    """The same checkpoints on pages in random order: neighbours in a map are no neighbours in memory."""
    layout = cell.organization.layout()
    order = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(layout.state_pages - 1)])
    order = order.to(device=cell.src_map.device, dtype=torch.int32)
    slots = layout.lines // layout.state_pages

    def moved(lines: torch.Tensor) -> torch.Tensor:
        return order[lines // slots] * slots + lines % slots

    return cell._replace(
        src_map=order[cell.src_map], dst_map=order[cell.dst_map],
        src_line=moved(cell.src_line), dst_line=moved(cell.dst_line),
    )  # fmt: skip


def sets_for(mixer: Mixer, dtype: torch.dtype, batch: int, step_bytes: int) -> int:
    """Launches a graph: 4 to 128, their state about `WORK_BYTES`, their arenas at most `ARENA_BYTES`."""
    checkpoints = 2 * batch * mixer.stripes * mixer.inner * mixer.size * dtype.itemsize
    return max(4, min(128, WORK_BYTES // (batch * step_bytes), ARENA_BYTES // (2 * checkpoints)))


def make_case(
    mixer: Mixer,
    dtype: torch.dtype,
    memory: str,
    batch: int,
    sets: int,
    *,
    tokens: int | None = None,
    grid: int = 512,
    device: str = "cuda",
) -> Case:
    """Random state, and inputs of a decode step or of a prefill of `tokens` a request."""
    torch.manual_seed(0)
    cell = shuffled(make_cell(mixer, memory, dtype, grid=grid, batch=batch * sets, device=device))
    for buffer in cell.arenas.state_buffers:
        buffer.view(BF16).normal_()

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(BF16)

    segments, rows = None, batch
    if tokens is not None:
        rows = batch * tokens
        segments = plan_segments(range(0, rows + 1, tokens), [grid] * batch, grid, device=device)
    row = normal(rows, mixer.channels)
    grouped = mixer.groups * mixer.size
    x, b, c = torch.split(row, [mixer.inner, grouped, grouped], 1)
    return Case(
        mixer, cell, batch, sets,
        x.view(rows, mixer.heads, mixer.dim), normal(rows, mixer.heads),
        b.view(rows, mixer.groups, mixer.size), c.view(rows, mixer.groups, mixer.size),
        -torch.rand(mixer.heads, device=device), normal(2, mixer.heads),
        normal(rows, mixer.channels), normal(mixer.channels, 4), normal(mixer.channels),
        delta_inputs(mixer, rows, BF16, device), segments,
        ArenaTable(cell.arenas.state_buffers),
    )  # fmt: skip


def state_step(case: Case, route: Route, index: int, forked: bool) -> torch.Tensor:
    """One `state_update` of the route."""
    src, dst, _, _ = case.maps(index, forked)
    d, bias = case.weights
    return route.state_update(
        case.cell.arenas.state(case.cell.layer), src, dst, case.x, case.dt, case.a, case.b, case.c,
        d=d, dt_bias=bias, dt_softplus=True,
    )  # fmt: skip


def delta_step(case: Case, route: Route, index: int, forked: bool) -> torch.Tensor:
    """One `delta_update` of the route."""
    src, dst, _, _ = case.maps(index, forked)
    return route.delta_update(case.cell.arenas.state(case.cell.layer), src, dst, case.delta)


def conv_step(case: Case, route: Route, index: int, forked: bool) -> torch.Tensor:
    """One `conv_update` of the route."""
    _, _, src, dst = case.maps(index, forked)
    view = case.cell.arenas.conv(case.cell.layer)
    return route.conv_update(view, src, dst, case.conv_x, case.conv_weight, case.conv_bias)


def scan_step(case: Case, route: Route, index: int, forked: bool) -> torch.Tensor:
    """One `paged_scan` of the route."""
    src, dst, _, _ = case.maps(index, forked)
    d, bias = case.weights
    return route.paged_scan(
        case.cell.arenas.state(case.cell.layer), src, dst, case.x, case.dt, case.a, case.b, case.c,
        case.segments, d=d, dt_bias=bias, dt_softplus=True,
    )  # fmt: skip


def delta_scan_step(case: Case, route: Route, index: int, forked: bool) -> torch.Tensor:
    """One `paged_delta_scan` of the route."""
    src, dst, _, _ = case.maps(index, forked)
    view = case.cell.arenas.state(case.cell.layer)
    return route.paged_delta_scan(view, src, dst, case.delta, case.segments)


def prefill_conv_step(case: Case, route: Route, index: int, forked: bool) -> torch.Tensor:
    """One `paged_conv` of the route."""
    _, _, src, dst = case.maps(index, forked)
    view = case.cell.arenas.conv(case.cell.layer)
    return route.paged_conv(view, src, dst, case.conv_x, case.conv_weight, case.conv_bias, case.segments)


def copy_step(case: Case, route: Route, index: int, forked: bool) -> None:
    """One `copy_checkpoints` of the route, from source to destination."""
    src, dst, src_line, dst_line = case.maps(index, forked)
    route.copy_checkpoints(spans_of(case), case.table, case.table, src, src_line, dst, dst_line)


def fill_step(case: Case, route: Route, index: int, forked: bool) -> None:
    """One `fill_checkpoints` of the route, zeros to the destination."""
    _, dst, _, dst_line = case.maps(index, forked)
    route.fill_checkpoints(spans_of(case), case.table, dst, dst_line, "zero")


def spans_of(case: Case) -> CheckpointSpans:
    """Where checkpoints lie in the case's arenas."""
    return CheckpointSpans.of(case.cell.organization.layout(), case.cell.organization.model)


class Operation(NamedTuple):
    """What is timed: a step of a route, and the bytes a request moves at least, in and out."""

    step: Callable[[Case, Route, int, bool], torch.Tensor | None]
    request_bytes: Callable[[Mixer, torch.dtype], int]
    prefill: bool = False
    in_place: bool = True
    written: torch.dtype | None = None
    """Dtype of what it writes; None: the state's."""
    delta: bool | None = None
    """Of layers of the gated delta rule, of others, or of both."""


def state_bytes(mixer: Mixer, dtype: torch.dtype) -> int:
    """A layer's recurrent state, read and written."""
    return 2 * mixer.inner * mixer.size * dtype.itemsize


def window_bytes(mixer: Mixer, dtype: torch.dtype) -> int:
    """A layer's conv window, bf16, read and written."""
    return 2 * mixer.channels * 3 * BF16.itemsize


def token_bytes(mixer: Mixer, outputs: int) -> int:
    """Inputs of a prefill and `outputs` channels a token, bf16."""
    return PREFILL_TOKENS * (mixer.channels + outputs) * BF16.itemsize


def checkpoint_bytes(mixer: Mixer, dtype: torch.dtype) -> int:
    """SSM and conv states of an arena's layers, once."""
    return mixer.stripes * (state_bytes(mixer, dtype) + window_bytes(mixer, dtype)) // 2


def scan_bytes(mixer: Mixer, dtype: torch.dtype) -> int:
    """A layer's recurrent state, its inputs and its output."""
    return state_bytes(mixer, dtype) + token_bytes(mixer, mixer.inner)


OPERATIONS = {
    "state_update": Operation(state_step, state_bytes, delta=False),
    "delta_update": Operation(delta_step, state_bytes, delta=True),
    "conv_update": Operation(conv_step, window_bytes, written=BF16),
    "paged_scan": Operation(scan_step, scan_bytes, True, delta=False),
    "paged_delta_scan": Operation(delta_scan_step, scan_bytes, True, delta=True),
    "paged_conv": Operation(
        prefill_conv_step, lambda m, t: window_bytes(m, t) + token_bytes(m, m.channels), True, written=BF16
    ),
    "copy_checkpoints": Operation(
        copy_step, lambda m, t: 2 * checkpoint_bytes(m, t), in_place=False, written=torch.uint8
    ),
    "fill_checkpoints": Operation(fill_step, checkpoint_bytes, in_place=False, written=torch.uint8),
}
"""By the names of `sglang_hybrid.kernels`."""


def check(
    case: Case,
    written: torch.dtype,
    step: Callable[[], torch.Tensor | None],
    reference: Callable[[], torch.Tensor | None],
) -> None:
    """Raise when the variant's output, or what it wrote as `written`, differs from the torch route's."""
    buffers = case.cell.arenas.state_buffers
    before = [buffer.clone() for buffer in buffers]
    want, states = reference(), [buffer.clone() for buffer in buffers]
    for buffer, old in zip(buffers, before, strict=True):
        buffer.copy_(old)
    got = step()
    pairs = [(buffer.view(written), state.view(written)) for buffer, state in zip(buffers, states)]
    if got is not None and want is not None:
        pairs.append((got, want))
    for now, was in pairs:
        error = float((now.double() - was.double()).norm() / was.double().norm())
        most = 0.0 if now.dtype == torch.uint8 else 1e-2
        if not error <= most:
            raise SystemExit(
                f"wrong result: norm error {error:.3g} against the torch route, needs {most} at most"
            )
