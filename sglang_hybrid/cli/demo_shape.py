"""Shape of a demo model.  No torch here: the command line needs only this."""

from __future__ import annotations

from dataclasses import dataclass

MIN_VOCAB = 300
"""Specials, 256 bytes, and some ids for the model to say."""


@dataclass(frozen=True)
class DemoShape:
    """Geometry of a demo model; what a field means in a family's config is in `demo_families`.

    The defaults copy Falcon-H1-7B's proportions in small: with a grid of 8 and fp32 everywhere a
    page is 16 KiB, a checkpoint fills three of them to the byte (two heads a page), and a conv line
    (3,840 bytes) fits a slot of a quarter page.

    `attention_every`: layers n, 2n, ... (counted from 1) are attention, the others recurrent; 0:
    every layer is both.
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
    attention_every: int = 0

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
        if self.attention_every and not 2 <= self.attention_every <= self.layers:
            raise ValueError(
                f"attention in every {self.attention_every}th of {self.layers} layers makes no hybrid "
                f"model: needs 2 to {self.layers}"
            )

    @property
    def ssm_width(self) -> int:
        return self.ssm_heads * self.ssm_head_dim

    @property
    def conv_channels(self) -> int:
        return self.ssm_width + 2 * self.ssm_groups * self.ssm_state

    @property
    def attention(self) -> tuple[bool, ...]:
        """Whether each layer is an attention layer; every layer of a model without separate ones."""
        every = self.attention_every or 1
        return tuple((layer + 1) % every == 0 for layer in range(self.layers))
