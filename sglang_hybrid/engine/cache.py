"""SGLang's prefix cache over the grid tree: match, adopt, publish, release (`BasePrefixCache`)."""

from __future__ import annotations

import dataclasses
import logging
import time
from array import array
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    CacheRequestHandle,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    MatchPrefixParams,
    MatchResult,
    TreeLock,
)
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_hybrid.engine import holders
from sglang_hybrid.engine.last_line import Failed, asked
from sglang_hybrid.engine.reuse import ReuseLog
from sglang_hybrid.pools.organization import Need
from sglang_hybrid.radix.account import Refusals, binding
from sglang_hybrid.radix.admission import Pass
from sglang_hybrid.radix.history import Lookup
from sglang_hybrid.radix.live_state import Duplicate, Lease, LiveState
from sglang_hybrid.radix.memory import Memory, Publication
from sglang_hybrid.radix.policy import DEFAULT_POLICY, Policy
from sglang_hybrid.radix.tree import Node

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_hybrid.engine.metrics import Exporter
    from sglang_hybrid.engine.requests import GridRequests
    from sglang_hybrid.engine.tokens import GridTokens

logger = logging.getLogger(__name__)

ENDED_AT = ("door", "arrival", "admission", "prefill")
"""Requests refused with a sentence in the scheduler, and those that an exception ended: on the way to the
queue, while they were asked for, while their first forward was prepared."""
TOKEN_BYTES = 8
"""SGLang keeps token ids in `array('q')`."""


@dataclasses.dataclass
class GridLock(TreeLock):
    """A lock of SGLang's on a path; its lease is a running request's once that has its live state."""

    lease: Lease | None = None


