"""Real launches at the shapes of real models, small in batch: what the check compiles and counts.

State lies as an organization lays it out, and inputs are slices of the rows that a mixer projects, so
strides and alignment are those of a server.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from sglang_hybrid.geometry import ModelGeometry, ceil_div, whole_rows_bytes
from sglang_hybrid.kernels.checkpoint_io import ArenaTable, CheckpointSpans
from sglang_hybrid.kernels.delta_rule import DeltaInputs
from sglang_hybrid.kernels.launch import Launch
from sglang_hybrid.kernels.segments import plan_segments
from sglang_hybrid.kernels.triton_checkpoint_io import plan_move
from sglang_hybrid.kernels.triton_conv_update import plan_conv_update
from sglang_hybrid.kernels.triton_delta_update import plan_delta_update
from sglang_hybrid.kernels.triton_paged_conv import plan_paged_conv
from sglang_hybrid.kernels.triton_paged_delta_scan import plan_paged_delta_scan
from sglang_hybrid.kernels.triton_paged_scan import plan_paged_scan
from sglang_hybrid.kernels.triton_row_fill import plan_fill
from sglang_hybrid.kernels.triton_state_update import plan_state_update
from sglang_hybrid.pools.arena import Arenas, StateShape
from sglang_hybrid.pools.factory import ORGANIZATIONS, make_organization
from sglang_hybrid.pools.organization import Organization

BF16, FP32 = torch.bfloat16, torch.float32
BATCH = 1
"""Every program of a request does the same; one request keeps the interpreter's count short."""


class Mixer(NamedTuple):
    """A recurrent layer, the KV row of the attention beside it, and recurrent layers an arena (`stripes`)."""

    heads: int
    dim: int
    size: int
    groups: int
    kv_heads: int
    kv_dim: int
    stripes: int = 1
    delta: bool = False
    """Delta rule: `groups` heads of keys, rows of `size` key elements."""
    channels_decay: bool = False
    """KDA: a decay a key channel."""
    steps: bool = True
    """Mamba2: dt, D and a bias.  Lightning attention has one step of 1 for all tokens, inputs in fp32."""

    @property
    def inner(self) -> int:
        return self.heads * self.dim

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.size


FALCON_H1_7B = Mixer(heads=24, dim=128, size=256, groups=1, kv_heads=2, kv_dim=128)
FALCON_H1_7B_TP8 = Mixer(heads=3, dim=128, size=256, groups=1, kv_heads=1, kv_dim=128)
"""One rank of eight, so that the interpreter soon walks through a scan."""
NEMOTRON_NANO_9B_TP4 = Mixer(heads=32, dim=80, size=128, groups=2, kv_heads=2, kv_dim=128, stripes=7)
"""One rank of four: members of 12.8 heads, seven stripes an arena."""
NEMOTRON_NANO_9B_TP8 = Mixer(heads=16, dim=80, size=128, groups=1, kv_heads=1, kv_dim=128, stripes=7)
QWEN3_NEXT = Mixer(heads=32, dim=128, size=128, groups=16, kv_heads=2, kv_dim=256, stripes=3, delta=True)
QWEN3_NEXT_TP8 = Mixer(heads=4, dim=128, size=128, groups=2, kv_heads=1, kv_dim=256, stripes=3, delta=True)
QWEN35_27B_TP4 = Mixer(heads=12, dim=128, size=128, groups=4, kv_heads=1, kv_dim=256, stripes=3, delta=True)
"""One rank of four: members of 10.7 heads, which a page of the default grid cuts."""

KIMI_LINEAR = Mixer(
    heads=32, dim=128, size=128, groups=32, kv_heads=1, kv_dim=288, stripes=3, delta=True, channels_decay=True
)
"""A latent row of 576 elements weighs what keys and values of 288 do."""
KIMI_LINEAR_TP8 = KIMI_LINEAR._replace(heads=4, groups=4)
LING_2_5 = Mixer(heads=32, dim=128, size=128, groups=32, kv_heads=1, kv_dim=288, stripes=7, steps=False)
"""Lightning attention: a group a head, no conv window."""
LING_2_5_TP8 = LING_2_5._replace(heads=4, groups=4)


