"""From a Hugging Face config to the state of all ranks: one reader a spelling of the config.

Formulas restate the shapes of `sglang.srt.configs.mamba_utils` (`Mamba2StateShape.create`,
`KimiLinearStateShape.create`) and the layer lists of SGLang's config classes, in plain Python: the
ledger needs neither torch nor transformers.
"""

from __future__ import annotations

from sglang_hybrid.geometry import SCAN_CHUNK
from sglang_hybrid.models.fields import ConfigError, Fields
from sglang_hybrid.models.shape import HybridShape


def falcon_h1(fields: Fields) -> HybridShape:
    """Every layer holds attention and a Mamba2 mixer."""
    layers = tuple(range(fields.whole("num_hidden_layers")))
    inner = fields.whole("mamba_d_ssm", default=0) or fields.whole("mamba_expand", default=2) * fields.whole(
        "hidden_size"
    )
    return _mamba2(
        fields,
        (layers, layers),
        inner=inner,
        heads=fields.whole("mamba_n_heads"),
        groups=fields.whole("mamba_n_groups", default=1),
        state=fields.whole("mamba_d_state"),
        window=fields.whole("mamba_d_conv", default=4),
        chunk=fields.whole("mamba_chunk_size", default=SCAN_CHUNK),
    )


def granite(fields: Fields) -> HybridShape:
    """Mamba2 and attention layers by `layer_types`."""
    return _mamba2(
        fields,
        fields.layers("layer_types", "layers_block_type"),
        inner=fields.whole("mamba_expand", default=2) * fields.whole("hidden_size"),
        heads=fields.whole("mamba_n_heads"),
        groups=fields.whole("mamba_n_groups", default=1),
        state=fields.whole("mamba_d_state"),
        window=fields.whole("mamba_d_conv", default=4),
        chunk=fields.whole("mamba_chunk_size", default=SCAN_CHUNK),
    )


def nemotron_h(fields: Fields) -> HybridShape:
    """Mamba2, attention, MLP and expert layers by a pattern of letters or a list of names."""
    heads = fields.whole("mamba_num_heads")
    return _mamba2(
        fields,
        fields.layers("layers_block_type", "layer_types", "hybrid_override_pattern", counted=False),
        inner=heads * fields.whole("mamba_head_dim"),
        heads=heads,
        groups=fields.whole("n_groups", "mamba_n_groups", "mamba_num_groups", default=8),
        state=fields.whole("ssm_state_size"),
        window=fields.whole("conv_kernel", "mamba_d_conv", default=4),
        chunk=fields.whole("mamba_chunk_size", "chunk_size", default=SCAN_CHUNK),
    )


