"""SGLang's token allocator over an organization's units: slots, capacity, eviction by exact need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from sglang_hybrid.engine.admission import GridPrefillBudget, most_new_tokens
from sglang_hybrid.engine.last_line import preparing
from sglang_hybrid.geometry import ceil_div
from sglang_hybrid.kernels import upload
from sglang_hybrid.pools.organization import Organization
from sglang_hybrid.radix.live_state import OutOfState
from sglang_hybrid.radix.memory import Memory

if TYPE_CHECKING:
    from sglang_hybrid.engine.cache import GridPrefixCache
    from sglang_hybrid.engine.requests import GridRequests


class GridTokens(PagedTokenToKVPoolAllocator):
    """Units of attention KV as slot ids; ids are decided on the host, the device only gets copies."""

    def __init__(
        self,
        organization: Organization,
        requests: GridRequests,
        dtype: torch.dtype,
        device: str,
        kvcache: Any,
    ) -> None:
        self.organization = organization
        self.requests = requests
        super().__init__(
            organization.token_capacity(), organization.unit_tokens, dtype, device, kvcache, need_sort=False
        )
        self._offsets = torch.arange(organization.unit_tokens, dtype=torch.int64)

    def connect(self, cache: GridPrefixCache) -> None:
        self.cache = cache
        self.memory: Memory = cache.memory

    # -- size -------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Free tokens plus attention tokens: pages that hold state leave it while they do.

        SGLang divides by it, so one unit stands in when states have taken every page.
        """
        units = self.organization.units_free() + self.organization.units_allocated
        return max(units, 1) * self.page_size

    @size.setter
    def size(self, value: int) -> None:
        """The base class assigns its constant; ours follows the organization."""

    def available_size(self) -> int:
        free = self.organization.units_free()
        if not free and not self.organization.units_allocated:
            free = 1  # the unit that `size` stands in
        return free * self.page_size

    def get_all_free_pages(self) -> None:
        """No page list on the device: SGLang's page census is skipped, `check_integrity` is ours."""
        return

    # -- allocation -------------------------------------------------------------------------

    def slots_of(self, units: Sequence[int]) -> torch.Tensor:
        """All slots of these units in order, `[len(units) * unit_tokens]` int64 on the device."""
        first = torch.tensor(units, dtype=torch.int64) * self.organization.slots_per_unit
        return upload((first[:, None] + self._offsets).view(-1), self.device)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Slots of an extend batch, in the order of `GridRequests.alloc`.  Raises PrefillFailed."""
        assert self.requests.batch is not None
        with preparing(self.requests.batch):
            return self._extend(prefix_lens_cpu.tolist(), seq_lens_cpu.tolist())

    def _extend(self, starts: list[int], ends: list[int]) -> torch.Tensor:
        states = self.requests.preparing_states()
        unit_tokens = self.page_size
        if not self.memory.take_units(states, ends):
            raise OutOfState(f"no units for an admitted prefill of {len(states)} requests")
        units: list[int] = []
        shifts: list[int] = []
        tokens = 0
        for state, start, end in zip(states, starts, ends, strict=True):
            first = start // unit_tokens
            # From a token's place in the batch to its place in the units of the batch, end to end.
            shifts.append((len(units) - first) * unit_tokens + start - tokens)
            tokens += end - start
            units += state.units[first : ceil_div(end, unit_tokens)]
        first_slots = torch.tensor(units, dtype=torch.int64) * self.organization.slots_per_unit
        shift = torch.tensor(shifts, dtype=torch.int64)
        place = torch.arange(tokens) + shift.repeat_interleave(torch.tensor(ends) - torch.tensor(starts))
        return upload((first_slots[:, None] + self._offsets).view(-1)[place], self.device)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """One slot a request: the next of its unit, or the first of a new one."""
        crossing = ((seq_lens_cpu - 1) % self.page_size == 0).nonzero().view(-1)
        out = last_loc.to(torch.int64) + 1
        if not len(crossing):
            return out
        units = self.memory.take_step_units(len(crossing))
        if units is None:
            return None
        first = torch.tensor(units, dtype=torch.int64) * self.organization.slots_per_unit
        position, slot = upload(torch.stack([crossing, first]), self.device)
        out[position] = slot
        return out

    def free(self, free_index: torch.Tensor) -> None:
        """Release the units under these slots.  SGLang's regular releases come by `free_kv_row`; those of a
        batch whose preparation failed are `GridRequests.take_back`'s."""
        if free_index.numel() and self.requests.batch is None:
            units = torch.unique(free_index // self.organization.slots_per_unit).tolist()
            self.organization.release_units(units)

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        self.free(free_index)

    def clear(self) -> None:
        """Flush; the cache resets the organization."""
        self.free_pages = self.release_pages = None
        self.free_group = None
        self.free_page_ids_group: list[torch.Tensor] = []

    # -- capacity ---------------------------------------------------------------------------

    def evict_to_free_tokens(self, tree_cache: Any, num_tokens: int) -> None:
        """SGLang asks by a page-rounded estimate before each allocation; ours evict by exact need."""

    def get_extend_allocation_demand(self, *args: Any, **kwargs: Any) -> int:
        return 0

    def create_prefill_budget(
        self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0
    ) -> GridPrefillBudget:
        return GridPrefillBudget(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def max_new_tokens_for_memory(self, input_tokens: int, max_new_tokens: int, **kwargs: Any) -> int:
        """At arrival: clip an answer to what an empty budget holds beside the prompt."""
        return min(max_new_tokens, most_new_tokens(self.organization, input_tokens))

    def check_decode_capacity(
        self, *, num_tokens: int, tree_cache: Any, requests: Any = None, spec_algorithm: Any = None
    ) -> bool:
        """Whether the next decode step finds its units, and pages for live states that others adopted.

        Checkpoints at its boundaries are optional.
        """
        missing = self.memory.missing_for_step(ceil_div(num_tokens, self.page_size))
        if missing is None:
            return True
        self.cache.refused("decode", missing)
        return False

    def verify_byte_accounting(self) -> list[str]:
        """Idle check of SGLang: nothing runs, so no page may be held or half reclaimed."""
        self.cache.idle()
        usage = self.organization.usage()
        problems = []
        if usage.pages_held:
            problems.append(f"{usage.pages_held} pages are held while nothing runs")
        if usage.pages_reclaiming:
            problems.append(f"{usage.pages_reclaiming} pages are stuck in a reclaim")
        return problems
