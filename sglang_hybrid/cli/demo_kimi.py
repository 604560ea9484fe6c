"""Weights of a small random Kimi-Linear whose delta rule remembers (see `demo_gdn`)."""

from __future__ import annotations

import math

import torch

from sglang_hybrid.cli.demo_families import KV_RANK, KV_ROPE
from sglang_hybrid.cli.demo_gdn import CONSTANT, STRENGTH
from sglang_hybrid.cli.demo_parts import MEMORY_SPAN, SMALL, STEP, checkpoint, mlp, normal, prefixed
from sglang_hybrid.cli.demo_shape import DemoShape


def _delta(shape: DemoShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Weights of one recurrent mixer; `forget_gate` and the one convolution are transformers' names."""
    fan_in, inner = 1 / math.sqrt(shape.hidden), 1 / math.sqrt(shape.ssm_head_dim)
    spans = torch.logspace(math.log10(MEMORY_SPAN[0]), math.log10(MEMORY_SPAN[1]), shape.ssm_heads)
    strength = normal((shape.ssm_heads, shape.hidden), fan_in, generator)
    scale = math.sqrt(1 + (CONSTANT**2 - 1) / shape.hidden)  # what the norm divides by
    strength[:, 0] = STRENGTH * scale / CONSTANT
    weights = {
        f"{name}_proj.weight": normal((shape.ssm_width, shape.hidden), fan_in, generator) for name in "qkv"
    }
    return weights | {
        "conv1d.weight": normal(
            (3 * shape.ssm_width, 1, shape.conv_width), SMALL / math.sqrt(shape.conv_width), generator
        ),
        "forget_gate.f_a_proj.weight": normal((shape.ssm_head_dim, shape.hidden), fan_in, generator),
        "forget_gate.f_b_proj.weight": normal((shape.ssm_width, shape.ssm_head_dim), 0.3 * inner, generator),
        "forget_gate.dt_bias": torch.full((shape.ssm_width,), math.log(math.expm1(STEP))),
        "forget_gate.A_log": torch.log(1 / (STEP * spans)).view(1, 1, -1, 1),
        "b_proj.weight": strength,
        "g_a_proj.weight": normal((shape.ssm_head_dim, shape.hidden), fan_in, generator),
        "g_b_proj.weight": normal((shape.ssm_width, shape.ssm_head_dim), inner, generator),
        "o_norm.weight": torch.ones(shape.ssm_head_dim),
        "o_proj.weight": normal((shape.hidden, shape.ssm_width), 1 / math.sqrt(shape.ssm_width), generator),
    }


def _latent_attention(shape: DemoShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Keys and values of all heads come from one latent row; heads have `head_dim` of both beside the rope
    part, which no rotation touches."""
    fan_in, rank = 1 / math.sqrt(shape.hidden), 1 / math.sqrt(KV_RANK)
    inner = shape.heads * shape.head_dim
    return {
        "q_proj.weight": normal((inner + shape.heads * KV_ROPE, shape.hidden), fan_in, generator),
        "kv_a_proj_with_mqa.weight": normal((KV_RANK + KV_ROPE, shape.hidden), fan_in, generator),
        "kv_a_layernorm.weight": torch.ones(KV_RANK),
        "kv_b_proj.weight": normal((2 * inner, KV_RANK), rank, generator),
        "o_proj.weight": normal((shape.hidden, inner), 1 / math.sqrt(inner), generator),
    }


def kimi_layer(shape: DemoShape, layer: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """One layer of transformers' Kimi-Linear without experts: latent attention or KDA, then the MLP."""
    mixer = _latent_attention if shape.attention[layer] else _delta
    return (
        prefixed("self_attn", mixer(shape, generator))
        | prefixed("mlp", mlp(shape, generator))
        | {
            "input_layernorm.weight": torch.ones(shape.hidden),
            "post_attention_layernorm.weight": torch.ones(shape.hidden),
        }
    )


def kimi_weights(
    shape: DemoShape, seed: int, silent: int, logit_std: float = 10.0
) -> dict[str, torch.Tensor]:
    """All weights of a Kimi-Linear without experts; see `checkpoint`."""
    return checkpoint(shape, kimi_layer, seed, silent, logit_std, constant=CONSTANT)
