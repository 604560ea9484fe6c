"""Families of demo models: what a `DemoShape` means in each one's config.json.  No torch here."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_hybrid import models
from sglang_hybrid.cli.demo_shape import DemoShape

EXPERTS, CHOSEN = 4, 2
"""Experts of an LFM2-MoE layer, and how many of them a token goes to; each is half as wide as the MLP."""

KV_RANK, KV_ROPE = 448, 64
"""Elements of a latent row, and of the part beside it that only keys have: 2 KiB a token in fp32."""

QUERY_RANK = 48
"""Elements of the row that a Ling's queries come from."""


@dataclass(frozen=True)
class DemoFamily:
    """`model`: the class of transformers (None: it has none), `model_type` its name in config.json, `config`
    other fields of config.json for a shape, `weights` (`module:function`, see `demo_weights`) its random
    weights.  `on_disk`: (part of a weight's name as transformers writes it, as SGLang reads it), where the
    two differ.

    `config` raises ValueError for a shape that the family cannot have.
    """

    model: str | None
    model_type: str
    shape: DemoShape
    config: Callable[[DemoShape], dict[str, Any]]
    weights: str
    on_disk: tuple[tuple[str, str], ...] = ()


def common_config(shape: DemoShape) -> dict[str, Any]:
    """Fields that all families have."""
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": False,
    }


def _mamba2(shape: DemoShape) -> dict[str, Any]:
    return {
        "mamba_n_heads": shape.ssm_heads,
        "mamba_d_head": shape.ssm_head_dim,
        "mamba_n_groups": shape.ssm_groups,
        "mamba_d_state": shape.ssm_state,
        "mamba_d_conv": shape.conv_width,
        "mamba_chunk_size": 64,
    }


def falcon_config(shape: DemoShape) -> dict[str, Any]:
    """Fields of `FalconH1Config` of transformers and of SGLang.

    The gated norm is on, gate first, because SGLang knows no other order; muP multipliers are 1.
    """
    if shape.attention_every:
        raise ValueError(
            f"attention_every is {shape.attention_every}, but every layer of a Falcon-H1 is both: needs 0"
        )
    return (
        common_config(shape)
        | _mamba2(shape)
        | {
            "head_dim": shape.head_dim,
            "mamba_d_ssm": shape.ssm_width,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
        }
    )


def need_separate(shape: DemoShape, title: str) -> None:
    """Raise ValueError for a shape whose layers are both."""
    if not shape.attention_every:
        raise ValueError(
            f"attention_every is 0, but the layers of a {title} are attention or recurrent: needs 2 or more"
        )


def granite_config(shape: DemoShape) -> dict[str, Any]:
    """Fields of `GraniteMoeHybridConfig` of transformers and of SGLang, without experts.

    The defaults of the two differ, so all multipliers are given; they are 1, as far as attention
    lets them.  No positions, as in the public models.
    """
    need_separate(shape, "Granite-4")
    if shape.heads * shape.head_dim != shape.hidden or shape.ssm_width % shape.hidden:
        raise ValueError(
            f"a Granite-4 has heads x head_dim = hidden and SSM heads x SSM head dim a multiple of it, this "
            f"one {shape.heads} x {shape.head_dim}, {shape.hidden} and {shape.ssm_heads} x "
            f"{shape.ssm_head_dim}"
        )
    return (
        common_config(shape)
        | _mamba2(shape)
        | {
            "mamba_expand": shape.ssm_width // shape.hidden,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "layer_types": ["attention" if attention else "mamba" for attention in shape.attention],
            "shared_intermediate_size": shape.intermediate,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "nope",
            "attention_multiplier": shape.head_dim**-0.5,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
            "attention_bias": False,
            "rms_norm_eps": 1e-5,
        }
    )


def qwen_config(shape: DemoShape) -> dict[str, Any]:
    """Fields of `Qwen3_5TextConfig` of transformers and of SGLang, dense, without the vision half.

    transformers goes by `layer_types`, SGLang by `full_attention_interval`.  A recurrent head is a
    value head, a state row as long as a key.
    """
    need_separate(shape, "Qwen3.5")
    rotary = shape.head_dim // 4
    return common_config(shape) | {
        "head_dim": shape.head_dim,
        "full_attention_interval": shape.attention_every,
        "layer_types": [
            "full_attention" if attention else "linear_attention" for attention in shape.attention
        ],
        "linear_num_value_heads": shape.ssm_heads,
        "linear_value_head_dim": shape.ssm_head_dim,
        "linear_num_key_heads": shape.ssm_groups,
        "linear_key_head_dim": shape.ssm_state,
        "linear_conv_kernel_dim": shape.conv_width,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [rotary // 2 - 2 * (rotary // 6), rotary // 6, rotary // 6],
        },
        "rms_norm_eps": 1e-6,
    }


