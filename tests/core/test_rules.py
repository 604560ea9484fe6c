"""What a request finds, keeps and hands over.  Each test is one rule of docs/architecture.md."""

from unittest.mock import patch

import pytest

from sglang_hybrid.pools.organization import Need
from sglang_hybrid.pools.pages import IntegrityError
from sglang_hybrid.radix.admission import Admission
from sglang_hybrid.radix.live_state import LiveState
from tests.core.request import Request
from tests.core.serve import (
    NO_KEY,
    audit,
    checkpoint_at,
    decode,
    everywhere,
    match,
    node_at,
    scheduler,
    serve,
    start,
    step,
)
from tests.core.shadow import Shadow
from tests.core.worlds import NAMES
from tests.support.tokens import T

every_organization = pytest.mark.parametrize("name", NAMES)


@every_organization
def test_match_needs_both_halves(name: str) -> None:
    shadow = scheduler(name, grid=8)
    serve(shadow, T(1, 33))
    assert match(shadow, T(1, 33))[1:] == (4, 4)
    shadow.tree.evict_checkpoint(checkpoint_at(shadow, T(1, 33), 4))
    assert match(shadow, T(1, 33))[1:] == (3, 4)  # KV alone reaches further, and is of no use
    for depth in (3, 1):
        shadow.tree.evict_checkpoint(checkpoint_at(shadow, T(1, 33), depth))
    assert match(shadow, T(1, 33))[1:] == (2, 4)  # a deeper boundary does not need the one before it
    shadow.tree.evict_leaf(node_at(shadow, T(1, 33), 4))
    assert match(shadow, T(1, 33))[1:] == (2, 3)
    audit(shadow)


@every_organization
@pytest.mark.parametrize("chunk", [3, 4, 5, 12, 1000])
def test_hit_is_the_last_boundary_before_the_last_token(name: str, chunk: int) -> None:
    for n in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 43, 64):
        shadow = scheduler(name)
        assert [serve(shadow, T(n, n), 4, chunk=chunk).hit for _ in range(3)] == [
            0,
            (n - 1) // 4 * 4,
            (n - 1) // 4 * 4,
        ]


@every_organization
def test_lookups_do_not_wear_the_cache_out(name: str) -> None:
    shadow = scheduler(name, grid=8)
    serve(shadow, T(1, 43), 4)
    before = shadow.organization.usage(), shadow.tree.blocks
    for n in range(1, 60):
        match(shadow, T(1, n))
    serve(shadow, T(1, 43), 4)
    assert (shadow.organization.usage(), shadow.tree.blocks) == before


@every_organization
def test_every_boundary_of_a_shared_prefix_serves_others(name: str) -> None:
    for tail in (3, 24):
        shadow = scheduler(name, grid=8, pages=400, units=400, states=200)
        hits = [serve(shadow, T(1, 42) + T(100 + i, tail)).hit for i in range(6)]
        assert hits == [0, 40, 40, 40, 40, 40]
    shadow, base = scheduler(name, grid=8, pages=400, units=400, states=200), T(1, 67)
    serve(shadow, base)
    ends = (0, 1, 7, 8, 9, 23, 24, 25, 66)
    hits = [serve(shadow, base[:end] + T(200 + end, 67 - end)).hit for end in ends]
    assert [*hits, serve(shadow, base).hit] == [0, 0, 0, 8, 8, 16, 24, 24, 64, 64]


@every_organization
def test_generated_text_is_hit_up_to_its_last_known_token(name: str) -> None:
    for new in range(1, 14):
        shadow = scheduler(name)
        first = serve(shadow, T(1, 10), new)
        turn = first.tokens[: 10 + new] + T(9, 5)
        assert serve(shadow, turn).hit == (10 + new - 1) // 4 * 4


@every_organization
def test_leaving_a_boundary_forks_and_the_old_pages_stay(name: str) -> None:
    shadow = scheduler(name)
    request = start(shadow, T(1, 8))
    kept = checkpoint_at(shadow, T(1, 8), 2)
    assert request.live.live is kept
    decode(shadow, request)
    assert request.live.live is not kept and checkpoint_at(shadow, T(1, 8), 2) is kept
    assert not set(kept.members) & set(request.live.live.members) and kept.line != request.live.live.line
    assert shadow.live.counts.forks == 1
    decode(shadow, request)
    assert kept.references == 0  # settled: evictable while its request runs
    decode(shadow, request, 3)
    assert shadow.live.counts.forks == 2


