"""Weights of a small random Ling-2.5, named as SGLang's `BailingMoeV2_5ForCausalLM` reads them."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from sglang_hybrid.cli.demo_families import KV_RANK, KV_ROPE, QUERY_RANK
from sglang_hybrid.cli.demo_moe import EXPERTS
from sglang_hybrid.cli.demo_parts import SMALL, checkpoint, mlp, normal, prefixed
from sglang_hybrid.cli.demo_shape import DemoShape


def _lightning(shape: DemoShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Weights of one recurrent mixer.  Its decay has none."""
    fan_in = 1 / math.sqrt(shape.hidden)
    return {
        "query_key_value.weight": normal((3 * shape.ssm_width, shape.hidden), SMALL * fan_in, generator),
        "query_layernorm.weight": torch.ones(shape.ssm_head_dim),
        "key_layernorm.weight": torch.ones(shape.ssm_head_dim),
        "g_proj.weight": normal((shape.ssm_width, shape.hidden), fan_in, generator),
        "g_norm.weight": torch.ones(shape.ssm_width),
        "dense.weight": normal((shape.hidden, shape.ssm_width), 1 / math.sqrt(shape.ssm_width), generator),
    }


def _latent_attention(shape: DemoShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Queries come from a row of their own, keys and values from another; a head has `head_dim` of all three
    beside the part that is rotated."""
    fan_in = 1 / math.sqrt(shape.hidden)
    queries, inner = 1 / math.sqrt(QUERY_RANK), shape.heads * shape.head_dim
    return {
        "q_a_proj.weight": normal((QUERY_RANK, shape.hidden), fan_in, generator),
        "q_a_layernorm.weight": torch.ones(QUERY_RANK),
        "q_b_proj.weight": normal((inner + shape.heads * KV_ROPE, QUERY_RANK), queries, generator),
        "kv_a_proj_with_mqa.weight": normal((KV_RANK + KV_ROPE, shape.hidden), fan_in, generator),
        "kv_a_layernorm.weight": torch.ones(KV_RANK),
        "kv_b_proj.weight": normal((2 * inner, KV_RANK), 1 / math.sqrt(KV_RANK), generator),
        "dense.weight": normal((shape.hidden, inner), 1 / math.sqrt(inner), generator),
    }


def ling_layer(shape: DemoShape, layer: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """One layer without experts: latent attention or lightning attention, then the MLP."""
    mixer = _latent_attention if shape.attention[layer] else _lightning
    return (
        prefixed("attention", mixer(shape, generator))
        | prefixed("mlp", mlp(shape, generator))
        | {
            "input_layernorm.weight": torch.ones(shape.hidden),
            "post_attention_layernorm.weight": torch.ones(shape.hidden),
        }
    )


def _experts(shape: DemoShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Routed experts, half as wide as the MLP, and a shared one."""
    half = replace(shape, intermediate=shape.intermediate // 2)
    weights = {
        "gate.weight": normal((2 * EXPERTS, shape.hidden), 1 / math.sqrt(shape.hidden), generator),
        "gate.expert_bias": normal((2 * EXPERTS,), 0.1, generator),
        **prefixed("shared_experts", mlp(half, generator)),
    }
    for expert in range(2 * EXPERTS):
        weights |= prefixed(f"experts.{expert}", mlp(half, generator))
    return weights


def ling_moe_layer(shape: DemoShape, layer: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The same with experts, which the first layer has not."""
    weights = ling_layer(shape, layer, generator)
    if layer == 0:
        return weights
    dense = [name for name in weights if name.startswith("mlp.")]
    for name in dense:
        del weights[name]
    return weights | prefixed("mlp", _experts(shape, generator))


def ling_weights(
    shape: DemoShape, seed: int, silent: int, logit_std: float = 10.0
) -> dict[str, torch.Tensor]:
    """All weights of a Ling-2.5 without experts; see `checkpoint`."""
    return _renamed(checkpoint(shape, ling_layer, seed, silent, logit_std))


def ling_moe_weights(
    shape: DemoShape, seed: int, silent: int, logit_std: float = 10.0
) -> dict[str, torch.Tensor]:
    """All weights of a Ling-2.5 with experts; see `checkpoint`."""
    return _renamed(checkpoint(shape, ling_moe_layer, seed, silent, logit_std))


def _renamed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    weights["model.word_embeddings.weight"] = weights.pop("model.embed_tokens.weight")
    return weights
