"""Parts that the weights of all demo families share."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from sglang_hybrid.cli.demo_shape import DemoShape

MEMORY_SPAN = (512.0, 4096.0)
"""Tokens after which a head's state has decayed to 1/e: shortest and longest, geometric between."""

STEP = 0.5
"""Mean discretisation step; with the decay it sets A."""

SMALL = 0.35
"""Scale of the convolution's output.  Near zero silu is almost linear, so x, B and C keep a mean near
zero and the state does not drown in a constant that is the same for every prompt."""


def normal(shape: tuple[int, ...], std: float, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator) * std


def prefixed(prefix: str, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in weights.items()}


def attention(shape: DemoShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    fan_in = 1 / math.sqrt(shape.hidden)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "q_proj.weight": normal((queries, shape.hidden), fan_in, generator),
        "k_proj.weight": normal((keys, shape.hidden), fan_in, generator),
        "v_proj.weight": normal((keys, shape.hidden), fan_in, generator),
        "o_proj.weight": normal((shape.hidden, queries), 1 / math.sqrt(queries), generator),
    }


def mlp(shape: DemoShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    fan_in = 1 / math.sqrt(shape.hidden)
    return {
        "gate_proj.weight": normal((shape.intermediate, shape.hidden), fan_in, generator),
        "up_proj.weight": normal((shape.intermediate, shape.hidden), fan_in, generator),
        "down_proj.weight": normal(
            (shape.hidden, shape.intermediate), 1 / math.sqrt(shape.intermediate), generator
        ),
    }


def checkpoint(
    shape: DemoShape,
    layer_weights: Callable[[DemoShape, int, torch.Generator], dict[str, torch.Tensor]],
    seed: int,
    silent: int,
    logit_std: float,
    *,
    final_norm: str = "norm",
    unit_norm: float = 1.0,
    constant: float | None = None,
    blocks: int | None = None,
) -> dict[str, torch.Tensor]:
    """All weights of a model in fp32, named as transformers' class of the family names them.

    `layer_weights(shape, layer, generator)`: those of one layer.  Ids below `silent` (specials and single
    bytes) never win: the model does not stop by itself, and what it says is text that encodes back to the
    same ids.  `logit_std` spreads the logits of the others; it decides how far apart first and second are.
    `unit_norm`: the weight of a norm that changes nothing.  `constant`: first channel of every embedding.
    `blocks`: layers by their count in the checkpoint, where that is not `shape.layers`.
    """
    generator = torch.Generator().manual_seed(seed)
    head = normal((shape.vocab, shape.hidden), logit_std / math.sqrt(shape.hidden), generator)
    head[:silent] = 0
    embeddings = normal((shape.vocab, shape.hidden), 1.0, generator)
    if constant is not None:
        embeddings[:, 0] = constant
    weights = {
        "model.embed_tokens.weight": embeddings,
        f"model.{final_norm}.weight": torch.full((shape.hidden,), unit_norm),
        "lm_head.weight": head,
    }
    for layer in range(blocks or shape.layers):
        weights |= prefixed(f"model.layers.{layer}", layer_weights(shape, layer, generator))
    return weights
