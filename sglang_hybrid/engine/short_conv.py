"""Short-convolution layers (LFM2) whose windows lie in conv lines (`ShortConvAttnBackend`).

Such a layer asks its backend for a slot pool and calls a convolution on it by itself, a fused one on CUDA
where it can.  A window read from one line and written to another does not fit that call, so the backend
takes over the layers' `forward`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from sglang.srt.layers.attention.linear.short_conv_backend import ShortConvAttnBackend
from sglang.srt.models.lfm2 import Lfm2ShortConv
from sglang.srt.models.lfm2_moe import Lfm2MoeShortConv

from sglang_hybrid.engine.page_maps import DecodeMaps, ExtendMaps, PageMapMetadata
from sglang_hybrid.engine.seams import SeamError

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

LAYERS = (Lfm2ShortConv, Lfm2MoeShortConv)
"""Layers whose `forward` `mix` stands in for.  Not their subclasses, which compute something else."""


class HybridShortConvBackend(PageMapMetadata, ShortConvAttnBackend):
    """Stock backend with page maps for metadata, and the forward of the model's short-convolution layers."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.attach(model_runner)
        self.choose_route()
        self.take_over(model_runner.model)

    def take_over(self, model: torch.nn.Module) -> None:
        """Let `mix` be the forward of every short-convolution layer of `model`.

        Raises:
            SeamError: the layers found are not those that have windows.
        """
        layers: list[Any] = [module for module in model.modules() if type(module) in LAYERS]
        found = {int(layer.layer_idx): layer for layer in layers}
        if sorted(found) != sorted(self.convs):
            raise SeamError(
                f"short-convolution layers: expected {sorted(self.convs)}, found {sorted(found)} among "
                f"{', '.join(kind.__name__ for kind in LAYERS)}"
            )
        for layer in layers:
            layer.forward = partial(self.mix, layer)

    def mix(self, layer: Any, hidden_states: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """`Lfm2ShortConv.forward` over conv lines; projections are the layer's own modules.

        `hidden_states` [T, hidden]; rows past the batch's tokens are padding and give finite rows.
        """
        if forward_batch.forward_mode.is_idle():
            return hidden_states
        projected, _ = layer.in_proj(hidden_states)
        before, after, x = projected.chunk(3, dim=-1)
        mixed = self._convolve(layer, before * x)
        if mixed.shape[0] < hidden_states.shape[0]:
            mixed = torch.nn.functional.pad(mixed, (0, 0, 0, hidden_states.shape[0] - mixed.shape[0]))
        result: torch.Tensor
        result, _ = layer.out_proj(after * mixed)
        return result

    def _convolve(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        """The batch's tokens of `x` [T, channels], convolved; their windows go to the lines of the maps."""
        maps, view = self.forward_metadata, self.convs[layer.layer_idx]
        if isinstance(maps, DecodeMaps):
            return self.route.conv_update(
                view,
                maps.src_lines,
                maps.dst_lines,
                x[: maps.src_lines.shape[0]],
                layer.conv_weight,
                layer.conv_bias,
                activation=None,
            )
        assert isinstance(maps, ExtendMaps)
        return self.route.paged_conv(
            view,
            maps.src_lines,
            maps.dst_lines,
            x[: maps.segments.tokens],
            layer.conv_weight,
            layer.conv_bias,
            maps.segments,
            activation=None,
        )

    def conv_state_metadata(self, layer_id: int, forward_batch: ForwardBatch) -> NoReturn:
        """There is no slot pool to hand out.

        Raises:
            SeamError: always; a layer that was not taken over asked.
        """
        raise SeamError(f"layer {layer_id} asks for a slot pool of conv windows, and there is none")
