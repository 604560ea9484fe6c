"""Prefill of the Mamba2 recurrence between pages: initial states by a source map, emissions by another.

The torch route gathers, scans and scatters; it is the reference of routes that do all three in one launch.
"""

from __future__ import annotations

import torch

from sglang_hybrid.kernels.segments import Segments
from sglang_hybrid.kernels.ssd_scan import NO_LIMIT, ssd_scan
from sglang_hybrid.kernels.state_io import read_states, write_states
from sglang_hybrid.pools.views import StateView


def paged_scan(
    view: StateView,
    src_map: torch.Tensor,
    dst_map: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    segments: Segments,
    *,
    d: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
) -> torch.Tensor:
    """Scan a ragged batch -> y [T, H, P] in x's dtype; writes the state of every emission.

    `src_map` [S, members] int by sequence (column 0 negative: zeros), `dst_map` [K, members] int by emission
    (column 0 negative: nowhere); the rest as in `ssd_scan`.  All reads come before all writes, so the last
    emission of a sequence may go where its initial state came from.
    """
    y, states = ssd_scan(
        x, dt, a, b, c, segments,
        d=d, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit,
        initial_states=read_states(view, src_map), state_dtype=view.rows.dtype,
    )  # fmt: skip
    write_states(view, dst_map, states)
    return y
