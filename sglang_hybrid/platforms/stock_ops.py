"""Torch replacements for the Mamba2 kernels that stock SGLang calls, as thin adapters over `kernels/`.

`MambaMixer2` (`sglang.srt.layers.attention.mamba.mamba`) calls six names of its module.  On a
platform without an accelerator four of them do not exist and two are Triton.  A stock pool is the
simplest view there is: one member a checkpoint, one slot a page, read and written in place.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import lru_cache

import torch

from sglang_hybrid.kernels import (
    Segments,
    causal_conv,
    conv_update,
    plan_segments,
    read_windows,
    ssd_scan,
    state_update,
    write_windows,
)
from sglang_hybrid.kernels.checks import KernelError
from sglang_hybrid.pools.views import ConvView, StateView

MIXER_MODULE = "sglang.srt.layers.attention.mamba.mamba"


@lru_cache(maxsize=8)
def _segments(query_start: tuple[int, ...], grid: int | None, device: torch.device) -> Segments:
    """Pieces of a stock prefill, positions relative to the extend; one plan for all layers."""
    return plan_segments(query_start, [0] * (len(query_start) - 1), grid, device=device)


def stock_plan(
    query_start_loc: torch.Tensor, device: torch.device, snapshot_grid: int | None = None
) -> Segments:
    """`_segments` of a stock prefill's flat offsets, a state every `snapshot_grid` tokens of an extend."""
    return _segments(tuple(query_start_loc.tolist()), snapshot_grid, device)


