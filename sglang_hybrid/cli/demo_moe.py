"""Demo models with experts, with a picture half, and of the families around them.  No torch here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang_hybrid.cli.demo_families import (
    GRANITE_4,
    LING_2_5,
    QWEN3_5,
    DemoFamily,
    common_config,
    granite_config,
    ling_config,
    need_separate,
    qwen_config,
)
from sglang_hybrid.cli.demo_shape import DemoShape

EXPERTS, CHOSEN = 4, 2
"""Experts of a layer, and how many of them a token goes to; each is half as wide as the MLP."""

FACTOR = 2.5
"""What Nemotron and Ling multiply their routed experts by."""

_WEIGHTS = "sglang_hybrid.cli.demo_moe_weights:"


def granite_moe_config(shape: DemoShape) -> dict[str, Any]:
    """As a Granite-4, with routed experts beside the shared MLP."""
    return granite_config(shape) | {
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "intermediate_size": shape.intermediate // 2,
    }


def _experts(shape: DemoShape) -> dict[str, Any]:
    """Fields of Qwen's experts: in every layer, one of them shared."""
    return {
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "moe_intermediate_size": shape.intermediate // 2,
        "shared_expert_intermediate_size": shape.intermediate // 2,
        "norm_topk_prob": True,
    }


def qwen_moe_config(shape: DemoShape) -> dict[str, Any]:
    """Fields of `Qwen3_5MoeTextConfig`."""
    return qwen_config(shape) | _experts(shape)


def qwen_next_config(shape: DemoShape) -> dict[str, Any]:
    """Fields of `Qwen3NextConfig` of transformers and of SGLang."""
    config = qwen_config(shape) | _experts(shape) | {"decoder_sparse_step": 1, "mlp_only_layers": []}
    config["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
    }
    return config


VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
    "in_channels": 3,
    "deepstack_visual_indexes": [],
    "hidden_act": "gelu_pytorch_tanh",
}
"""The picture half of a demo model; `out_hidden_size` is the width of its language model.

SGLang on a CPU rounds `intermediate_size` up to a multiple of 64, and then cannot load others.
"""


def _vision(text: dict[str, Any], model_type: str) -> dict[str, Any]:
    """A config whose language model is nested in `text_config`, as of the public Qwen3.5 checkpoints.

    The four last ids of the vocabulary stand around and for pictures and videos.
    """
    last = text["vocab_size"]
    return {
        "text_config": text | {"model_type": f"{model_type}_text", "dtype": "float32"},
        "vision_config": VISION | {"model_type": model_type, "out_hidden_size": text["hidden_size"]},
        "vision_start_token_id": last - 4,
        "vision_end_token_id": last - 3,
        "image_token_id": last - 2,
        "video_token_id": last - 1,
        "tie_word_embeddings": False,
    }


def qwen_vl_config(shape: DemoShape) -> dict[str, Any]:
    """Fields of `Qwen3_5Config` of transformers and of SGLang."""
    return _vision(qwen_config(shape), "qwen3_5")


def qwen_vl_moe_config(shape: DemoShape) -> dict[str, Any]:
    """Fields of `Qwen3_5MoeConfig` of transformers and of SGLang."""
    return _vision(qwen_moe_config(shape), "qwen3_5_moe")


BLOCKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _nemotron(shape: DemoShape, ffn: str) -> dict[str, Any]:
    need_separate(shape, "Nemotron-H")
    pattern = "".join(("*" if attention else "M") + ffn for attention in shape.attention)
    config = common_config(shape)
    del config["num_hidden_layers"]  # both count the pattern
    return config | {
        "head_dim": shape.head_dim,
        "attention_head_dim": shape.head_dim,
        "hybrid_override_pattern": pattern,
        "layers_block_type": [BLOCKS[letter] for letter in pattern],
        "mamba_num_heads": shape.ssm_heads,
        "mamba_head_dim": shape.ssm_head_dim,
        "ssm_state_size": shape.ssm_state,
        # The mixer reads one, the shape of the state the other.
        "n_groups": shape.ssm_groups,
        "mamba_n_groups": shape.ssm_groups,
        "conv_kernel": shape.conv_width,
        "chunk_size": 64,
        "mamba_hidden_act": "silu",
        "mlp_hidden_act": "relu2",
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
    }


def nemotron_config(shape: DemoShape) -> dict[str, Any]:
    """Fields of `NemotronHConfig` of transformers and of SGLang: an MLP block behind every mixer."""
    return _nemotron(shape, "-")


def nemotron_moe_config(shape: DemoShape) -> dict[str, Any]:
    """The same with experts in place of the MLP, whose routed ones are multiplied by `FACTOR`."""
    return _nemotron(shape, "E") | {
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "moe_intermediate_size": shape.intermediate // 2,
        "moe_shared_expert_intermediate_size": shape.intermediate // 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": FACTOR,
    }


def ling_moe_config(shape: DemoShape) -> dict[str, Any]:
    """As a Ling-2.5, with experts in all layers but the first: those of a token come from half of the groups,
    chosen with a bias that their weights do not have."""
    return ling_config(shape) | {
        "first_k_dense_replace": 1,
        "num_experts": 2 * EXPERTS,
        "n_group": EXPERTS,
        "topk_group": EXPERTS // 2,
        "num_experts_per_tok": CHOSEN,
        "num_shared_experts": 1,
        "moe_intermediate_size": shape.intermediate // 2,
        "moe_router_enable_expert_bias": True,
        "score_function": "sigmoid",
        "norm_topk_prob": True,
        "router_dtype": "fp32",
        "routed_scaling_factor": FACTOR,
    }


GRANITE_4_MOE = replace(GRANITE_4, config=granite_moe_config, weights=_WEIGHTS + "granite_moe_weights")
QWEN3_5_MOE = DemoFamily(
    "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe_text",
    QWEN3_5.shape,
    qwen_moe_config,
    _WEIGHTS + "qwen_moe_weights",
)
QWEN3_5_VL = DemoFamily(
    "Qwen3_5ForConditionalGeneration",
    "qwen3_5",
    QWEN3_5.shape,
    qwen_vl_config,
    _WEIGHTS + "qwen_vl_weights",
)
QWEN3_5_VL_MOE = DemoFamily(
    "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe",
    QWEN3_5.shape,
    qwen_vl_moe_config,
    _WEIGHTS + "qwen_vl_moe_weights",
)
LING_2_5_MOE = replace(
    LING_2_5, config=ling_moe_config, weights="sglang_hybrid.cli.demo_ling:ling_moe_weights"
)
QWEN3_NEXT = DemoFamily(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    QWEN3_5.shape,
    qwen_next_config,
    _WEIGHTS + "qwen_next_weights",
)
NEMOTRON_H = DemoFamily(
    "NemotronHForCausalLM",
    "nemotron_h",
    GRANITE_4.shape,
    nemotron_config,
    _WEIGHTS + "nemotron_weights",
)
NEMOTRON_H_MOE = replace(NEMOTRON_H, config=nemotron_moe_config, weights=_WEIGHTS + "nemotron_moe_weights")
