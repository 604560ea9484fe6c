"""Weights of a demo model: small, random, and unable to hide a wrong state.

Plain random weights forget within a few tokens, and most state bugs would then stay invisible.
Here every head has its own memory, spread from `MEMORY_SPAN[0]` to `MEMORY_SPAN[1]` tokens; the
state is the larger part of what a recurrent layer says; and logits are far apart, so that rounding
does not decide which token comes next.
"""

from __future__ import annotations

import math

import torch

from sglang_hybrid.cli.demo_gdn import CONSTANT, qwen_layer
from sglang_hybrid.cli.demo_parts import MEMORY_SPAN, SMALL, STEP, attention, mlp, normal, prefixed
from sglang_hybrid.cli.demo_shape import DemoShape


def _mamba(shape: DemoShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
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
        | prefixed("mamba", _mamba(shape, generator))
    )


def granite_layer(shape: DemoShape, layer: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """One layer of transformers' Granite-4: attention or Mamba2, then the shared MLP alone."""
    if shape.attention[layer]:
        mixer = prefixed("self_attn", attention(shape, generator))
    else:
        mixer = prefixed("mamba", _mamba(shape, generator))
    ffn = mlp(shape, generator)
    return mixer | {
        "input_layernorm.weight": torch.ones(shape.hidden),
        "post_attention_layernorm.weight": torch.ones(shape.hidden),
        "shared_mlp.input_linear.weight": torch.cat([ffn["gate_proj.weight"], ffn["up_proj.weight"]]),
        "shared_mlp.output_linear.weight": ffn["down_proj.weight"],
    }


LAYERS = {"falcon-h1": falcon_layer, "granite-4": granite_layer, "qwen3.5": qwen_layer}
"""By family: the weights of a layer."""


def demo_weights(
    family: str, shape: DemoShape, seed: int, silent: int, logit_std: float = 10.0
) -> dict[str, torch.Tensor]:
    """All weights of the checkpoint in fp32, named as transformers' class of the family names them.

    Ids below `silent` (specials and single bytes) never win: the model does not stop by itself, and
    what it says is text that encodes back to the same ids.  `logit_std` spreads the logits of the
    others; it decides how far apart first and second are.
    """
    layer_weights = LAYERS[family]
    generator = torch.Generator().manual_seed(seed)
    head = normal((shape.vocab, shape.hidden), logit_std / math.sqrt(shape.hidden), generator)
    head[:silent] = 0
    embeddings, norm = normal((shape.vocab, shape.hidden), 1.0, generator), torch.ones(shape.hidden)
    if family == "qwen3.5":
        embeddings[:, 0], norm = CONSTANT, torch.zeros(shape.hidden)
    weights = {
        "model.embed_tokens.weight": embeddings,
        f"model.{'final_layernorm' if family == 'falcon-h1' else 'norm'}.weight": norm,
        "lm_head.weight": head,
    }
    for layer in range(shape.layers):
        weights |= prefixed(f"model.layers.{layer}", layer_weights(shape, layer, generator))
    return weights
