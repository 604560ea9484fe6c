"""Delta rule layers that read and write their state through page maps: GDN and KDA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend

from sglang_hybrid.engine.page_maps import DecodeMaps, ExtendMaps, PageMapMetadata
from sglang_hybrid.kernels import DeltaInputs

if TYPE_CHECKING:
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

Projected = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Queries, keys and values side by side; on CUDA a decode step may bring the raw projections instead."""


class DeltaRuleMaps(PageMapMetadata):
    """Page maps for metadata, and our own convolution and recurrence over a route of `kernels`."""

    def _extend(
        self, layer: RadixLinearAttention, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        """y [1, T, heads, value dim] of the batch's tokens, the first rows of `mixed_qkv`, `a` and `b`."""
        maps = self.forward_metadata
        assert isinstance(maps, ExtendMaps)
        tokens = maps.segments.tokens
        conv_out = self.route.paged_conv(
            self.convs[layer.layer_id],
            maps.src_lines,
            maps.dst_lines,
            mixed_qkv[:tokens],
            layer.conv_weights,
            layer.bias,
            maps.segments,
            activation=layer.activation,
        )
        y = self.route.paged_delta_scan(
            self.states[layer.layer_id],
            maps.src_pages,
            maps.dst_pages,
            _inputs(layer, conv_out, a[:tokens], b[:tokens]),
            maps.segments,
        )
        return y[None]

    def _decode(
        self, layer: RadixLinearAttention, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        """y [1, B, heads, value dim]."""
        maps = self.forward_metadata
        assert isinstance(maps, DecodeMaps)
        conv_out = self.route.conv_update(
            self.convs[layer.layer_id],
            maps.src_lines,
            maps.dst_lines,
            mixed_qkv,
            layer.conv_weights,
            layer.bias,
            activation=layer.activation,
        )
        y = self.route.delta_update(
            self.states[layer.layer_id],
            maps.src_pages,
            maps.dst_pages,
            _inputs(layer, conv_out, a, b),
        )
        return y[None]


class HybridGDNBackend(DeltaRuleMaps, GDNAttnBackend):
    """Gated delta rule: one decay a head."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.attach(model_runner)
        self.choose_route()

    def forward_decode(
        self,
        layer: RadixLinearAttention,
        forward_batch: ForwardBatch,
        mixed_qkv: Projected,
        a: torch.Tensor,
        b: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`GDNAttnBackend.forward_decode` -> y [1, B, heads, value dim]; (y, z) for raw projections."""
        if isinstance(mixed_qkv, torch.Tensor):
            return self._decode(layer, mixed_qkv, a, b)
        # Laid out as for `fused_qkvzba_split_reshape_cat_contiguous`: q, k, v, z and b, a.
        qkvz, ba = mixed_qkv
        split = layer.q_dim + layer.k_dim + layer.v_dim
        b, a = ba.chunk(2, dim=-1)
        y = self._decode(layer, qkvz[:, :split], a, b)
        return y, qkvz[:, split:].reshape(-1, layer.num_v_heads, layer.head_v_dim)

    def forward_extend(
        self,
        layer: RadixLinearAttention,
        forward_batch: ForwardBatch,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`GDNAttnBackend.forward_extend` -> y [1, T, heads, value dim], the batch's tokens alone."""
        return self._extend(layer, mixed_qkv, a, b)


class HybridKDABackend(DeltaRuleMaps, KDAAttnBackend):
    """Kimi delta attention: one decay a key channel.  `a` comes as [B, heads x key dim] or [1, T, heads, key
    dim], `b` as [1, T, heads]."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.attach(model_runner)
        self.choose_route()

    def forward_decode(
        self,
        layer: RadixLinearAttention,
        forward_batch: ForwardBatch,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`KDAAttnBackend.forward_decode` -> y [1, B, heads, value dim]."""
        return self._decode(layer, mixed_qkv, *_by_channel(layer, a, b))

    def forward_extend(
        self,
        layer: RadixLinearAttention,
        forward_batch: ForwardBatch,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`KDAAttnBackend.forward_extend` -> y [1, rows of mixed_qkv, heads, value dim]; rows past the
        batch's tokens are zero."""
        y = self._extend(layer, mixed_qkv, *_by_channel(layer, a, b))
        padding = mixed_qkv.shape[0] - y.shape[1]
        return torch.nn.functional.pad(y, (0, 0, 0, 0, 0, padding)) if padding else y


def _by_channel(
    layer: RadixLinearAttention, a: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        a.reshape(-1, layer.num_v_heads, layer.head_k_dim),
        b.reshape(-1, layer.num_v_heads),
    )


def _inputs(
    layer: RadixLinearAttention, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> DeltaInputs:
    """q and k `[T, key heads, key dim]`, v `[T, value heads, value dim]`, the rest as it is."""
    q, k, v = torch.split(mixed_qkv, [layer.q_dim, layer.k_dim, layer.v_dim], dim=-1)
    tokens = mixed_qkv.shape[0]
    return DeltaInputs(
        q.view(tokens, layer.num_q_heads, layer.head_q_dim),
        k.view(tokens, layer.num_k_heads, layer.head_k_dim),
        v.view(tokens, layer.num_v_heads, layer.head_v_dim),
        a,
        b,
        layer.A_log.view(-1),
        layer.dt_bias.view(a.shape[1:]),
        layer.lower_bound,
    )
