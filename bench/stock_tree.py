"""SGLang's own prefix cache, built in this process without a server, as the opponent of `bench.overhead`.

`UnifiedRadixCache` with the components of a hybrid model (full attention and Mamba) at page 1, its default
for them, over either of its tree cores: the Rust extension of the wheel, or the Python one.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.rust_tree_core import adapter
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components import mamba
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

CORES = ("rust", "python")
CHUNK = 256
"""Tokens of a scan chunk, which SGLang would read from the model's config."""


class Slots:
    """Mamba slots: a list of free ones, which costs SGLang no less."""

    def __init__(self, size: int) -> None:
        self.free_slots = list(range(size))

    def alloc(self) -> int:
        return self.free_slots.pop()

    def free(self, slots: torch.Tensor) -> None:
        self.free_slots.extend(slots.tolist())

    def available_size(self) -> int:
        return len(self.free_slots)


class Requests(HybridReqToTokenPool):
    """Only what the Mamba component asks of it."""

    def __init__(self, slots: int, longest: int) -> None:
        self.mamba_allocator = Slots(slots)
        self.mamba_pool = SimpleNamespace(replayssm_write_pos=None)
        self.mamba_ckpt_pool = None
        self.req_to_token = torch.zeros((1, longest), dtype=torch.int32)


@contextmanager
def _settings() -> Iterator[None]:
    """What a server would have published: no bound on the states of a path, the model's chunk."""
    execution = SimpleNamespace(mamba=SimpleNamespace(mamba_max_states_per_path=-1))
    with (
        patch.object(mamba, "get_exec", lambda: execution),
        patch.object(mamba, "mamba_cache_chunk_size", lambda: CHUNK),
        patch.object(mamba, "mamba_checkpoint_grid", lambda page_size: CHUNK),
        patch.object(adapter, "get_exec", lambda: execution),
        patch.object(adapter, "mamba_cache_chunk_size", lambda: CHUNK),
    ):
        yield


class StockTree:
    """Holds `tokens`, in prompts of `filler`, and has room for some of up to `longest`.

    Every operation returns the seconds that it took.
    """

    def __init__(self, core: str, tokens: int, filler: int, longest: int) -> None:
        self._tokens, self._filler, self._fillers = tokens, filler, 0
        self._slots = Requests(2 * tokens // filler + 100, max(filler, longest))
        room = tokens + filler + 3 * longest
        self._kv = TokenToKVPoolAllocator(room, torch.bfloat16, "cpu", SimpleNamespace(), False)
        parameters = CacheInitParams(
            disable=False,
            req_to_token_pool=self._slots,
            token_to_kv_pool_allocator=self._kv,
            page_size=1,
            tree_components=(ComponentType.FULL, ComponentType.MAMBA),
            tree_core_backend=core,
        )
        with _settings():
            self._cache = UnifiedRadixCache(parameters)
        self._core = self._cache.tree_core
        self.top_up()

    def allocate(self, tokens: int) -> float:
        """KV and a state for a prompt of so many tokens."""
        begun = time.perf_counter()
        self._values = self._kv.alloc(tokens)
        self._state = torch.tensor([self._slots.mamba_allocator.alloc()])
        return time.perf_counter() - begun

    def insert(self, prompt: array[int]) -> float:
        """What was allocated last, for a request that ends with this prompt: SGLang's whole publication."""
        state = SimpleNamespace(
            req_pool_idx=0, cache_protected_len=0, cache_inserted_len=0, mamba_pool_idx=self._state[0]
        )
        request = SimpleNamespace(
            full_untruncated_fill_ids=prompt,
            origin_input_ids=prompt,
            extra_key=None,
            cache_salt=None,
            finished=lambda: True,
            priority=0,
            session_id=None,
            kv_rotation_base=None,
            kv=state,
            lock=None,
        )
        self._slots.req_to_token[0, : len(prompt)] = self._values
        begun = time.perf_counter()
        self._cache.checkpoint_into_tree(request, up_to=len(prompt))
        seconds = time.perf_counter() - begun
        self._cache.unlock(request.lock)
        return seconds

    def insert_tree(self, prompt: array[int]) -> float:
        """The same by the tree core alone: the key, the KV's slots and a state."""
        core = self._core
        begun = time.perf_counter()
        step = core.begin_insert(
            InsertParams(key=RadixKey(prompt), value=self._values, mamba_value=self._state)
        )
        while step.result is None:
            step = core.resume_insert()
        core.end_insert()
        return time.perf_counter() - begun

    def match(self, prompt: array[int]) -> float | None:
        """By the tree core alone; None when it has been evicted meanwhile."""
        begun = time.perf_counter()
        match = self._core.match_prefix(MatchPrefixParams(key=RadixKey(prompt)))
        seconds = time.perf_counter() - begun
        return seconds if match.device_prefix_len == len(prompt) else None

    def evict(self, tokens: int) -> float:
        """Tokens and a state; returning the KV to its tensor of free slots is not counted."""
        self._kv.free_group_begin()
        begun = time.perf_counter()
        self._cache.evict(EvictParams(num_tokens=tokens, mamba_num=1))
        seconds = time.perf_counter() - begun
        self._kv.free_group_end()
        return seconds

    def reclaim(self) -> float:
        """One state, whose KV stays."""
        self._kv.free_group_begin()
        begun = time.perf_counter()
        self._cache.evict(EvictParams(num_tokens=0, mamba_num=1))
        seconds = time.perf_counter() - begun
        self._kv.free_group_end()
        return seconds

    def top_up(self) -> None:
        """Fill up to the number of tokens with prompts that nobody asks for."""
        while self._core.full_evictable_size() < self._tokens:
            self._fillers += 1
            self.allocate(self._filler)
            self.insert_tree(array("q", [-self._fillers]) * self._filler)