@every_organization
def test_a_running_request_holds_one_state(name: str) -> None:
    shadow = scheduler(name)
    request = start(shadow, T(1, 30))
    for _ in range(20):
        decode(shadow, request)
        held = shadow.organization.checkpoints_allocated - shadow.organization.checkpoints_cached
        leaving = (request.end - 1) % 4 == 0
        assert held <= (2 if leaving else 1)


def test_a_checkpoint_that_finds_no_memory_is_skipped_and_counted() -> None:
    shadow = scheduler("S1", pages=5 + 1 + 3 + 3)  # prompt, next unit, live state, and one checkpoint
    request = serve(shadow, T(1, 17), 2)
    assert request.known == 19
    assert shadow.live.counts.checkpoints_skipped == 3  # of the boundaries 4, 8, 12 and 16
    assert match(shadow, T(1, 17)).depth == 4  # memory for some goes to the deepest


@every_organization
def test_an_optional_checkpoint_leaves_running_requests_their_next_unit(name: str) -> None:
    shadow = scheduler(name, pages=17, units=16, states=4)
    requests = [start(shadow, T(i, 5), 9) for i in (1, 2)]
    for _ in range(8):
        assert shadow.prepare_decode(requests) == requests  # nobody is preempted for it
        step(shadow)
        assert shadow.organization.could_fit(Need(units=len(shadow.running)))


@every_organization
def test_a_published_live_state_is_taken_back_rather_than_failing(name: str) -> None:
    shadow = scheduler(name)
    request = start(shadow, T(1, 4))
    assert match(shadow, T(1, 4)).depth == 1
    squeeze(shadow, pages=1)
    run_on(shadow, request)
    assert shadow.live.counts.settled_in_place == 1
    assert match(shadow, T(1, 4))[1:] == (0, 1)


@every_organization
def test_a_live_state_that_others_read_is_left_to_them(name: str) -> None:
    shadow = scheduler(name)
    first = start(shadow, T(1, 4))
    second = shadow.submit(T(1, 4) + T(2, 3), 9, NO_KEY)
    assert second is not None
    shadow.prepare_extend(100)
    assert second.hit == 4 and shadow.live.forced == 1
    assert shadow.prepare_decode([first]) == [first]  # the same batch reads it twice and writes elsewhere
    assert first.live.source is second.live.source and first.live.live is not first.live.source
    step(shadow)
    assert shadow.live.forced == 0


@every_organization
def test_states_that_somebody_may_have_to_take_are_not_spent_on_checkpoints(name: str) -> None:
    shadow = scheduler(name)
    first = start(shadow, T(1, 4))
    second = shadow.submit(T(1, 4) + T(2, 14), 9, NO_KEY)
    assert second is not None and shadow.live.due == 1
    # Room for the second's units and live state, the first's next state, and one unit each.
    state = {"S0": 1, "S1": 3, "S2": 2, "D0": 0}[name]
    squeeze(shadow, pages=4 + state + state + 2, states=2)
    with patch.object(Admission, "reserve", return_value=Need()):  # it would wait for room for both
        shadow.prepare_extend(100)
    assert second.live.boundaries == []
    assert shadow.prepare_decode([first]) == [first]
    shadow.launch()


