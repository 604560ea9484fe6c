"""Weights of small random models with experts, of Qwen3-Next and of Nemotron-H.

Names are those that transformers keeps in memory, experts of a layer in one tensor.  A router spreads its
logits wide, so that rounding does not choose another expert.
"""

from __future__ import annotations

import math

import torch

from sglang_hybrid.cli.demo_gdn import CONSTANT, qwen_layer, qwen_weights
from sglang_hybrid.cli.demo_moe import EXPERTS, VISION
from sglang_hybrid.cli.demo_parts import attention, checkpoint, mlp, normal, prefixed
from sglang_hybrid.cli.demo_shape import DemoShape
from sglang_hybrid.cli.demo_weights import granite_layer, mamba

Weights = dict[str, torch.Tensor]

ROUTER_SPREAD = 4.0

MARKS = 4
"""Last ids of the vocabulary that stand around and for pictures."""


def _experts(shape: DemoShape, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(router, gate and up projections, down projections) of experts half as wide as the MLP."""
    fan_in, wide = 1 / math.sqrt(shape.hidden), shape.intermediate // 2
    return (
        normal((EXPERTS, shape.hidden), ROUTER_SPREAD * fan_in, generator),
        normal((EXPERTS, 2 * wide, shape.hidden), fan_in, generator),
        normal((EXPERTS, shape.hidden, wide), 1 / math.sqrt(wide), generator),
    )


def granite_moe_layer(shape: DemoShape, layer: int, generator: torch.Generator) -> Weights:
    """One layer of Granite-4: as without experts, and routed experts beside the shared MLP."""
    router, up, down = _experts(shape, generator)
    return granite_layer(shape, layer, generator) | {
        "block_sparse_moe.router.weight": router,
        "block_sparse_moe.experts.gate_up_proj": up,
        "block_sparse_moe.experts.down_proj": down,
    }


def qwen_moe_layer(shape: DemoShape, layer: int, generator: torch.Generator) -> Weights:
    """One layer of Qwen3.5 with experts in place of the MLP, one of them shared."""
    weights = qwen_layer(shape, layer, generator)
    weights = {name: tensor for name, tensor in weights.items() if not name.startswith("mlp.")}
    return weights | prefixed("mlp", _qwen_experts(shape, generator))


def _qwen_experts(shape: DemoShape, generator: torch.Generator) -> Weights:
    fan_in, wide = 1 / math.sqrt(shape.hidden), shape.intermediate // 2
    router, up, down = _experts(shape, generator)
    return {
        "gate.weight": router,
        "experts.gate_up_proj": up,
        "experts.down_proj": down,
        "shared_expert.gate_proj.weight": normal((wide, shape.hidden), fan_in, generator),
        "shared_expert.up_proj.weight": normal((wide, shape.hidden), fan_in, generator),
        "shared_expert.down_proj.weight": normal((shape.hidden, wide), 1 / math.sqrt(wide), generator),
        "shared_expert_gate.weight": normal((1, shape.hidden), fan_in, generator),
    }


def _by_key_head(shape: DemoShape, parts: list[torch.Tensor]) -> torch.Tensor:
    """Rows of several projections `[groups * n, hidden]`, all of one key head side by side."""
    each = [part.view(shape.ssm_groups, -1, shape.hidden) for part in parts]
    return torch.cat(each, dim=1).flatten(0, 1)


def qwen_next_layer(shape: DemoShape, layer: int, generator: torch.Generator) -> Weights:
    """One layer of Qwen3-Next: that of Qwen3.5, its projections interleaved by key head."""
    weights = qwen_moe_layer(shape, layer, generator)
    if shape.attention[layer]:
        return weights
    keys = shape.ssm_groups * shape.ssm_state
    q, k, v = torch.split(weights.pop("linear_attn.in_proj_qkv.weight"), [keys, keys, shape.ssm_width])
    z = weights.pop("linear_attn.in_proj_z.weight")
    b, a = (weights.pop(f"linear_attn.in_proj_{name}.weight") for name in "ba")
    return weights | {
        "linear_attn.in_proj_qkvz.weight": _by_key_head(shape, [q, k, v, z]),
        "linear_attn.in_proj_ba.weight": _by_key_head(shape, [b, a]),
    }


def _nemotron_layer(experts: bool, shape: DemoShape, block: int, generator: torch.Generator) -> Weights:
    """Blocks 0, 2, ... are mixers, the others an MLP or experts."""
    fan_in = 1 / math.sqrt(shape.hidden)
    if block % 2 and experts:
        wide = shape.intermediate // 2
        router, up, down = _experts(shape, generator)
        mixer = {
            "gate.weight": router,
            "gate.e_score_correction_bias": normal((EXPERTS,), 0.01, generator),
            "experts.up_proj": up[:, :wide].contiguous(),
            "experts.down_proj": down,
            "shared_experts.up_proj.weight": normal((wide, shape.hidden), fan_in, generator),
            "shared_experts.down_proj.weight": normal((shape.hidden, wide), 1 / math.sqrt(wide), generator),
        }
    elif block % 2:
        mixer = mlp(shape, generator)
        del mixer["gate_proj.weight"]
    elif shape.attention[block // 2]:
        mixer = attention(shape, generator)
    else:
        mixer = mamba(shape, generator)
    return prefixed("mixer", mixer) | {"norm.weight": torch.ones(shape.hidden)}


def _nemotron(shape: DemoShape, seed: int, silent: int, logit_std: float, experts: bool) -> Weights:
    weights = checkpoint(
        shape,
        lambda shape, block, generator: _nemotron_layer(experts, shape, block, generator),
        seed,
        silent,
        logit_std,
        final_norm="norm_f",
        blocks=2 * shape.layers,
    )
    weights["model.embeddings.weight"] = weights.pop("model.embed_tokens.weight")
    return weights


def granite_moe_weights(shape: DemoShape, seed: int, silent: int, logit_std: float = 10.0) -> Weights:
    """All weights of a Granite-4 with experts; see `checkpoint`."""
    return checkpoint(shape, granite_moe_layer, seed, silent, logit_std)


def qwen_moe_weights(shape: DemoShape, seed: int, silent: int, logit_std: float = 10.0) -> Weights:
    """All weights of a Qwen3.5 with experts; see `checkpoint`."""
    return checkpoint(shape, qwen_moe_layer, seed, silent, logit_std, unit_norm=0.0, constant=CONSTANT)


def _vision(shape: DemoShape, seed: int) -> Weights:
    """The picture half, named as in the checkpoint."""
    generator = torch.Generator().manual_seed(seed + 1)
    width, inner, patch = (int(VISION[name]) for name in ("hidden_size", "intermediate_size", "patch_size"))
    merged = width * int(VISION["spatial_merge_size"]) ** 2
    pixels = (int(VISION["in_channels"]), int(VISION["temporal_patch_size"]), patch, patch)

    def linear(name: str, out: int, size: int) -> Weights:
        weight = normal((out, size), 1 / math.sqrt(size), generator)
        return {f"{name}.weight": weight, f"{name}.bias": torch.zeros(out)}

    def norm(name: str) -> Weights:
        return {f"{name}.weight": torch.ones(width), f"{name}.bias": torch.zeros(width)}

    weights = {
        "patch_embed.proj.weight": normal((width, *pixels), 1 / math.sqrt(math.prod(pixels)), generator),
        "patch_embed.proj.bias": torch.zeros(width),
        "pos_embed.weight": normal((int(VISION["num_position_embeddings"]), width), 0.5, generator),
    }
    for block in range(int(VISION["depth"])):
        weights |= prefixed(
            f"blocks.{block}",
            norm("norm1")
            | norm("norm2")
            | linear("attn.qkv", 3 * width, width)
            | linear("attn.proj", width, width)
            | linear("mlp.linear_fc1", inner, width)
            | linear("mlp.linear_fc2", width, inner),
        )
    weights |= norm("merger.norm") | linear("merger.linear_fc1", merged, merged)
    return weights | linear("merger.linear_fc2", shape.hidden, merged)


def _with_vision(text: Weights, shape: DemoShape, seed: int) -> Weights:
    """A language model's weights under the names that they have beside a picture half, and that half."""
    inner = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in text.items()}
    return inner | prefixed("model.visual", _vision(shape, seed))


