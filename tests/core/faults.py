"""Faults to plant: each breaks one guard of the core, or of the engine's calling order."""

from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from sglang_hybrid.geometry import ceil_div
from sglang_hybrid.pools.leftovers import Leftovers
from sglang_hybrid.pools.organization import Checkpoint, Need, Organization
from sglang_hybrid.pools.pages import Entry, PagePool
from sglang_hybrid.pools.reclaim import Reclaim, ReclaimStep
from sglang_hybrid.pools.shared import PackedConv
from sglang_hybrid.pools.slabs import SlabLines
from sglang_hybrid.radix.admission import Admission
from sglang_hybrid.radix.coming import Coming
from sglang_hybrid.radix.lifetime import Lifetime
from sglang_hybrid.radix.live import LiveStates
from sglang_hybrid.radix.live_state import LiveState, Published
from sglang_hybrid.radix.memory import Publication
from sglang_hybrid.radix.retention import Retention
from sglang_hybrid.radix.tree import GridTree, Match, Node
from tests.core import shadow as shadow_module
from tests.core.content import Contents, Place
from tests.core.request import Request
from tests.core.shadow import Shadow
from tests.core.worlds import GRID
from tests.support.publish_faults import FAULTS as PUBLISH_FAULTS

Fault = Callable[[], AbstractContextManager[object]]
FAULTS: dict[str, tuple[str, Fault]] = {}


def fault(organization: str) -> Callable[[Fault], Fault]:
    """Register a planted fault, to be run on this organization."""

    def register(plant: Fault) -> Fault:
        FAULTS[plant.__name__] = (organization, plant)
        return plant

    return register


# -- references -----------------------------------------------------------------------------


@fault("S1")
def a_reference_is_dropped_in_hold() -> AbstractContextManager[object]:
    hold = PagePool.hold
    return patch.object(PagePool, "hold", lambda self, pages: hold(self, list(pages)[:-1]))


@fault("S2")
def a_reference_is_forgotten_in_release() -> AbstractContextManager[object]:
    release = PagePool.release
    return patch.object(PagePool, "release", lambda self, pages: release(self, list(pages)[1:]))


@fault("D0")
def a_lock_does_not_hold_the_kv_of_its_path() -> AbstractContextManager[object]:
    def lock(self: GridTree, node: Node | None) -> None:
        while node is not None:
            node.locks += 1
            self.blocks_locked += node.locks == 1 and not node.is_root
            node = node.parent if node.locks == 1 else None

    return patch.object(GridTree, "_lock", lock)


@fault("S1")
def a_source_is_released_before_the_launch() -> AbstractContextManager[object]:
    prepare = Shadow._prepare

    def prepare_and_settle(self: Shadow, request: Request, end: int) -> None:
        prepare(self, request, end)
        if request.live.source is not None:
            self.organization.release(request.live.source)
            request.live.source = None

    return patch.object(Shadow, "_prepare", prepare_and_settle)


# -- invalidation before reassignment -------------------------------------------------------


@fault("S1")
def a_page_is_freed_before_its_entry_leaves_the_lookup() -> AbstractContextManager[object]:
    return patch.object(Checkpoint, "detach", lambda self: None)


@fault("S1")
def a_page_is_freed_though_the_lookup_wants_it() -> AbstractContextManager[object]:
    release = PagePool.release

    def release_and_free(self: PagePool, pages: Sequence[int]) -> None:
        release(self, pages)
        for page in pages:
            if not self.references(page) and self.on_free is not None:
                self.on_free(page)

    return patch.object(PagePool, "release", release_and_free)


@fault("S0")
def a_reclaim_does_not_wait_for_executions() -> AbstractContextManager[object]:
    advance = Reclaim.advance

    def hurry(self: Reclaim) -> ReclaimStep:
        if self.step in (ReclaimStep.WAIT, ReclaimStep.DETACH):
            self.entries = tuple(self.pool.dependents(self.page))
            for entry in self.entries:
                entry.detach()
            self.step = ReclaimStep.UNINDEX
            return self.step
        return advance(self)

    return patch.object(Reclaim, "advance", hurry)


@fault("S2")
def a_reclaim_does_not_freeze() -> AbstractContextManager[object]:
    advance = Reclaim.advance

    def advance_unfrozen(self: Reclaim) -> ReclaimStep:
        step = advance(self)
        if step is ReclaimStep.WAIT:
            for entry in self.entries:
                entry.frozen = False
        return step

    return patch.object(Reclaim, "advance", advance_unfrozen)


@fault("D0")
def blocks_below_a_lost_block_stay() -> AbstractContextManager[object]:
    return patch.object(GridTree, "_drop_below", lambda self, node: None)


