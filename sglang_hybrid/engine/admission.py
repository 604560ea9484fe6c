"""What a request must find before it is admitted, in the organization's own pieces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from sglang_hybrid.engine.last_line import asked
from sglang_hybrid.geometry import ceil_div
from sglang_hybrid.pools.organization import Need, Organization
from sglang_hybrid.radix.admission import Pass
from sglang_hybrid.radix.coming import MOST_PASSED_OVER
from sglang_hybrid.radix.live_state import LiveState

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

ADMISSION_STATES = 2
"""States a request may need at once: its live state, and the checkpoint that a hit starts from."""


def longest_request(organization: Organization) -> int:
    """Tokens, prompt and answer together, of the longest request that an empty budget serves.

    The same pieces as `GridPrefillBudget.check_prefill` asks on an idle server, so that whatever
    is no longer is admitted some time.
    """
    low, high = 0, organization.token_capacity() // organization.unit_tokens
    while low < high:
        middle = (low + high + 1) // 2
        if organization.capacity_fits(Need(units=middle, checkpoints=ADMISSION_STATES)):
            low = middle
        else:
            high = middle - 1
    return low * organization.unit_tokens


def most_new_tokens(organization: Organization, input_tokens: int) -> int:
    """Tokens that a request may generate; one for a prompt that is too long.

    SGLang's length check comes after this question.  It refuses such a prompt and names the limit,
    or cuts it (`--allow-auto-truncate`).
    """
    return max(1, longest_request(organization) - input_tokens)


class GridPrefillBudget(PrefillBudget):
    """Admission of one prefill pass.  Each admitted request also takes a live state."""

    def __init__(self, allocator: Any, tree_cache: Any, *, num_mixed_decode_tokens: int = 0) -> None:
        super().__init__(allocator, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)
        self.organization: Organization = allocator.organization
        self.refused = tree_cache.refused
        self.rules: Pass = tree_cache.memory.begin_pass()
        self.begun = 0
        """Tokens for which the chunked prompt's last unit has room."""
        self.closed = False
        """A chunked prompt could not go on: nobody may take what it waits for."""
        self.preempted: Sequence[LiveState] | None = None
        """Set while a request is asked for that others make room for: those of them that still run."""

    def _available_and_evictable(self) -> int:
        return self.rules.units_left() * self.page_size

    def has_capacity(self) -> bool:
        return not self.closed and super().has_capacity()

    def check_prefill(
        self,
        *,
        extend_input_len: int,
        total_tokens: int,
        input_tokens: int,
        chunk_limit: int | None,
        **kwargs: Any,
    ) -> tuple[bool, int | None]:
        """Whether a waiting request may begin (`Admission.missing`), after all promised in this pass."""
        if self.closed:
            return False, None
        # Without SGLang's page for rounding: a prefix ends on a unit, so what follows is rounded here.
        own = ceil_div(total_tokens - self.page_size, self.page_size)
        units = own + ceil_div(math.ceil(self.total_offset), self.page_size)
        start = input_tokens - extend_input_len
        end = start + min(extend_input_len, extend_input_len if chunk_limit is None else chunk_limit)
        if self.preempted is None:
            missing = self.rules.missing(units, start, end)
        else:
            missing = self.rules.missing_after(units, start, end, self.preempted)
        if missing is None:
            return True, chunk_limit
        self.refused("admission", missing)
        return False, None

    def available_chunk_tokens(self, chunk_limit: int) -> int | None:
        """Tokens that a chunked prompt may go on with; it waits when others hold the memory."""
        # Its last unit may have room.
        decodes = int(self.current_offset)  # in this batch, when chunks are mixed: a unit each, at most
        units = self.rules.chunk_units(ceil_div(max(0, chunk_limit - self.begun), self.page_size), decodes)
        if not units + self.begun:
            self.closed = True
            self.refused("chunk", self.rules.chunk_need(1 + decodes))
            return None
        return min(chunk_limit, self.begun + units * self.page_size)

    def fit_chunk(self, *, extend_input_len: int, max_new_tokens: int, chunk_limit: int) -> int | None:
        if extend_input_len > chunk_limit:
            # The rest of this prompt comes first when others ask in this pass.
            self.total_offset += extend_input_len - chunk_limit + max_new_tokens
        return chunk_limit

    def reserve(self, *args: Any, is_chunked_continuation: bool = False, **kwargs: Any) -> None:
        super().reserve(*args, is_chunked_continuation=is_chunked_continuation, **kwargs)
        if not is_chunked_continuation:
            self.rules.admitted()


