"""Reclaim as a transaction, slabs, allocation.  Each test is one rule of docs/paper.md, Ownership rules."""

import pytest

from sglang_hybrid.pools.organization import Need
from sglang_hybrid.pools.pages import IntegrityError, PagePool, PageState
from sglang_hybrid.pools.reclaim import Reclaim, ReclaimStep
from sglang_hybrid.pools.shared import PackedConv
from sglang_hybrid.pools.slabs import SlabLines
from tests.core.request import Request
from tests.core.serve import audit, checkpoint_at, decode, match, node_at, scheduler, serve, start, step
from tests.core.shadow import Shadow
from tests.core.worlds import CONV_ONLY, NAMES, World
from tests.support.tokens import T

every_organization = pytest.mark.parametrize("name", NAMES)
PROMPT = T(1, 17)

TARGETS = {
    "first member": lambda shadow: shadow.organization.reclaim_state(at(shadow, 2).pages[0]),
    "last page": lambda shadow: shadow.organization.reclaim_state(at(shadow, 2).pages[-1]),
    "leaf": lambda shadow: shadow.organization.reclaim_unit(node_at(shadow, PROMPT, 4).units[-1]),
    "inner block": lambda shadow: shadow.organization.reclaim_unit(node_at(shadow, PROMPT, 2).units[0]),
}
"""Pages whose reclaim is interrupted.  The last page of a checkpoint is its conv page, or in S2 the slab."""

LEFT = {
    ("S0", "first member"): (4, 4, 3),
    ("S1", "first member"): (4, 4, 3),
    ("S2", "first member"): (4, 4, 3),
    ("D0", "first member"): (4, 4, 3),
    ("S0", "last page"): (4, 4, 3),
    ("S1", "last page"): (4, 4, 3),
    ("S2", "last page"): (1, 4, 1),  # three and the live state lay on one slab
    ("D0", "last page"): (4, 4, 3),
}
"""(depth, attention depth, checkpoints) that a match finds afterwards."""


def at(shadow: Shadow, depth: int):  # type: ignore[no-untyped-def]
    return checkpoint_at(shadow, PROMPT, depth)


def world(shadow: Shadow) -> tuple[int, int, int]:
    found = match(shadow, PROMPT)
    usage = shadow.organization.usage()
    return found.depth, found.attention_depth, usage.checkpoints_cached + usage.checkpoints_shared


@every_organization
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("stop", range(6))
def test_an_interrupted_reclaim_is_resumed_to_the_new_world(name: str, target: str, stop: int) -> None:
    shadow = scheduler(name)
    serve(shadow, PROMPT)
    new = {"leaf": (3, 3, 3), "inner block": (1, 1, 1)}.get(target) or LEFT[name, target]
    reclaim = TARGETS[target](shadow)
    shadow.reclaims.append(reclaim)
    for _ in range(stop):
        reclaim.advance()
        audit(shadow)
    if stop:  # frozen or gone: whatever depends on the page is not found any more
        assert match(shadow, PROMPT)[1:] == new[:2]
    assert reclaim.run() and reclaim.step is ReclaimStep.DONE
    shadow.reclaims.clear()
    audit(shadow)
    assert world(shadow) == new
    assert reclaim.pool.state(reclaim.page) is PageState.FREE
    serve(shadow, PROMPT)
    assert match(shadow, PROMPT).depth == 4


@every_organization
@pytest.mark.parametrize("target", TARGETS)
def test_a_reclaim_can_be_abandoned_until_it_detaches(name: str, target: str) -> None:
    for stop in range(6):
        shadow = scheduler(name)
        serve(shadow, PROMPT)
        before = shadow.organization.usage()
        reclaim = TARGETS[target](shadow)
        for _ in range(stop):
            reclaim.advance()
        if reclaim.step <= ReclaimStep.DETACH:
            reclaim.abandon()
            assert (world(shadow), shadow.organization.usage()) == ((4, 4, 4), before)
            audit(shadow)
        elif reclaim.step is not ReclaimStep.DONE:
            with pytest.raises(RuntimeError, match="run it to the end"):
                reclaim.abandon()


@every_organization
def test_a_reclaim_waits_for_executions_and_lets_no_new_one_start(name: str) -> None:
    shadow = scheduler(name)
    serve(shadow, PROMPT)
    running = shadow.submit(PROMPT + T(2, 5), 20, (None, None))
    assert running is not None
    shadow.prepare_extend(100)
    node = node_at(shadow, PROMPT, 4)
    block = shadow.organization.reclaim_unit(node.units[0])
    for reclaim in (block, shadow.organization.reclaim_state(at(shadow, 4).pages[0])):
        assert not reclaim.run() and reclaim.step is ReclaimStep.WAIT
    assert match(shadow, PROMPT)[1:] == (3, 3)
    with pytest.raises(IntegrityError, match="left the lookup"):
        idle = at(shadow, 1)
        idle.frozen = True
        shadow.organization.hold(idle)
    idle.frozen = False
    step(shadow)
    decode(shadow, running, 4)
    shadow.abort(running)
    shadow.organization.resume_reclaims()
    assert world(shadow)[:2] == (3, 3) and not node.tree.is_linked(node)
    audit(shadow)


