"""Torch replacements for what stock SGLang's Qwen3.5 calls, as thin adapters over `kernels/`.

Unlike the Mamba2 mixer's, these functions exist on every platform, as Triton; whoever imported one
by name holds it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_hybrid.kernels import DeltaInputs, delta_scan, delta_update, gates, read_states, write_states
from sglang_hybrid.kernels.checks import KernelError
from sglang_hybrid.kernels.elementwise import silu
from sglang_hybrid.platforms.replace import replace_functions
from sglang_hybrid.platforms.stock_ops import causal_conv1d_fn, causal_conv1d_update, stock_plan
from sglang_hybrid.pools.views import StateView


def fused_gdn_gating(
    A_log: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates of a ragged row: `a` and `b` [T, H] -> (log decay, write strength), both [1, T, H] in fp32."""
    if (beta, threshold) != (1.0, 20.0):
        raise KernelError(f"beta {beta} and threshold {threshold} bend softplus, needs 1.0 and 20.0")
    decay, strength = gates(a, b, A_log, dt_bias)
    return decay[None], strength[None]


def stock_states(states: torch.Tensor) -> StateView:
    """A stock pool [slots, H, V, K] as pages of one state each."""
    slots, heads, dim, size = states.shape
    return StateView(states.view(slots, heads * dim, size), 0, heads, dim)


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
) -> tuple[torch.Tensor, None, None]:
    """Prefill scan of one ragged row: `q`, `k` [1, T, G, K], `v` [1, T, H, V] -> (y like v, None, None).

    `initial_state` [slots, H, V, K] is read, fresh slots too, and written in place.  Source symbol:
    `chunk_gated_delta_rule` of `sglang.kernels.ops.attention.fla.chunk`, as `TritonGDNKernel.extend`
    calls it.  The states at chunk starts, its third result, belong to the strategy `extra_buffer`,
    which this platform does not offer.
    """
    if initial_state is None or initial_state_indices is None or cu_seqlens is None:
        raise KernelError(
            "the scan serves GDNAttnBackend only: needs initial_state, its indices and cu_seqlens"
        )
    if scale is not None or head_first or not use_qk_l2norm_in_kernel:
        raise KernelError("the scan serves GDNAttnBackend only: needs unit keys, tokens first, no own scale")
    view, slots = stock_states(initial_state), initial_state_indices[:, None]
    y, states = delta_scan(
        q[0],
        k[0],
        v[0],
        g[0],
        beta[0],
        stock_plan(cu_seqlens, q.device),
        initial_states=read_states(view, slots),
        state_dtype=initial_state.dtype,
    )
    if inplace_update:
        write_states(view, slots, states)
    return y[None], None, None


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> None:
    """Decode step: `mixed_qkv` [B, 2 G K + H V] -> `out` [B, 1, H, V]; `initial_state` updated in place.

    Source symbol: the function of that name in `sglang.kernels.ops.attention.fla.fused_recurrent`.
    """
    _, heads, dim, size = initial_state.shape
    if not use_qk_l2norm_in_kernel or abs(scale - size**-0.5) > 1e-6:
        raise KernelError(f"scale is {scale}, needs unit keys and {size}**-0.5")
    batch, keys = mixed_qkv.shape[0], (mixed_qkv.shape[1] - heads * dim) // 2
    q, k, v = torch.split(mixed_qkv, [keys, keys, heads * dim], dim=-1)
    slots = ssm_state_indices[:, None]
    y = delta_update(
        stock_states(initial_state),
        slots,
        slots,
        DeltaInputs(
            q.view(batch, keys // size, size),
            k.view(batch, keys // size, size),
            v.view(batch, heads, dim),
            a,
            b,
            A_log,
            dt_bias,
        ),
    )
    out.copy_(y[:, None])


def fused_qkvzba_split_reshape_cat_contiguous(
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Projections [T, q k v z] and [T, b a] -> (qkv [T, *], z [T, H, V], b [T, H], a [T, H]), each packed."""
    values = num_heads_v * head_v
    qkv, z = torch.split(mixed_qkvz, [2 * num_heads_qk * head_qk + values, values], dim=-1)
    b, a = mixed_ba.chunk(2, dim=-1)
    return qkv.contiguous(), z.contiguous().view(-1, num_heads_v, head_v), b.contiguous(), a.contiguous()


def rms_norm_gated(
    *,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
) -> torch.Tensor:
    """Norm of the last dimension, or of groups of `group_size` of it, then the gate `z` where there is one:
    `x` and `z` [..., V] -> the same in x's dtype."""
    if bias is not None or not (norm_before_gate and is_rms_norm):
        raise KernelError("the norm is an RMS norm in front of its gate on this platform, and has no bias")
    if activation not in ("swish", "silu", "sigmoid"):
        raise KernelError(f"activation is {activation!r}, needs 'swish', 'silu' or 'sigmoid'")
    wide = x.float().reshape(*x.shape[:-1], -1, group_size or x.shape[-1])
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight.float()
    if z is not None:
        gate = z.reshape(x.shape).float()
        normed = normed * (torch.sigmoid(gate) if activation == "sigmoid" else silu(gate))
    return normed.to(x.dtype)


def fused_sigmoid_mul(
    attn_output: torch.Tensor, gate: torch.Tensor, inplace: bool = False, quant: bool = False
) -> torch.Tensor:
    """`attn_output` times sigmoid of `gate`, which may be [T, heads, dim] for a flat output."""
    if quant:
        raise KernelError("quant is True, needs False on this platform")
    gated = attn_output.float() / (1 + torch.exp(-gate.reshape(attn_output.shape).float()))
    return attn_output.copy_(gated) if inplace else gated.to(attn_output.dtype)


REPLACEMENTS: dict[str, tuple[Callable[..., object], ...]] = {
    "sglang.kernels.ops.mamba.causal_conv1d_triton": (causal_conv1d_fn, causal_conv1d_update),
    "sglang.kernels.ops.attention.linear.fused_gdn_gating": (fused_gdn_gating,),
    "sglang.kernels.ops.attention.fla.chunk": (chunk_gated_delta_rule,),
    "sglang.kernels.ops.attention.fla.fused_recurrent": (fused_recurrent_gated_delta_rule_packed_decode,),
    "sglang.kernels.ops.attention.triton_gdn_fused_proj": (fused_qkvzba_split_reshape_cat_contiguous,),
    "sglang.kernels.ops.attention.fla.layernorm_gated": (rms_norm_gated,),
    "sglang.kernels.ops.elementwise.elementwise": (fused_sigmoid_mul,),
}
"""Module that defines a function -> ours of the same name."""


def install() -> None:
    """Put the replacements where they are defined and wherever they were imported by name.  Idempotent."""
    replace_functions(REPLACEMENTS)
