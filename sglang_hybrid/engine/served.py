"""Which models the plugin serves: asked of SGLang's own configuration, never of a list of names."""

from __future__ import annotations

import pkgutil
from typing import Any

from sglang_hybrid.engine.seams import SeamError
from sglang_hybrid.models import KINDS, RecurrentKind, tested

_BYPASS = "its recurrent layers read and write SGLang's pool themselves, past the backend that we replace"
EXCLUDED = {"JetNemotronForCausalLM": _BYPASS, "JetVLMForConditionalGeneration": _BYPASS}
"""What the predicate below would let pass, and why it must not."""

LAYER_NUMBER = ("layer_id", "layer_idx")
"""Where a layer of SGLang's, or the module around it, has its number."""


def architecture(model: Any) -> str:
    """First name in `architectures` of a `ModelConfig`."""
    return str((model.hf_config.architectures or ["?"])[0])


def state_backend(model: Any) -> str | None:
    """SGLang's backend (`module:Class`) for the recurrent layers of a `ModelConfig`; None: it has none.

    Chooses as `sglang.srt.layers.attention.attention_registry.attn_backend_wrapper` does; whether that
    really built it is proved at start (`hooks.build_attention`).
    """
    from sglang.srt.configs import (
        InklingMMConfig,
        InklingModelConfig,
        Lfm2Config,
        Lfm2MoeConfig,
        Lfm2VlConfig,
        ZayaConfig,
    )
    from sglang.srt.configs import hybrid_arch as arch
    from sglang.srt.configs.linear_attn_model_registry import get_linear_attn_config

    linear = "sglang.srt.layers.attention.linear."
    if isinstance(model.hf_config, InklingModelConfig | InklingMMConfig):
        return linear + "inkling_sconv_backend:InklingShortConvAttnBackend"
    if arch.hybrid_gdn_config(model) is not None:
        return linear + "gdn_backend:GDNAttnBackend"
    config = arch.mamba2_config(model)
    if isinstance(config, Lfm2Config | Lfm2MoeConfig | Lfm2VlConfig | ZayaConfig):
        return linear + "short_conv_backend:ShortConvAttnBackend"
    if config is not None:
        return "sglang.srt.layers.attention.hybrid_linear_attn_backend:Mamba2AttnBackend"
    if arch.hybrid_kda_config(model) is not None:
        return linear + "kda_backend:KDAAttnBackend"
    if arch.hybrid_lightning_config(model) is not None:
        return linear + "lightning_backend:LightningAttentionBackend"
    found = get_linear_attn_config(model.hf_config)
    return None if found is None else ":".join(found[0].backend_class_name.rsplit(".", 1))


def kind_of(model: Any) -> RecurrentKind | None:
    """The kind of the recurrent layers of a `ModelConfig`; None where they have no adapter."""
    backend = state_backend(model)
    return next((kind for kind in KINDS.values() if kind.backend == backend), None)


def sibling_state(model: Any) -> str | None:
    """What a request of this model keeps beside KV and one recurrent checkpoint; None: nothing."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import is_deepseek_dsa
    from sglang.srt.layers.attention.qsa.config import is_qwen_qsa
    from sglang.srt.runtime_context import get_parallel

    config = mambaish_config(model)
    if is_qwen_qsa(model.hf_config):
        return "keys of a sparse attention index (QSA)"
    if is_deepseek_dsa(model.hf_config) or is_deepseek_dsa(config):
        return "keys of a sparse attention index (DSA)"
    if getattr(config, "short_conv_layer_ids", None) or getattr(config, "ngram_context_len", 0):
        return "short convolutions and n-grams of its embeddings"
    if getattr(config, "has_minicpm_sparse_attention", False):
        return "compressed keys of sparse attention (InfLLM)"
    with get_parallel().override(attn_tp_size=1, tp_size=1, enable_cp_tp_group_sharing=False):
        count = len(config.mamba2_cache_params.shape.conv)
    return f"{count} conv states a layer" if count > 1 else None


def why_not_served(model: Any) -> str | None:
    """Why a `ModelConfig` is not served, as the end of a sentence about it; None: it is."""
    name = architecture(model)
    if name in EXCLUDED:
        return EXCLUDED[name]
    backend = state_backend(model)
    kind = kind_of(model)
    if backend is None:
        return "it has no recurrent layers beside attention that SGLang serves through a state backend"
    if kind is None:
        return f"its recurrent layers are served by SGLang's {backend.split(':')[1]}, which has no adapter"
    if state := sibling_state(model):
        return f"its requests keep {state}, which the plugin's pages do not hold"
    form = model.attention_arch.name
    if form not in kind.attention:
        return (
            f"its attention keeps {form} rows, and beside {kind.name} layers only "
            f"{' and '.join(kind.attention)} rows are served"
        )
    return None


def untested(model: Any) -> str | None:
    """A warning for an architecture that passes and that no end-to-end test of ours serves."""
    name, kind = architecture(model), kind_of(model)
    if kind is None or name in tested():
        return None
    return (
        f"{name} is served by the same code as other {kind.name} models, but no test of this package serves "
        "it: compare it with stock SGLang first (sglang-hybrid verify --model DIR)."
    )


def check_layers(kind: RecurrentKind, module: Any, recurrent: list[int]) -> None:
    """Raise SeamError unless the layers of the loaded model that call our adapter are the recurrent ones.

    A layer that keeps its state past the backend would otherwise be served from pages that it never wrote.
    """
    layers = tuple(pkgutil.resolve_name(name) for name in kind.layers)
    found = [
        _number(child, parent)
        for parent in module.modules()
        for child in parent.children()
        if isinstance(child, layers)
    ]
    if sorted(found) != sorted(recurrent):
        wanted = " or ".join(one.__name__ for one in layers)
        raise SeamError(
            f"{type(module).__name__}: expected a {wanted} in each of the recurrent layers "
            f"{sorted(recurrent)}, found them in layers {sorted(found)}"
        )


def _number(*modules: Any) -> int:
    """The layer number that the first of these modules with one has, else -1."""
    numbers = [getattr(one, name) for one in modules for name in LAYER_NUMBER if hasattr(one, name)]
    return int(numbers[0]) if numbers else -1