@every_organization
def test_a_request_that_publishes_through_a_frozen_block_is_waited_for(name: str) -> None:
    shadow = scheduler(name)
    first, second = two_with_the_same_prompt(shadow)
    shadow.launch()
    shadow.publish(first, first.end)
    shadow.abort(first)
    reclaim = shadow.organization.reclaim_unit(node_at(shadow, PROMPT, 1).units[0])
    while reclaim.step is not ReclaimStep.DETACH:
        reclaim.advance()
    shadow.publish(second, second.end)  # its own blocks are duplicates: it goes on in the frozen ones
    assert reclaim.advance() is ReclaimStep.WAIT and not reclaim.run()
    audit(shadow)
    decode(shadow, second, 5)
    shadow.abort(second)
    assert reclaim.run() and shadow.tree.blocks == 0
    audit(shadow)


def two_with_the_same_prompt(shadow: Shadow) -> tuple[Request, Request]:
    shadow.live.waits = False
    for _ in range(2):
        assert shadow.submit(PROMPT, 20, (None, None))
    first, second = shadow.prepare_extend(100)
    return first, second


@every_organization
def test_what_is_published_on_a_page_under_reclaim_goes_with_it(name: str) -> None:
    shadow = scheduler(name)
    running = shadow.submit(T(1, 8), 20, (None, None))
    assert running is not None
    shadow.prepare_extend(100)
    unit = shadow.organization.reclaim_unit(running.live.units[0])
    assert running.live.live is not None
    state = shadow.organization.reclaim_state(running.live.live.pages[0])
    assert not unit.run() and not state.run()
    step(shadow)  # publishes the block and the live state
    assert shadow.tree.blocks == 2 and match(shadow, T(1, 8)).attention_depth == 0
    shadow.abort(running)
    assert unit.run() and state.run() and shadow.tree.blocks == 0
    audit(shadow)


def test_a_page_is_under_one_reclaim_only() -> None:
    shadow = scheduler("S1")
    serve(shadow, PROMPT)
    page = at(shadow, 2).pages[0]
    reclaim = shadow.organization.reclaim_state(page)
    reclaim.advance()
    assert shadow.organization.reclaim_state(page) is reclaim
    with pytest.raises(IntegrityError, match="is RECLAIMING"):
        Reclaim(reclaim.pool, page, lambda entry: None).advance()
    assert reclaim.run()
    assert shadow.organization.reclaim_state(page) is not reclaim
    assert shadow.organization.reclaim_state(page).advance() is ReclaimStep.DONE  # nothing to take


def test_an_entry_on_two_pages_under_reclaim_stays_frozen_when_one_is_abandoned() -> None:
    shadow = scheduler("S1")
    serve(shadow, PROMPT)
    one, two = (shadow.organization.reclaim_state(page) for page in at(shadow, 4).pages[:2])
    one.advance()
    two.advance()
    one.abandon()
    assert at(shadow, 4).frozen and match(shadow, PROMPT).depth == 3
    audit(shadow)
    two.abandon()
    assert match(shadow, PROMPT).depth == 4


@every_organization
def test_making_room_brings_interrupted_reclaims_to_their_end(name: str) -> None:
    for stop in range(1, 5):
        shadow = scheduler(name)
        serve(shadow, PROMPT)
        reclaims = [TARGETS[target](shadow) for target in ("leaf", "first member")]
        for reclaim in reclaims:
            for _ in range(stop):
                reclaim.advance()
        pool = shadow.organization.unit_pool
        assert shadow.organization.could_fit(Need(units=pool.size))
        assert shadow.lifetime.make_room(Need(units=pool.size))
        assert all(reclaim.step is ReclaimStep.DONE for reclaim in reclaims)
        audit(shadow)


# -- slabs ----------------------------------------------------------------------------------


def test_the_fullest_slab_is_filled_first() -> None:
    slabs = SlabLines(4)
    for page in (7, 9):
        slabs.add_slab(page)
    lines = [slabs.take() for _ in range(7)]
    assert lines == [28, 29, 30, 31, 36, 37, 38]
    assert slabs.give_back(29) is slabs.give_back(30) is None
    assert slabs.take() == 39  # page 9 has fewer free slots
    assert slabs.take() == 30
    assert slabs.occupancy() == 7 / 8


