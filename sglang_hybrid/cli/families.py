"""From a Hugging Face config to the state of one rank: the hybrid families that SGLang serves.

Formulas restate the shapes of `sglang.srt.configs.mamba_utils` (`Mamba2StateShape.create`,
`KimiLinearStateShape.create`) and the layer lists of SGLang's config classes, in plain Python: the
ledger needs neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_hybrid.cli.fields import ConfigError, Fields
from sglang_hybrid.geometry import SCAN_CHUNK, ModelGeometry

LEGAL_TP = 64
"""Largest tensor-parallel size that a message offers."""


@dataclass(frozen=True)
class HybridShape:
    """What all ranks together keep, in elements; one recurrent layer, one token of one attention layer.

    A recurrent layer keeps `heads * head_rows` rows of `row` elements and a conv window of `taps`
    for `channels + groups * group_channels` channels.  Attention keeps `kv_heads` times `kv_row`
    elements (K and V); a latent row is one that every rank keeps whole.
    """

    family: str
    attention: tuple[int, ...]
    recurrent: tuple[int, ...]
    query_heads: int
    kv_heads: int
    kv_row: int
    heads: int
    head_rows: int
    row: int
    channels: int
    taps: int
    groups: int = 1
    group_channels: int = 0
    latent: bool = False
    chunk: int = SCAN_CHUNK

    def divides(self, tp: int) -> bool:
        """Whether SGLang can split the model over this many ranks."""
        heads = self.heads if self.row else self.channels
        kv = self.latent or self.kv_heads % tp == 0 or tp % self.kv_heads == 0
        groups = self.groups == 1 or self.groups % tp == 0
        return self.query_heads % tp == 0 and kv and heads % tp == 0 and groups

    def geometry(self, tp: int, *, kv_bytes: int, ssm_bytes: int, conv_bytes: int) -> ModelGeometry:
        """State of one rank for these element sizes.  Raises `ConfigError` for a TP that does not fit."""
        if not self.divides(tp):
            legal = ", ".join(str(n) for n in range(1, LEGAL_TP + 1) if self.divides(n))
            raise ConfigError(
                f"--tp {tp} does not split {self.query_heads} query heads, {self.kv_heads} KV heads, "
                f"{self.heads} recurrent heads and {self.groups} groups evenly: use one of {legal}"
            )
        # A single group is copied to every rank; fewer KV heads than ranks are too.
        groups = tp if self.groups % tp else self.groups
        kv_heads = 1 if self.latent else max(1, self.kv_heads // tp)
        return ModelGeometry(
            attention_layers=self.attention,
            recurrent_layers=self.recurrent,
            kv_row_bytes=kv_heads * self.kv_row * kv_bytes,
            ssm_rows=self.heads // tp * self.head_rows if self.row else 0,
            ssm_row_bytes=self.row * ssm_bytes,
            conv_bytes=(self.channels + groups * self.group_channels) // tp * self.taps * conv_bytes,
        )


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


FAMILIES: dict[str, Callable[[Fields], HybridShape]] = {
    "falcon_h1": falcon_h1,
    "granitemoehybrid": granite,
    "nemotron_h": nemotron_h,
    "qwen3_next": gated_delta,
    "qwen3_5": gated_delta,
    "qwen3_5_text": gated_delta,
    "qwen3_5_moe": gated_delta,
    "qwen3_5_moe_text": gated_delta,
    "kimi_linear": kimi_linear,
    "lfm2": lfm2,
    "lfm2_moe": lfm2,
}
"""Reader of each `model_type`."""


def hybrid_shape(config: dict[str, Any], where: str) -> HybridShape:
    """The shape that a config describes; `where` names it in messages.

    Raises `ConfigError` for a family, a field or a value that gives no hybrid geometry.
    """
    inner = config.get("text_config")
    if isinstance(inner, dict):
        family = inner.get("model_type", config.get("model_type"))
        config = inner
    else:
        family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ConfigError(f"{where}: model_type {family!r} is no known hybrid family: {', '.join(FAMILIES)}")
    shape = FAMILIES[family](Fields(config, family, where))
    if not shape.attention or not shape.recurrent:
        raise ConfigError(
            f"{where}: {len(shape.attention)} attention and {len(shape.recurrent)} recurrent layers make no "
            "hybrid model: give one with both"
        )
    return shape