def qwen_vl_weights(shape: DemoShape, seed: int, silent: int, logit_std: float = 10.0) -> Weights:
    """All weights of a Qwen3.5 with a picture half; see `checkpoint`.  Its marks are never said."""
    return _with_vision(_unsaid_marks(qwen_weights(shape, seed, silent, logit_std)), shape, seed)


def qwen_vl_moe_weights(shape: DemoShape, seed: int, silent: int, logit_std: float = 10.0) -> Weights:
    """The same with experts."""
    return _with_vision(_unsaid_marks(qwen_moe_weights(shape, seed, silent, logit_std)), shape, seed)


def _unsaid_marks(weights: Weights) -> Weights:
    weights["lm_head.weight"][-MARKS:] = 0
    return weights


def qwen_next_weights(shape: DemoShape, seed: int, silent: int, logit_std: float = 10.0) -> Weights:
    """All weights of a Qwen3-Next; see `checkpoint`."""
    return checkpoint(shape, qwen_next_layer, seed, silent, logit_std, unit_norm=0.0, constant=CONSTANT)


def nemotron_weights(shape: DemoShape, seed: int, silent: int, logit_std: float = 10.0) -> Weights:
    """All weights of a Nemotron-H; see `checkpoint`."""
    return _nemotron(shape, seed, silent, logit_std, experts=False)


def nemotron_moe_weights(shape: DemoShape, seed: int, silent: int, logit_std: float = 10.0) -> Weights:
    """All weights of a Nemotron-H with experts; see `checkpoint`."""
    return _nemotron(shape, seed, silent, logit_std, experts=True)
