"""Torch replacements for what stock SGLang's Kimi-Linear calls, as thin adapters over `kernels/`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_hybrid.kernels import DeltaInputs, delta_scan, delta_update, read_states, write_states
from sglang_hybrid.kernels.checks import KernelError
from sglang_hybrid.platforms.gdn_ops import stock_states
from sglang_hybrid.platforms.replace import replace_functions
from sglang_hybrid.platforms.stock_ops import stock_plan


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    output_intermediate_states: bool = False,
    beta_is_raw: bool = False,
    **_unused: object,
) -> torch.Tensor:
    """Prefill scan of one ragged row: `q`, `k`, `g` [1, T, H, K], `v` [1, T, H, V] -> y like v.

    `initial_state` [slots, H, V, K] is read, fresh slots too, and written in place.  Source symbol:
    `chunk_kda` of `sglang.kernels.ops.attention.fla.kda`, as `TritonKDAKernel.extend` calls it.
    """
    if initial_state is None or initial_state_indices is None or cu_seqlens is None:
        raise KernelError("the scan serves KDAAttnBackend only: needs initial_state, its indices, cu_seqlens")
    if A_log is None or dt_bias is None or not beta_is_raw or not use_qk_l2norm_in_kernel:
        raise KernelError("the scan serves KDAAttnBackend only: needs raw gates and unit keys")
    if scale is not None or output_intermediate_states:
        raise KernelError("the scan has no own scale and hands out no states on the way")
    view, slots = stock_states(initial_state), initial_state_indices[:, None]
    gate = dt_bias.view(g.shape[2:])
    inputs = DeltaInputs(q[0], k[0], v[0], g[0], beta[0], A_log.view(-1), gate, lower_bound)
    y, states = delta_scan(
        inputs.q,
        inputs.k,
        inputs.v,
        *inputs.gates(),
        stock_plan(cu_seqlens, q.device),
        initial_states=read_states(view, slots),
        state_dtype=initial_state.dtype,
    )
    write_states(view, slots, states)
    return y[None]


def fused_recurrent_kda_packed_decode(
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
    lower_bound: float | None = None,
) -> None:
    """Decode step: `mixed_qkv` [B, 2 H K + H V], `a` [B, H K], `b` [B, H] -> `out` [B, 1, H, V];
    `initial_state` updated in place.

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
            a.view(batch, heads, size),
            b,
            A_log,
            dt_bias.view(heads, size),
            lower_bound,
        ),
    )
    out.copy_(y[:, None])


def rms_norm_gated(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str = "swish",
    residual: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Norm of the last dimension, then the gate: `x` and `g` [..., V] -> the same in x's dtype."""
    if bias is not None or residual is not None or prenorm:
        raise KernelError("the norm has no bias, no residual and no second result on this platform")
    if activation not in ("swish", "silu", "sigmoid"):
        raise KernelError(f"activation is {activation!r}, needs 'swish', 'silu' or 'sigmoid'")
    wide, gate = x.float(), g.reshape(x.shape).float()
    open_ = torch.sigmoid(gate) if activation == "sigmoid" else gate * torch.sigmoid(gate)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (normed * open_).to(x.dtype)


REPLACEMENTS: dict[str, tuple[Callable[..., object], ...]] = {
    "sglang.kernels.ops.attention.fla.kda": (chunk_kda,),
    "sglang.kernels.ops.attention.fla.fused_recurrent": (fused_recurrent_kda_packed_decode,),
    "sglang.kernels.ops.attention.fla.fused_norm_gate": (rms_norm_gated,),
}
"""Module that defines a function -> ours of the same name."""


def install() -> None:
    """Put the replacements where they are defined and wherever they were imported by name.  Idempotent."""
    replace_functions(REPLACEMENTS)
    read_latent_rows("torch_native")


def read_latent_rows(backend: str) -> None:
    """Let latent attention go by its latent rows with an attention backend that has keys and values from the
    pool alone; SGLang's choice would be to expand those of a prefill."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register(backend, lambda attn, forward_batch: AttnForwardMethod.MLA)
