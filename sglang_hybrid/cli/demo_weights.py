"""Weights of the Mamba2 demo models: small, random, and unable to hide a wrong state.

Plain random weights forget within a few tokens, and most state bugs would then stay invisible.
Here every head has its own memory, spread from `MEMORY_SPAN[0]` to `MEMORY_SPAN[1]` tokens; the
state is the larger part of what a recurrent layer says; and logits are far apart, so that rounding
does not decide which token comes next.
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


def mamba(shape: DemoShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Weights of one recurrent mixer, named as in the checkpoint."""
    fan_in = 1 / math.sqrt(shape.hidden)
    bc = shape.ssm_groups * shape.ssm_state
    rows = [
        normal((shape.ssm_width, shape.hidden), fan_in, generator),  # gate
        normal((shape.ssm_width + 2 * bc, shape.hidden), fan_in, generator),  # x, B, C
        normal((shape.ssm_heads, shape.hidden), 0.3 * fan_in, generator),  # dt
    ]
    spans = torch.logspace(math.log10(MEMORY_SPAN[0]), math.log10(MEMORY_SPAN[1]), shape.ssm_heads)
    taps = normal((shape.conv_channels, 1, shape.conv_width), SMALL / math.sqrt(shape.conv_width), generator)
    return {
        "in_proj.weight": torch.cat(rows),
        "conv1d.weight": taps,
        "conv1d.bias": torch.zeros(shape.conv_channels),
        "dt_bias": torch.full((shape.ssm_heads,), math.log(math.expm1(STEP))),
        "A_log": torch.log(1 / (STEP * spans)),
        "D": torch.full((shape.ssm_heads,), 0.25),
        "norm.weight": torch.ones(shape.ssm_width),
        "out_proj.weight": normal((shape.hidden, shape.ssm_width), 1 / math.sqrt(shape.ssm_width), generator),
    }


def falcon_layer(shape: DemoShape, layer: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """One layer of transformers' Falcon-H1: attention and Mamba2 side by side, then the MLP."""
    return (
        {
            "input_layernorm.weight": torch.ones(shape.hidden),
            "pre_ff_layernorm.weight": torch.ones(shape.hidden),
        }
        | prefixed("self_attn", attention(shape, generator))
        | prefixed("feed_forward", mlp(shape, generator))
        | prefixed("mamba", mamba(shape, generator))
    )


def granite_layer(shape: DemoShape, layer: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """One layer of transformers' Granite-4: attention or Mamba2, then the shared MLP alone."""
    if shape.attention[layer]:
        mixer = prefixed("self_attn", attention(shape, generator))
    else:
        mixer = prefixed("mamba", mamba(shape, generator))
    ffn = mlp(shape, generator)
    return mixer | {
        "input_layernorm.weight": torch.ones(shape.hidden),
        "post_attention_layernorm.weight": torch.ones(shape.hidden),
        "shared_mlp.input_linear.weight": torch.cat([ffn["gate_proj.weight"], ffn["up_proj.weight"]]),
        "shared_mlp.output_linear.weight": ffn["down_proj.weight"],
    }


def falcon_weights(
    shape: DemoShape, seed: int, silent: int, logit_std: float = 10.0
) -> dict[str, torch.Tensor]:
    """All weights of a Falcon-H1; see `checkpoint`."""
    return checkpoint(shape, falcon_layer, seed, silent, logit_std, final_norm="final_layernorm")


def granite_weights(
    shape: DemoShape, seed: int, silent: int, logit_std: float = 10.0
) -> dict[str, torch.Tensor]:
    """All weights of a Granite-4; see `checkpoint`."""
    return checkpoint(shape, granite_layer, seed, silent, logit_std)
