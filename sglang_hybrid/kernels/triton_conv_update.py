"""One decode step of the depthwise causal convolution in Triton: one launch for all requests.

A conv line is a contiguous run of (channel, tap), so a thread takes 8 channels (4 in fp32) of one line:
their taps are whole words of 16 bytes, and the shift by one tap stays in its registers.  Where lines lie,
a page apart (S1), a slot apart (S2) or behind a checkpoint (S0, D0), is one stride.  Line 0 belongs to
the sink page: like the invalid line it is neither read nor written.
"""

# Tuples grow in unrolled loops; Triton has no starred expressions.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sglang_hybrid.kernels.checks import need_dtype
from sglang_hybrid.kernels.conv_update import check_conv
from sglang_hybrid.kernels.launch import WORD_BYTES, Launch, power_of_two, vector
from sglang_hybrid.kernels.state_access import read_state, write_state
from sglang_hybrid.kernels.state_io import need_lines
from sglang_hybrid.kernels.triton_columns import columns, tile_of
from sglang_hybrid.kernels.triton_math import silu
from sglang_hybrid.pools.views import ConvView

LINE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def inside(
    element: tl.tensor, group: tl.tensor, size: tl.tensor, V: tl.constexpr, EVEN: tl.constexpr
) -> tl.tensor:
    """Mask of elements below `size`; where groups are whole it is the group's, so that words stay whole."""
    if EVEN:
        return group < size // V
    else:
        return element < size


@triton.jit
def read_window(
    line: tl.tensor,
    g: tl.tensor,
    wanted: tl.tensor,
    channels: tl.tensor,
    channel_stride: tl.tensor,
    tap_stride: tl.tensor,
    MEMORY: tl.constexpr,
    V: tl.constexpr,
    EVEN: tl.constexpr,
    PACKED: tl.constexpr,
) -> tl.tuple:
    """Taps of groups `g` of a line: V x MEMORY tensors [groups], channel by channel; zeros if not wanted."""
    window = ()
    if PACKED:
        # Word j of a group: elements j V to j V + V - 1 of its V x MEMORY taps.
        group, lane = g[:, None], tl.arange(0, V)[None, :]
        for j in tl.static_range(MEMORY):
            at = group * (V * MEMORY) + j * V + lane
            mask = inside(at, group, channels * MEMORY, V * MEMORY, EVEN) & wanted
            window = window + columns(read_state(line + at, mask), V)
    else:
        for i in tl.static_range(V):
            for k in tl.static_range(MEMORY):
                at = (g * V + i) * channel_stride + k * tap_stride
                window = window + (read_state(line + at, (g * V + i < channels) & wanted),)
    return window


@triton.jit
def write_window(
    line: tl.tensor,
    window: tl.tuple,
    g: tl.tensor,
    wanted: tl.tensor,
    channels: tl.tensor,
    channel_stride: tl.tensor,
    tap_stride: tl.tensor,
    MEMORY: tl.constexpr,
    V: tl.constexpr,
    EVEN: tl.constexpr,
    PACKED: tl.constexpr,
) -> None:
    """The reverse of `read_window`; nothing is written if not wanted."""
    if PACKED:
        group, lane = g[:, None], tl.arange(0, V)[None, :]
        for j in tl.static_range(MEMORY):
            at = group * (V * MEMORY) + j * V + lane
            mask = inside(at, group, channels * MEMORY, V * MEMORY, EVEN) & wanted
            write_state(line + at, tile_of(window[j * V : (j + 1) * V], V), mask)
    else:
        for i in tl.static_range(V):
            for k in tl.static_range(MEMORY):
                at = (g * V + i) * channel_stride + k * tap_stride
                write_state(line + at, window[i * MEMORY + k], (g * V + i < channels) & wanted)


