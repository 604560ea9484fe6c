"""Depthwise causal convolution over a ragged batch, with the window handed out on the way.

Source symbol: `causal_conv1d_fn` of SGLang's Mamba ops, which it follows in meaning.  A window is
the last W - 1 inputs, oldest first: the convolution's whole memory.
"""

from __future__ import annotations

import torch

from sglang_hybrid.kernels.checks import KernelError, need_activation, need_shape
from sglang_hybrid.kernels.elementwise import silu
from sglang_hybrid.kernels.segments import Segments


def check_weights(weight: torch.Tensor, bias: torch.Tensor | None, channels: int) -> int:
    """Check `weight` [C, W] and `bias` [C]; return W.  Raises `KernelError`; a width of 1 has no memory."""
    need_shape("weight", weight, (channels, None))
    if bias is not None:
        need_shape("bias", bias, (channels,))
    width = weight.shape[1]
    if width < 2:
        raise KernelError(f"weight has shape {list(weight.shape)}, needs [{channels}, 2 or more]")
    return width


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    segments: Segments,
    *,
    activation: str | None = "silu",
    windows: torch.Tensor | None = None,
    window_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve a ragged batch -> (y [T, C] in x's dtype, windows [K, C, W - 1] in `window_dtype`).

    `x` [T, C], `weight` [C, W], `bias` [C] or None, `segments` of the batch (K emissions), `windows`
    [S, C, W - 1] before each extend (None: zeros), `window_dtype` the stored dtype (None: x's).
    Sums are fp32.  An emission less than W - 1 tokens into its extend takes the older taps from the
    initial window.  Taps that lie behind a boundary of the grid are rounded to `window_dtype`, as a
    resume at that boundary would read them.
    """
    need_shape("x", x, (segments.tokens, None))
    need_activation(activation)
    tokens, channels = x.shape
    width = check_weights(weight, bias, channels)
    window_dtype = x.dtype if window_dtype is None else window_dtype
    memory = width - 1
    if windows is None:
        windows = x.new_zeros((segments.sequences, channels, memory))
    need_shape("windows", windows, (segments.sequences, channels, memory))
    if tokens == 0:
        return x.new_zeros(x.shape), x.new_zeros((0, channels, memory), dtype=window_dtype)

    # One line of inputs a batch, each sequence's window in front of its tokens: no tap can then
    # reach into a neighbour, and the window of any emission is a run of the line.
    offsets = torch.arange(memory, device=x.device)
    sequences = torch.arange(segments.sequences, device=x.device)
    line = torch.empty(tokens + segments.sequences * memory, channels, dtype=torch.float32, device=x.device)
    line[(segments.seq_flat_start + sequences * memory)[:, None] + offsets] = windows.transpose(1, 2).float()
    place = torch.arange(tokens, device=x.device) + (segments.token_seq + 1) * memory
    line[place] = x.float()

    taps = weight.float()
    y = x.float() * taps[:, memory]
    grid = segments.grid if torch.promote_types(x.dtype, window_dtype) != window_dtype else None
    for lag in range(1, width):
        tap = line[place - lag]
        if grid is not None:  # the stored dtype loses bits
            behind = segments.token_position % grid < lag
            tap = torch.where(behind[:, None], tap.to(window_dtype).float(), tap)
        y = torch.addcmul(y, tap, taps[:, memory - lag])
    if bias is not None:
        y = y + bias.float()
    if activation is not None:
        y = silu(y)
    runs = (segments.emission_flat_end + segments.emission_seq * memory)[:, None] + offsets
    return y.to(x.dtype), line[runs].transpose(1, 2).to(window_dtype)
