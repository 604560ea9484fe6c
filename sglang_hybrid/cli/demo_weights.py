"""Weights of the demo model: a small random Falcon-H1 that cannot hide a wrong state.

Plain random weights forget within a few tokens, and most state bugs would then stay invisible.
Here every head has its own memory, spread from `MEMORY_SPAN[0]` to `MEMORY_SPAN[1]` tokens; the
state is the larger part of what a recurrent layer says; and logits are far apart, so that rounding
does not decide which token comes next.
"""

from __future__ import annotations

import math

import torch

from sglang_hybrid.cli.demo_shape import DemoShape

MEMORY_SPAN = (512.0, 4096.0)
"""Tokens after which a head's state has decayed to 1/e: shortest and longest, geometric between."""

STEP = 0.5
"""Mean discretisation step; with the decay it sets A."""

SMALL = 0.35
"""Scale of the convolution's output.  Near zero silu is almost linear, so x, B and C keep a mean near
zero and the state does not drown in a constant that is the same for every prompt."""


def _normal(shape: tuple[int, ...], std: float, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator) * std


def _mamba(shape: DemoShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Weights of one recurrent mixer, named as in the checkpoint."""
    fan_in = 1 / math.sqrt(shape.hidden)
    bc = shape.ssm_groups * shape.ssm_state
    rows = [
        _normal((shape.ssm_width, shape.hidden), fan_in, generator),  # gate
        _normal((shape.ssm_width + 2 * bc, shape.hidden), fan_in, generator),  # x, B, C
        _normal((shape.ssm_heads, shape.hidden), 0.3 * fan_in, generator),  # dt
    ]
    spans = torch.logspace(math.log10(MEMORY_SPAN[0]), math.log10(MEMORY_SPAN[1]), shape.ssm_heads)
    taps = _normal((shape.conv_channels, 1, shape.conv_width), SMALL / math.sqrt(shape.conv_width), generator)
    return {
        "in_proj.weight": torch.cat(rows),
        "conv1d.weight": taps,
        "conv1d.bias": torch.zeros(shape.conv_channels),
        "dt_bias": torch.full((shape.ssm_heads,), math.log(math.expm1(STEP))),
        "A_log": torch.log(1 / (STEP * spans)),
        "D": torch.full((shape.ssm_heads,), 0.25),
        "norm.weight": torch.ones(shape.ssm_width),
        "out_proj.weight": _normal(
            (shape.hidden, shape.ssm_width), 1 / math.sqrt(shape.ssm_width), generator
        ),
    }


def _layer(shape: DemoShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    fan_in = 1 / math.sqrt(shape.hidden)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = {
        "input_layernorm.weight": torch.ones(shape.hidden),
        "pre_ff_layernorm.weight": torch.ones(shape.hidden),
        "self_attn.q_proj.weight": _normal((queries, shape.hidden), fan_in, generator),
        "self_attn.k_proj.weight": _normal((keys, shape.hidden), fan_in, generator),
        "self_attn.v_proj.weight": _normal((keys, shape.hidden), fan_in, generator),
        "self_attn.o_proj.weight": _normal((shape.hidden, queries), 1 / math.sqrt(queries), generator),
        "feed_forward.gate_proj.weight": _normal((shape.intermediate, shape.hidden), fan_in, generator),
        "feed_forward.up_proj.weight": _normal((shape.intermediate, shape.hidden), fan_in, generator),
        "feed_forward.down_proj.weight": _normal(
            (shape.hidden, shape.intermediate), 1 / math.sqrt(shape.intermediate), generator
        ),
    }
    return weights | {f"mamba.{name}": tensor for name, tensor in _mamba(shape, generator).items()}


def demo_weights(
    shape: DemoShape, seed: int, silent: int, logit_std: float = 10.0
) -> dict[str, torch.Tensor]:
    """All weights of the checkpoint in fp32, named as transformers' `FalconH1ForCausalLM` names them.

    Ids below `silent` (specials and single bytes) never win: the model does not stop by itself, and
    what it says is text that encodes back to the same ids.  `logit_std` spreads the logits of the
    others; it decides how far apart first and second are.
    """
    generator = torch.Generator().manual_seed(seed)
    head = _normal((shape.vocab, shape.hidden), logit_std / math.sqrt(shape.hidden), generator)
    head[:silent] = 0
    weights = {
        "model.embed_tokens.weight": _normal((shape.vocab, shape.hidden), 1.0, generator),
        "model.final_layernorm.weight": torch.ones(shape.hidden),
        "lm_head.weight": head,
    }
    for layer in range(shape.layers):
        weights |= {
            f"model.layers.{layer}.{name}": tensor for name, tensor in _layer(shape, generator).items()
        }
    return weights