@triton.jit(do_not_specialize_on_alignment=["src_line", "dst_line"])
def conv_update_kernel(
    lines: tl.tensor,
    src_line: tl.tensor,
    dst_line: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    channels: tl.tensor,
    line_units: tl.tensor,
    channel_stride: tl.tensor,
    tap_stride: tl.tensor,
    src_stride: tl.tensor,
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
    GROUPS: tl.constexpr,
) -> None:
    WIDTH: tl.constexpr = MEMORY + 1
    g = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    group, lane = g[:, None], tl.arange(0, V)[None, :]
    request = tl.program_id(1).to(tl.int64)
    source = tl.load(src_line + request * src_stride).to(tl.int64)
    target = tl.load(dst_line + request * dst_stride).to(tl.int64)
    src = lines + source * line_units * LINE_UNIT
    dst = lines + target * line_units * LINE_UNIT

    window = read_window(src, g, source > 0, channels, channel_stride, tap_stride, MEMORY, V, EVEN, PACKED)
    taps = ()
    for j in tl.static_range(WIDTH):
        at = group * (V * WIDTH) + j * V + lane
        mask = inside(at, group, channels * WIDTH, V * WIDTH, EVEN)
        taps = taps + columns(tl.load(weight + at, mask=mask, other=0.0).to(tl.float32), V)
    channel = group * V + lane
    mask = inside(channel, group, channels, V, EVEN)
    token = columns(tl.load(x + request * x_units * X_UNIT + channel, mask=mask, other=0.0), V)
    if bias is not None:
        offset = columns(tl.load(bias + channel, mask=mask, other=0.0).to(tl.float32), V)

    outs = ()
    shifted = ()
    for i in tl.static_range(V):
        out = token[i].to(tl.float32) * taps[i * WIDTH + MEMORY]
        for lag in tl.static_range(1, WIDTH):
            out += window[i * MEMORY + MEMORY - lag].to(tl.float32) * taps[i * WIDTH + MEMORY - lag]
        if bias is not None:
            out += offset[i]
        if SILU:
            out = silu(out)
        outs = outs + (out,)
        for k in tl.static_range(1, MEMORY):
            shifted = shifted + (window[i * MEMORY + k],)
        shifted = shifted + (token[i].to(lines.dtype.element_ty),)
    tl.store(y + request * y_units * Y_UNIT + channel, tile_of(outs, V).to(y.dtype.element_ty), mask=mask)
    write_window(dst, shifted, g, target > 0, channels, channel_stride, tap_stride, MEMORY, V, EVEN, PACKED)


def conv_args(
    view: ConvView,
    src_line: torch.Tensor,
    dst_line: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    activation: str | None,
) -> dict[str, Any]:
    """Named arguments that the conv kernels share; `y` contiguous, the rest as in the operation.

    Parameters of a model are contiguous, and channels of x lie side by side; anything else is copied.
    """
    lines = view.lines
    need_dtype("conv lines", lines, LINE_DTYPES)
    x = x if x.stride(1) == 1 else x.contiguous()
    channels = x.shape[1]
    word = WORD_BYTES // lines.element_size()
    line_unit = vector(lines.element_size(), lines.stride(0))
    x_unit, y_unit = (vector(t.element_size(), t.stride(0)) for t in (x, y))
    memory = lines.shape[2]
    return {
        "lines": lines, "src_line": src_line, "dst_line": dst_line,
        "x": x, "weight": weight.contiguous(), "bias": None if bias is None else bias.contiguous(), "y": y,
        "channels": channels, "line_units": lines.stride(0) // line_unit,
        "channel_stride": lines.stride(1), "tap_stride": lines.stride(2),
        "src_stride": src_line.stride(0), "dst_stride": dst_line.stride(0),
        "x_units": x.stride(0) // x_unit, "y_units": y.stride(0) // y_unit,
        "MEMORY": memory, "V": word, "EVEN": channels % word == 0,
        "PACKED": lines.stride()[1:] == (memory, 1),
        "LINE_UNIT": line_unit, "X_UNIT": x_unit, "Y_UNIT": y_unit,
        "SILU": activation is not None, "GROUPS": min(32, power_of_two(-(-channels // word))),
    }  # fmt: skip


def plan_conv_update(
    view: ConvView,
    src_line: torch.Tensor,
    dst_line: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    *,
    activation: str | None = "silu",
) -> Launch:
    """The launch of `conv_update` into a contiguous `y` [B, C]; B is at least 1."""
    check_conv(view, src_line, x, weight, bias, activation)
    need_lines(view, src_line)
    need_lines(view, dst_line, x.shape[0])
    args = conv_args(view, src_line, dst_line, x, weight, bias, y, activation)
    grid = (-(-x.shape[1] // (args["GROUPS"] * args["V"])), x.shape[0])
    return Launch(conv_update_kernel, grid, args, warps=1)


def conv_update(
    view: ConvView,
    src_line: torch.Tensor,
    dst_line: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: str | None = "silu",
) -> torch.Tensor:
    """`kernels.conv_update.conv_update` as one Triton launch: same arguments, result and errors.

    Requests run at once: a line that one request writes may be read by that request alone.  Windows of
    other strides than (W - 1, 1) work, element by element.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        plan_conv_update(view, src_line, dst_line, x, weight, bias, y, activation=activation).run()
    return y
