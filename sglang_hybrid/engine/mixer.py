"""Mamba2 layers that read and write their state through page maps (`Mamba2AttnBackend`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend

from sglang_hybrid.engine.page_maps import DecodeMaps, ExtendMaps, PageMapMetadata

if TYPE_CHECKING:
    from sglang.srt.layers.attention.mamba.mamba import MambaMixer2
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class HybridMamba2Backend(PageMapMetadata, Mamba2AttnBackend):
    """Stock backend with page maps for metadata and our own mixer routine over a route of `kernels`."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.attach(model_runner)
        self.choose_route()

    # -- forward ----------------------------------------------------------------------------

    def forward(
        self,
        mixer: MambaMixer2,
        hidden_states: torch.Tensor,
        output: torch.Tensor | None,
        layer_id: int,
        forward_batch: ForwardBatch,
        mup_vector: torch.Tensor | None = None,
        use_triton_causal_conv: bool = False,
    ) -> torch.Tensor:
        """`MambaMixer2.forward` over page maps: projections and norm are the mixer's own modules."""
        projected, _ = mixer.in_proj(hidden_states)
        if mup_vector is not None:
            projected = projected * mup_vector
        shards = mixer.tp_size
        gate, conv_in, dt = torch.split(
            projected,
            [mixer.intermediate_size // shards, mixer.conv_dim // shards, mixer.num_heads // shards],
            dim=-1,
        )
        maps = self.forward_metadata
        if isinstance(maps, DecodeMaps):
            tokens = maps.src_lines.shape[0]
            mixed = self._decode(mixer, layer_id, conv_in[:tokens], dt[:tokens], maps)
        else:
            assert maps is not None
            tokens = maps.segments.tokens
            mixed = self._extend(mixer, layer_id, conv_in[:tokens], dt[:tokens], maps)
        if tokens < projected.shape[0]:
            # Rows past the batch's tokens are padding; they must stay finite.
            mixed = torch.nn.functional.pad(mixed, (0, 0, 0, projected.shape[0] - tokens))
        result: torch.Tensor
        result, _ = mixer.out_proj(mixer.norm(mixed, gate))
        if output is not None:
            output[: result.shape[0]].copy_(result)
        return result

    def _split(
        self, mixer: MambaMixer2, conv_out: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x `[T, heads, head_dim]`, B and C `[T, groups, state_size]`."""
        inner = mixer.intermediate_size // mixer.tp_size
        grouped = mixer.groups_ssm_state_size // mixer.tp_size
        x, b, c = torch.split(conv_out, [inner, grouped, grouped], dim=-1)
        groups = mixer.n_groups // mixer.tp_size
        return (
            x.view(x.shape[0], -1, mixer.head_dim),
            b.view(b.shape[0], groups, -1),
            c.view(c.shape[0], groups, -1),
        )

    def _decode(
        self, mixer: MambaMixer2, layer: int, conv_in: torch.Tensor, dt: torch.Tensor, maps: DecodeMaps
    ) -> torch.Tensor:
        conv_out = self.route.conv_update(
            self.convs[layer],
            maps.src_lines,
            maps.dst_lines,
            conv_in,
            mixer.conv1d.weight.squeeze(1),
            mixer.conv1d.bias,
            activation=mixer.activation,
        )
        x, b, c = self._split(mixer, conv_out)
        y = self.route.state_update(
            self.states[layer],
            maps.src_pages,
            maps.dst_pages,
            x,
            dt,
            mixer.A,
            b,
            c,
            d=mixer.D,
            dt_bias=mixer.dt_bias,
            dt_softplus=True,
        )
        return y.flatten(1)

    def _extend(
        self, mixer: MambaMixer2, layer: int, conv_in: torch.Tensor, dt: torch.Tensor, maps: ExtendMaps
    ) -> torch.Tensor:
        conv_out = self.route.paged_conv(
            self.convs[layer],
            maps.src_lines,
            maps.dst_lines,
            conv_in,
            mixer.conv1d.weight.squeeze(1),
            mixer.conv1d.bias,
            maps.segments,
            activation=mixer.activation,
        )
        x, b, c = self._split(mixer, conv_out)
        y = self.route.paged_scan(
            self.states[layer],
            maps.src_pages,
            maps.dst_pages,
            x,
            dt,
            mixer.A,
            b,
            c,
            maps.segments,
            d=mixer.D,
            dt_bias=mixer.dt_bias,
            dt_softplus=True,
        )
        return y.flatten(1)