def kimi_config(shape: DemoShape) -> dict[str, Any]:
    """Fields of `KimiLinearConfig` of transformers and of SGLang, without experts.

    transformers goes by `layer_types` and `mlp_layer_types`, SGLang by the lists of `linear_attn_config`,
    which count from 1, and by `first_k_dense_replace`.
    """
    need_separate(shape, "Kimi-Linear")
    if shape.ssm_head_dim != shape.ssm_state or shape.kv_heads != shape.heads:
        raise ValueError(
            f"a Kimi-Linear has square states and no KV heads of its own, this one {shape.ssm_head_dim} x "
            f"{shape.ssm_state} and {shape.kv_heads} for {shape.heads} heads"
        )
    numbers = {
        kind: [i + 1 for i, attention in enumerate(shape.attention) if attention is kind]
        for kind in (True, False)
    }
    return common_config(shape) | {
        "linear_attn_config": {
            "full_attn_layers": numbers[True],
            "kda_layers": numbers[False],
            "num_heads": shape.ssm_heads,
            "head_dim": shape.ssm_head_dim,
            "short_conv_kernel_size": shape.conv_width,
        },
        "layer_types": [
            "full_attention" if attention else "linear_attention" for attention in shape.attention
        ],
        "mlp_layer_types": ["dense"] * shape.layers,
        "first_k_dense_replace": shape.layers,
        "kv_lora_rank": KV_RANK,
        "q_lora_rank": None,
        "qk_rope_head_dim": KV_ROPE,
        "qk_nope_head_dim": shape.head_dim,
        "v_head_dim": shape.head_dim,
        "mla_use_nope": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
    }


def ling_config(shape: DemoShape) -> dict[str, Any]:
    """Fields of SGLang's `BailingHybridConfig` as Ling-2.5 sets them, without experts.

    Attention and recurrent layers have the same heads; `head_dim` of the file is that of the recurrent ones.
    The decay of a head is no weight: it follows from the number of heads and layers.
    """
    need_separate(shape, "Ling-2.5")
    if shape.layers % shape.attention_every:
        raise ValueError(
            f"a Ling-2.5 has whole groups of layers, this one {shape.layers} layers in groups of "
            f"{shape.attention_every}"
        )
    if shape.ssm_head_dim != shape.ssm_state or {shape.ssm_heads, shape.ssm_groups} != {shape.heads}:
        raise ValueError(
            f"a Ling-2.5 has square states and as many recurrent heads and groups as attention heads, this "
            f"one {shape.ssm_head_dim} x {shape.ssm_state}, {shape.ssm_heads} and {shape.ssm_groups} for "
            f"{shape.heads} heads"
        )
    return common_config(shape) | {
        "head_dim": shape.ssm_head_dim,
        "layer_group_size": shape.attention_every,
        "group_norm_size": shape.heads,
        "linear_silu": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10_000.0,
        "rope_interleave": True,
        "kv_lora_rank": KV_RANK,
        "q_lora_rank": QUERY_RANK,
        "qk_rope_head_dim": KV_ROPE,
        "qk_nope_head_dim": shape.head_dim,
        "v_head_dim": shape.head_dim,
        "num_experts": EXPERTS,
        "num_shared_experts": 0,
        "num_experts_per_tok": CHOSEN,
        "first_k_dense_replace": shape.layers,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
    }


def lfm2_config(shape: DemoShape) -> dict[str, Any]:
    """Fields of `Lfm2Config` of transformers and of SGLang.  A short convolution has as many channels as the
    residual stream; there is no other recurrent state, so the fields of one are not used."""
    need_separate(shape, "Liquid LFM2")
    if shape.heads * shape.head_dim != shape.hidden:
        raise ValueError(
            f"an LFM2 has heads x head_dim = hidden, this one {shape.heads} x {shape.head_dim} and "
            f"{shape.hidden}"
        )
    return common_config(shape) | {
        "layer_types": ["full_attention" if attention else "conv" for attention in shape.attention],
        "conv_L_cache": shape.conv_width,
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
        "norm_eps": 1e-5,
    }


