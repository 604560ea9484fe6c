"""Weights of a small random Qwen3.5 whose gated delta rule remembers.

A key of K dimensions is overwritten by the keys that follow: a step of strength beta takes away
beta / K of what the state held.  So beta must be small, and there is no bias to make it so; the
residual stream carries a constant in its first channel instead, from which the projection of beta
takes its mean.
"""

from __future__ import annotations

import math

import torch

from sglang_hybrid.cli.demo_parts import (
    MEMORY_SPAN,
    SMALL,
    STEP,
    attention,
    checkpoint,
    mlp,
    normal,
    prefixed,
)
from sglang_hybrid.cli.demo_shape import DemoShape

CONSTANT = 4.0
"""First channel of every embedding; the others are around 1."""

STRENGTH = -4.0
"""Mean of what goes into beta's sigmoid in the first layer."""


def _delta(shape: DemoShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Weights of one recurrent mixer, named as in the checkpoint."""
    fan_in = 1 / math.sqrt(shape.hidden)
    spans = torch.logspace(math.log10(MEMORY_SPAN[0]), math.log10(MEMORY_SPAN[1]), shape.ssm_heads)
    strength = normal((shape.ssm_heads, shape.hidden), fan_in, generator)
    scale = math.sqrt(1 + (CONSTANT**2 - 1) / shape.hidden)  # what the norm divides by
    strength[:, 0] = STRENGTH * scale / CONSTANT
    return {
        "in_proj_qkv.weight": normal((shape.conv_channels, shape.hidden), fan_in, generator),
        "in_proj_z.weight": normal((shape.ssm_width, shape.hidden), fan_in, generator),
        "in_proj_b.weight": strength,
        "in_proj_a.weight": normal((shape.ssm_heads, shape.hidden), 0.3 * fan_in, generator),
        "conv1d.weight": normal(
            (shape.conv_channels, 1, shape.conv_width), SMALL / math.sqrt(shape.conv_width), generator
        ),
        "dt_bias": torch.full((shape.ssm_heads,), math.log(math.expm1(STEP))),
        "A_log": torch.log(1 / (STEP * spans)),
        "norm.weight": torch.ones(shape.ssm_head_dim),
        "out_proj.weight": normal((shape.hidden, shape.ssm_width), 1 / math.sqrt(shape.ssm_width), generator),
    }


def qwen_layer(shape: DemoShape, layer: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """One layer of transformers' dense Qwen3.5: gated attention or gated delta rule, then the MLP.

    The weight of a norm is what it adds to one, but for the gated norm of the recurrent mixer.
    """
    if shape.attention[layer]:
        fan_in = 1 / math.sqrt(shape.hidden)
        gated = normal((2 * shape.heads * shape.head_dim, shape.hidden), fan_in, generator)
        mixer = prefixed("self_attn", attention(shape, generator)) | {
            "self_attn.q_proj.weight": gated,
            "self_attn.q_norm.weight": torch.zeros(shape.head_dim),
            "self_attn.k_norm.weight": torch.zeros(shape.head_dim),
        }
    else:
        mixer = prefixed("linear_attn", _delta(shape, generator))
    return (
        mixer
        | prefixed("mlp", mlp(shape, generator))
        | {
            "input_layernorm.weight": torch.zeros(shape.hidden),
            "post_attention_layernorm.weight": torch.zeros(shape.hidden),
        }
    )


def qwen_weights(
    shape: DemoShape, seed: int, silent: int, logit_std: float = 10.0
) -> dict[str, torch.Tensor]:
    """All weights of a dense Qwen3.5; see `checkpoint`."""
    return checkpoint(shape, qwen_layer, seed, silent, logit_std, unit_norm=0.0, constant=CONSTANT)
