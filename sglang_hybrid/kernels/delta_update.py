"""One decode step of the gated delta rule, state read and written through page maps.

Source symbols: `fused_recurrent_gated_delta_rule_packed_decode` and `fused_recurrent_kda_packed_decode` of
SGLang's fla ops; those work in place, this one may fork: read the source pages, write the destination pages.
"""

from __future__ import annotations

import torch

from sglang_hybrid.kernels.delta_rule import DeltaInputs, unit
from sglang_hybrid.kernels.state_io import read_states, write_states
from sglang_hybrid.pools.views import StateView


def delta_update(
    view: StateView,
    src_map: torch.Tensor,
    dst_map: torch.Tensor,
    inputs: DeltaInputs,
) -> torch.Tensor:
    """Advance the state by one token a batch row -> y [B, H, V] in v's dtype; writes the new state.

    `src_map`, `dst_map` [B, members] int: pages read (column 0 negative: zeros) and written (column
    0 negative: nowhere).  All reads come before all writes, so any row may work in place.  y comes
    from the fp32 state; only what is written is rounded to the pages' dtype.
    """
    inputs.check(view, src_map.shape[0])
    decay, strength = inputs.gates()
    ratio = view.heads // inputs.q.shape[1]
    keys = unit(inputs.k).repeat_interleave(ratio, 1)
    queries = (unit(inputs.q) * view.state_size**-0.5).repeat_interleave(ratio, 1)
    # [B, H, 1, K or 1]: along a row of the state lie its key channels.
    left = decay.exp().view(*decay.shape[:2], 1, -1)
    state = read_states(view, src_map) * left
    known = torch.matmul(state, keys[..., None])
    written = (inputs.v.float()[..., None] - known) * strength[..., None, None]
    state = torch.addcmul(state, written, keys[..., None, :])
    write_states(view, dst_map, state)
    return torch.matmul(state, queries[..., None])[..., 0].to(inputs.v.dtype)
