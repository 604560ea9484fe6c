"""One decode step of the Mamba2 recurrence, state read and written through page maps.

Source symbol: `selective_state_update` of SGLang's Mamba Triton ops; that one works in place, this
one may fork: read the source pages, write the destination pages.
"""

from __future__ import annotations

import torch

from sglang_hybrid.kernels.checks import KernelError, need_groups, need_shape
from sglang_hybrid.kernels.elementwise import silu
from sglang_hybrid.kernels.ssd_scan import NO_LIMIT, time_steps
from sglang_hybrid.kernels.state_io import read_states, write_states
from sglang_hybrid.pools.views import StateView


def check_update(
    view: StateView,
    src_map: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
) -> None:
    """Raise `KernelError` unless the inputs of `state_update` fit each other; for every route."""
    need_shape("x", x, (src_map.shape[0], view.heads, view.head_dim))
    batch, heads, dim = x.shape
    need_shape("dt", dt, (batch, heads))
    need_shape("A", a, (heads,))
    need_shape("B", b, (batch, None, view.state_size))
    need_shape("C", c, tuple(b.shape))
    need_groups(heads, b.shape[1])
    if d is not None and d.shape not in ((heads,), (heads, dim)):
        raise KernelError(f"D has shape {list(d.shape)}, needs [{heads}] or [{heads}, {dim}]")
    if z is not None:
        need_shape("z", z, (batch, heads, dim))


def state_update(
    view: StateView,
    src_map: torch.Tensor,
    dst_map: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    *,
    d: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
) -> torch.Tensor:
    """Advance the state by one token a batch row -> y [B, H, P] in x's dtype; writes the new state.

    `src_map`, `dst_map` [B, members] int: pages read (column 0 negative: zeros) and written (column
    0 negative: nowhere).  `x` [B, H, P], `dt` [B, H], `a` [H], `b` and `c` [B, G, N], `d` [H] or
    [H, P], `z` [B, H, P] (y is multiplied by silu(z)), `dt_bias` [H].  All reads come before all
    writes, so any row may work in place.  y comes from the fp32 state; only what is written is
    rounded to the pages' dtype.
    """
    check_update(view, src_map, x, dt, a, b, c, d, z)
    batch, heads, dim = x.shape
    groups, size = b.shape[1:]
    steps = time_steps(dt, dt_bias, dt_softplus, dt_limit)
    decay = (steps * a.float()).exp()[..., None, None]
    ratio = heads // groups
    weighted = (x.float() * steps[..., None]).view(batch, groups, ratio, dim, 1)
    added = weighted * b.float()[:, :, None, None]
    state = torch.addcmul(added.view(batch, heads, dim, size), read_states(view, src_map), decay)
    write_states(view, dst_map, state)
    grouped = state.view(batch, groups, ratio * dim, size)
    y = torch.matmul(grouped, c.float()[..., None]).view(batch, heads, dim)
    if d is not None:
        y = y + x.float() * (d.float()[:, None] if d.dim() == 1 else d.float())
    if z is not None:
        y = y * silu(z.float())
    return y.to(x.dtype)