def _snapshots(
    states: torch.Tensor, plan: Segments, chunk: int, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """States before every chunk of the flat row [1, chunks, H, P, N], and those at flat `ends` [1, K, ...].

    The caller wants states at whole chunks of an extend, counted from its first token: where that is a
    multiple of the chunk in the flat row too, it looks them up in the first, elsewhere it names them in
    `ends`.  The rest of the first is zero.
    """
    at = {int(end): index for index, end in enumerate(plan.emission_flat_end.tolist())}
    before = states.new_zeros((1, plan.tokens // chunk + 1, *states.shape[1:]))
    for end, index in at.items():
        if end % chunk == 0:
            before[0, end // chunk] = states[index]
    return before, states[[at[int(end)] for end in ends.tolist()]][None]


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: Sequence[int] | None = None,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = -1,
    **_unused: object,
) -> torch.Tensor:
    """Prefill convolution: `x` [C, T] -> [C, T]; `conv_states` [slots, C, W - 1] updated in place.

    Source symbol: `causal_conv1d_fn` of `sglang.kernels.ops.mamba.causal_conv1d_triton`.
    """
    if cache_indices is None:
        raise KernelError("cache_indices is missing, needs [sequences] slots of conv_states")
    plan = stock_plan(query_start_loc, x.device)
    view = ConvView(conv_states)
    windows = read_windows(view, cache_indices)
    if has_initial_state is None:
        windows = torch.zeros_like(windows)
    else:
        windows = torch.where(has_initial_state[:, None, None], windows, 0)
    y, ends = causal_conv(
        x.transpose(0, 1),
        weight,
        bias,
        plan,
        activation=activation,
        windows=windows,
        window_dtype=conv_states.dtype,
    )
    write_windows(view, cache_indices, ends)
    return y.transpose(0, 1)


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
    **_unused: object,
) -> torch.Tensor:
    """Decode convolution: `x` [B, C] -> [B, C]; `conv_state` [slots, C, W - 1] updated in place.

    Source symbol: `causal_conv1d_update` of `sglang.kernels.ops.mamba.causal_conv1d_triton`.
    """
    if conv_state_indices is None or cache_seqlens is not None:
        raise KernelError("conv_state_indices is missing or cache_seqlens given, needs slots and no ring")
    return conv_update(
        ConvView(conv_state), conv_state_indices, conv_state_indices, x, weight, bias, activation=activation
    )


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    out: torch.Tensor | None = None,
    return_varlen_states: bool = False,
    return_track_states: bool = False,
    state_dtype: torch.dtype | None = None,
    track_end_locs: torch.Tensor | None = None,
    **_unused: object,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """Prefill scan of one ragged row: `x` [1, T, H, P] -> (None, end states [S, H, P, N], None).

    Source symbol: `mamba_chunk_scan_combined` of `sglang.kernels.ops.mamba.triton_ops`, as
    `MambaMixer2.forward` calls it: outputs go to `out`.  With `track_end_locs`, which the strategy
    `extra_buffer` gives (maybe empty), the first and the third are `_snapshots`.
    """
    if cu_seqlens is None or out is None or not return_varlen_states or not return_track_states:
        raise KernelError("the scan serves MambaMixer2 only: needs cu_seqlens, out, varlen and track states")
    plan = stock_plan(cu_seqlens, x.device, None if track_end_locs is None else chunk_size)
    _, states = ssd_scan(
        x[0],
        dt[0],
        A,
        B[0],
        C[0],
        plan,
        d=D,
        z=None if z is None else z[0],
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        initial_states=initial_states,
        state_dtype=torch.float32 if state_dtype is None else state_dtype,
        out=out[0],
    )
    if track_end_locs is None:
        return None, states, None
    before, tracked = _snapshots(states, plan, chunk_size, track_end_locs)
    return before, states[plan.last_emission], tracked


def _head_values(name: str, tensor: torch.Tensor, keep: int) -> torch.Tensor:
    """Undo the broadcast over head dim and state size: the update works with one value a head."""
    if any(tensor.stride(axis) != 0 and tensor.shape[axis] != 1 for axis in range(keep, tensor.dim())):
        raise KernelError(
            f"{name} has shape {list(tensor.shape)} with its own values, needs one value a head"
        )
    return tensor.flatten(keep)[..., 0] if tensor.dim() > keep else tensor


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    out: torch.Tensor | None = None,
    disable_state_update: bool = False,
    **_unused: object,
) -> None:
    """Decode step: `x` [B, H, P] -> `out`; `state` [slots, H, P, N] updated in place.

    Source symbol: `selective_state_update` of `sglang.kernels.ops.mamba.triton_ops`; `dt`, `A`,
    `D` and `dt_bias` come broadcast over head dim and state size.
    """
    if state_batch_indices is None or out is None or disable_state_update:
        raise KernelError("the update serves MambaMixer2 only: needs state_batch_indices, out and an update")
    _, heads, dim, size = state.shape
    view = StateView(state.view(-1, heads * dim, size), 0, heads, dim)
    slots = state_batch_indices[:, None]
    y = state_update(
        view,
        slots,
        slots,
        x,
        _head_values("dt", dt, 2),
        _head_values("A", A, 1),
        B,
        C,
        d=None if D is None else _head_values("D", D, 1),
        z=z,
        dt_bias=None if dt_bias is None else _head_values("dt_bias", dt_bias, 1),
        dt_softplus=dt_softplus,
    )
    out.copy_(y)


REPLACEMENTS = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "causal_conv1d_fn_triton": causal_conv1d_fn,
    "causal_conv1d_update": causal_conv1d_update,
    "causal_conv1d_update_triton": causal_conv1d_update,
    "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
    "selective_state_update": selective_state_update,
}
"""Name in the mixer's module -> function.  All six are globals that `MambaMixer2.forward` looks up."""


def install() -> None:
    """Put the replacements into the mixer's module.  Idempotent.

    Set by attribute: four of the names do not exist there on this platform, so a REPLACE hook
    finds no target.  Imports the mixer, so call it where that is wanted (a worker process).
    """
    mixer = importlib.import_module(MIXER_MODULE)
    for name, replacement in REPLACEMENTS.items():
        setattr(mixer, name, replacement)


def installed() -> bool:
    """True when all six names of the mixer's module are ours (a second plugin may have taken them back)."""
    mixer = importlib.import_module(MIXER_MODULE)
    return all(getattr(mixer, name, None) is replacement for name, replacement in REPLACEMENTS.items())
