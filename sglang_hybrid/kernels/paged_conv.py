"""Prefill of the causal convolution between conv lines: windows by a source map, emissions by another.

The torch route gathers, convolves and scatters; it is the reference of the other routes.
"""

from __future__ import annotations

import torch

from sglang_hybrid.kernels.causal_conv import causal_conv, check_weights
from sglang_hybrid.kernels.checks import need_activation, need_shape
from sglang_hybrid.kernels.segments import Segments
from sglang_hybrid.kernels.state_io import need_lines, read_windows, write_windows
from sglang_hybrid.pools.views import ConvView


def check_paged_conv(
    view: ConvView,
    src_line: torch.Tensor,
    dst_line: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    segments: Segments,
    activation: str | None,
) -> int:
    """Raise `KernelError` unless the inputs of `paged_conv` fit each other; returns W.  For every route."""
    need_shape("x", x, (segments.tokens, None))
    need_activation(activation)
    width = check_weights(weight, bias, x.shape[1])
    need_shape("conv lines", view.lines, (None, x.shape[1], width - 1))
    need_lines(view, src_line, segments.sequences)
    need_lines(view, dst_line, len(segments.emissions))
    return width


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
    """Convolve a ragged batch -> y [T, C] in x's dtype; writes the window of every emission.

    `src_line` [S] int by sequence (`NO_LINE`: zeros), `dst_line` [K] int by emission (`NO_LINE`: nowhere);
    the rest as in `causal_conv`.  All reads come before all writes, so the last emission of a sequence may
    go where its window came from.
    """
    check_paged_conv(view, src_line, dst_line, x, weight, bias, segments, activation)
    y, windows = causal_conv(
        x, weight, bias, segments,
        activation=activation, windows=read_windows(view, src_line), window_dtype=view.lines.dtype,
    )  # fmt: skip
    write_windows(view, dst_line, windows)
    return y