def lfm2_moe_config(shape: DemoShape) -> dict[str, Any]:
    """Fields of `Lfm2MoeConfig` of transformers and of SGLang."""
    config = lfm2_config(shape)
    del config["block_auto_adjust_ff_dim"]
    return config | {
        "num_dense_layers": 1,
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "moe_intermediate_size": shape.intermediate // 2,
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


FALCON_H1 = DemoFamily(
    "FalconH1ForCausalLM",
    "falcon_h1",
    DemoShape(),
    falcon_config,
    "sglang_hybrid.cli.demo_weights:falcon_weights",
)
# With a grid of 16 and fp32 everywhere a page is 32 KiB.  Three recurrent layers lie in the arenas of
# two attention layers: a checkpoint is two stripes of 256 rows, cut by pages of 204; the conv line of
# both (8,064 bytes) fits a slot of a quarter page.
GRANITE_4 = DemoFamily(
    "GraniteMoeHybridForCausalLM",
    "granitemoehybrid",
    DemoShape(
        layers=5,
        attention_every=2,
        hidden=256,
        heads=4,
        kv_heads=4,
        head_dim=64,
        ssm_heads=8,
        ssm_head_dim=32,
        ssm_state=40,
    ),
    granite_config,
    "sglang_hybrid.cli.demo_weights:granite_weights",
)
# The same page.  A checkpoint is two stripes of 96 rows, cut by pages of 170; the conv line of both
# (6,912 bytes) fits a slot of a quarter page.
QWEN3_5 = DemoFamily(
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    DemoShape(
        layers=5,
        attention_every=2,
        hidden=128,
        ssm_heads=4,
        ssm_head_dim=24,
        ssm_groups=2,
        ssm_state=48,
    ),
    qwen_config,
    "sglang_hybrid.cli.demo_gdn:qwen_weights",
)

# The same page.  A checkpoint is two stripes of 96 rows: in one page at a grid of 16, cut at row 170 at 8;
# the conv line of both (6,912 bytes) fits a slot of a quarter page.
KIMI_LINEAR = DemoFamily(
    "KimiLinearForCausalLM",
    "kimi_linear",
    DemoShape(
        layers=5,
        attention_every=2,
        hidden=128,
        heads=4,
        kv_heads=4,
        head_dim=32,
        ssm_heads=4,
        ssm_head_dim=24,
        ssm_groups=4,
        ssm_state=24,
    ),
    kimi_config,
    "sglang_hybrid.cli.demo_kimi:kimi_weights",
    on_disk=((".block_sparse_moe.", ".mlp."),),
)
# The same page, and no conv line.  A checkpoint is two stripes of 96 rows, cut at row 170 at a grid of 8.
LING_2_5 = DemoFamily(
    None,
    "bailing_hybrid",
    DemoShape(
        layers=6,
        attention_every=3,
        hidden=128,
        heads=4,
        kv_heads=4,
        head_dim=32,
        ssm_heads=4,
        ssm_head_dim=24,
        ssm_groups=4,
        ssm_state=24,
    ),
    ling_config,
    "sglang_hybrid.cli.demo_ling:ling_weights",
)
LFM2_SHAPE = DemoShape(
    layers=5, attention_every=2, hidden=256, heads=4, kv_heads=4, head_dim=64, conv_width=3
)
"""With a grid of 16 and fp32 everywhere a page is 32 KiB.  The windows of three convolutions lie in the
arenas of two attention layers: the conv line of both stripes is 4 KiB, an eighth of a page."""
LFM2 = DemoFamily(
    "Lfm2ForCausalLM", "lfm2", LFM2_SHAPE, lfm2_config, "sglang_hybrid.cli.demo_lfm2:lfm2_weights"
)
LFM2_MOE = DemoFamily(
    "Lfm2MoeForCausalLM",
    "lfm2_moe",
    LFM2_SHAPE,
    lfm2_moe_config,
    "sglang_hybrid.cli.demo_lfm2:lfm2_moe_weights",
)


def demo_names() -> tuple[str, ...]:
    """What `--family` takes: families of the registry with a demo model."""
    return tuple(name for name, family in models.FAMILIES.items() if family.demo is not None)


def demo_family(name: str) -> DemoFamily:
    """The demo model of a family.  Raises ValueError for a name that has none."""
    row = models.FAMILIES.get(name)
    if row is None or row.demo is None:
        raise ValueError(f"family is {name!r}, needs one of {', '.join(demo_names())}")
    found: DemoFamily = pkgutil.resolve_name(row.demo)
    return found
