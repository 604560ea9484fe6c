"""What stock SGLang's strategy `extra_buffer` needs on a plain CPU: snapshots of Mamba2 states.

A prefill's snapshot is a state inside the scan (`stock_ops`); a decode's is a copy to another slot, which
stock leaves to Triton.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_hybrid.platforms.replace import replace_functions

SCATTER_MODULE = "sglang.kernels.ops.mamba.mamba_state_scatter_triton"


def _rows(
    sources: torch.Tensor, mask: torch.Tensor, targets: torch.Tensor, batch_size: int, check_freed_slots: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots to copy from and to."""
    wanted = mask[:batch_size].bool()
    if check_freed_slots:
        wanted = wanted & (sources[:batch_size] >= 0) & (targets[:batch_size] >= 0)
    return sources[:batch_size][wanted].long(), targets[:batch_size][wanted].long()


def track_mamba_states_if_needed(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copy one layer's states [slots, ...] of the masked rows from their live to their tracking slots."""
    sources, targets = _rows(
        cache_indices, mamba_track_mask, mamba_track_indices, batch_size, check_freed_slots
    )
    for states in (conv_states, ssm_states):
        states[targets] = states[sources]


def track_mamba_states_all_layers(
    conv_states_pool: torch.Tensor,
    ssm_states_pool: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """`track_mamba_states_if_needed` for the pools [layers, slots, ...] of all layers."""
    sources, targets = _rows(
        cache_indices, mamba_track_mask, mamba_track_indices, batch_size, check_freed_slots
    )
    for states in (conv_states_pool, ssm_states_pool):
        states[:, targets] = states[:, sources]


def _unpinned(self: torch.Tensor, *_device: object) -> torch.Tensor:
    return self


REPLACEMENTS: dict[str, tuple[Callable[..., object], ...]] = {
    SCATTER_MODULE: (track_mamba_states_if_needed, track_mamba_states_all_layers),
}
"""Module that defines a function -> ours of the same name."""


def install() -> None:
    """Called once in each worker.  `ScheduleBatch.prepare_for_decode` pins its mask without asking whether
    there is a device to pin it for, which torch refuses on a machine without one; here a pinned tensor is
    the tensor itself."""
    replace_functions(REPLACEMENTS)
    torch.Tensor.pin_memory = _unpinned  # type: ignore[assignment, method-assign]
