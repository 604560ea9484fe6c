"""Public hybrid models by name: the config fields that the ledger reads.

Each row says what its figures were checked against, and which are from memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

CONFIG = "its config.json"
"""A stored copy of it, whole or the fields used here: test fixtures of public repositories that say so."""
GGUF = "its GGUF metadata"
DOCS = "the table of Transformers' Falcon-H1 page"
DEFAULTS = "the defaults of SGLang's config class"
"""Of 0.5.23; the docstring gives them to this model."""
SOURCE = "the source (its chunk)"

ALL = "all figures"


class PublicModel(NamedTuple):
    """`config`: as in config.json, cut to what is read.  `recalled`: fields that were found nowhere."""

    repository: str
    config: dict[str, Any]
    checked: tuple[str, ...]
    recalled: tuple[str, ...] = ()

    def source(self) -> str:
        """For people: whose figures these are and how far they can be trusted."""
        checked = f", checked against {' and '.join(self.checked)}" if self.checked else ""
        recalled = f"; from memory: {', '.join(self.recalled)}" if self.recalled else ""
        return f"built-in figures of {self.repository}{checked}{recalled}"


def _falcon(
    layers: int,
    query_heads: int,
    kv_heads: int,
    dim: int,
    heads: int,
    head: int,
    state: int,
    groups: int,
    chunk: int,
) -> dict[str, Any]:
    return {
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


def _qwen(family: str, layers: int, query_heads: int, kv_heads: int, value_heads: int) -> dict[str, Any]:
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


def _nemotron(
    pattern: str, query_heads: int, kv_heads: int, heads: int, head: int, chunk: int
) -> dict[str, Any]:
    return {
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


def _granite(hidden: int, attention_heads: int, kv_heads: int, heads: int) -> dict[str, Any]:
    mamba = ["mamba"]
    return {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 40,
        # Attention in layers 5, 15, 25 and 35.
        "layer_types": [*mamba * 5, *(["attention", *mamba * 9] * 3), "attention", *mamba * 4],
        "hidden_size": hidden,
        "num_attention_heads": attention_heads,
        "num_key_value_heads": kv_heads,
        "mamba_n_heads": heads,
        "mamba_expand": 2,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_chunk_size": 256,
    }


def _lfm2(family: str, layers: int, attention: list[int], hidden: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "full_attn_idxs": attention,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
    }


LFM2_ATTENTION = [2, 5, 8, 10, 12, 14]
"""Of the models with 16 layers."""

PUBLIC: dict[str, PublicModel] = {
    "falcon-h1-0.5b": PublicModel(
        "tiiuae/Falcon-H1-0.5B-Instruct", _falcon(36, 8, 2, 64, 24, 64, 128, 1, 128), (CONFIG, DOCS)
    ),
    "falcon-h1-1.5b": PublicModel(
        "tiiuae/Falcon-H1-1.5B-Instruct",
        _falcon(24, 8, 2, 128, 48, 64, 256, 1, 128),
        (CONFIG, DOCS),
        ("mamba_chunk_size",),
    ),
    "falcon-h1-1.5b-deep": PublicModel(
        "tiiuae/Falcon-H1-1.5B-Deep-Instruct",
        _falcon(66, 6, 2, 128, 24, 64, 256, 1, 128),
        (DOCS,),
        ("mamba_n_groups", "mamba_d_conv", "mamba_chunk_size"),
    ),
    "falcon-h1-3b": PublicModel(
        "tiiuae/Falcon-H1-3B-Instruct", _falcon(32, 10, 2, 128, 32, 128, 256, 1, 128), (CONFIG, DOCS)
    ),
    # The source's model.  Its chunk of 256, and so D0's grid of 1792, is the source's figure (docs/paper.md);
    # the one public copy of this config that names a chunk has 128, which would make 1664.
    "falcon-h1-7b": PublicModel(
        "tiiuae/Falcon-H1-7B-Instruct",
        _falcon(44, 12, 2, 128, 24, 128, 256, 1, 256),
        (CONFIG, DOCS, SOURCE),
    ),
    "falcon-h1-34b": PublicModel(
        "tiiuae/Falcon-H1-34B-Instruct", _falcon(72, 20, 4, 128, 32, 128, 256, 2, 128), (CONFIG, DOCS)
    ),
    "qwen3-next-80b": PublicModel(
        "Qwen/Qwen3-Next-80B-A3B-Instruct", _qwen("qwen3_next", 48, 16, 2, 32), (CONFIG, DEFAULTS)
    ),
    "qwen3.5-4b": PublicModel("Qwen/Qwen3.5-4B", _qwen("qwen3_5_text", 32, 16, 4, 32), (CONFIG,)),
    "qwen3.5-9b": PublicModel("Qwen/Qwen3.5-9B", _qwen("qwen3_5_text", 32, 16, 4, 32), (CONFIG,)),
    # Stored copies name Qwen3.5, Qwen3.6-27B and Qwen3.8-27B; all agree.
    "qwen3.5-27b": PublicModel(
        "Qwen/Qwen3.5-27B", _qwen("qwen3_5_text", 64, 24, 4, 48), ("the config.json of Qwen3.6-27B",)
    ),
    "qwen3.5-35b-a3b": PublicModel(
        "Qwen/Qwen3.5-35B-A3B",
        _qwen("qwen3_5_moe_text", 40, 16, 2, 32),
        ("the config.json of Qwen3.6-35B-A3B",),
        ("num_attention_heads",),
    ),
    "qwen3.5-122b-a10b": PublicModel(
        "Qwen/Qwen3.5-122B-A10B", _qwen("qwen3_5_moe_text", 48, 32, 2, 64), (), (ALL,)
    ),
    "qwen3.5-397b-a17b": PublicModel(
        "Qwen/Qwen3.5-397B-A17B", _qwen("qwen3_5_moe_text", 60, 32, 2, 64), (), (ALL,)
    ),
    "nemotron-h-8b": PublicModel(
        "nvidia/Nemotron-H-8B-Base-8K",
        _nemotron("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", 32, 8, 128, 64, 256),
        (CONFIG, DEFAULTS),
        ("chunk_size",),
    ),
    "nemotron-nano-9b-v2": PublicModel(
        "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
        _nemotron("M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", 40, 8, 128, 80, 128),
        (CONFIG,),
        ("chunk_size",),
    ),
    "nemotron-3-nano-30b-a3b": PublicModel(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        _nemotron("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", 32, 2, 64, 64, 128),
        (CONFIG,),
    ),
    "granite-4.0-h-small": PublicModel(
        "ibm-granite/granite-4.0-h-small",
        _granite(4096, 32, 8, 128),
        (GGUF,),
        ("places of the 4 attention layers", "mamba_chunk_size"),
    ),
    "granite-4.0-h-tiny": PublicModel("ibm-granite/granite-4.0-h-tiny", _granite(1536, 12, 4, 48), (CONFIG,)),
    "granite-4.0-h-micro": PublicModel(
        "ibm-granite/granite-4.0-h-micro", _granite(2048, 32, 8, 64), (CONFIG,)
    ),
    "granite-4.0-h-1b": PublicModel("ibm-granite/granite-4.0-h-1b", _granite(1536, 12, 4, 48), (CONFIG,)),
    "kimi-linear-48b": PublicModel(
        "moonshotai/Kimi-Linear-48B-A3B-Instruct",
        {
            "model_type": "kimi_linear",
            "num_hidden_layers": 27,
            "num_attention_heads": 32,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "linear_attn_config": {
                # 1-based.
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "kda_layers": [layer for layer in range(1, 27) if layer % 4],
                "num_heads": 32,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
            },
        },
        (CONFIG,),
    ),
    "lfm2-350m": PublicModel("LiquidAI/LFM2-350M", _lfm2("lfm2", 16, LFM2_ATTENTION, 1024, 16), (CONFIG,)),
    "lfm2-700m": PublicModel("LiquidAI/LFM2-700M", _lfm2("lfm2", 16, LFM2_ATTENTION, 1536, 24), (), (ALL,)),
    "lfm2-1.2b": PublicModel("LiquidAI/LFM2-1.2B", _lfm2("lfm2", 16, LFM2_ATTENTION, 2048, 32), (CONFIG,)),
    "lfm2-2.6b": PublicModel(
        "LiquidAI/LFM2-2.6B", _lfm2("lfm2", 30, [2, 5, 9, 13, 17, 21, 24, 27], 2048, 32), (CONFIG,)
    ),
    "lfm2-8b-a1b": PublicModel(
        "LiquidAI/LFM2-8B-A1B", _lfm2("lfm2_moe", 24, [2, 6, 10, 14, 18, 21], 2048, 32), (CONFIG,)
    ),
}
"""By the name that `sglang-hybrid ledger` takes."""
