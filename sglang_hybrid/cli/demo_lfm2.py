"""Weights of a small random LFM2: gated short convolutions and attention, with or without experts.

The taps of a convolution are of one size, so that a window that is lost, shifted or another request's shows
in the next token, and the keys of that token carry it on.
"""

from __future__ import annotations

import math

import torch

from sglang_hybrid.cli.demo_families import EXPERTS
from sglang_hybrid.cli.demo_parts import attention, checkpoint, normal, prefixed
from sglang_hybrid.cli.demo_shape import DemoShape


def _short_conv(shape: DemoShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    fan_in = 1 / math.sqrt(shape.hidden)
    return {
        "in_proj.weight": normal((3 * shape.hidden, shape.hidden), fan_in, generator),
        "conv.weight": normal(
            (shape.hidden, 1, shape.conv_width), 1 / math.sqrt(shape.conv_width), generator
        ),
        "out_proj.weight": normal((shape.hidden, shape.hidden), fan_in, generator),
    }


def _mlp(width: int, shape: DemoShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    fan_in = 1 / math.sqrt(shape.hidden)
    return {
        "w1.weight": normal((width, shape.hidden), fan_in, generator),
        "w3.weight": normal((width, shape.hidden), fan_in, generator),
        "w2.weight": normal((shape.hidden, width), 1 / math.sqrt(width), generator),
    }


def _experts(shape: DemoShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Named as transformers keeps them in memory.  The router spreads wide: no tie decides who computes."""
    fan_in, wide = 1 / math.sqrt(shape.hidden), shape.intermediate // 2
    return {
        "gate.weight": normal((EXPERTS, shape.hidden), 4 * fan_in, generator),
        "expert_bias": normal((EXPERTS,), 0.01, generator),
        "experts.gate_up_proj": normal((EXPERTS, 2 * wide, shape.hidden), fan_in, generator),
        "experts.down_proj": normal((EXPERTS, shape.hidden, wide), 1 / math.sqrt(wide), generator),
    }


def _layer(
    shape: DemoShape, layer: int, ffn: dict[str, torch.Tensor], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    if shape.attention[layer]:
        weights = attention(shape, generator)
        weights["out_proj.weight"] = weights.pop("o_proj.weight")
        mixer = prefixed("self_attn", weights) | {
            "self_attn.q_layernorm.weight": torch.ones(shape.head_dim),
            "self_attn.k_layernorm.weight": torch.ones(shape.head_dim),
        }
    else:
        mixer = prefixed("conv", _short_conv(shape, generator))
    return (
        mixer
        | prefixed("feed_forward", ffn)
        | {
            "operator_norm.weight": torch.ones(shape.hidden),
            "ffn_norm.weight": torch.ones(shape.hidden),
        }
    )


def lfm2_layer(shape: DemoShape, layer: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """One layer of transformers' LFM2: attention or short convolution, then the MLP."""
    return _layer(shape, layer, _mlp(shape.intermediate, shape, generator), generator)


def lfm2_moe_layer(shape: DemoShape, layer: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The same of LFM2-MoE: behind the first layer experts instead of the MLP."""
    if layer == 0:
        return lfm2_layer(shape, layer, generator)
    return _layer(shape, layer, _experts(shape, generator), generator)


def lfm2_weights(
    shape: DemoShape, seed: int, silent: int, logit_std: float = 10.0
) -> dict[str, torch.Tensor]:
    """All weights of an LFM2; see `checkpoint`."""
    return checkpoint(shape, lfm2_layer, seed, silent, logit_std, final_norm="embedding_norm")


def lfm2_moe_weights(
    shape: DemoShape, seed: int, silent: int, logit_std: float = 10.0
) -> dict[str, torch.Tensor]:
    """All weights of an LFM2-MoE; see `checkpoint`."""
    return checkpoint(shape, lfm2_moe_layer, seed, silent, logit_std, final_norm="embedding_norm")