def _mamba2(
    fields: Fields,
    layers: tuple[tuple[int, ...], tuple[int, ...]],
    *,
    inner: int,
    heads: int,
    groups: int,
    state: int,
    window: int,
    chunk: int,
) -> HybridShape:
    if inner % heads:
        raise ConfigError(f"{fields.where}: {heads} recurrent heads do not divide the inner size of {inner}")
    given = fields.values.get("mamba_d_head", "auto")
    if given not in (None, "auto", inner // heads):
        raise ConfigError(
            f"{fields.where}: mamba_d_head {given!r} times {heads} heads is not the inner size of {inner}: "
            f"use {inner // heads}"
        )
    return HybridShape(
        fields.family,
        "mamba2",
        *layers,
        *_attention(fields),
        heads,
        inner // heads,
        state,
        channels=inner,
        taps=window - 1,
        groups=groups,
        group_channels=2 * state,
        chunk=chunk,
    )


def gated_delta(fields: Fields) -> HybridShape:
    """Qwen3-Next and Qwen3.5: every `full_attention_interval`-th layer is attention, the others GDN."""
    interval = fields.whole("full_attention_interval", default=0)
    if interval or not fields.has("layer_types"):
        count, step = fields.whole("num_hidden_layers"), interval or 4
        attention = tuple(range(step - 1, count, step))
        layers = attention, tuple(layer for layer in range(count) if layer not in attention)
    else:
        layers = fields.layers("layer_types")
    key_dim, value_dim = fields.whole("linear_key_head_dim"), fields.whole("linear_value_head_dim")
    heads = fields.whole("linear_num_value_heads")
    return HybridShape(
        fields.family,
        "gated-delta",
        *layers,
        *_attention(fields),
        heads,
        value_dim,
        key_dim,
        channels=heads * value_dim,
        taps=fields.whole("linear_conv_kernel_dim", default=4) - 1,
        groups=fields.whole("linear_num_key_heads"),
        group_channels=2 * key_dim,
    )


def kimi_linear(fields: Fields) -> HybridShape:
    """KDA layers (a 1-based list) and MLA layers, whose row is one latent vector."""
    kda = fields.inner("linear_attn_config")
    count = fields.whole("num_hidden_layers")
    recurrent = kda.positions("kda_layers", count, first=1)
    heads, dim = kda.whole("num_heads"), kda.whole("head_dim")
    latent = fields.has("kv_lora_rank")
    if latent:
        row = fields.whole("kv_lora_rank") + fields.whole("qk_rope_head_dim")
        kept = fields.whole("num_attention_heads"), 1, row
    else:
        kept = _attention(fields)
    return HybridShape(
        fields.family,
        "kda",
        tuple(layer for layer in range(count) if layer not in recurrent),
        recurrent,
        *kept,
        heads,
        dim,
        dim,
        channels=3 * heads * dim,
        taps=kda.whole("short_conv_kernel_size", default=4) - 1,
        latent=latent,
    )


def bailing_hybrid(fields: Fields) -> HybridShape:
    """Ling: every `layer_group_size`-th layer is MLA; the others are KDA where the config has a short
    convolution, else lightning attention, which keeps no window."""
    count, step = fields.whole("num_hidden_layers"), fields.whole("layer_group_size", default=1)
    heads = fields.whole("num_attention_heads")
    dim = fields.whole("head_dim", default=0) or fields.whole("hidden_size") // heads
    kda = fields.has("short_conv_kernel_size")
    rope = 0 if fields.values.get("use_mla_nope") else fields.whole("qk_rope_head_dim", default=64)
    attention = tuple(range(step - 1, count, step))
    own = heads if kda else fields.whole("num_linear_key_value_heads", default=heads)
    return HybridShape(
        fields.family,
        "kda" if kda else "lightning",
        attention,
        tuple(layer for layer in range(count) if layer not in attention),
        heads,
        1,
        fields.whole("kv_lora_rank", default=512) + rope,
        own,
        dim,
        dim,
        channels=3 * heads * dim if kda else 0,
        taps=fields.whole("short_conv_kernel_size") - 1 if kda else 0,
        latent=True,
    )


def lfm2(fields: Fields) -> HybridShape:
    """Short convolutions and attention: a checkpoint is its conv line."""
    if fields.has("layer_types"):
        layers = fields.layers("layer_types")
    else:
        count = fields.whole("num_hidden_layers")
        attention = fields.positions("full_attn_idxs", count, first=0)
        layers = attention, tuple(layer for layer in range(count) if layer not in attention)
    return HybridShape(
        fields.family,
        "short-conv",
        *layers,
        *_attention(fields),
        1,
        0,
        0,
        channels=fields.whole("hidden_size"),
        taps=fields.whole("conv_L_cache", default=3) - 1,
        chunk=1,
    )


def _attention(fields: Fields) -> tuple[int, int, int]:
    """(query heads, KV heads, elements of K and V of a token in one of these)."""
    heads = fields.whole("num_attention_heads")
    dim = fields.whole("head_dim", "attention_head_dim", default=0) or fields.whole("hidden_size") // heads
    return heads, fields.whole("num_key_value_heads", default=heads), 2 * dim
