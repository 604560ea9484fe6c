"""Torch replacements for what stock SGLang's Ling-2.5 calls: lightning attention over `kernels/`, and rotary
positions by the route that every platform has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_hybrid.kernels import ssd_scan
from sglang_hybrid.kernels.checks import KernelError
from sglang_hybrid.platforms.replace import replace_functions
from sglang_hybrid.platforms.stock_ops import stock_plan


def seg_la_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s: torch.Tensor,
    decay_scales: torch.Tensor,
    meta: Any,
    caches: torch.Tensor | None = None,
    cache_indices: torch.Tensor | None = None,
    track_lens: torch.Tensor | None = None,
    track_state_indices: torch.Tensor | None = None,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """Prefill or decode of one ragged row: `q`, `k`, `v` [T, H, D] -> y [T, H, D].

    `s` [slots, H, key, value] is read where `meta.s_scales` is set and written in place; a negative slot is
    neither.  Source symbol: the function of that name in `sglang.kernels.ops.attention.linear.seg_la`, whose
    speculative paths and snapshots this platform does not offer.
    """
    if caches is not None or meta.mask is not None:
        raise KernelError("lightning attention verifies no drafts on this platform")
    if track_lens is not None or track_state_indices is not None:
        raise KernelError("lightning attention leaves no snapshots on this platform: needs no_buffer")
    plan = stock_plan(meta.q_offsets, q.device)
    tokens, slots = plan.tokens, meta.s_offsets.long()
    begun = (meta.s_scales > 0) & (slots >= 0)
    held = s[slots.clamp(min=0)].transpose(-1, -2).float()
    y, states = ssd_scan(
        v[:tokens],
        torch.ones(tokens, q.shape[1]),
        -decay_scales.flatten(),
        k[:tokens],
        q[:tokens] * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale),
        plan,
        initial_states=torch.where(begun[:, None, None, None], held, 0.0),
    )
    there = slots >= 0
    s[slots[there]] = states[there].transpose(-1, -2).to(s.dtype)
    out = q.new_zeros(q.shape)
    out[:tokens] = y
    return out


def get_rope_cpu(
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: int,
    is_neox_style: bool = True,
    rope_scaling: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    partial_rotary_factor: float = 1.0,
    device: str | None = None,
) -> Any:
    """`get_rope` of `sglang.srt.layers.rotary_embedding.factory`; the function of this name there is for
    SGLang's own CPU engine and makes YaRN alone."""
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    return get_rope(
        head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, partial_rotary_factor
    )


def _rotate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`RotaryEmbedding.forward_cuda`, which Ling's latent attention asks for by name."""
    return self.forward_native(*args, **kwargs)


REPLACEMENTS: dict[str, tuple[Callable[..., object], ...]] = {
    "sglang.kernels.ops.attention.linear.seg_la": (seg_la_fwd,),
    "sglang.srt.layers.rotary_embedding.factory": (get_rope_cpu,),
}
"""Module that defines a function -> ours of the same name."""


def install() -> None:
    """Put the replacements where they are defined and wherever they were imported by name.  Idempotent."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    replace_functions(REPLACEMENTS)
    RotaryEmbedding.forward_cuda = _rotate
