"""Shape of the demo model: a small Falcon-H1.  No torch here: the command line needs only this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MIN_VOCAB = 300
"""Specials, 256 bytes, and some ids for the model to say."""


@dataclass(frozen=True)
class DemoShape:
    """Geometry of the demo model.

    The defaults copy Falcon-H1-7B's proportions in small: with a grid of 8 and fp32 everywhere a
    page is 16 KiB, a checkpoint fills three of them to the byte (two heads a page), and a conv line
    (3,840 bytes) fits a slot of a quarter page.
    """

    layers: int = 2
    hidden: int = 64
    intermediate: int = 128
    vocab: int = 32_000
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    ssm_heads: int = 6
    ssm_head_dim: int = 32
    ssm_state: int = 64
    ssm_groups: int = 1
    conv_width: int = 4
    context: int = 16_384

    def __post_init__(self) -> None:
        if self.vocab < MIN_VOCAB:
            raise ValueError(f"a vocabulary of {self.vocab} is too small, needs at least {MIN_VOCAB}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.kv_heads} KV heads do not divide {self.heads} attention heads")
        if self.ssm_heads % self.ssm_groups:
            raise ValueError(f"{self.ssm_groups} groups do not divide {self.ssm_heads} SSM heads")
        if min(self.layers, self.hidden, self.head_dim, self.ssm_head_dim, self.ssm_state) < 1:
            raise ValueError(f"every size must be at least 1: {self}")
        if self.conv_width < 2:
            raise ValueError(f"a conv width of {self.conv_width} has no window, needs at least 2")

    @property
    def ssm_width(self) -> int:
        return self.ssm_heads * self.ssm_head_dim

    @property
    def conv_channels(self) -> int:
        return self.ssm_width + 2 * self.ssm_groups * self.ssm_state

    def config(self) -> dict[str, Any]:
        """Fields of the model's config.json (`FalconH1Config` of transformers and of SGLang).

        The gated norm is on, gate first, because SGLang knows no other order; muP multipliers are 1.
        """
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "mamba_d_ssm": self.ssm_width,
            "mamba_n_heads": self.ssm_heads,
            "mamba_d_head": self.ssm_head_dim,
            "mamba_n_groups": self.ssm_groups,
            "mamba_d_state": self.ssm_state,
            "mamba_d_conv": self.conv_width,
            "mamba_chunk_size": 64,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": False,
        }
