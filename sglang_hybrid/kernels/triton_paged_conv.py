"""Prefill of the causal convolution in Triton: one launch gathers the sequences' windows from lines, one
convolves the ragged batch and writes the window of every emission straight into its line.

A program walks one piece of one sequence for a few channels, the window in registers, with the arithmetic of
the decode step.  Where the piece begins, the window comes from the tokens before it, and from the
sequence's own as far as there are none.  Pieces never straddle a boundary of the grid, so whatever has to
be rounded there, as a resume would read it, lies before the first token.  Pieces run at once, and the last
may write the line that the sequence came from: hence the gather before.
"""

# Tuples grow in unrolled loops; Triton has no starred expressions.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, var-annotated"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_hybrid.kernels.launch import Launch
from sglang_hybrid.kernels.paged_conv import check_paged_conv
from sglang_hybrid.kernels.segments import Segments
from sglang_hybrid.kernels.triton_columns import columns, tile_of
from sglang_hybrid.kernels.triton_conv_update import conv_args, inside, read_window, write_window
from sglang_hybrid.kernels.triton_math import silu
from sglang_hybrid.kernels.triton_parts import PIECE_TABLES
from sglang_hybrid.pools.views import ConvView


@triton.jit(do_not_specialize_on_alignment=["src_line"])
def gather_windows_kernel(
    lines: tl.tensor,
    src_line: tl.tensor,
    windows: tl.tensor,
    channels: tl.tensor,
    line_units: tl.tensor,
    channel_stride: tl.tensor,
    tap_stride: tl.tensor,
    src_stride: tl.tensor,
    row_words: tl.tensor,
    MEMORY: tl.constexpr,
    V: tl.constexpr,
    EVEN: tl.constexpr,
    PACKED: tl.constexpr,
    LINE_UNIT: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    sequence = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    group, lane = g[:, None], tl.arange(0, V)[None, :]
    source = tl.load(src_line + sequence * src_stride).to(tl.int64)
    line = lines + source * line_units * LINE_UNIT
    window = read_window(line, g, source > 0, channels, channel_stride, tap_stride, MEMORY, V, EVEN, PACKED)
    for j in tl.static_range(MEMORY):
        at = (sequence * row_words + group * MEMORY + j) * V + lane
        tl.store(windows + at, tile_of(window[j * V : (j + 1) * V], V), mask=group * V < channels)


@triton.jit(
    do_not_specialize=["period"],
    do_not_specialize_on_alignment=["dst_line", *PIECE_TABLES],
)
def paged_conv_kernel(
    lines: tl.tensor,
    windows: tl.tensor,
    dst_line: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    piece_start: tl.tensor,
    piece_length: tl.tensor,
    piece_position: tl.tensor,
    piece_seq: tl.tensor,
    piece_emission: tl.tensor,
    seq_flat_start: tl.tensor,
    period: tl.tensor,
    channels: tl.tensor,
    line_units: tl.tensor,
    channel_stride: tl.tensor,
    tap_stride: tl.tensor,
    row_words: tl.tensor,
    dst_stride: tl.tensor,
    x_units: tl.tensor,
    y_units: tl.tensor,
    MEMORY: tl.constexpr,
    V: tl.constexpr,
    EVEN: tl.constexpr,
    PACKED: tl.constexpr,
    LINE_UNIT: tl.constexpr,
    X_UNIT: tl.constexpr,
    Y_UNIT: tl.constexpr,
    SILU: tl.constexpr,
    ROUND: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    WIDTH: tl.constexpr = MEMORY + 1
    piece = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    group, lane = g[:, None], tl.arange(0, V)[None, :]
    channel = group * V + lane
    there = inside(channel, group, channels, V, EVEN)
    x += channel
    y += channel

    sequence = tl.load(piece_seq + piece)
    first = tl.load(piece_start + piece)
    count = tl.load(piece_length + piece).to(tl.int32)
    before = first - tl.load(seq_flat_start + sequence)  # tokens of the sequence before this piece

    held = ()
    for j in tl.static_range(MEMORY):
        at = (sequence * row_words + group * MEMORY + j) * V + lane
        held = held + columns(tl.load(windows + at, mask=(group * V < channels) & (before < MEMORY)), V)
    # Tap k lies MEMORY - k tokens back; what lies before the sequence is held.
    rows = ()
    for k in tl.static_range(MEMORY):
        row = x + (first - (MEMORY - k)) * x_units * X_UNIT
        rows = rows + columns(tl.load(row, mask=there & (before >= MEMORY - k), other=0.0).to(tl.float32), V)
    if ROUND:
        since = tl.load(piece_position + piece) % period  # tokens since the last boundary
    window = ()
    for i in tl.static_range(V):
        for k in tl.static_range(MEMORY):
            tap = rows[k * V + i]
            if ROUND:
                tap = tl.where(since < MEMORY - k, tap.to(lines.dtype.element_ty).to(tl.float32), tap)
            for j in tl.static_range(k, MEMORY):
                tap = tl.where(before == j - k, held[i * MEMORY + j].to(tl.float32), tap)
            window = window + (tap,)

    taps = ()
    for j in tl.static_range(WIDTH):
        at = group * (V * WIDTH) + j * V + lane
        mask = inside(at, group, channels * WIDTH, V * WIDTH, EVEN)
        taps = taps + columns(tl.load(weight + at, mask=mask, other=0.0).to(tl.float32), V)
    if bias is not None:
        offset = columns(tl.load(bias + channel, mask=there, other=0.0).to(tl.float32), V)
    for slot in range(count):
        token = columns(tl.load(x + (first + slot) * x_units * X_UNIT, mask=there, other=0.0), V)
        outs = ()
        shifted = ()
        for i in tl.static_range(V):
            out = token[i].to(tl.float32) * taps[i * WIDTH + MEMORY]
            for lag in tl.static_range(1, WIDTH):
                out += window[i * MEMORY + MEMORY - lag] * taps[i * WIDTH + MEMORY - lag]
            if bias is not None:
                out += offset[i]
            if SILU:
                out = silu(out)
            outs = outs + (out,)
            for k in tl.static_range(1, MEMORY):
                shifted = shifted + (window[i * MEMORY + k],)
            shifted = shifted + (token[i].to(tl.float32),)
        window = shifted
        row = y + (first + slot) * y_units * Y_UNIT
        tl.store(row, tile_of(outs, V).to(y.dtype.element_ty), mask=there)

    emission = tl.load(piece_emission + piece)
    target = tl.load(dst_line + emission * dst_stride, mask=emission >= 0, other=0).to(tl.int64)
    last = ()
    for i in tl.static_range(V * MEMORY):
        last = last + (window[i].to(lines.dtype.element_ty),)
    write_window(
        lines + target * line_units * LINE_UNIT, last, g, target > 0,
        channels, channel_stride, tap_stride, MEMORY, V, EVEN, PACKED,
    )  # fmt: skip


def plan_paged_conv(
    view: ConvView,
    src_line: torch.Tensor,
    dst_line: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    segments: Segments,
    y: torch.Tensor,
    *,
    activation: str | None = "silu",
) -> tuple[Launch, Launch]:
    """The launches of `paged_conv` into a contiguous `y` [T, C]; T is at least 1."""
    check_paged_conv(view, src_line, dst_line, x, weight, bias, segments, activation)
    args = conv_args(view, src_line, dst_line, x, weight, bias, y, activation)
    word, groups = args["V"], args["GROUPS"]
    blocks = -(-x.shape[1] // (groups * word))
    words = -(-x.shape[1] // word) * args["MEMORY"]
    shared = {
        "windows": torch.empty(segments.sequences, words * word, dtype=view.lines.dtype, device=x.device),
        "row_words": words,
    }
    gather = {name: args[name] for name in gather_windows_kernel.arg_names if name in args} | shared
    lossy = torch.promote_types(x.dtype, view.lines.dtype) != view.lines.dtype
    del args["src_line"], args["src_stride"]
    args |= shared
    args |= {
        "piece_start": segments.piece_start, "piece_length": segments.piece_length,
        "piece_position": segments.piece_position, "piece_seq": segments.piece_seq,
        "piece_emission": segments.piece_emission, "seq_flat_start": segments.seq_flat_start,
        "period": segments.grid or 1, "ROUND": lossy and segments.grid is not None,
    }  # fmt: skip
    return (
        Launch(gather_windows_kernel, (segments.sequences, blocks), gather, warps=1),
        Launch(paged_conv_kernel, (segments.pieces, blocks), args, warps=1),
    )


def paged_conv(
    view: ConvView,
    src_line: torch.Tensor,
    dst_line: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    segments: Segments,
    *,
    activation: str | None = "silu",
) -> torch.Tensor:
    """`kernels.paged_conv.paged_conv` as two Triton launches: same arguments, result and errors.

    All reads of lines come before all writes.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        for launch in plan_paged_conv(
            view, src_line, dst_line, x, weight, bias, segments, y, activation=activation
        ):
            launch.run()
    return y
