"""Which pages a forward reads and writes: the metadata half of every state backend of ours.

Maps are gathered once a forward, at metadata preparation.  Those of a decode step go into static buffers,
which a captured graph refers to: preparing one allocates nothing and waits for nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

from sglang_hybrid import kernels
from sglang_hybrid.engine.args import settings
from sglang_hybrid.engine.requests import GridRequests
from sglang_hybrid.kernels import Runs, Segments
from sglang_hybrid.pools.organization import Checkpoint
from sglang_hybrid.pools.views import ConvView, StateView

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

logger = logging.getLogger(__name__)


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


class PageMapMetadata:
    """In front of a state backend of SGLang's: page maps instead of its slot indices as metadata."""

    forward_metadata: DecodeMaps | ExtendMaps | None
    device: Any

    def attach(self, model_runner: Any) -> None:
        """Take the views of all recurrent layers; for the end of the backend's `__init__`."""
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
        self._static = self._buffers(requests.maps.src_pages.shape[0])

    def choose_route(self) -> None:
        """Take the kernels that `--hybrid-kernels` names; likewise."""
        self.route = kernels.choose(settings().kernels, self.device)
        logger.info("Recurrent state goes through %s kernels.", self.route.name)

    # -- metadata ---------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        runs = self.requests.tails.due(self.route)
        if forward_batch.forward_mode.is_decode_or_idle():
            self.requests.tails.clear(self.route, runs)
            self.forward_metadata = self._decode_maps(forward_batch.req_pool_indices)
        else:
            self.forward_metadata = self._extend_maps(forward_batch, runs)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Before capture: a padded batch may have more rows than there are requests."""
        if max_bs > self._static.src_lines.shape[0]:
            self._static = self._buffers(max_bs)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        self.requests.tails.clear(self.route, self.requests.tails.due(self.route))
        self.forward_metadata = self._decode_maps(forward_batch.req_pool_indices)

    def shared_read_ends(self, fm: Any) -> SharedReadEnds:
        """The tables are read at metadata preparation only."""
        return SharedReadEnds.PRE_REPLAY

    def _tables(self) -> tuple[torch.Tensor, ...]:
        """By request row, in the order of `DecodeMaps`."""
        maps = self.requests.maps
        return maps.src_pages, maps.src_lines, maps.dst_pages, maps.dst_lines

    def _buffers(self, rows: int) -> DecodeMaps:
        """One row a request of the largest batch."""
        return DecodeMaps(*(table.new_empty((rows, *table.shape[1:])) for table in self._tables()))

    def _decode_maps(self, rows: torch.Tensor) -> DecodeMaps:
        """Gathered on the stream of the forward, which reads them before the next is prepared there."""
        views = DecodeMaps(*(buffer[: rows.shape[0]] for buffer in self._static))
        for table, view in zip(self._tables(), views, strict=True):
            torch.index_select(table, 0, rows, out=view)
        return views

    def _extend_maps(self, forward_batch: ForwardBatch, runs: Runs = ()) -> ExtendMaps:
        """`runs` are rows to clear: what says where they are comes to the device in the same copy."""
        requests, maps = self.requests, self.requests.maps
        begins, lengths = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
        rows = forward_batch.req_pool_indices_cpu
        assert begins is not None and lengths is not None and rows is not None
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        cut = kernels.cut_segments(starts, begins, requests.organization.grid)
        states = [requests.state(row) for row in rows.tolist()]
        planned: list[dict[int, Checkpoint | None]] = [dict(state.boundaries) for state in states]
        for state, depths, begin, length in zip(states, planned, begins, lengths, strict=True):
            depths[begin + length] = state.live
        sources = [(s.source or s.live) if begin else None for s, begin in zip(states, begins, strict=True)]
        # A boundary that found no memory has no destination: its emission goes nowhere.
        targets = [planned[seq].get(end) for seq, end in cut.emissions]
        columns = [column for one in (*sources, *targets) for column in maps.columns(one)]
        segments, (packed, placed) = cut.on(self.device, columns, [bound for run in runs for bound in run])
        if runs:
            requests.tails.clear(self.route, runs, placed)
        packed = packed.to(torch.int32).view(-1, maps.members + 1)
        src, dst = torch.split(packed, [len(sources), len(targets)])
        return ExtendMaps(segments, src[:, :-1], src[:, -1], dst[:, :-1], dst[:, -1])
