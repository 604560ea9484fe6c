"""Exact mode (`--hybrid-exact`): a resumed run equals a recomputed one bit for bit.

On the CPU platform a token goes through the same arithmetic in prefill and in decode, alone and in
company: `platforms.exact_ops` for products, norms and softmax, `kernels.exact_attention`, and
`kernels.exact_recurrence` for the recurrent layers.  So every checkpoint is canonical, whoever made it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_hybrid import kernels
from sglang_hybrid.engine.mixer import HybridMamba2Backend
from sglang_hybrid.engine.page_maps import DecodeMaps, ExtendMaps
from sglang_hybrid.engine.seams import SeamError
from sglang_hybrid.kernels.exact_attention import exact_attention
from sglang_hybrid.kernels.exact_recurrence import exact_conv, exact_scan
from sglang_hybrid.platforms import exact_ops

if TYPE_CHECKING:
    from sglang.srt.layers.attention.mamba.mamba import MambaMixer2
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class ExactAttention(TorchNativeAttnBackend):
    """Stock backend with `exact_attention` instead of torch's fused attention."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        exact_ops.install()
        _same_logprobs(model_runner)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        begins, lengths = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
        assert begins is not None and lengths is not None
        return self._attend(q, k, v, layer, forward_batch, list(zip(begins, lengths)), save_kv_cache)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        extends = [(length - 1, 1) for length in forward_batch.seq_lens.tolist()]
        return self._attend(q, k, v, layer, forward_batch, extends, save_kv_cache)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        extends: list[tuple[int, int]],
        save_kv_cache: bool,
    ) -> torch.Tensor:
        """`extends`: (tokens before, new tokens) of each sequence."""
        assert not layer.is_cross_attention and layer.attn_type == AttentionType.DECODER
        assert layer.sliding_window_size in (None, -1) and not layer.logit_cap
        if save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        table = self.req_to_token_pool.req_to_token
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_zeros(queries.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        done = 0
        for row, (begin, length) in zip(forward_batch.req_pool_indices.tolist(), extends, strict=True):
            slots = table[row, : begin + length].long()
            part = slice(done, done + length)
            out[part] = exact_attention(queries[part], keys[slots], values[slots], begin, layer.scaling)
            done += length
        return out.flatten(1)


def _same_logprobs(model_runner: Any) -> None:
    """Have logprobs of a prompt and of an answer, at any temperature, computed by log_softmax alike.

    Source symbols: `Sampler.enable_deterministic`, `InputLogprobProcessor.enable_fast_input_logprobs`;
    SGLang's deterministic inference sets both so.
    """
    modules = [
        module for module in model_runner.model.modules() if hasattr(module, "input_logprob_processor")
    ]
    processors = [module.input_logprob_processor for module in modules]
    switches = [(model_runner.sampler, "enable_deterministic", True)]
    switches += [(processor, "enable_fast_input_logprobs", False) for processor in processors]
    for owner, name, value in switches:
        if not processors or not hasattr(owner, name):
            raise SeamError(
                f"{type(owner).__name__}.{name} of the model: expected it to exist, found nothing"
            )
        setattr(owner, name, value)


class ExactMamba2Backend(HybridMamba2Backend):
    """`HybridMamba2Backend` whose prefill and decode are one routine: single steps."""

    def _decode(
        self, mixer: MambaMixer2, layer: int, conv_in: torch.Tensor, dt: torch.Tensor, maps: DecodeMaps
    ) -> torch.Tensor:
        return self._extend(mixer, layer, conv_in, dt, ExtendMaps(_one_token_each(conv_in.shape[0]), *maps))

    def _extend(
        self, mixer: MambaMixer2, layer: int, conv_in: torch.Tensor, dt: torch.Tensor, maps: ExtendMaps
    ) -> torch.Tensor:
        state, conv = self.states[layer], self.convs[layer]
        conv_out, windows = exact_conv(
            conv_in,
            mixer.conv1d.weight.squeeze(1),
            mixer.conv1d.bias,
            maps.segments,
            activation=mixer.activation,
            windows=kernels.read_windows(conv, maps.src_lines),
        )
        kernels.write_windows(conv, maps.dst_lines, windows)
        x, b, c = self._split(mixer, conv_out)
        y, states = exact_scan(
            x,
            dt,
            mixer.A,
            b,
            c,
            maps.segments,
            d=mixer.D,
            dt_bias=mixer.dt_bias,
            dt_softplus=True,
            initial_states=kernels.read_states(state, maps.src_pages),
            state_dtype=state.rows.dtype,
        )
        kernels.write_states(state, maps.dst_pages, states)
        return y.flatten(1)


@lru_cache(maxsize=256)
def _one_token_each(count: int) -> kernels.Segments:
    """A decode batch as extends of one token; no boundary matters, the maps know where states go."""
    return kernels.plan_segments(range(count + 1), [0] * count, None)
