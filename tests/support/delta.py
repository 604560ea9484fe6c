"""The gated delta rule, one token after another in float64: what its kernels must equal."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True)
class DeltaInputs:
    """`q` and `k` `[T, G, K]`, `v [T, H, V]`, log decay `g` and strength `beta` `[T, H]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    @classmethod
    def random(
        cls, tokens: int, heads: int, groups: int, dim: int, size: int, dtype: torch.dtype = torch.float32
    ) -> "DeltaInputs":
        """Normal values; memories of a few to some hundred tokens, so that a lost state shows."""
        return cls(
            q=torch.randn(tokens, groups, size).to(dtype),
            k=torch.randn(tokens, groups, size).to(dtype),
            v=torch.randn(tokens, heads, dim).to(dtype),
            g=-torch.rand(tokens, heads) * torch.logspace(-3, 0, heads),
            beta=torch.rand(tokens, heads),
        )

    def part(self, begin: int, end: int) -> "DeltaInputs":
        """Tokens [begin, end)."""
        return DeltaInputs(*(getattr(self, field.name)[begin:end] for field in fields(self)))


def recur(
    inputs: DeltaInputs, initial: torch.Tensor, stored: torch.dtype, round_at: Sequence[int] = ()
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One sequence -> (y [T, H, V], state [H, V, K] after every token), float64.

    The state carried on from `round_at` (tokens done) is rounded to `stored` there.
    """
    state = initial.double()
    ratio = inputs.v.shape[1] // inputs.k.shape[1]
    size = inputs.k.shape[2]
    y, states = [], []
    for t in range(inputs.v.shape[0]):
        q, k = (
            (x[t].double() / (x[t].double().square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(
                ratio, 0
            )
            for x in (inputs.q, inputs.k)
        )
        state = inputs.g[t].double().exp()[:, None, None] * state
        known = (state * k[:, None, :]).sum(-1)
        written = inputs.beta[t].double()[:, None] * (inputs.v[t].double() - known)
        state = state + written[:, :, None] * k[:, None, :]
        y.append((state * q[:, None, :]).sum(-1) / size**0.5)
        if t + 1 in round_at:
            state = state.to(stored).double()
        states.append(state)
    return torch.stack(y), states
