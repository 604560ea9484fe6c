"""Attention that reads as fa3 does, on a CPU.

A page table is filled at metadata preparation (in decode a static one, outside of a captured graph).  Whole
pages are read through it, scores past a sequence's end become -inf, and their weights, all 0, are multiplied
with what lies in those rows of V: 0 x NaN is NaN.  torch's own backend gathers the rows of tokens alone and
never meets what lies behind them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MLATokenToKVPool

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

QUERIES = 128
"""Rows of a query tile in prefill; bounds the memory for scores."""


class Pages(NamedTuple):
    """Of every sequence: first slots of its pages `[B, pages]` and tokens `[B]`, both int64 on the device.

    Columns past a sequence's last page repeat that page: a kernel does not go there, and here the weights
    of what is read twice are 0.
    """

    first_slots: torch.Tensor
    lengths: torch.Tensor


def page_table(
    req_to_token: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, page: int, pages: int
) -> torch.Tensor:
    """First slots `[B, pages]` of the pages of these request rows, as `req_to_token` has them."""
    last = (lengths - 1).clamp(min=0) // page
    column = torch.minimum(torch.arange(pages, device=rows.device), last[:, None]) * page
    return req_to_token[rows[:, None], column].long()


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    ends: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`[B, n, heads, v_dim]` of queries `[B, n, heads, dim]` over `[B, rows, kv_heads, dim]` whole pages.

    Query i of sequence b sees the rows before `ends[b, i]`.  Sums in fp32, weights of the others exactly 0.
    """
    batch, count, heads, dim = q.shape
    rows, kv_heads = keys.shape[1:3]
    grouped = q.reshape(batch, count, kv_heads, heads // kv_heads, dim).float()
    scores = torch.einsum("bnhgd,bthd->bhgnt", grouped, keys.float()) * scale
    seen = torch.arange(rows, device=q.device) < ends[:, :, None]
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    out = torch.einsum("bhgnt,bthd->bnhgd", weights, values.float())
    return out.reshape(batch, count, heads, -1).to(q.dtype)


class WholePages(TorchNativeAttnBackend):
    """See the module.  `page` rows of a page lie side by side, whatever lies between two pages."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.page = runner.page_size
        self.max_context_len = runner.model_config.context_len
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.offsets = torch.arange(self.page, device=self.device)
        self.latent = isinstance(self.token_to_kv_pool, MLATokenToKVPool)
        self._reserve(self.req_to_token.shape[0])

    def _reserve(self, rows: int) -> None:
        pages = -(-self.max_context_len // self.page)
        self.static = Pages(
            torch.zeros((rows, pages), dtype=torch.int64, device=self.device),
            torch.ones(rows, dtype=torch.int64, device=self.device),
        )

    # -- metadata -----------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        lengths = forward_batch.seq_lens_cpu.tolist()
        pages = -(-max(lengths, default=1) // self.page)
        if forward_batch.forward_mode.is_decode_or_idle():
            self.forward_metadata = self._decode_pages(forward_batch, max(pages, 1))
            return
        rows, tokens = forward_batch.req_pool_indices, forward_batch.seq_lens
        table = page_table(self.req_to_token, rows, tokens, self.page, pages)
        self.forward_metadata = Pages(table, tokens)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Before capture: a padded batch may have more rows than there are requests."""
        if max_bs > self.static.lengths.shape[0]:
            self._reserve(max_bs)

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """A graph holds these addresses and this width: that of the longest context."""
        self.forward_metadata = self._decode_pages(forward_batch, self.static.first_slots.shape[1])

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def _decode_pages(self, forward_batch: ForwardBatch, pages: int) -> Pages:
        rows, tokens = forward_batch.req_pool_indices, forward_batch.seq_lens
        batch = rows.shape[0]
        views = Pages(self.static.first_slots[:batch, :pages], self.static.lengths[:batch])
        views.first_slots.copy_(page_table(self.req_to_token, rows, tokens, self.page, pages))
        views.lengths.copy_(tokens)
        return views

    # -- forward ------------------------------------------------------------------------

    def _store(self, k: Any, v: Any, layer: RadixAttention, forward_batch: ForwardBatch) -> None:
        assert not layer.is_cross_attention and layer.attn_type == AttentionType.DECODER
        assert layer.sliding_window_size in (None, -1) and not layer.logit_cap
        scales = () if self.latent else (layer.k_scale, layer.v_scale)
        self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v, *scales)

    def _read(self, layer: RadixAttention, first_slots: torch.Tensor) -> list[torch.Tensor]:
        """K and V `[B, pages * page, kv_heads, dim]` in fp32, multiplied by their scales."""
        slots = (first_slots[:, :, None] + self.offsets).flatten(1)
        pool = self.token_to_kv_pool
        found = []
        for buffer, factor in (
            (pool.get_key_buffer(layer.layer_id), layer.k_scale),
            (pool.get_value_buffer(layer.layer_id), layer.v_scale),
        ):
            rows = buffer[slots].float()
            found.append(rows if factor is None else rows * factor)
        return found

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        if save_kv_cache and k is not None:
            self._store(k, v, layer, forward_batch)
        pages = self.forward_metadata
        queries = q.reshape(-1, 1, layer.tp_q_head_num, layer.qk_head_dim)
        keys, values = self._read(layer, pages.first_slots)
        return attend(queries, keys, values, pages.lengths[:, None], layer.scaling).flatten(1)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        if save_kv_cache and k is not None:
            self._store(k, v, layer, forward_batch)
        pages = self.forward_metadata
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_zeros(queries.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        done = 0
        extends = zip(forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu)
        for index, (begin, length) in enumerate(extends):
            for low in range(0, length, QUERIES):
                size = min(QUERIES, length - low)
                end = begin + low + size
                keys, values = self._read(
                    layer, pages.first_slots[index : index + 1, : -(-end // self.page)]
                )
                part = slice(done + low, done + low + size)
                ends = torch.arange(end - size + 1, end + 1, device=q.device)[None]
                out[part] = attend(queries[None, part], keys, values, ends, layer.scaling)[0]
            done += length
        return out.flatten(1)
