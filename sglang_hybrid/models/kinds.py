"""One row a kind of recurrent layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class StateDims(NamedTuple):
    """State of one recurrent layer of one rank: `heads * head_dim` rows of `state_size` elements, and a conv
    window of `window` values for each of `channels`."""

    heads: int
    head_dim: int
    state_size: int
    channels: int
    window: int


def channels_first(temporal: Sequence[int], conv: Sequence[int]) -> StateDims:
    """From SGLang's `(heads, head dim, state size)` and `(channels, window)`."""
    return StateDims(*temporal, *conv)


def time_first(temporal: Sequence[int], conv: Sequence[int]) -> StateDims:
    """Likewise, where SGLang keeps its conv windows as `(window, channels)`; our pages do not."""
    return StateDims(*temporal, *reversed(conv))


@dataclass(frozen=True)
class RecurrentKind:
    """`backend`, `adapter`, `exact`, `layers`: `module:Class`.

    `backend`: the class of SGLang's that serves these layers, `adapter` ours in its place, `exact` ours with
    `--hybrid-exact` (None: there is none).  `layers`: SGLang's modules that call the backend, one for each
    recurrent layer.  `step` and `scan`: the recurrence in decode and in prefill, operations of
    `kernels.Route` (None: a layer keeps nothing but its conv window).  `attention`: forms of attention KV
    that are served beside it (SGLang's `AttentionArch`).  `dims` reads SGLang's state shapes.  `flashinfer`:
    FlashInfer has its step.
    """

    name: str
    backend: str
    adapter: str
    layers: tuple[str, ...]
    step: str | None
    scan: str | None
    attention: tuple[str, ...] = ("MHA",)
    exact: str | None = None
    dims: Callable[[Sequence[int], Sequence[int]], StateDims] = channels_first
    flashinfer: bool = False


KINDS: dict[str, RecurrentKind] = {}
"""By name."""


def add_kind(kind: RecurrentKind) -> RecurrentKind:
    """Enter a kind.  Raises ValueError where another one has its name or its backend."""
    if kind.name in KINDS or any(kind.backend == other.backend for other in KINDS.values()):
        raise ValueError(f"recurrent kind {kind.name!r} with backend {kind.backend} is already entered")
    KINDS[kind.name] = kind
    return kind


MAMBA2 = add_kind(
    RecurrentKind(
        name="mamba2",
        backend="sglang.srt.layers.attention.hybrid_linear_attn_backend:Mamba2AttnBackend",
        adapter="sglang_hybrid.engine.mixer:HybridMamba2Backend",
        layers=("sglang.srt.layers.attention.mamba.mamba:MambaMixer2",),
        step="state_update",
        scan="paged_scan",
        exact="sglang_hybrid.engine.exact:ExactMamba2Backend",
        flashinfer=True,
    )
)
GATED_DELTA = add_kind(
    RecurrentKind(
        name="gated-delta",
        backend="sglang.srt.layers.attention.linear.gdn_backend:GDNAttnBackend",
        adapter="sglang_hybrid.engine.gdn_mixer:HybridGDNBackend",
        layers=("sglang.srt.layers.radix_linear_attention:RadixLinearAttention",),
        step="delta_update",
        scan="paged_delta_scan",
    )
)
SHORT_CONV = add_kind(
    RecurrentKind(
        name="short-conv",
        backend="sglang.srt.layers.attention.linear.short_conv_backend:ShortConvAttnBackend",
        adapter="sglang_hybrid.engine.short_conv:HybridShortConvBackend",
        layers=("sglang.srt.models.lfm2:Lfm2ShortConv", "sglang.srt.models.lfm2_moe:Lfm2MoeShortConv"),
        step=None,
        scan=None,
    )
)
KDA = add_kind(
    RecurrentKind(
        name="kda",
        backend="sglang.srt.layers.attention.linear.kda_backend:KDAAttnBackend",
        adapter="sglang_hybrid.engine.gdn_mixer:HybridKDABackend",
        layers=("sglang.srt.layers.radix_linear_attention:RadixLinearAttention",),
        step="delta_update",
        scan="paged_delta_scan",
        attention=("MLA",),
        dims=time_first,
    )
)
LIGHTNING = add_kind(
    RecurrentKind(
        name="lightning",
        backend="sglang.srt.layers.attention.linear.lightning_backend:LightningAttentionBackend",
        adapter="sglang_hybrid.engine.lightning:HybridLightningBackend",
        layers=("sglang.srt.models.bailing_moe_linear:BailingMoELinearAttention",),
        step="state_update",
        scan="paged_scan",
        attention=("MLA",),
    )
)