class GridPrefixCache(BasePrefixCache):
    """One per scheduler.  Nodes are handed to SGLang as they are; it never looks inside."""

    def __init__(
        self,
        requests: GridRequests,
        tokens: GridTokens,
        enable_metrics: bool,
        policy: Policy = DEFAULT_POLICY,
    ) -> None:
        self.req_to_token_pool = requests
        self.token_to_kv_pool_allocator = tokens
        self.organization = tokens.organization
        self.page_size = self.organization.unit_tokens
        self.grid = self.organization.grid
        self.device = tokens.device
        self.disable = False
        self.sliding_window_size = None
        self.memory = memory = Memory(self.organization, policy, token_bytes=TOKEN_BYTES)
        memory.on_given_up = self._given_up
        memory.on_unpublished = self._unpublished
        # For reports.
        self.tree, self.lifetime, self.live = memory.tree, memory.lifetime, memory.live
        self.admission, self.pins = memory.admission, memory.pins
        self.reuse = ReuseLog(self.grid)
        self.refusals = Refusals()
        self.ended: Counter[str] = Counter()
        """Requests that were ended by us, by the stage that they had come to (`ENDED_AT`)."""
        self.unpublished = 0
        """Times that an exception kept a request's blocks out of the tree."""
        self.failed: dict[str, Failed] = {}
        """By request id, those that failed in the running pass (`last_line.asked`)."""
        self.suspects: set[str] = set()
        """Ids of requests of which one made a prefill fail: they are admitted one by one."""
        self.exporter: Exporter | None = None
        """Set where this scheduler has metrics to show."""
        requests.connect(self)
        tokens.connect(self)
        if enable_metrics:
            self.init_metrics_collector()

    # -- match and adopt --------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Joint match (docs/architecture.md); no side effects, SGLang calls it once a pass and request."""
        if params.req is None:
            return self._match(params)
        with asked(self, params.req):
            return self._match(params)
        # It is not admitted any more; SGLang's loop over the queue goes on.
        return self._match(dataclasses.replace(params, key=RadixKey(array("q")), req=None))

    def _match(self, params: MatchPrefixParams) -> MatchResult:
        key = params.key
        namespace = (key.extra_key, key.cache_salt)
        view = memoryview(key.token_ids).cast("B") if key.token_ids else b""
        if params.req is None:
            match = self.memory.match(namespace, view, len(key))
        else:
            before: Lookup | None = getattr(params.req, "hybrid_lookup", None)
            lookup = params.req.hybrid_lookup = self.memory.look_up(namespace, view, len(key), before)
            match = lookup.match
        length = match.depth * self.grid
        return MatchResult(
            device_prefix_len=length,
            last_device_node=match.node,
            last_host_node=match.node,
            best_match_node=match.node,
            cache_protected_len=length,
            full_kv_hit_length=match.attention_depth * self.grid,
            mamba_branching_seqlen=match.attention_depth * self.grid,
        )

    def lock(self, node: Any) -> GridLock:
        """Adopt: protect the path's KV and the checkpoint at its end."""
        lease = self.memory.adopt(node)
        return GridLock(lease.node, DecLockRefParams(), lease=lease)

    def unlock(self, lock: TreeLock | None) -> None:
        """Undo `lock`; the lease of a running request is given back by `Memory.finish`, with its row."""
        if lock is None:
            return
        assert isinstance(lock, GridLock)
        if lock.lease is not None:
            lease, lock.lease = lock.lease, None
            self.memory.abandon(lease)

    def awaits(self, req: Req, rules: Pass) -> bool:
        """Whether the request, just matched, should wait for a prefix that a running prefill, or one that
        was admitted in this pass, is computing."""
        return rules.should_wait(req.hybrid_lookup, lambda: _encode(req.full_untruncated_fill_ids))

    def expect(self, req: Req, rules: Pass) -> None:
        """The request is admitted in this pass: others may wait for its prefix."""
        if not req.skip_radix_cache_insert:
            tokens = req.full_untruncated_fill_ids
            rules.promise(req.hybrid_lookup, req.lock.lease, lambda: _encode(tokens), len(tokens))

    def admitted(self, req: Req) -> LiveState:
        """The request gets its row: its live state takes the lease over."""
        lookup: Lookup = req.hybrid_lookup
        tokens = req.full_untruncated_fill_ids
        state, reuse = self.memory.admit(
            lookup,
            req.lock.lease,
            _encode(tokens),
            len(tokens),
            private=bool(req.skip_radix_cache_insert),
            resumed=bool(req.retracted_stain),
            key=req.rid,
        )
        req.lock.lease = None
        req.hybrid_admission = lookup.namespace, reuse
        return state

    def begun(self, req: Req) -> None:
        """The request's first forward is prepared: its admission counts."""
        self.reuse.admitted(req, *req.hybrid_admission)
        self.suspects.discard(req.rid)

    def inc_lock_ref(self, node: Any) -> IncLockRefResult:
        self.tree.lock(node)
        return IncLockRefResult()

    def dec_lock_ref(self, node: Any, params: DecLockRefParams | None = None) -> DecLockRefResult:
        self.tree.unlock(node)
        return DecLockRefResult()

    def path_device_indices(self, node: Node) -> torch.Tensor:
        units = [unit for block in node.path() for unit in block.units]
        return self.token_to_kv_pool_allocator.slots_of(units)

    # -- publish ----------------------------------------------------------------------------

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        """Hand the request's whole blocks up to token `up_to` to the tree, states where they stand."""
        self.published(req, self.memory.publish(*self.publication(req, up_to)))

    def publication(self, req: Req, up_to: int) -> Publication:
        """What the request can publish, up to token `up_to`; nothing, if SGLang has barred it from the tree.

        Not past the token ids that are known: with overlap scheduling the last one may be missing.
        """
        req.refresh_fill_ids()
        known = req.full_untruncated_fill_ids
        state = self.req_to_token_pool.state(req.kv.req_pool_idx)
        if req.skip_radix_cache_insert:
            return Publication(state, b"", 0, req.kv.kv_committed_len)
        return Publication(state, _encode(known), min(up_to, len(known)), req.kv.kv_committed_len)

    def published(self, req: Req, duplicates: Sequence[Duplicate]) -> None:
        """The memory has published for the request: its row and SGLang's view of it follow."""
        node = self.req_to_token_pool.state(req.kv.req_pool_idx).lease.node
        if node is req.lock.node:
            return
        for block, units in duplicates:
            self._repoint(req, block, units)
        req.lock.node = req.last_node = node
        req.kv.cache_protected_len = req.kv.cache_inserted_len = node.depth * self.grid

    def _unpublished(self, state: LiveState, error: Exception) -> None:
        """The request keeps its answer.  Raises IntegrityError if something is half done."""
        logger.error(
            "What request %s has computed since its last checkpoint is not cached.", state.key, exc_info=error
        )
        holders.check(self)
        self.unpublished += 1

    def _repoint(self, req: Req, block: int, units: Sequence[int]) -> None:
        """Row positions of this block now lie in the tree's units; the request's own are free."""
        start = block * self.grid
        slots = self.token_to_kv_pool_allocator.slots_of(units)
        self.req_to_token_pool.write(
            (req.kv.req_pool_idx, slice(start, start + self.grid)), slots.to(torch.int32)
        )

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        """Nothing yet: `Memory.finish` gives back all units of the request, with its row."""

    # -- preemption -------------------------------------------------------------------------

    def claim_kv_row(self, req: Req) -> bool:
        """First call of SGLang's `release_kv_cache`: an unfinished request here is preempted."""
        if not req.finished() and req.to_finish is None and not req.skip_radix_cache_insert:
            one = self.publication(req, req.kv.kv_committed_len)
            self.published(req, self.memory.preempt(req.rid, one))
        return False

    def _given_up(self, rid: Hashable, tokens: int) -> None:
        logger.warning(
            "Preempted request %s gives up its checkpoint at token %d: nothing else could make room. "
            "It will be computed again.",
            rid,
            tokens,
        )

    def release_aborted_request(self, handle: CacheRequestHandle) -> None:
        self.memory.forget(handle.rid)
        self.suspects.discard(handle.rid)
        self.reuse.aborted(handle.rid)

    # -- eviction and flush -----------------------------------------------------------------

    def evict(self, params: EvictParams) -> EvictResult:
        """Make room for what is asked beyond what is free.  Our own calls evict by exact need."""
        started = time.perf_counter()
        before = self.organization.usage()
        organization = self.organization
        if params.num_tokens:
            asked = organization.units_free() + -(-params.num_tokens // self.page_size)
            self.memory.make_room(Need(units=min(asked, organization.units_reclaimable())))
        if params.mamba_num:
            self.memory.make_room(Need(checkpoints=params.mamba_num))
        after = self.organization.usage()
        tokens = (before.units_allocated - after.units_allocated) * self.page_size
        self.update_eviction_metrics(tokens, started)
        return EvictResult(
            num_tokens_evicted=tokens,
            mamba_num_evicted=before.checkpoints_allocated - after.checkpoints_allocated,
        )

    def reset(self) -> None:
        """Flush: SGLang calls it when nothing runs, before it clears the pools."""
        self.memory.flush()
        self.changed()

    # -- metrics ----------------------------------------------------------------------------

    def changed(self) -> None:
        """A step is prepared, or something refused: metrics are out of date."""
        if self.exporter is not None:
            self.exporter.changed()

    def idle(self) -> None:
        """Nothing runs or waits."""
        if self.exporter is not None:
            self.exporter.idle()

    def refused(self, where: str, need: Need) -> None:
        """Count a need that does not fit, by its binding resource."""
        self.refusals.add(where, binding(self.organization, need))
        self.changed()

    # -- what SGLang asks -------------------------------------------------------------------

    @property
    def root_node(self) -> Node:
        """Root of the namespace without key and salt."""
        return self.tree.match((None, None), b"", 0).node

    def root_node_handle(self, extra_key: str | None = None) -> Node:
        return self.tree.match((extra_key, None), b"", 0).node

    def dfs_weight_order(self, node_handles: Sequence[Any]) -> list[int]:
        """Requests that share the most first, tree by tree: namespaces have a root each."""
        groups: dict[Hashable, list[int]] = {}
        for index, node in enumerate(node_handles):
            while node.parent is not None:
                node = node.parent
            groups.setdefault(node.key, []).append(index)
        order = sorted(groups.values(), key=len, reverse=True)
        return [index for group in order for index in sorted(group, key=lambda i: _path_key(node_handles[i]))]

    def supports_mamba(self) -> bool:
        return True

    def supports_prefix_sharing(self) -> bool:
        return True

    def supports_fast_match_prefix(self) -> bool:
        return False

    def full_evictable_size(self) -> int:
        return self.tree.blocks_evictable * self.grid

    def full_protected_size(self) -> int:
        return self.tree.blocks_locked * self.grid

    evictable_size = full_evictable_size
    protected_size = full_protected_size

    def mamba_evictable_size(self) -> int:
        return self.organization.checkpoints_cached

    def mamba_protected_size(self) -> int:
        return self.organization.checkpoints_shared

    def total_size(self) -> tuple[int, int]:
        usage = self.organization.usage()
        return self.tree.blocks * self.grid, usage.checkpoints_cached + usage.checkpoints_shared

    def all_values_flatten(self) -> torch.Tensor:
        """Units of all cached blocks (diagnostics)."""
        return torch.tensor([unit for node in self.tree.nodes() for unit in node.units], dtype=torch.int64)

    def all_mamba_values_flatten(self) -> torch.Tensor:
        """First pages of all cached checkpoints (diagnostics)."""
        pages = [node.checkpoint.pages[0] for node in self.tree.nodes() if node.checkpoint is not None]
        return torch.tensor(pages, dtype=torch.int64)

    def available_and_evictable_str(self) -> str:
        return f"{self.organization.name} pages: {self.organization.usage()}"

    def pretty_print(self) -> None:
        print(self.available_and_evictable_str())

    def sanity_check(self) -> None:
        """Idle check behind `SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK`."""
        self.check_integrity()

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless tree and organization agree with themselves and each other."""
        self.memory.check_integrity()


def _encode(token_ids: Any) -> bytes:
    return token_ids.tobytes()


def _path_key(node: Node) -> tuple[Any, ...]:
    return tuple(block.key for block in node.path())
