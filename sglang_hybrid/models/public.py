"""Public hybrid models by name: the config fields that the ledger reads.

Each row says what its figures were checked against, and which are from memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang_hybrid.models.configs import (
    dense,
    falcon,
    granite,
    kda,
    latent,
    lfm2,
    ling,
    named,
    nemotron,
    qwen,
    text,
    vision,
)

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

    @property
    def whole(self) -> bool:
        """Whether `config` has all that SGLang's configuration of the model needs."""
        return "architectures" in self.config

    def source(self) -> str:
        """For people: whose figures these are and how far they can be trusted."""
        checked = f", checked against {' and '.join(self.checked)}" if self.checked else ""
        recalled = f"; from memory: {', '.join(self.recalled)}" if self.recalled else ""
        return f"built-in figures of {self.repository}{checked}{recalled}"


LFM2_ATTENTION = [2, 5, 8, 10, 12, 14]
"""Of the models with 16 layers."""
LFM2_5_1B = lfm2("lfm2", 16, LFM2_ATTENTION, 2048, 32, "Lfm2ForCausalLM")
LFM2_MOE = {
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "use_expert_bias": True,
    "norm_topk_prob": True,
}
NANO_30B = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
SUPER_120B = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
NEXT = qwen("qwen3_next", 48, 16, 2, 32)
K3_ATTENTION = list(range(4, 93, 4))

