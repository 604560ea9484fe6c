"""Mamba2 and its convolution, one token after another in float64: what every kernel must equal."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional


@dataclass(frozen=True)
class MixerInputs:
    """`x [T, H, P]`, `dt [T, H]`, `a [H]`, `b` and `c [T, G, N]`, `d` and `dt_bias [H]`, `z` like x."""

    x: torch.Tensor
    dt: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    d: torch.Tensor | None
    z: torch.Tensor | None
    dt_bias: torch.Tensor | None

    @classmethod
    def random(
        cls,
        tokens: int,
        heads: int,
        groups: int,
        dim: int,
        size: int,
        dtype: torch.dtype,
        extras: bool = True,
    ) -> "MixerInputs":
        """Normal values; memories of a few to some hundred tokens, so that a lost state shows."""
        return cls(
            x=torch.randn(tokens, heads, dim).to(dtype),
            dt=torch.randn(tokens, heads).to(dtype),
            a=-torch.logspace(-3, 0, heads),
            b=torch.randn(tokens, groups, size).to(dtype),
            c=torch.randn(tokens, groups, size).to(dtype),
            d=torch.randn(heads) if extras else None,
            z=torch.randn(tokens, heads, dim).to(dtype) if extras else None,
            dt_bias=torch.randn(heads) if extras else None,
        )

    def part(self, begin: int, end: int) -> "MixerInputs":
        """The same weights over tokens [begin, end)."""
        return MixerInputs(
            self.x[begin:end],
            self.dt[begin:end],
            self.a,
            self.b[begin:end],
            self.c[begin:end],
            self.d,
            None if self.z is None else self.z[begin:end],
            self.dt_bias,
        )


def scan(
    inputs: MixerInputs, initial: torch.Tensor, stored: torch.dtype, round_at: Sequence[int] = ()
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One sequence -> (y [T, H, P], state [H, P, N] after every token), float64, softplus on.

    The state carried on from `round_at` (tokens done) is rounded to `stored` there.
    """
    state = initial.double()
    ratio = inputs.x.shape[1] // inputs.b.shape[1]
    y, states = [], []
    for t in range(inputs.x.shape[0]):
        step = inputs.dt[t].double()
        if inputs.dt_bias is not None:
            step = step + inputs.dt_bias.double()
        step = functional.softplus(step)
        x = inputs.x[t].double()
        b, c = (group[t].double().repeat_interleave(ratio, 0) for group in (inputs.b, inputs.c))
        state = (step * inputs.a.double()).exp()[:, None, None] * state + (
            (step[:, None] * x)[:, :, None] * b[:, None]
        )
        out = (state * c[:, None]).sum(-1)
        if inputs.d is not None:
            out = out + inputs.d.double()[:, None] * x
        if inputs.z is not None:
            out = out * functional.silu(inputs.z[t].double())
        if t + 1 in round_at:
            state = state.to(stored).double()
        y.append(out)
        states.append(state)
    return torch.stack(y), states


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool, window: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One sequence `x [T, C]` after `window [C, W - 1]` -> (y [T, C] float64, window after every token)."""
    line = window
    y, windows = [], []
    for t in range(x.shape[0]):
        line = torch.cat([line, x[t][:, None].to(window.dtype)], 1)
        out = (line.double() * weight.double()).sum(1)
        if bias is not None:
            out = out + bias.double()
        y.append(functional.silu(out) if silu else out)
        line = line[:, 1:]
        windows.append(line)
    return torch.stack(y), windows


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference as a share of the largest value that was wanted; inf when `got` is not finite."""
    if not torch.isfinite(got).all():
        return float("inf")
    scale = float(want.abs().max()) if want.numel() else 1.0
    return float((got.double() - want.double()).abs().max()) / scale if want.numel() else 0.0
