"""Configs of public models from the figures that tell one from another; see `public.py`."""

from __future__ import annotations

from typing import Any


def falcon(
    layers: int,
    query_heads: int,
    kv_heads: int,
    dim: int,
    heads: int,
    head: int,
    state: int,
    groups: int,
    chunk: int,
    hidden: int = 0,
) -> dict[str, Any]:
    """A Falcon-H1; with `hidden`, all that SGLang needs."""
    whole = {"hidden_size": hidden, "intermediate_size": 4 * hidden, **named("FalconH1ForCausalLM", 65536)}
    return (whole if hidden else {}) | {
        "model_type": "falcon_h1",
        "num_hidden_layers": layers,
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "mamba_d_ssm": heads * head,
        "mamba_n_heads": heads,
        "mamba_d_head": head,
        "mamba_d_state": state,
        "mamba_n_groups": groups,
        "mamba_d_conv": 4,
        "mamba_chunk_size": chunk,
    }


def named(architecture: str, vocab: int, context: int = 131072) -> dict[str, Any]:
    """What every whole config has."""
    return {
        "architectures": [architecture],
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "dtype": "bfloat16",
    }


def qwen(family: str, layers: int, query_heads: int, kv_heads: int, value_heads: int) -> dict[str, Any]:
    """The layers of a Qwen3-Next or Qwen3.5."""
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "full_attention_interval": 4,
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }


def text(
    base: dict[str, Any],
    architecture: str,
    hidden: int,
    inner: int,
    experts: tuple[int, int, int] | None = None,
) -> dict[str, Any]:
    """A Qwen's language model alone; `experts`: their number, those of a token, width of one."""
    count, chosen, wide = experts or (0, 0, 0)
    routed = {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": wide,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    }
    rope = {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    }
    return (
        base
        | named(architecture, 248320, 262144)
        | {
            "hidden_size": hidden,
            "intermediate_size": inner,
            "mamba_ssm_dtype": "float32",
            "partial_rotary_factor": 0.25,
            "rope_parameters": rope,
        }
        | (routed if experts else {})
    )


def vision(inner: dict[str, Any]) -> dict[str, Any]:
    """The same as the language model of a checkpoint with pictures, as Qwen publishes it."""
    architecture = str(inner.pop("architectures")[0]).replace("ForCausalLM", "ForConditionalGeneration")
    outer = str(inner["model_type"]).removesuffix("_text")
    return {
        "architectures": [architecture],
        "model_type": outer,
        "text_config": inner,
        "vision_config": {
            "model_type": outer,
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "out_hidden_size": inner["hidden_size"],
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [],
        },
        "image_token_id": 248056,
        "video_token_id": 248057,
        "vision_start_token_id": 248053,
        "vision_end_token_id": 248054,
        "dtype": "bfloat16",
    }


def dense(
    hidden: int, inner: int, layers: int, query_heads: int, kv_heads: int, value_heads: int
) -> dict[str, Any]:
    """A dense Qwen3.5's language model alone."""
    base = qwen("qwen3_5_text", layers, query_heads, kv_heads, value_heads)
    return text(base, "Qwen3_5ForCausalLM", hidden, inner)


def nemotron(
    pattern: str,
    query_heads: int,
    kv_heads: int,
    heads: int,
    head: int,
    chunk: int,
    hidden: int = 0,
    experts: tuple[int, int, int, int] | None = None,
) -> dict[str, Any]:
    """`experts`: their number, those of a token, width of one, of the shared one."""
    count, chosen, wide, shared = experts or (0, 0, 0, 0)
    routed = {
        "n_routed_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": wide,
        "moe_shared_expert_intermediate_size": shared,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    }
    whole = {
        **named("NemotronHForCausalLM", 131072, 262144),
        "num_hidden_layers": len(pattern),
        "hidden_size": hidden,
        "attention_head_dim": 128,
        "mamba_n_groups": 8,
        "mlp_hidden_act": "relu2",
    }
    return (
        {
            "model_type": "nemotron_h",
            "hybrid_override_pattern": pattern,
            "num_attention_heads": query_heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 128,
            "mamba_num_heads": heads,
            "mamba_head_dim": head,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "chunk_size": chunk,
        }
        | (whole if hidden else {})
        | (routed if experts else {})
    )


GRANITE_ATTENTION = (5, 15, 25, 35)
"""Attention layers of the models with 40."""


def granite(
    hidden: int,
    attention_heads: int,
    kv_heads: int,
    heads: int,
    *,
    experts: int = 0,
    layers: int = 40,
    attention: tuple[int, ...] = GRANITE_ATTENTION,
) -> dict[str, Any]:
    """A Granite-4."""
    return named("GraniteMoeHybridForCausalLM", 100352) | {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": layers,
        "layer_types": ["attention" if layer in attention else "mamba" for layer in range(layers)],
        "hidden_size": hidden,
        "num_attention_heads": attention_heads,
        "num_key_value_heads": kv_heads,
        "mamba_n_heads": heads,
        "mamba_d_head": 2 * hidden // heads,
        "mamba_expand": 2,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_chunk_size": 256,
        "num_local_experts": experts,
        "num_experts_per_tok": 10 if experts else 0,
        "intermediate_size": 768,
        "shared_intermediate_size": 1536,
        "position_embedding_type": "nope",
    }


def lfm2(
    family: str, layers: int, attention: list[int], hidden: int, heads: int, architecture: str = ""
) -> dict[str, Any]:
    """An LFM2; `attention`: its attention layers."""
    return (named(architecture, 65536, 128000) if architecture else {}) | {
        "model_type": family,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention" if layer in attention else "conv" for layer in range(layers)],
        "hidden_size": hidden,
        "intermediate_size": 8192,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
    }


def latent(query_rank: int | None) -> dict[str, Any]:
    """Multi-head latent attention: one row of 512 and the rope part for all heads."""
    return {
        "kv_lora_rank": 512,
        "q_lora_rank": query_rank,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }


def kda(layers: int, attention: list[int], heads: int) -> dict[str, Any]:
    """`attention` counts from 1, as the lists of the config do."""
    return {
        "full_attn_layers": attention,
        "kda_layers": [layer for layer in range(1, layers + 1) if layer not in attention],
        "num_heads": heads,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    }


def ling(architecture: str, group: int) -> dict[str, Any]:
    """Every `group`-th layer is attention."""
    return (
        named(architecture, 157184)
        | latent(1536)
        | {
            "model_type": "bailing_hybrid",
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "hidden_size": 4096,
            "head_dim": 128,
            "layer_group_size": group,
            "num_experts": 256,
            "num_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1024,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 1,
            "group_norm_size": 8,
            "linear_silu": True,
        }
    )
