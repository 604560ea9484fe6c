"""The state that a model's config describes, before any tensor-parallel split."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_hybrid.geometry import SCAN_CHUNK, ModelGeometry
from sglang_hybrid.models.fields import ConfigError

LEGAL_TP = 64
"""Largest tensor-parallel size that a message offers."""


@dataclass(frozen=True)
class HybridShape:
    """What all ranks together keep, in elements; one recurrent layer, one token of one attention layer.

    `kind`: of the recurrent layers (`kinds.KINDS`, or one that has no adapter).
    A recurrent layer keeps `heads * head_rows` rows of `row` elements and a conv window of `taps`
    for `channels + groups * group_channels` channels.  Attention keeps `kv_heads` times `kv_row`
    elements (K and V); a latent row is one that every rank keeps whole.
    """

    family: str
    kind: str
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
