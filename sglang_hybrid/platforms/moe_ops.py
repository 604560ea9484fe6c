"""Torch replacements for what models with experts, Qwen3-Next and Nemotron-H call beside their layers' state.

SGLang's own expert routine for platforms without kernels leaves out the factor that some models multiply the
routed experts by, and knows gated activations only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from sglang_hybrid.kernels.checks import KernelError
from sglang_hybrid.platforms.replace import replace_functions

GATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": F.silu, "gelu": F.gelu}
"""Activations of the first half of an expert's projection; the second half multiplies the result."""
PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **GATED,
    "relu2": lambda x: F.relu(x).square(),
}
"""Activations of an expert that has no second half."""


def moe_forward_native(layer: Any, x: torch.Tensor, topk_output: Any, moe_runner_config: Any) -> torch.Tensor:
    """Routed experts of `x` `[T, hidden]`: the sum over a token's experts, by weight and the model's factor.

    Source symbol: `moe_forward_native` of `sglang.srt.layers.moe.fused_moe_native`.
    """
    if moe_runner_config.apply_router_weight_on_input or moe_runner_config.gemm1_alpha is not None:
        raise KernelError("experts weigh their inputs or clip their gates, needs neither on this platform")
    table = GATED if moe_runner_config.is_gated else PLAIN
    act = table.get(moe_runner_config.activation)
    if act is None:
        raise KernelError(
            f"the experts' activation is {moe_runner_config.activation!r}, needs one of {', '.join(table)}"
        )
    weights, chosen, _ = topk_output
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in chosen.unique().tolist():
        if expert < 0:  # padding
            continue
        rows, places = torch.where(chosen == expert)
        inner = F.linear(x[rows], layer.w13_weight[expert])
        if moe_runner_config.is_gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = act(gate) * up
        else:
            inner = act(inner)
        out = F.linear(inner, layer.w2_weight[expert]).float() * weights[rows, places, None].float()
        total.index_add_(0, rows, out)
    factor = moe_runner_config.routed_scaling_factor
    return (total if factor is None else total * factor).to(x.dtype)


def fused_gate_sigmoid_mul_add(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> None:
    """Add the shared expert's output `[T, hidden]`, times sigmoid of its gate, to that of the routed ones."""
    gate = torch.sigmoid(hidden_states.float() @ gate_weight.float())
    final_hidden_states.add_((gate[:, None] * shared_output.float()).to(final_hidden_states.dtype))


def fused_qkvzba_split_reshape_cat(
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Projections that lie side by side for each key head -> (qkv `[T, *]`, z `[T, H, V]`, b, a `[T, H]`)."""
    each = num_heads_v // num_heads_qk
    rows = mixed_qkvz.view(-1, num_heads_qk, 2 * head_qk + 2 * each * head_v)
    q, k, v, z = torch.split(rows, [head_qk, head_qk, each * head_v, each * head_v], dim=-1)
    b, a = torch.split(mixed_ba.view(-1, num_heads_qk, 2 * each), [each, each], dim=-1)
    qkv = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=-1)
    return (
        qkv,
        z.reshape(-1, num_heads_v, head_v),
        b.reshape(-1, num_heads_v),
        a.reshape(-1, num_heads_v),
    )


_torch_mm = torch.mm


def _mm(
    a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype | None = None, **options: Any
) -> torch.Tensor:
    """`torch.mm`, whose `out_dtype` torch has on accelerators alone; Nemotron-H's router asks for it."""
    if out_dtype is None:
        return _torch_mm(a, b, **options)
    return _torch_mm(a.to(out_dtype), b.to(out_dtype), **options)


def _current_device() -> torch.device:
    return torch.device("cpu")


REPLACEMENTS: dict[str, tuple[Callable[..., object], ...]] = {
    "sglang.srt.layers.moe.fused_moe_native": (moe_forward_native,),
    "sglang.kernels.ops.elementwise.elementwise": (fused_gate_sigmoid_mul_add,),
    "sglang.kernels.ops.attention.triton_gdn_fused_proj": (fused_qkvzba_split_reshape_cat,),
}
"""Module that defines a function -> ours of the same name."""


def install() -> None:
    """Called once in each worker.

    `Qwen3GatedDeltaNet` asks torch's accelerator for its current device, which a build of torch for CUDA
    cannot answer on a machine without one; here every tensor is on the CPU.
    """
    replace_functions(REPLACEMENTS)
    torch.mm = _mm  # type: ignore[assignment]
    torch.cuda.current_device = _current_device  # type: ignore[assignment]
