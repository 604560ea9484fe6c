"""Prefill of the gated delta rule between pages: initial states by a source map, emissions by another.

The torch route gathers, scans and scatters; it is the reference of routes that do all three in one launch.
"""

from __future__ import annotations

import torch

from sglang_hybrid.kernels.delta_rule import DeltaInputs, delta_scan
from sglang_hybrid.kernels.segments import Segments
from sglang_hybrid.kernels.state_io import read_states, write_states
from sglang_hybrid.pools.views import StateView


def paged_delta_scan(
    view: StateView,
    src_map: torch.Tensor,
    dst_map: torch.Tensor,
    inputs: DeltaInputs,
    segments: Segments,
) -> torch.Tensor:
    """Scan a ragged batch -> y [T, H, V] in v's dtype; writes the state of every emission.

    `src_map` [S, members] int by sequence (column 0 negative: zeros), `dst_map` [E, members] int by emission
    (column 0 negative: nowhere); a row of `inputs` a token.  All reads come before all writes, so the last
    emission of a sequence may go where its initial state came from.
    """
    inputs.check(view, segments.tokens)
    y, states = delta_scan(
        inputs.q, inputs.k, inputs.v, *inputs.gates(), segments,
        initial_states=read_states(view, src_map), state_dtype=view.rows.dtype,
    )  # fmt: skip
    write_states(view, dst_map, states)
    return y