def test_a_slab_is_free_when_its_last_line_is() -> None:
    slabs = SlabLines(2)
    slabs.add_slab(5)
    one, two = slabs.take(), slabs.take()
    assert slabs.take() is None and one is not None and two is not None
    assert slabs.give_back(one) is None and slabs.give_back(two) == 5
    assert (slabs.slabs, slabs.lines, slabs.room, slabs.occupancy()) == (0, 0, 0, 1.0)
    for line in (one, -1, 0):
        with pytest.raises(IntegrityError, match="not in use"):
            slabs.give_back(line)


def test_reclaiming_a_slab_invalidates_every_checkpoint_on_it_and_no_other() -> None:
    shadow = scheduler("S2")
    serve(shadow, T(1, 13))
    serve(shadow, T(2, 21))
    slots = shadow.organization.slabs.slots_per_page  # type: ignore[attr-defined]
    page = checkpoint_at(shadow, T(2, 21), 2).pages[-1]
    offered = [node.checkpoint for node in shadow.tree.nodes() if node.checkpoint is not None]
    on_it = [checkpoint for checkpoint in offered if checkpoint.line // slots == page]
    assert 1 < len(on_it) <= slots
    assert shadow.organization.reclaim_state(page).run()
    left = [node.checkpoint for node in shadow.tree.nodes() if node.checkpoint is not None]
    assert set(left) == set(offered) - set(on_it)
    audit(shadow)


def test_a_slab_under_reclaim_takes_no_more_lines() -> None:
    for model in (World("S2").model, CONV_ONLY):
        shadow = scheduler("S2", model=model)
        running = start(shadow, T(1, 2))
        assert running.live.live is not None
        slab = running.live.live.pages[-1]
        reclaim = shadow.organization.reclaim_state(slab)
        assert not reclaim.run()
        serve(shadow, T(2, 30))
        assert all(slab not in node.checkpoint.pages for node in shadow.tree.nodes() if node.checkpoint)
        shadow.abort(running)
        assert reclaim.run() and shadow.organization.state_pool.state(slab) is PageState.FREE


def test_no_line_is_minus_one_or_on_the_sink() -> None:
    for name in NAMES:
        organization = World(name).build()
        slots = organization.slabs.slots_per_page if isinstance(organization, PackedConv) else 1
        taken = []
        while (checkpoint := organization.allocate_checkpoint()) is not None:
            taken.append(checkpoint)
        assert all(checkpoint.line >= slots and 0 not in checkpoint.pages for checkpoint in taken)
        assert len({checkpoint.line for checkpoint in taken}) == len(taken) > 1


# -- allocation -----------------------------------------------------------------------------


@every_organization
def test_allocation_of_several_pieces_is_all_or_nothing(name: str) -> None:
    for lines in range(5):
        for free in range(4):
            organization = World(name, pages=40, units=20, states=8).build()
            held = [organization.allocate_checkpoint() for _ in range(lines)]
            pool = organization.state_pool
            assert all(held) and pool.allocate(pool.free - free) is not None
            before = organization.usage(), pool.free
            checkpoint = organization.allocate_checkpoint()
            assert (checkpoint is not None) == could_take(name, lines, free)
            if checkpoint is not None:
                organization.release(checkpoint)
            assert (organization.usage(), pool.free) == before
            assert organization.allocate_units(organization.unit_pool.free + 1) is None
            assert (organization.usage(), pool.free) == before


def could_take(name: str, lines: int, free: int) -> bool:
    need = {"S0": 1, "S1": 3, "S2": 2 if lines % 4 else 3, "D0": 1}[name]
    return free >= need


def test_free_pages_can_be_neither_held_nor_cached_nor_released() -> None:
    shadow = scheduler("S1")
    serve(shadow, T(1, 5))
    checkpoint, node = checkpoint_at(shadow, T(1, 5), 1), node_at(shadow, T(1, 5), 1)
    shadow.tree.evict_leaf(node)
    pool: PagePool = shadow.organization.state_pool
    with pytest.raises(IntegrityError, match="left the lookup"):
        shadow.organization.hold(checkpoint)
    with pytest.raises(IntegrityError, match="cannot be held"):
        pool.hold(checkpoint.pages)
    with pytest.raises(IntegrityError, match="cannot be cached"):
        pool.want(node.units, node)
    with pytest.raises(IntegrityError, match="no execution reference"):
        pool.release(node.units)
    with pytest.raises(IntegrityError, match="released but not held"):
        shadow.organization.release(checkpoint)