class Sample(NamedTuple):
    """`state`: the tensors whose bytes count as state; `floor`: bytes of state once in, once out each time it
    has to be stored."""

    launch: Launch
    state: tuple[torch.Tensor, ...]
    floor: int


class Cell(NamedTuple):
    """Arenas with `2 x batch` checkpoints, the first half read, the second written, and the layer `layer`."""

    organization: Organization
    arenas: Arenas
    src_map: torch.Tensor
    dst_map: torch.Tensor
    src_line: torch.Tensor
    dst_line: torch.Tensor
    layer: int
    """A recurrent index: the arena's last stripe, where alignment is worst."""


def make_cell(
    mixer: Mixer,
    memory: str,
    dtype: torch.dtype,
    *,
    grid: int = 512,
    batch: int = BATCH,
    arenas: int = 1,
    device: str = "cpu",
    conv_dtype: torch.dtype | None = None,
) -> Cell:
    """Arenas of `memory` just large enough for the batch, state in `dtype`, conv in `conv_dtype` (bf16)."""
    shape = StateShape(
        mixer.kv_heads, mixer.kv_dim, BF16,
        mixer.heads, mixer.dim, mixer.size, dtype,
        mixer.channels if mixer.steps else 0, 3, conv_dtype or BF16,
    )  # fmt: skip
    layers = tuple(range(arenas)), tuple(range(arenas * mixer.stripes))
    model: ModelGeometry = shape.geometry(*layers)
    # What the checkpoints and four more take, and as much again for attention where there are two pools.
    block, kind = grid * model.kv_row_bytes, ORGANIZATIONS[memory]
    split = any(option.splits for option in kind.options)
    piece = block * (ceil_div(model.checkpoint_bytes, block) + 1)
    if split or not kind.dense_slots:
        piece = max(block, whole_rows_bytes(model, model.checkpoint_bytes)) * (1 + split)
    organization = make_organization(memory, model, grid, arenas * piece * (2 * batch + 4))
    taken = [organization.allocate_checkpoint() for _ in range(2 * batch)]
    pages = torch.tensor([c.members for c in taken if c], dtype=torch.int32, device=device)
    lines = torch.tensor([c.line for c in taken if c], dtype=torch.int32, device=device)
    return Cell(
        organization, Arenas(organization.layout(), shape, model, device),
        pages[:batch], pages[batch:], lines[:batch], lines[batch:], arenas * (mixer.stripes - 1),
    )  # fmt: skip


Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def mamba2_inputs(mixer: Mixer, tokens: int, inputs: torch.dtype) -> tuple[Five, dict[str, Any]]:
    """x, dt, A, B, C, and what else the recurrence takes."""
    row = torch.randn(tokens, mixer.channels).to(inputs)
    grouped = mixer.groups * mixer.size
    x, b, c = torch.split(row, [mixer.inner, grouped, grouped], 1)
    dt = torch.randn(tokens, mixer.heads + 8).to(inputs)[:, : mixer.heads]
    weights = torch.rand(3, mixer.heads)
    options: dict[str, Any] = {"d": weights[1], "dt_bias": weights[2], "dt_softplus": True}
    if not mixer.steps:
        dt, options = torch.ones(()).expand(tokens, mixer.heads), {}
    shape = (tokens, mixer.groups, mixer.size)
    return (x.view(tokens, mixer.heads, mixer.dim), dt, -weights[0], b.view(shape), c.view(shape)), options