@fault("S1")
def the_reverse_index_is_not_cleared() -> AbstractContextManager[object]:
    def unwant(self: PagePool, pages: Sequence[int], entry: Entry) -> None:
        for page in pages:
            before = self.state(page)
            self._wanted[page] -= 1
            self._moved(page, before)

    return patch.object(PagePool, "unwant", unwant)


# -- lines and sentinels --------------------------------------------------------------------


@fault("S2")
def the_sentinel_is_taken_as_page_0() -> AbstractContextManager[object]:
    return patch.object(shadow_module, "NOWHERE", Place((0, 0, 0), 0))


@fault("S2")
def the_sink_page_is_handed_out() -> AbstractContextManager[object]:
    reset = PagePool.reset

    def reset_with_sink(self: PagePool) -> None:
        reset(self)
        self._free.append(0)

    return patch.object(PagePool, "reset", reset_with_sink)


@fault("S2")
def a_slab_is_freed_with_a_live_slot() -> AbstractContextManager[object]:
    give_back = SlabLines.give_back

    def give_back_all(self: SlabLines, line: int) -> int | None:
        page = self.page_of(line)
        give_back(self, line)
        if page in self._free:
            del self._by_room[len(self._free[page])][page]
            del self._free[page]
        return page

    return patch.object(SlabLines, "give_back", give_back_all)


@fault("S2")
def a_conv_line_is_given_back_while_it_is_cached() -> AbstractContextManager[object]:
    release = Organization.release

    def release_line(self: Organization, checkpoint: Checkpoint) -> None:
        release(self, checkpoint)
        if not checkpoint.references and checkpoint.owner is not None:
            self.dispose(checkpoint)

    return patch.object(Organization, "release", release_line)


@fault("S2")
def a_line_overlaps_the_next_one() -> AbstractContextManager[object]:
    take = SlabLines.take

    def take_even(self: SlabLines, closed: Sequence[int] = ()) -> int | None:
        line = take(self, closed)
        return None if line is None else line // 2 * 2

    return patch.object(SlabLines, "take", take_even)


# -- forks and publication ------------------------------------------------------------------


@fault("S1")
def a_boundary_is_kept_though_its_forward_was_never_launched() -> AbstractContextManager[object]:
    abort = Shadow.abort

    def publish_and_abort(self: Shadow, request: Request) -> None:
        if request.pending and not request.private:
            self.publish(request, request.end)
        abort(self, request)

    return patch.object(Shadow, "abort", publish_and_abort)


@fault("S0")
def tokens_are_published_that_are_not_known() -> AbstractContextManager[object]:
    def publish_guesses(request: Request, up_to: int) -> Publication:
        tokens = [*request.tokens[: request.known], *[VOCABULARY_END] * (up_to - request.known)]
        return Publication(request.live, array("q", tokens).tobytes(), up_to, request.end)

    return patch.object(Shadow, "_publication", staticmethod(publish_guesses))


VOCABULARY_END = 99
"""A placeholder token id, as SGLang keeps for a token that the device has and the host has not."""