@every_organization
def test_a_duplicate_is_freed_and_its_row_repointed(name: str) -> None:
    shadow = scheduler(name)
    shadow.live.waits = False
    requests = [shadow.submit(T(1, 10), 5, NO_KEY) for _ in range(2)]
    assert shadow.prepare_extend(100) == requests
    assert shadow.organization.units_allocated == 2 * -(-10 // shadow.organization.unit_tokens)
    step(shadow)
    own = 10 // shadow.organization.unit_tokens - 8 // shadow.organization.unit_tokens
    own += 10 % shadow.organization.unit_tokens > 0
    assert shadow.organization.units_allocated == 8 // shadow.organization.unit_tokens + 2 * own
    first, second = (request.live.units[:-own] for request in shadow.running)
    assert first == second
    assert shadow.live.counts.duplicates == 2
    assert shadow.organization.checkpoints_allocated == 4  # two live, two cached: none is stored twice


@every_organization
def test_a_private_request_is_served_and_leaves_nothing(name: str) -> None:
    shadow = scheduler(name)
    serve(shadow, T(1, 12))
    before = shadow.organization.usage()
    assert serve(shadow, T(1, 12) + T(2, 9), 9, private=True).hit == 12
    assert shadow.organization.usage() == before


@every_organization
def test_namespaces_are_compared_as_fields(name: str) -> None:
    shadow, keys = scheduler(name), [(None, None), ("a", None), (None, "a"), ("", "a"), ("a", ""), ("a", "a")]
    for key in keys:
        assert serve(shadow, T(1, 9), key=key).hit == 0
    for key in keys:
        assert serve(shadow, T(1, 9), key=key).hit == 8
    assert shadow.tree.namespaces == len(keys) and shadow.tree.blocks == 2 * len(keys)


@every_organization
def test_an_empty_namespace_leaves_no_root(name: str) -> None:
    shadow = scheduler(name)
    match(shadow, T(1, 9), ("looked up", None))
    serve(shadow, T(1, 3), key=("too short", None))
    serve(shadow, T(1, 9), key=("evicted", None))
    request = shadow.submit(T(1, 9), 1, ("aborted", None))
    assert request is not None
    shadow.prepare_extend(100)
    shadow.abort(request)
    assert shadow.tree.namespaces == 1
    assert shadow.lifetime.make_room(everything(shadow))
    assert shadow.tree.namespaces == 0


@every_organization
def test_a_preempted_request_resumes_at_its_last_boundary(name: str) -> None:
    shadow = scheduler(name)
    request = start(shadow, T(1, 10))
    decode(shadow, request, 5)
    shadow.preempt(request)
    assert shadow.pins[request.rid] is match(shadow, request.tokens).node.checkpoint
    audit(shadow)
    shadow.prepare_extend(100)
    assert (request.hit, request.prompt, shadow.pins) == (12, 16, {})
    step(shadow)
    decode(shadow, request, 5)


@every_organization
def test_an_aborted_request_gives_everything_back(name: str) -> None:
    for launched, steps in ((False, 0), (True, 0), (True, 3)):
        shadow = scheduler(name)
        serve(shadow, T(1, 8))
        before = shadow.organization.usage()
        request = shadow.submit(T(1, 8) + T(2, 9), 20, NO_KEY)
        assert request is not None
        shadow.prepare_extend(100)
        if launched:
            shadow.launch()
        for _ in range(steps):
            shadow.prepare_decode([request])
            shadow.launch()
        shadow.abort(request)
        assert shadow.organization.usage() == before
        audit(shadow)


@every_organization
def test_a_flush_leaves_an_empty_budget(name: str) -> None:
    shadow = scheduler(name)
    empty = shadow.organization.usage()
    serve(shadow, T(1, 20))
    start(shadow, T(1, 30))
    shadow.flush()
    assert shadow.organization.usage() == empty and shadow.tree.blocks == 0
    assert serve(shadow, T(1, 20)).hit == 0
    assert serve(shadow, T(1, 20)).hit == 16


def test_a_request_never_begins_in_the_middle_without_a_state() -> None:
    shadow = scheduler()
    shadow.live.running += 1
    with pytest.raises(IntegrityError, match="begins at token 4 without the state"):
        shadow.live.begin(LiveState(), 4, None)


def test_a_block_that_was_evicted_cannot_be_locked() -> None:
    for shadow in everywhere():
        serve(shadow, T(1, 9))
        found = match(shadow, T(1, 9))
        assert shadow.lifetime.make_room(everything(shadow))
        with pytest.raises(IntegrityError, match="locked after it was evicted"):
            shadow.tree.lock(found.node)


def everything(shadow: Shadow) -> Need:
    """A need that leaves nothing cached."""
    return Need(shadow.organization.units_reclaimable(), 0 if shadow.organization.name != "D0" else 1)


def squeeze(shadow: Shadow, pages: int, states: int = 0) -> None:
    """Take all memory but this many pages; of D0, all but this many checkpoints."""
    organization = shadow.organization
    if organization.name == "D0":
        for _ in range(organization.state_pool.free - states):
            assert organization.allocate_checkpoint() is not None
    else:
        assert organization.allocate_units(organization.units_free() - pages) is not None


def run_on(shadow: Shadow, request: Request) -> None:
    """A decode step whose memory somebody else may hold: contents are checked, holders not."""
    assert shadow.prepare_decode([request]) == [request]
    shadow.launch()
    shadow.process()
