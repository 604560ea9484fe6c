"""Lightning attention layers that read and write their state through page maps (`LightningAttentionBackend`).

Their recurrence is Mamba2's without a step that depends on the input: a head keeps
`S_t = exp(-slope) S_(t-1) + v_t k_t^T` and answers `S_t q_t`.  So dt is 1, A the negative slope, B the key, C
the query, and every head is a group of its own.  SGLang keeps S transposed; nothing else reads our pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.linear.lightning_backend import LightningAttentionBackend

from sglang_hybrid.engine.page_maps import DecodeMaps, ExtendMaps, PageMapMetadata

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

UNSCALED = "minimax"
"""SGLang's `linear_backend` whose layers scale their queries themselves."""


class HybridLightningBackend(PageMapMetadata, LightningAttentionBackend):
    """Stock backend with page maps for metadata and the Mamba2 recurrence of a route of `kernels`.

    With `--kv-cache-dtype` of eight bits stock SGLang rounds the queries of these layers to it, though they
    keep no KV; this backend does not.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.attach(model_runner)
        self.choose_route()
        self.decays = {layer: -self.tp_slope[layer].flatten() for layer in self.states}
        self.one = torch.ones((), device=self.device)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`LightningAttentionBackend.forward_decode`: q, k, v [B, heads, dim] -> [B, heads x dim]."""
        maps = self.forward_metadata
        assert isinstance(maps, DecodeMaps)
        y = self.route.state_update(
            self.states[layer.layer_id],
            maps.src_pages,
            maps.dst_pages,
            *self._inputs(layer, q, k, v),
        )
        return y.flatten(1)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`LightningAttentionBackend.forward_extend`: q, k, v [T, heads, dim] -> [T, heads x dim]; rows past
        the batch's tokens are zero."""
        maps = self.forward_metadata
        assert isinstance(maps, ExtendMaps)
        tokens = maps.segments.tokens
        y = self.route.paged_scan(
            self.states[layer.layer_id],
            maps.src_pages,
            maps.dst_pages,
            *self._inputs(layer, q[:tokens], k[:tokens], v[:tokens]),
            maps.segments,
        )
        padding = q.shape[0] - tokens
        return (torch.nn.functional.pad(y, (0, 0, 0, 0, 0, padding)) if padding else y).flatten(1)

    def _inputs(
        self, layer: RadixAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """x, dt, A, B and C of the Mamba2 recurrence."""
        queries = q if self.linear_backend == UNSCALED else q * layer.scaling
        return v, self.one.expand(v.shape[:2]), self.decays[layer.layer_id], k, queries
