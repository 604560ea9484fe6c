"""Mamba2 layers that read and write their state through page maps (`Mamba2AttnBackend`).

Maps are gathered once a forward, at metadata preparation, into buffers that the layers share; a
captured decode graph refers to the same static buffers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend

from sglang_hybrid import kernels
from sglang_hybrid.engine.requests import GridRequests
from sglang_hybrid.kernels import Segments
from sglang_hybrid.pools.organization import Checkpoint
from sglang_hybrid.pools.views import ConvView, StateView

if TYPE_CHECKING:
    from sglang.srt.layers.attention.mamba.mamba import MambaMixer2
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class DecodeMaps(NamedTuple):
    """One token a request: pages `[B, members]` and lines `[B]`, read and written."""

    src_pages: torch.Tensor
    src_lines: torch.Tensor
    dst_pages: torch.Tensor
    dst_lines: torch.Tensor


class ExtendMaps(NamedTuple):
    """Ragged batch: sources by sequence, destinations by emission (`Segments`)."""

    segments: Segments
    src_pages: torch.Tensor
    src_lines: torch.Tensor
    dst_pages: torch.Tensor
    dst_lines: torch.Tensor


class HybridMamba2Backend(Mamba2AttnBackend):
    """Stock backend with page maps for metadata and our own mixer routine over `kernels`."""

    forward_metadata: DecodeMaps | ExtendMaps | None

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        requests = model_runner.req_to_token_pool
        assert isinstance(requests, GridRequests), (
            f"page maps need a GridRequests pool, not {type(requests).__name__}"
        )
        self.requests = requests
        self.states: dict[int, StateView] = {}
        self.convs: dict[int, ConvView] = {}
        for layer, index in requests.mamba_map.items():
            self.states[layer] = requests.arenas.state(index)
            self.convs[layer] = requests.arenas.conv(index)
        self._static: DecodeMaps | None = None

    # -- metadata ---------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if forward_batch.forward_mode.is_decode_or_idle():
            self.forward_metadata = self._decode_maps(forward_batch.req_pool_indices, None)
        else:
            self.forward_metadata = self._extend_maps(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Static buffers that a captured decode graph reads."""
        maps = self.requests.maps
        self._static = DecodeMaps(
            *(
                torch.zeros((max_bs, *table.shape[1:]), dtype=torch.int32, device=self.device)
                for table in (maps.src_pages, maps.src_lines, maps.dst_pages, maps.dst_lines)
            )
        )

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        self.forward_metadata = self._decode_maps(forward_batch.req_pool_indices, self._static)

    def shared_read_ends(self, fm: Any) -> SharedReadEnds:
        """The tables are read at metadata preparation only."""
        return SharedReadEnds.PRE_REPLAY

    def _decode_maps(self, rows: torch.Tensor, out: DecodeMaps | None) -> DecodeMaps:
        maps = self.requests.maps
        tables = (maps.src_pages, maps.src_lines, maps.dst_pages, maps.dst_lines)
        if out is None:
            return DecodeMaps(*(table.index_select(0, rows) for table in tables))
        views = DecodeMaps(*(buffer[: rows.shape[0]] for buffer in out))
        for table, view in zip(tables, views, strict=True):
            torch.index_select(table, 0, rows, out=view)
        return views

    def _extend_maps(self, forward_batch: ForwardBatch) -> ExtendMaps:
        requests, maps = self.requests, self.requests.maps
        begins, lengths = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
        rows = forward_batch.req_pool_indices_cpu
        assert begins is not None and lengths is not None and rows is not None
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        segments = kernels.plan_segments(starts, begins, requests.organization.grid, device=self.device)
        states = [requests.state(row) for row in rows.tolist()]
        planned: list[dict[int, Checkpoint | None]] = [dict(state.boundaries) for state in states]
        for state, depths, begin, length in zip(states, planned, begins, lengths, strict=True):
            depths[begin + length] = state.live
        src_pages, src_lines = maps.rows_of(
            [(s.source or s.live) if begin else None for s, begin in zip(states, begins, strict=True)]
        )
        # A boundary that found no memory has no destination: its emission goes nowhere.
        dst_pages, dst_lines = maps.rows_of([planned[seq].get(end) for seq, end in segments.emissions])
        return ExtendMaps(segments, src_pages, src_lines, dst_pages, dst_lines)

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
        conv_out = kernels.conv_update(
            self.convs[layer],
            maps.src_lines,
            maps.dst_lines,
            conv_in,
            mixer.conv1d.weight.squeeze(1),
            mixer.conv1d.bias,
            activation=mixer.activation,
        )
        x, b, c = self._split(mixer, conv_out)
        y = kernels.state_update(
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
        state, conv = self.states[layer], self.convs[layer]
        conv_out, windows = kernels.causal_conv(
            conv_in,
            mixer.conv1d.weight.squeeze(1),
            mixer.conv1d.bias,
            maps.segments,
            activation=mixer.activation,
            windows=kernels.read_windows(conv, maps.src_lines),
            window_dtype=conv.lines.dtype,
        )
        kernels.write_windows(conv, maps.dst_lines, windows)
        x, b, c = self._split(mixer, conv_out)
        y, states = kernels.ssd_scan(
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