class GridPrefillAdder(PrefillAdder):
    """Chunks end where the budget ends: every boundary that a prefill passes leaves its checkpoint,
    so neither the cut nor the charge is rounded to a page.  What the running requests may still take is
    counted in whole units, request by request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.exact_chunk_fill = True
        self.passed_over = 0
        self._continues = False
        """A prompt that was begun in an earlier pass goes on after this one."""
        if self.tree_cache.suspects:
            self.prefill_max_requests = 1

    def add_one_req(self, req: Req, *args: Any, **kwargs: Any) -> AddReqResult:
        """As the stock one; a request whose prefix is being computed stays in the queue, and the next is
        asked.  One that fails is ended after the pass."""
        try:
            return self._add(req, *args, **kwargs)
        finally:
            self.memory_budget.preempted = None

    def _add(self, req: Req, *args: Any, **kwargs: Any) -> AddReqResult:
        if req.rid in self.tree_cache.failed:
            return AddReqResult.CONTINUE
        with asked(self.tree_cache, req):
            if self.tree_cache.awaits(req, self.memory_budget.rules):
                self.passed_over += 1
                spent = self.passed_over >= MOST_PASSED_OVER
                return AddReqResult.OTHER if spent else AddReqResult.CONTINUE
            return super().add_one_req(req, *args, **kwargs)
        self._forget(req)
        return AddReqResult.CONTINUE

    def _forget(self, req: Req) -> None:
        """It failed: what it was charged stays charged in this pass, what it locked is let go."""
        if req in self.can_run_list:
            self.can_run_list.remove(req)
        if self.new_chunked_req is req:
            self.new_chunked_req: Req | None = None
        if req.lock is not None:
            self.tree_cache.unlock(req.lock)
            req.lock = None

    def preempt_to_schedule(self, req: Req) -> bool:
        """As the stock one, which preempts by numbers of tokens before it looks the request up.  Here whether
        the request can begin is asked first, and nobody is preempted for one that waits."""
        if (most := self.prefill_max_requests) is not None and len(self.can_run_list) >= most:
            return False
        req.init_next_round_input(self.tree_cache)
        waits = begins = False
        with asked(self.tree_cache, req):
            waits = self.tree_cache.awaits(req, self.memory_budget.rules)
            begins = not waits and self._would_begin(req)
        if waits or req.rid in self.tree_cache.failed:
            return True  # `add_one_req` passes over it
        if not begins or not super().preempt_to_schedule(req):
            return False
        self.memory_budget.preempted = ()
        return True

    def _would_begin(self, req: Req) -> bool:
        """Whether `add_one_req` admits the request once SGLang has preempted those that it would: both are
        tried on copies, which change nothing."""

        def nothing(*_: Any, **__: Any) -> None: ...

        running = self.running_batch
        trial: Any = copy(self)
        trial.memory_budget, trial.prefill_delayer_single_pass = copy(self.memory_budget), None
        trial.preempt_list, trial.can_run_list = [], [*self.can_run_list]
        trial.running_batch = SimpleNamespace(
            reqs=[one for one in running.reqs if one not in self.preempt_list],
            batch_size=running.batch_size,
            release_req=nothing,
            filter_batch=nothing,
        )
        trial._commit_prefill_admission = lambda begins, *_: trial.can_run_list.append(begins)
        if not PrefillAdder.preempt_to_schedule(trial, req):
            return False
        rows = self.tree_cache.req_to_token_pool
        budget = trial.memory_budget
        budget.preempted = [rows.state(one.kv.req_pool_idx) for one in trial.preempt_list]
        budget.refused = nothing
        PrefillAdder.add_one_req(trial, req, self._continues, None)
        return req in trial.can_run_list

    def _commit_prefill_admission(self, req: Req, *args: Any, **kwargs: Any) -> None:
        super()._commit_prefill_admission(req, *args, **kwargs)
        self.tree_cache.expect(req, self.memory_budget.rules)

    def add_chunked_req(self, req: Req) -> Req | None:
        self.memory_budget.begun = -req.prefix_len % self.page_size
        left: Req | None = super().add_chunked_req(req)
        self._continues = left is not None
        return left

    def _get_running_request_total_token_offset(self, req: Req) -> int:
        """Tokens of the units that a running request is expected to take, beside those that it has."""
        tokens = super()._get_running_request_total_token_offset(req)
        end = self.ceil_paged_tokens(req.kv.kv_committed_len + math.ceil(max(tokens, 0)))
        return max(0, end - self.ceil_paged_tokens(req.kv.kv_allocated_len))
