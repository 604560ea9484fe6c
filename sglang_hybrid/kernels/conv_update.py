"""One decode step of the depthwise causal convolution, read and written through line maps.

Source symbol: `causal_conv1d_update` of SGLang's Mamba ops; that one works in place, this one may
fork: read one conv line, write another.
"""

from __future__ import annotations

import torch

from sglang_hybrid.kernels.causal_conv import check_weights
from sglang_hybrid.kernels.checks import need_activation, need_shape
from sglang_hybrid.kernels.elementwise import silu
from sglang_hybrid.kernels.state_io import read_windows, write_windows
from sglang_hybrid.pools.views import ConvView


def check_conv(
    view: ConvView,
    src_line: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> int:
    """Raise `KernelError` unless the inputs of `conv_update` fit each other; returns W.  For every route."""
    need_shape("x", x, (src_line.shape[0], None))
    need_activation(activation)
    width = check_weights(weight, bias, x.shape[1])
    need_shape("conv lines", view.lines, (None, x.shape[1], width - 1))
    return width


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
    """Convolve one new token a batch row -> y [B, C] in x's dtype; writes the shifted windows.

    `x` [B, C], `weight` [C, W], `bias` [C] or None.  `src_line` [B] int: the window is read there
    (`NO_LINE`: zeros); `dst_line` [B] int: window without its oldest tap plus x is written there
    (`NO_LINE`: nowhere).  All reads come before all writes, so any row may work in place.
    Sums are fp32, in the order of `causal_conv`.
    """
    width = check_conv(view, src_line, x, weight, bias, activation)
    memory = width - 1
    window = read_windows(view, src_line)
    taps = weight.float()
    y = x.float() * taps[:, memory]
    for lag in range(1, width):
        y = torch.addcmul(y, window[:, :, memory - lag].float(), taps[:, memory - lag])
    if bias is not None:
        y = y + bias.float()
    if activation is not None:
        y = silu(y)
    shifted = torch.cat([window[:, :, 1:], x[:, :, None].to(window.dtype)], dim=2)
    write_windows(view, dst_line, shifted)
    return y.to(x.dtype)