def state_sample(
    mixer: Mixer, memory: str, dtype: torch.dtype, grid: int = 512, inputs: torch.dtype = BF16
) -> Sample:
    """`state_update` forked."""
    cell = make_cell(mixer, memory, dtype, grid=grid)
    view = cell.arenas.state(cell.layer)
    given, options = mamba2_inputs(mixer, BATCH, inputs)
    launch = plan_state_update(
        view, cell.src_map, cell.dst_map, *given,
        torch.empty(BATCH, mixer.heads, mixer.dim, dtype=inputs), **options,
    )  # fmt: skip
    floor = 2 * BATCH * mixer.inner * mixer.size * dtype.itemsize
    return Sample(launch, tuple(cell.arenas.state_buffers), floor)


def delta_inputs(mixer: Mixer, tokens: int, inputs: torch.dtype, device: str = "cpu") -> DeltaInputs:
    """q, k and v as the convolution leaves them, a and b as the projection does, A_log and the bias of a."""
    grouped = mixer.groups * mixer.size
    row = torch.randn(tokens, mixer.channels, device=device).to(inputs)
    q, k, v = torch.split(row, [grouped, grouped, mixer.inner], 1)
    b, a = torch.randn(tokens, 2 * mixer.heads, device=device).to(inputs).chunk(2, 1)
    channels = (mixer.size,) if mixer.channels_decay else ()
    if channels:
        a = torch.randn(tokens, mixer.heads, *channels, device=device).to(inputs)
    return DeltaInputs(
        q.view(tokens, mixer.groups, mixer.size), k.view(tokens, mixer.groups, mixer.size),
        v.view(tokens, mixer.heads, mixer.dim), a, b,
        torch.rand(mixer.heads, device=device), torch.rand(mixer.heads, *channels, device=device),
    )  # fmt: skip


def delta_sample(mixer: Mixer, memory: str, dtype: torch.dtype, grid: int = 512) -> Sample:
    """`delta_update` forked, inputs bf16."""
    cell = make_cell(mixer, memory, dtype, grid=grid)
    launch = plan_delta_update(
        cell.arenas.state(cell.layer), cell.src_map, cell.dst_map, delta_inputs(mixer, BATCH, BF16),
        torch.empty(BATCH, mixer.heads, mixer.dim, dtype=BF16),
    )  # fmt: skip
    floor = 2 * BATCH * mixer.inner * mixer.size * dtype.itemsize
    return Sample(launch, tuple(cell.arenas.state_buffers), floor)


