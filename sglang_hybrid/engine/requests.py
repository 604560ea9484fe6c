"""SGLang's request pool over live states: rows, page maps, and forks before every forward.

SGLang calls `alloc` and `alloc_aux_to_lengths` while it prepares a batch, on the scheduler thread;
both end before the forward is launched.  The maps are tables indexed by request row, so that a
captured decode graph can gather them by `req_pool_indices`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool, ReqToTokenPool

from sglang_hybrid.engine.last_line import preparing
from sglang_hybrid.engine.unit_tails import UnitTails
from sglang_hybrid.kernels import upload
from sglang_hybrid.pools.arena import Arenas
from sglang_hybrid.pools.organization import Checkpoint, Need, Organization
from sglang_hybrid.pools.views import NO_LINE, SINK_PAGE
from sglang_hybrid.radix.live_state import LiveState
from sglang_hybrid.radix.memory import Memory, Prefill

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_hybrid.engine.cache import GridPrefixCache


class PageMaps:
    """Device tables by request row: where its state is read, where it is written.

    `src_pages`, `dst_pages` are `[rows, members]`, `src_lines`, `dst_lines` `[rows]`, all int32.
    Row 0 is the padding row of captured batches: no source, sink destination.
    """

    def __init__(self, rows: int, members: int, device: str) -> None:
        self.device = device
        # A conv-only family has no member pages; one column keeps the "no source" test uniform.
        self.members = max(members, 1)
        self.src_pages = torch.full((rows, self.members), NO_LINE, dtype=torch.int32, device=device)
        self.dst_pages = torch.full((rows, self.members), SINK_PAGE, dtype=torch.int32, device=device)
        self.src_lines = torch.full((rows,), NO_LINE, dtype=torch.int32, device=device)
        self.dst_lines = torch.full((rows,), SINK_PAGE, dtype=torch.int32, device=device)

    def columns(self, checkpoint: Checkpoint | None) -> Sequence[int]:
        """Member pages and conv line of a checkpoint, `members + 1` ints; the sentinels for none."""
        if checkpoint is None:
            return (NO_LINE,) * (self.members + 1)
        return (*(checkpoint.members or (checkpoint.pages[0],)), checkpoint.line)

    def write(self, rows: Sequence[int], states: Sequence[LiveState]) -> None:
        """Refresh the given rows: O(changed requests), one copy to the device."""
        if not rows:
            return
        packed = [
            (row, *self.columns(state.source or state.live), *self.columns(state.live))
            for row, state in zip(rows, states, strict=True)
        ]
        table = upload(torch.tensor(packed, dtype=torch.int32), self.device)
        index, src, dst = torch.split(table, [1, self.members + 1, self.members + 1], 1)
        index = index[:, 0].long()
        self.src_pages[index], self.src_lines[index] = src[:, :-1], src[:, -1]
        self.dst_pages[index], self.dst_lines[index] = dst[:, :-1], dst[:, -1]


class CheckpointCount:
    """What SGLang asks of a Mamba slot allocator, answered in checkpoints.

    `Scheduler` and `ensure_mamba_capacity` read it; nothing is ever allocated through it.
    """

    def __init__(self, organization: Organization) -> None:
        self._organization = organization
        self.size = checkpoint_capacity(organization)

    def available_size(self) -> int:
        return self.size - self._organization.checkpoints_allocated

    def schedulable_available_size(self) -> int:
        # Admission has charged the states already (engine/admission.py); this must not object.
        return self.size

    @property
    def free_slots(self) -> torch.Tensor:
        return torch.arange(self.available_size(), dtype=torch.int64)

    def alloc_group_begin(self, need_size: int) -> None:
        pass

    def alloc_group_end(self) -> None:
        pass

    def clear(self) -> None:
        pass


def checkpoint_capacity(organization: Organization) -> int:
    """Checkpoints that an empty budget holds beside no attention block."""
    low, high = 1, organization.state_pool.size
    while low < high:
        middle = (low + high + 1) // 2
        if organization.capacity_fits(Need(checkpoints=middle)):
            low = middle
        else:
            high = middle - 1
    return low


class GridRequests(HybridReqToTokenPool):
    """`HybridReqToTokenPool` whose recurrent state lives in an organization's pages."""

    fresh: Sequence[Req] = ()
    """Requests of the extend batch in preparation that get their row with it."""

    def __init__(self, *, organization: Organization, arenas: Arenas, **kwargs: Any) -> None:
        self.organization = organization
        self.arenas = arenas
        self.tails = UnitTails(organization, arenas)
        super().__init__(**kwargs)

    def _init_mamba_pool(
        self,
        mamba_size: int,
        mamba_spec_state_size: int,
        cache_params: Any,
        mamba_layer_ids: list[int],
        device: str,
        enable_mamba_extra_buffer: bool,
        **kwargs: Any,
    ) -> None:
        """Stand-ins with the attributes SGLang reads; no slot pool is built."""
        self.device = device
        self.mamba_map = {layer: index for index, layer in enumerate(mamba_layer_ids)}
        self.mamba_allocator = CheckpointCount(self.organization)
        self.mamba_ckpt_pool = None
        self.short_conv_pool = self.ngram_pool = SimpleNamespace(enabled=False)
        shape, meta = self.arenas.shape, torch.device("meta")
        lead = (len(mamba_layer_ids), self.mamba_allocator.size + 1)
        self.mamba_pool = SimpleNamespace(
            size=self.mamba_allocator.size,
            # Only shapes and dtypes are read from these (Mamba2AttnBackend.__init__).
            mamba_cache=MambaPool.State(
                conv=[
                    torch.empty((*lead, shape.channels, shape.window), dtype=shape.conv_dtype, device=meta)
                ],
                temporal=torch.empty(
                    (*lead, shape.heads, shape.head_dim, shape.state_size), dtype=shape.ssm_dtype, device=meta
                ),
            ),
            enable_linear_replayssm=False,
            enable_linear_replayssm_spec=False,
            replayssm_write_pos=None,
            replayssm_spec_write_pos=None,
            _slot_siblings=(),
            mamba_layer_ids=list(mamba_layer_ids),
            get_kv_size_bytes=lambda: 0,
        )
        rows = self.req_to_token.shape[0]
        self.req_index_to_mamba_index_mapping = torch.arange(rows, dtype=torch.int32, device=device)
        self.maps = PageMaps(rows, self.organization.members, device)
        self.states_by_row: list[LiveState | None] = [None] * rows
        self._requests: list[Req | None] = [None] * rows
        self.batch: list[Req] | None = None
        """The extend batch in preparation."""
        self._forked: set[int] = set()
        """Rows whose source still differs from their live state."""
        self._unwritten: set[int] = set()
        """Rows whose maps no decode step has needed yet: a prefill takes its own from the states."""

    def connect(self, cache: GridPrefixCache) -> None:
        """The tree factory runs after the pools are built and completes the circle."""
        self.cache = cache
        self.memory: Memory = cache.memory

    # -- SGLang's calls, in the order of a batch's preparation ------------------------------

    def alloc(self, reqs: list[Req]) -> list[int] | None:
        """Bind rows.  States are given in `alloc_aux_to_lengths`, once the KV units are there."""
        self.batch, self.fresh = reqs, [req for req in reqs if not req.kv.holds_kv]
        with preparing(reqs):
            return self._bind(reqs)

    def _bind(self, reqs: list[Req]) -> list[int] | None:
        rows = ReqToTokenPool.alloc(self, reqs)
        if rows is None:
            return None
        for req in self.fresh:
            self.states_by_row[req.kv.req_pool_idx] = self.cache.admitted(req)
            self._requests[req.kv.req_pool_idx] = req
        return rows

    def preparing_states(self) -> list[LiveState]:
        """Live states of the extend batch in preparation, in its order."""
        assert self.batch is not None
        return [self.state(req.kv.req_pool_idx) for req in self.batch]

    def alloc_aux_to_lengths(
        self, *, req_pool_indices_cpu: torch.Tensor, target_seq_lens_cpu: torch.Tensor
    ) -> None:
        """Fork or settle every request whose state moves in the coming forward."""
        if self.batch is not None:
            with preparing(self.batch):
                self._prepare_extend(self.batch, target_seq_lens_cpu.tolist())
            self.batch = None
        else:
            self._prepare_decode(req_pool_indices_cpu, target_seq_lens_cpu - 1)
        self.cache.changed()

    def _prepare_extend(self, reqs: list[Req], ends: list[int]) -> None:
        rows = [req.kv.req_pool_idx for req in reqs]
        states = [self.state(row) for row in rows]
        parts = zip(states, reqs, ends, strict=True)
        self.memory.prepare_prefill([Prefill(state, req.prefix_len, end) for state, req, end in parts])
        self._forked.update(row for row, state in zip(rows, states, strict=True) if state.source is not None)
        self._unwritten.update(rows)
        for req in self.fresh:
            self.cache.begun(req)

    def _prepare_decode(self, rows: torch.Tensor, starts: torch.Tensor) -> None:
        crossing: list[LiveState] = []
        if self.memory.step_units:
            on_unit = starts % self.organization.unit_tokens == 0
            crossing = [self.state(row) for row in rows[on_unit].tolist()]
        on_grid = starts % self.organization.grid == 0
        leaving = dict(zip(rows[on_grid].tolist(), starts[on_grid].tolist(), strict=True))
        # Only of this batch: another request's forward may be prepared and not launched yet.  In its order,
        # so that equal histories give equal evictions, whatever rows they ran in.
        settling: list[int] = []
        if self._forked:
            settling = [row for row in rows.tolist() if row in self._forked and row not in leaving]
        reqs = [self._request(row) for row in leaving]
        published = self.memory.prepare_decode(
            [self.state(row) for row in settling],
            [self.cache.publication(req, start) for req, start in zip(reqs, leaving.values(), strict=True)],
            crossing,
        )
        for req, duplicates in zip(reqs, published, strict=True):
            self.cache.published(req, duplicates)
        changed = [*settling, *leaving]
        self._forked.difference_update(changed)
        self._forked.update(row for row in leaving if self.state(row).source is not None)
        self._unwritten.difference_update(changed)
        if self._unwritten:
            unwritten = [row for row in rows.tolist() if row in self._unwritten]
            self._unwritten.difference_update(unwritten)
            changed += unwritten
        self.maps.write(changed, [self.state(row) for row in changed])

    def free(self, req: Req) -> None:
        """Give back the row and everything that the request held on pages."""
        row = req.kv.req_pool_idx
        state = self.states_by_row[row]
        if state is not None:
            self.memory.finish(state)
            self.cache.reuse.left(req)
        self.states_by_row[row] = self._requests[row] = None
        self._forked.discard(row)
        self._unwritten.discard(row)
        super().free(req)

    def take_back(self, req: Req) -> None:
        """Undo what the preparation of its first forward has given to a request, which may wait again."""
        self.batch = None
        if req.kv.holds_kv:
            self.free(req)
        self.cache.unlock(req.lock)
        before = req.retraction_count, req.retracted_stain, req.is_retracted
        req.reset_for_retract()
        req.retraction_count, req.retracted_stain, req.is_retracted = before  # it was not preempted

    def clear(self) -> None:
        """Flush: no request is running.  Tree and organization are reset by the cache."""
        # Not `HybridReqToTokenPool.clear`: it clears slot pools that we do not have.
        ReqToTokenPool.clear(self)
        self.states_by_row = [None] * len(self.states_by_row)
        self._requests = [None] * len(self._requests)
        self._forked, self._unwritten = set(), set()

    # -- readers ----------------------------------------------------------------------------

    def state(self, row: int) -> LiveState:
        state = self.states_by_row[row]
        assert state is not None, f"request row {row} has no live state"
        return state

    def states(self) -> Iterator[LiveState]:
        """Of every request that has a row."""
        return (state for state in self.states_by_row if state is not None)

    def _request(self, row: int) -> Req:
        req = self._requests[row]
        assert req is not None, f"request row {row} is not bound"
        return req