PUBLIC: dict[str, PublicModel] = {
    "falcon-h1-tiny-90m": PublicModel(
        "tiiuae/Falcon-H1-Tiny-90M-Instruct", falcon(24, 8, 2, 64, 24, 32, 64, 1, 128, 512), (CONFIG,)
    ),
    "falcon-h1-0.5b": PublicModel(
        "tiiuae/Falcon-H1-0.5B-Instruct", falcon(36, 8, 2, 64, 24, 64, 128, 1, 128, 1024), (CONFIG, DOCS)
    ),
    "falcon-h1-1.5b": PublicModel(
        "tiiuae/Falcon-H1-1.5B-Instruct",
        falcon(24, 8, 2, 128, 48, 64, 256, 1, 128),
        (CONFIG, DOCS),
        ("mamba_chunk_size",),
    ),
    "falcon-h1-1.5b-deep": PublicModel(
        "tiiuae/Falcon-H1-1.5B-Deep-Instruct",
        falcon(66, 6, 2, 128, 24, 64, 256, 1, 128),
        (DOCS,),
        ("mamba_n_groups", "mamba_d_conv", "mamba_chunk_size"),
    ),
    "falcon-h1-3b": PublicModel(
        "tiiuae/Falcon-H1-3B-Instruct", falcon(32, 10, 2, 128, 32, 128, 256, 1, 128), (CONFIG, DOCS)
    ),
    # The source's model.  Its chunk of 256, and so D0's grid of 1792, is the source's figure (docs/paper.md);
    # the one public copy of this config that names a chunk has 128, which would make 1664.
    "falcon-h1-7b": PublicModel(
        "tiiuae/Falcon-H1-7B-Instruct",
        falcon(44, 12, 2, 128, 24, 128, 256, 1, 256, 3072),
        (CONFIG, DOCS, SOURCE),
    ),
    "falcon-h1-34b": PublicModel(
        "tiiuae/Falcon-H1-34B-Instruct",
        falcon(72, 20, 4, 128, 32, 128, 256, 2, 128, 5120),
        (CONFIG, DOCS),
    ),
    "qwen3-next-80b": PublicModel("Qwen/Qwen3-Next-80B-A3B-Instruct", NEXT, (CONFIG, DEFAULTS)),
    "qwen3-coder-next-80b": PublicModel(
        "Qwen/Qwen3-Coder-Next",
        text(NEXT, "Qwen3NextForCausalLM", 2048, 17408, (512, 10, 512))
        | {
            "vocab_size": 151936,
            "rope_parameters": None,
            "rope_theta": 5_000_000,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        (CONFIG,),
    ),
    "qwen3.5-0.8b": PublicModel("Qwen/Qwen3.5-0.8B", vision(dense(1024, 3584, 24, 8, 2, 16)), (CONFIG,)),
    "qwen3.5-4b": PublicModel("Qwen/Qwen3.5-4B", qwen("qwen3_5_text", 32, 16, 4, 32), (CONFIG,)),
    "qwen3.5-4b-finetune-text": PublicModel(
        "a text fine-tune of Qwen/Qwen3.5-4B", dense(2560, 9216, 32, 16, 4, 32), (CONFIG,)
    ),
    "qwen3.5-9b": PublicModel("Qwen/Qwen3.5-9B", vision(dense(4096, 12288, 32, 16, 4, 32)), (CONFIG,)),
    # Stored copies name Qwen3.5, Qwen3.6-27B and Qwen3.8-27B; all agree.
    "qwen3.5-27b": PublicModel(
        "Qwen/Qwen3.5-27B", qwen("qwen3_5_text", 64, 24, 4, 48), ("the config.json of Qwen3.6-27B",)
    ),
    "qwen3.6-27b": PublicModel("Qwen/Qwen3.6-27B", vision(dense(5120, 17408, 64, 24, 4, 48)), (CONFIG,)),
    "qwen3.5-35b-a3b": PublicModel(
        "Qwen/Qwen3.5-35B-A3B",
        qwen("qwen3_5_moe_text", 40, 16, 2, 32),
        ("the config.json of Qwen3.6-35B-A3B",),
        ("num_attention_heads",),
    ),
    "qwen3.6-35b-a3b": PublicModel(
        "Qwen/Qwen3.6-35B-A3B",
        vision(
            text(
                qwen("qwen3_5_moe_text", 40, 16, 2, 32),
                "Qwen3_5MoeForCausalLM",
                2048,
                17408,
                (256, 8, 512),
            )
        ),
        (CONFIG,),
    ),
    "qwen3.5-122b-a10b": PublicModel(
        "Qwen/Qwen3.5-122B-A10B", qwen("qwen3_5_moe_text", 48, 32, 2, 64), (), (ALL,)
    ),
    "qwen3.5-397b-a17b": PublicModel(
        "Qwen/Qwen3.5-397B-A17B", qwen("qwen3_5_moe_text", 60, 32, 2, 64), (), (ALL,)
    ),
    "qwen3.8-2.4t": PublicModel(
        "Qwen/Qwen3.8-2.4T-A95B",
        text(qwen("qwen3_5_moe_text", 92, 64, 4, 128), "Qwen3_5MoeForCausalLM", 8192, 17408, (512, 10, 2048)),
        (CONFIG,),
    ),
    "nemotron-h-8b": PublicModel(
        "nvidia/Nemotron-H-8B-Base-8K",
        nemotron("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", 32, 8, 128, 64, 256),
        (CONFIG, DEFAULTS),
        ("chunk_size",),
    ),
    "nemotron-nano-9b-v2": PublicModel(
        "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
        nemotron("M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", 40, 8, 128, 80, 128, 4480)
        | {"intermediate_size": 15680},
        (CONFIG,),
        ("chunk_size",),
    ),
    "nemotron-3-nano-30b": PublicModel(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        nemotron(NANO_30B, 32, 2, 64, 64, 128, 2688, (128, 6, 1856, 3712)),
        (CONFIG,),
    ),
    "nemotron-3-super-120b": PublicModel(
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
        nemotron(SUPER_120B, 32, 2, 128, 64, 128, 4096, (512, 22, 2688, 5376)) | {"moe_latent_size": 1024},
        (CONFIG,),
    ),
    "granite-4.0-h-small": PublicModel(
        "ibm-granite/granite-4.0-h-small",
        granite(4096, 32, 8, 128, experts=72),
        (GGUF,),
        ("places of the 4 attention layers", "mamba_chunk_size"),
    ),
    "granite-4.0-h-tiny": PublicModel(
        "ibm-granite/granite-4.0-h-tiny", granite(1536, 12, 4, 48, experts=64), (CONFIG,)
    ),
    "granite-4.0-h-micro": PublicModel(
        "ibm-granite/granite-4.0-h-micro", granite(2048, 32, 8, 64), (CONFIG,)
    ),
    "granite-4.0-h-1b": PublicModel("ibm-granite/granite-4.0-h-1b", granite(1536, 12, 4, 48), (CONFIG,)),
    "granite-4.0-h-350m": PublicModel(
        "ibm-granite/granite-4.0-h-350m",
        granite(768, 12, 4, 48, layers=32, attention=(10, 13, 17, 27)),
        (CONFIG,),
    ),
    "kimi-linear-48b": PublicModel(
        "moonshotai/Kimi-Linear-48B-A3B-Instruct",
        named("KimiLinearForCausalLM", 163840, 1048576)
        | latent(None)
        | {
            "model_type": "kimi_linear",
            "num_hidden_layers": 27,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": 72,
            "mla_use_nope": True,
            "linear_attn_config": kda(27, [4, 8, 12, 16, 20, 24, 27], 32),
            "num_experts": 256,
            "num_experts_per_token": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1024,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.446,
        },
        (CONFIG,),
    ),
    "kimi-k3": PublicModel(
        "moonshotai/Kimi-K3",
        {
            "architectures": ["KimiK3ForConditionalGeneration"],
            "model_type": "kimi_k3",
            "text_config": latent(1536)
            | {
                "model_type": "kimi_linear",
                "num_hidden_layers": 93,
                "hidden_size": 7168,
                "intermediate_size": 33792,
                "num_attention_heads": 96,
                "num_key_value_heads": 96,
                "mla_use_nope": True,
                "mla_use_output_gate": True,
                "linear_attn_config": kda(93, K3_ATTENTION, 96) | {"use_full_rank_gate": True},
                "num_experts": 896,
                "num_experts_per_token": 16,
                "num_shared_experts": 2,
                "moe_intermediate_size": 3072,
                "routed_expert_hidden_size": 3584,
                "first_k_dense_replace": 1,
                "vocab_size": 163840,
                "max_position_embeddings": 1048576,
            },
            "vision_config": {},
            "dtype": "bfloat16",
        },
        (CONFIG,),
        ("layers and their kinds",),
    ),
    "ling-2.6-flash": PublicModel(
        "inclusionAI/Ling-2.6-flash", ling("BailingMoeV2_5ForCausalLM", 8), (), (ALL,)
    ),
    "ling-3.0-flash": PublicModel(
        "inclusionAI/Ling-3.0-flash",
        ling("BailingMoeV3ForCausalLM", 4)
        | {
            "short_conv_kernel_size": 4,
            "kda_safe_gate": True,
            "kda_lower_bound": -5.0,
            "use_mla_nope": True,
        },
        (),
        (ALL,),
    ),
    "lfm2-350m": PublicModel("LiquidAI/LFM2-350M", lfm2("lfm2", 16, LFM2_ATTENTION, 1024, 16), (CONFIG,)),
    "lfm2-700m": PublicModel("LiquidAI/LFM2-700M", lfm2("lfm2", 16, LFM2_ATTENTION, 1536, 24), (), (ALL,)),
    "lfm2-1.2b": PublicModel("LiquidAI/LFM2-1.2B", lfm2("lfm2", 16, LFM2_ATTENTION, 2048, 32), (CONFIG,)),
    "lfm2-2.6b": PublicModel(
        "LiquidAI/LFM2-2.6B", lfm2("lfm2", 30, [2, 5, 9, 13, 17, 21, 24, 27], 2048, 32), (CONFIG,)
    ),
    "lfm2-8b-a1b": PublicModel(
        "LiquidAI/LFM2-8B-A1B", lfm2("lfm2_moe", 24, [2, 6, 10, 14, 18, 21], 2048, 32), (CONFIG,)
    ),
    "lfm2.5-1.2b": PublicModel("LiquidAI/LFM2.5-1.2B-Instruct", LFM2_5_1B, (CONFIG,)),
    "lfm2.5-8b-a1b": PublicModel(
        "LiquidAI/LFM2.5-8B-A1B",
        lfm2("lfm2_moe", 24, [2, 6, 10, 14, 18, 21], 2048, 32, "Lfm2MoeForCausalLM") | LFM2_MOE,
        (CONFIG,),
    ),
    "lfm2.5-vl-1.6b": PublicModel(
        "LiquidAI/LFM2.5-VL-1.6B",
        {
            "architectures": ["Lfm2VlForConditionalGeneration"],
            "model_type": "lfm2_vl",
            "text_config": LFM2_5_1B,
            "vision_config": {
                "model_type": "siglip2_vision_model",
                "hidden_size": 1152,
                "num_hidden_layers": 26,
                "num_attention_heads": 16,
                "intermediate_size": 4304,
            },
            "image_token_id": 396,
            "downsample_factor": 2,
            "projector_hidden_size": 2560,
            "dtype": "bfloat16",
        },
        (CONFIG,),
    ),
}
"""By the name that `sglang-hybrid ledger` takes."""