@fault("S1")
def the_live_state_is_offered_at_the_wrong_depth() -> AbstractContextManager[object]:
    publish = LiveStates.publish

    def publish_at_boundary(
        self: LiveStates, state: LiveState, node: Node, tokens: bytes, length: int, position: int
    ) -> Published:
        grid = self.organization.grid
        return publish(self, state, node, tokens, length, position // grid * grid)

    return patch.object(LiveStates, "publish", publish_at_boundary)


@fault("S1")
def a_published_live_state_is_taken_back_though_others_read_it() -> AbstractContextManager[object]:
    def go_on(self: LiveStates, live: Checkpoint) -> None:
        self.organization.uncache(live)

    return patch.object(LiveStates, "_go_on", go_on)


@fault("D0")
def a_step_from_a_boundary_does_not_fork() -> AbstractContextManager[object]:
    begin = LiveStates.begin

    def begin_in_place(self: LiveStates, state: LiveState, start: int, adopted: Checkpoint | None) -> None:
        if state.live is None:
            begin(self, state, start, adopted)
        else:
            self.settle(state)

    return patch.object(LiveStates, "begin", begin_in_place)


@fault("S0")
def a_duplicate_is_freed_but_its_row_is_not_repointed() -> AbstractContextManager[object]:
    publish = LiveStates.publish

    def publish_stale(
        self: LiveStates, state: LiveState, node: Node, tokens: bytes, length: int, position: int
    ) -> Published:
        units = list(state.units)
        published = publish(self, state, node, tokens, length, position)
        state.units = units
        return published

    return patch.object(LiveStates, "publish", publish_stale)


# -- publish, lock the new path, unlock the old one ------------------------------------------

FAULTS |= {
    name: (organization, plant)
    for organization, (name, plant) in zip(("S1", "S2", "S0", "D0"), PUBLISH_FAULTS.items(), strict=True)
}


# -- promises -------------------------------------------------------------------------------


@fault("S1")
def optional_checkpoints_eat_what_running_requests_need() -> AbstractContextManager[object]:
    def take_spare(self: LiveStates, last: int) -> Checkpoint | None:
        if not self.lifetime.make_room(Need(checkpoints=1)):
            return None
        return self.organization.allocate_checkpoint()

    return patch.object(LiveStates, "_take_spare", take_spare)


@fault("S2")
def could_fit_counts_room_that_goes_with_its_slab() -> AbstractContextManager[object]:
    def could_fit(self: PackedConv, need: Need) -> bool:
        slabs = ceil_div(max(0, need.checkpoints - self.slabs.room), self.slabs.slots_per_page)
        return need.units + need.checkpoints * self.members + slabs <= self._pool.reclaimable

    return patch.object(PackedConv, "could_fit", could_fit)


@fault("D0")
def a_locked_leaf_is_evicted() -> AbstractContextManager[object]:
    def is_idle_leaf(checkpoint: Checkpoint) -> bool:
        node = checkpoint.owner
        return isinstance(node, Node) and not checkpoint.references and not node.children

    return patch("sglang_hybrid.radix.eviction.is_idle_leaf", is_idle_leaf)


@fault("S1")
def interrupted_reclaims_are_forgotten() -> AbstractContextManager[object]:
    return patch.object(Organization, "resume_reclaims", lambda self: None)


@fault("S1")
def namespaces_are_joined_into_one_string() -> AbstractContextManager[object]:
    match = GridTree.match

    def match_joined(self: GridTree, namespace: tuple[Any, Any], tokens: bytes, limit: int) -> Match:
        return match(self, "".join(part or "" for part in namespace), tokens, limit)

    return patch.object(GridTree, "match", match_joined)


@fault("S1")
def a_pin_is_never_undone() -> AbstractContextManager[object]:
    return patch.object(Lifetime, "unpin", lambda self, checkpoint: None)


# -- what a unit held before ------------------------------------------------------------------


@fault("S1")
def a_tail_is_not_cleared() -> AbstractContextManager[object]:
    return patch.object(Contents, "clear_tails", lambda self, due: None)


@fault("S2")
def the_tail_of_another_unit_is_cleared() -> AbstractContextManager[object]:
    take = Leftovers.take

    def take_next(self: Leftovers) -> dict[int, int]:
        due = take(self)
        return dict(zip(due, reversed(list(due.values())))) if len(due) > 1 else {}

    return patch.object(Leftovers, "take", take_next)


@fault("S0")
def a_tail_is_cleared_after_its_forward() -> AbstractContextManager[object]:
    clear = Contents.clear_tails
    late: dict[int, int] = {}

    def clear_before(self: Contents, due: dict[int, int]) -> None:
        clear(self, late)
        late.clear()
        late.update(due)

    return patch.object(Contents, "clear_tails", clear_before)


@fault("S1")
def a_unit_that_no_forward_wrote_counts_as_kv() -> AbstractContextManager[object]:
    def given_back(self: Leftovers, units: Sequence[int]) -> None:
        self._state.difference_update(self._due)
        self._due = {}

    return patch.object(Leftovers, "given_back", given_back)


@fault("S2")
def a_slab_is_no_state() -> AbstractContextManager[object]:
    became_state = Leftovers.became_state
    return patch.object(Leftovers, "became_state", lambda self, pages: became_state(self, pages[:-1]))


@fault("S1")
def a_flush_forgets_what_lies_in_free_pages() -> AbstractContextManager[object]:
    return patch.object(Leftovers, "reset", lambda self, pages: self.__init__())  # type: ignore[misc]


@fault("S1")
def a_unit_counts_as_written_whole() -> AbstractContextManager[object]:
    will_write = Leftovers.will_write
    return patch.object(Leftovers, "will_write", lambda self, unit, rows: will_write(self, unit, GRID))


# -- policy ---------------------------------------------------------------------------------


@fault("S1")
def headroom_is_asked_for_when_nothing_runs() -> AbstractContextManager[object]:
    def missing(self: Admission, units: int, admitted: int, leaves: int) -> Need | None:
        need = Need(units, self.live.due + admitted + 1).plus(self.reserve(leaves))
        return None if self.organization.could_fit(need) else need

    return patch.object(Admission, "missing", missing)


@fault("S1")
def what_a_finished_request_made_stays_retained() -> AbstractContextManager[object]:
    return patch.object(Retention, "ended", lambda self, state: state.made.clear())


# -- waiting for a prefix -------------------------------------------------------------------


@fault("S1")
def a_prefill_that_has_ended_is_waited_for() -> AbstractContextManager[object]:
    return patch.object(Coming, "end", lambda self, trail: None)


@fault("S2")
def what_is_published_is_waited_for() -> AbstractContextManager[object]:
    return patch.object(Coming, "passed", lambda self, trail, block: None)