def delta_scan_sample(
    mixer: Mixer, memory: str, dtype: torch.dtype, parts: bool = False, inputs: torch.dtype = BF16
) -> Sample:
    """`paged_delta_scan` of 80 tokens that pass one boundary and end between two: two emissions.  Or, as
    `parts`, its first launch, which touches no state: counted is what it hands over."""
    cell = make_cell(mixer, memory, dtype)
    tokens, begin, grid = 80, 480, 512
    segments = plan_segments([0, tokens], [begin], grid)
    systems, scan = plan_paged_delta_scan(
        cell.arenas.state(cell.layer), cell.src_map, torch.cat([cell.dst_map, cell.src_map]),
        delta_inputs(mixer, tokens, inputs), segments,
        torch.empty(tokens, mixer.heads, mixer.dim, dtype=inputs),
    )  # fmt: skip
    floor = (1 + len(segments.emissions)) * mixer.inner * mixer.size * dtype.itemsize
    handed = systems.args["systems"]
    if parts:
        used = sum(-(-length // handed.shape[-1]) for length in segments.piece_length.tolist())
        return Sample(systems, (handed,), handed[:used].nbytes)
    handed.zero_()
    scan.args["factors"].zero_()
    return Sample(scan, tuple(cell.arenas.state_buffers), floor)


def scan_launches(
    mixer: Mixer, memory: str, dtype: torch.dtype, inputs: torch.dtype, tokens: int, begin: int = 0
) -> tuple[Cell, tuple[Launch, ...]]:
    """`paged_scan` of one sequence that begins at position `begin`.

    The first emission and the last have pages, boundaries between them none.
    """
    cell = make_cell(mixer, memory, dtype)
    segments = plan_segments([0, tokens], [begin], 512)
    given, options = mamba2_inputs(mixer, tokens, inputs)
    emissions = len(segments.emissions)
    middle = [torch.full_like(cell.dst_map, -1)] * (emissions - 2)
    targets = torch.cat([cell.dst_map, *middle, cell.src_map])[-emissions:]
    return cell, plan_paged_scan(
        cell.arenas.state(cell.layer), cell.src_map, targets, *given, segments,
        torch.empty(tokens, mixer.heads, mixer.dim, dtype=inputs), **options,
    )  # fmt: skip


def scan_sample(
    mixer: Mixer, memory: str, dtype: torch.dtype, inputs: torch.dtype = BF16, part: int | None = None
) -> Sample:
    """`paged_scan` of 80 tokens that pass one boundary and end between two, in one launch: two emissions.  Or
    of 600, launch `part` of three: of the first is counted what it hands over."""
    cell, launches = scan_launches(mixer, memory, dtype, inputs, 80 if part is None else 600, 480)
    launch = launches[part or 0]
    if part == 0:
        own = launch.args["own"]
        return Sample(launch, (own,), own.nbytes)
    if part == 1:
        launch.args["own"].zero_()
        launch.args["totals"].zero_()
    # One source and two emissions.
    floor = 3 * mixer.inner * mixer.size * dtype.itemsize
    return Sample(launch, tuple(cell.arenas.state_buffers), floor)


def conv_sample(mixer: Mixer, memory: str, dtype: torch.dtype) -> Sample:
    """`conv_update` forked, input and weights bf16, x a slice of the projected row (gate, x B C, dt)."""
    cell = make_cell(mixer, memory, BF16, conv_dtype=dtype)
    row = torch.randn(BATCH, mixer.inner + mixer.channels + mixer.heads).to(BF16)
    launch = plan_conv_update(
        cell.arenas.conv(cell.layer), cell.src_line, cell.dst_line,
        row[:, mixer.inner : mixer.inner + mixer.channels],
        torch.randn(mixer.channels, 4).to(BF16), torch.randn(mixer.channels).to(BF16),
        torch.empty(BATCH, mixer.channels, dtype=BF16),
    )  # fmt: skip
    return Sample(launch, tuple(cell.arenas.state_buffers), 2 * BATCH * mixer.channels * 3 * dtype.itemsize)


def paged_conv_sample(mixer: Mixer, memory: str, dtype: torch.dtype, gather: bool) -> Sample:
    """The gather or the convolution of `paged_conv`: 10 tokens that pass a boundary, two emissions."""
    cell = make_cell(mixer, memory, BF16, conv_dtype=dtype)
    tokens, begin, grid = 10, 508, 512
    segments = plan_segments([0, tokens], [begin], grid)
    row = torch.randn(tokens, mixer.inner + mixer.channels + mixer.heads).to(BF16)
    launches = plan_paged_conv(
        cell.arenas.conv(cell.layer), cell.src_line, torch.cat([cell.dst_line, cell.src_line]),
        row[:, mixer.inner : mixer.inner + mixer.channels],
        torch.randn(mixer.channels, 4).to(BF16), torch.randn(mixer.channels).to(BF16), segments,
        torch.empty(tokens, mixer.channels, dtype=BF16),
    )  # fmt: skip
    launches[1].args["windows"].zero_()
    window = mixer.channels * 3 * dtype.itemsize
    state = tuple(cell.arenas.state_buffers)
    return Sample(launches[0], state, window) if gather else Sample(launches[1], state, 2 * window)


def move_sample(memory: str, copy: bool) -> Sample:
    """Copy or poison of a checkpoint of Falcon-H1-7B in one arena."""
    cell = make_cell(FALCON_H1_7B, memory, BF16)
    table = ArenaTable(cell.arenas.state_buffers)
    spans = CheckpointSpans.of(cell.organization.layout(), cell.organization.model)
    if copy:
        launch = plan_move(spans, table, cell.dst_map, cell.dst_line, table, cell.src_map, cell.src_line)
    else:
        launch = plan_move(spans, table, cell.dst_map, cell.dst_line, fill="poison")
    floor = (2 if copy else 1) * BATCH * cell.organization.model.checkpoint_bytes
    return Sample(launch, table.buffers, floor)


def fill_sample(memory: str) -> Sample:
    """Rows of Falcon-H1-7B cleared in three arenas: behind a prefill of 100 tokens, and a fresh unit's."""
    cell = make_cell(FALCON_H1_7B, memory, BF16, arenas=3)
    model, stride = cell.organization.model, cell.organization.slots_per_unit
    table = ArenaTable(cell.arenas.kv_buffers)
    runs = torch.tensor([(stride + 100, 412), (2 * stride + 1, 511)])
    launch = plan_fill(table, runs, 511, model.kv_row_bytes, "zero")
    return Sample(launch, table.buffers, 3 * (412 + 511) * model.kv_row_bytes)


SAMPLES: dict[str, Callable[[], Sample]] = {
    "state_update Falcon-H1-7B S1 bf16": partial(state_sample, FALCON_H1_7B, "S1", BF16),
    "state_update Falcon-H1-7B S1 fp32": partial(state_sample, FALCON_H1_7B, "S1", FP32),
    "state_update Falcon-H1-7B S0 bf16": partial(state_sample, FALCON_H1_7B, "S0", BF16),
    "state_update Falcon-H1-7B S1 fp32, rows cut by pages": partial(
        state_sample, FALCON_H1_7B, "S1", FP32, 500
    ),
    "state_update Falcon-H1-7B S1 bf16, rows cut by pages": partial(
        state_sample, FALCON_H1_7B, "S1", BF16, 500
    ),
    "state_update Nemotron-Nano-9B-v2 TP4 S1 fp32": partial(state_sample, NEMOTRON_NANO_9B_TP4, "S1", FP32),
    "state_update Ling-2.5 S1 fp32, inputs too": partial(state_sample, LING_2_5, "S1", FP32, inputs=FP32),
    "delta_update Qwen3-Next S1 fp32": partial(delta_sample, QWEN3_NEXT, "S1", FP32),
    "delta_update Qwen3-Next S1 bf16": partial(delta_sample, QWEN3_NEXT, "S1", BF16),
    "delta_update Qwen3-Next S0 fp32": partial(delta_sample, QWEN3_NEXT, "S0", FP32),
    "delta_update Qwen3.5-27B TP4 S2 fp32, rows cut by pages": partial(
        delta_sample, QWEN35_27B_TP4, "S2", FP32, 500
    ),
    "delta_update Kimi-Linear S1 fp32": partial(delta_sample, KIMI_LINEAR, "S1", FP32),
    "delta_update Kimi-Linear S1 bf16": partial(delta_sample, KIMI_LINEAR, "S1", BF16),
    "conv_update Qwen3-Next S2 bf16": partial(conv_sample, QWEN3_NEXT, "S2", BF16),
    "conv_update Falcon-H1-7B S1 bf16": partial(conv_sample, FALCON_H1_7B, "S1", BF16),
    "conv_update Falcon-H1-7B S2 bf16": partial(conv_sample, FALCON_H1_7B, "S2", BF16),
    "conv_update Falcon-H1-7B S0 bf16": partial(conv_sample, FALCON_H1_7B, "S0", BF16),
    "conv_update Falcon-H1-7B S2 fp32": partial(conv_sample, FALCON_H1_7B, "S2", FP32),
    "paged_conv Falcon-H1-7B S2 bf16, gather": partial(paged_conv_sample, FALCON_H1_7B, "S2", BF16, True),
    "paged_conv Falcon-H1-7B S2 fp32, gather": partial(paged_conv_sample, FALCON_H1_7B, "S2", FP32, True),
    "paged_conv Falcon-H1-7B S2 bf16": partial(paged_conv_sample, FALCON_H1_7B, "S2", BF16, False),
    "paged_conv Falcon-H1-7B S1 fp32": partial(paged_conv_sample, FALCON_H1_7B, "S1", FP32, False),
    "paged_scan Falcon-H1-7B TP8 S1 bf16": partial(scan_sample, FALCON_H1_7B_TP8, "S1", BF16),
    "paged_scan Nemotron-Nano-9B-v2 TP8 S1 fp32": partial(scan_sample, NEMOTRON_NANO_9B_TP8, "S1", FP32),
    "paged_scan Ling-2.5 TP8, own states, inputs fp32": partial(
        scan_sample, LING_2_5_TP8, "S1", FP32, FP32, part=0
    ),
    "paged_scan Ling-2.5 TP8 S1 fp32, states, inputs fp32": partial(
        scan_sample, LING_2_5_TP8, "S1", FP32, FP32, part=1
    ),
    "paged_scan Falcon-H1-7B TP8, own states": partial(scan_sample, FALCON_H1_7B_TP8, "S1", FP32, part=0),
    "paged_scan Falcon-H1-7B TP8, own states, inputs fp32": partial(
        scan_sample, FALCON_H1_7B_TP8, "S1", FP32, FP32, part=0
    ),
    "paged_scan Falcon-H1-7B TP8 S1 bf16, states": partial(
        scan_sample, FALCON_H1_7B_TP8, "S1", BF16, part=1
    ),
    "paged_scan Falcon-H1-7B TP8 S1 fp32, states": partial(
        scan_sample, FALCON_H1_7B_TP8, "S1", FP32, part=1
    ),
    "paged_scan Nemotron-Nano-9B-v2 TP8 S1 fp32, states": partial(
        scan_sample, NEMOTRON_NANO_9B_TP8, "S1", FP32, part=1
    ),
    "paged_delta_scan Qwen3-Next TP8 S1 fp32": partial(delta_scan_sample, QWEN3_NEXT_TP8, "S1", FP32),
    "paged_delta_scan Qwen3-Next TP8 S1 bf16": partial(delta_scan_sample, QWEN3_NEXT_TP8, "S1", BF16),
    "paged_delta_scan Qwen3-Next TP8 S1 fp32, inputs too": partial(
        delta_scan_sample, QWEN3_NEXT_TP8, "S1", FP32, inputs=FP32
    ),
    "paged_delta_scan Qwen3-Next TP8, parts": partial(
        delta_scan_sample, QWEN3_NEXT_TP8, "S1", FP32, parts=True
    ),
    "paged_delta_scan Qwen3-Next TP8, parts, inputs fp32": partial(
        delta_scan_sample, QWEN3_NEXT_TP8, "S1", FP32, parts=True, inputs=FP32
    ),
    "paged_delta_scan Kimi-Linear TP8 S1 fp32": partial(delta_scan_sample, KIMI_LINEAR_TP8, "S1", FP32),
    "paged_delta_scan Kimi-Linear TP8 S1 fp32, inputs too": partial(
        delta_scan_sample, KIMI_LINEAR_TP8, "S1", FP32, inputs=FP32
    ),
    "paged_delta_scan Kimi-Linear TP8, parts": partial(
        delta_scan_sample, KIMI_LINEAR_TP8, "S1", FP32, parts=True
    ),
    "paged_delta_scan Kimi-Linear TP8, parts, inputs fp32": partial(
        delta_scan_sample, KIMI_LINEAR_TP8, "S1", FP32, parts=True, inputs=FP32
    ),
    "copy_checkpoints Falcon-H1-7B S1": partial(move_sample, "S1", True),
    "copy_checkpoints Falcon-H1-7B S2": partial(move_sample, "S2", True),
    "fill_checkpoints Falcon-H1-7B S2": partial(move_sample, "S2", False),
    "fill_rows Falcon-H1-7B S1": partial(fill_sample, "S1"),
    "fill_rows Falcon-H1-7B S0": partial(fill_sample, "S0"),
}
"""Name -> launch; the first word is the operation."""
