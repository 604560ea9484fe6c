"""The gated delta rule, one token after another in float64: what its kernels must equal."""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as functional

from sglang_hybrid.kernels import delta_rule

Decays = Literal["head", "channel", "bounded"]
"""One a head (GDN), one a key channel (KDA), and that with a lower bound (KDA's safe gate)."""


class DeltaInputs(delta_rule.DeltaInputs):
    """Inputs that a test draws, and what the reference makes of them."""

    @classmethod
    def random(
        cls,
        tokens: int,
        heads: int,
        groups: int,
        dim: int,
        size: int,
        dtype: torch.dtype = torch.float32,
        decays: Decays = "head",
    ) -> "DeltaInputs":
        """Normal values, side by side as a layer's convolution leaves them; memories of a few to some hundred
        tokens, so that a lost state shows."""
        keys = groups * size
        row = torch.randn(tokens, 2 * keys + heads * dim).to(dtype)
        q, k, v = torch.split(row, [keys, keys, heads * dim], 1)
        b, a = torch.randn(tokens, 2 * heads).to(dtype).chunk(2, 1)
        channels = () if decays == "head" else (size,)
        if channels:
            a = torch.randn(tokens, heads, size).to(dtype)
        return cls(
            q=q.view(tokens, groups, size),
            k=k.view(tokens, groups, size),
            v=v.view(tokens, heads, dim),
            a=a,
            b=b,
            a_log=torch.linspace(-7, 0, heads) if decays != "bounded" else torch.linspace(-1, 1, heads),
            dt_bias=torch.randn(heads, *channels) if decays != "bounded" else torch.randn(heads, size) - 4,
            lower_bound=-5.0 if decays == "bounded" else None,
        )

    @property
    def decay(self) -> torch.Tensor:
        """Log decay, shaped as `a`, float64."""
        step = self.a.double() + self.dt_bias.double()
        rate = self.a_log.double().exp().view(-1, *[1] * (self.a.dim() - 2))
        if self.lower_bound is not None:
            return self.lower_bound * (rate * step).sigmoid()
        return -rate * functional.softplus(step)

    @property
    def strength(self) -> torch.Tensor:
        """How much of a value is written, `[T, H]`, float64."""
        return self.b.double().sigmoid()

    def part(self, begin: int, end: int) -> "DeltaInputs":
        """The same weights over tokens [begin, end)."""
        return self._replace(**{name: getattr(self, name)[begin:end] for name in ("q", "k", "v", "a", "b")})


def recur(
    inputs: DeltaInputs, initial: torch.Tensor, stored: torch.dtype, round_at: Sequence[int] = ()
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One sequence -> (y [T, H, V], state [H, V, K] after every token), float64.

    The state carried on from `round_at` (tokens done) is rounded to `stored` there.
    """
    state = initial.double()
    ratio = inputs.v.shape[1] // inputs.k.shape[1]
    size = inputs.k.shape[2]
    decay, strength = inputs.decay, inputs.strength
    y, states = [], []
    for t in range(inputs.v.shape[0]):
        q, k = (
            (x[t].double() / (x[t].double().square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(
                ratio, 0
            )
            for x in (inputs.q, inputs.k)
        )
        state = decay[t].exp().view(decay.shape[1], 1, -1) * state
        known = (state * k[:, None, :]).sum(-1)
        written = strength[t][:, None] * (inputs.v[t].double() - known)
        state = state + written[:, :, None] * k[:, None, :]
        y.append((state * q[:, None, :]).sum(-1) / size**0.5)
        if t + 1 in round_at:
            state = state.to(stored).double()
        states.append(state)
    return torch.stack(y), states
