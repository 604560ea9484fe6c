"""What goes first when memory is short, and what stays.  Each test is one rule of docs/architecture.md."""

import pytest

from sglang_hybrid.pools.organization import Checkpoint, Need
from sglang_hybrid.pools.pages import IntegrityError
from sglang_hybrid.radix.order import EvictionOrder, Tier
from tests.core.serve import audit, checkpoint_at, decode, match, node_at, scheduler, serve, start
from tests.core.shadow import Shadow
from tests.core.worlds import CONV_ONLY, NAMES
from tests.support.tokens import T

every_organization = pytest.mark.parametrize("name", NAMES)


def evict_one(shadow: Shadow) -> bool:
    """Make room for one piece more than is free: of state where that has its own pool."""
    pool = shadow.organization.state_pool
    has_own_pool = pool is not shadow.organization.unit_pool
    more = Need(checkpoints=pool.free + 1) if has_own_pool else Need(units=pool.free + 1)
    return shadow.lifetime.make_room(more)


def order_of_eviction(shadow: Shadow) -> list[tuple[bytes, int]]:
    """(first block, depth) of the checkpoints in the order in which they are evicted."""
    order = []
    before = boundaries(shadow)
    while before and evict_one(shadow):
        after = boundaries(shadow)
        order += sorted(before - after)
        assert len(before - after) <= 1
        before = after
        audit(shadow)
    return order


def boundaries(shadow: Shadow) -> set[tuple[bytes, int]]:
    nodes = [node for node in shadow.tree.nodes() if node.checkpoint is not None]
    return {(node.path()[0].key, node.depth) for node in nodes}  # type: ignore[misc]


@every_organization
def test_dead_halves_go_first(name: str) -> None:
    shadow = scheduler(name)
    serve(shadow, T(1, 17))
    serve(shadow, T(2, 17))
    shadow.tree.evict_checkpoint(checkpoint_at(shadow, T(2, 17), 4))
    shadow.tree.evict_checkpoint(checkpoint_at(shadow, T(2, 17), 3))
    free = shadow.organization.units_free()
    assert shadow.lifetime.make_room(Need(units=free + 2 * shadow.organization.units_per_block))
    assert shadow.lifetime.counts == (2, 0, 0, 0, 0)
    assert match(shadow, T(1, 17))[1:] == (4, 4) and match(shadow, T(2, 17))[1:] == (2, 2)


@every_organization
def test_a_hit_refreshes_only_the_checkpoint_it_used(name: str) -> None:
    shadow = scheduler(name)
    for seed in (1, 2, 1):
        serve(shadow, T(seed, 13))
    one, two = (node_at(shadow, T(seed, 13), 1).key for seed in (1, 2))
    assert order_of_eviction(shadow) == [(one, 1), (one, 2), (two, 1), (two, 2), (two, 3), (one, 3)]


@every_organization
def test_what_is_executed_on_survives(name: str) -> None:
    shadow = scheduler(name)
    serve(shadow, T(2, 17))
    running = start(shadow, T(1, 9))
    while evict_one(shadow):
        audit(shadow)
    assert not match(shadow, T(2, 17)).depth and match(shadow, T(1, 9)).attention_depth == 2
    decode(shadow, running, 9)


@every_organization
def test_a_locked_leaf_stays_though_its_checkpoint_is_idle(name: str) -> None:
    shadow = scheduler(name)
    running = start(shadow, T(1, 4))
    decode(shadow, running, 2)
    assert checkpoint_at(shadow, T(1, 4), 1).references == 0
    serve(shadow, T(2, 9))
    assert shadow.lifetime.make_room(Need(units=shadow.organization.units_reclaimable()))
    assert match(shadow, T(1, 4)).attention_depth == 1 and not match(shadow, T(2, 9)).attention_depth
    decode(shadow, running, 6)


@every_organization
def test_leaves_go_before_the_blocks_above_them(name: str) -> None:
    shadow = scheduler(name)
    serve(shadow, T(1, 17))
    for depth in (4, 3, 2, 1):
        assert match(shadow, T(1, 17)).attention_depth == depth
        while match(shadow, T(1, 17)).attention_depth == depth:
            assert shadow.lifetime.make_room(Need(units=shadow.organization.units_free() + 1))
            audit(shadow)
    assert shadow.tree.blocks == 0


@every_organization
def test_retained_yields_before_pinned_and_both_after_everything_else(name: str) -> None:
    shadow = scheduler(name)
    for seed in (1, 2, 3, 4):
        serve(shadow, T(seed, 5))
    keys = [node_at(shadow, T(seed, 5), 1).key for seed in (1, 2, 3, 4)]
    shadow.lifetime.pin(checkpoint_at(shadow, T(1, 5), 1))
    shadow.pins[-1] = checkpoint_at(shadow, T(1, 5), 1)
    shadow.lifetime.retain(checkpoint_at(shadow, T(2, 5), 1))
    given_up = []
    before = boundaries(shadow)
    order = []
    while before:
        assert evict_one(shadow)
        order += [key for key, _ in before - boundaries(shadow)]
        given_up += [shadow.lifetime.pins_given_up] * len(before - boundaries(shadow))
        before = boundaries(shadow)
    assert order == [keys[2], keys[3], keys[1], keys[0]]
    assert given_up == [0, 0, 0, 1]


@every_organization
def test_an_end_of_pin_or_retention_is_noticed(name: str) -> None:
    shadow = scheduler(name)
    for seed in (1, 2, 3):
        serve(shadow, T(seed, 5))
    keys = [node_at(shadow, T(seed, 5), 1).key for seed in (1, 2, 3)]
    one, two = (checkpoint_at(shadow, T(seed, 5), 1) for seed in (1, 2))
    shadow.lifetime.pin(one)
    shadow.lifetime.retain(two)
    assert order_of_eviction_of_one(shadow) == (keys[2], 1)
    shadow.lifetime.unpin(one)
    shadow.lifetime.unretain(two)
    assert order_of_eviction(shadow) == [(keys[0], 1), (keys[1], 1)]
    assert shadow.lifetime.pins_given_up == 0


def order_of_eviction_of_one(shadow: Shadow) -> tuple[bytes, int]:
    before = boundaries(shadow)
    while boundaries(shadow) == before:
        assert evict_one(shadow)
    (gone,) = before - boundaries(shadow)
    return gone


@every_organization
def test_pins_and_retention_are_counted_not_switched(name: str) -> None:
    shadow = scheduler(name)
    serve(shadow, T(1, 5))
    checkpoint = checkpoint_at(shadow, T(1, 5), 1)
    for _ in range(2):
        shadow.lifetime.pin(checkpoint)
    shadow.lifetime.unpin(checkpoint)
    assert (checkpoint.pins, checkpoint.retained) == (1, 0)
    shadow.lifetime.unpin(checkpoint)
    with pytest.raises(IntegrityError, match="has no pin"):
        shadow.lifetime.unpin(checkpoint)
    with pytest.raises(IntegrityError, match="not retained"):
        shadow.lifetime.unretain(checkpoint)


@every_organization
@pytest.mark.parametrize("kind", ["pin", "retain"])
def test_an_optional_checkpoint_gives_up_neither_pin_nor_retention(name: str, kind: str) -> None:
    shadow = scheduler(name, pages={"S0": 8, "S1": 15, "S2": 12}.get(name, 0), units=16, states=2)
    serve(shadow, T(1, 5))
    kept = checkpoint_at(shadow, T(1, 5), 1)
    getattr(shadow.lifetime, kind)(kept)
    if kind == "pin":
        shadow.pins[-1] = kept
    else:
        shadow.retained.append(kept)
    serve(shadow, T(2, 14))
    assert match(shadow, T(1, 5)).depth == 1
    assert shadow.live.counts.checkpoints_skipped > 0 and shadow.lifetime.pins_given_up == 0


@every_organization
def test_a_published_live_state_that_is_pinned_goes_on_in_new_pages_or_is_given_up(name: str) -> None:
    for room in (True, False):
        shadow = scheduler(name)
        running = start(shadow, T(1, 4))
        live = checkpoint_at(shadow, T(1, 4), 1)
        shadow.lifetime.pin(live)
        shadow.pins[-1] = live
        if not room:
            units = shadow.organization.units_free() - 1
            assert name == "D0" or shadow.organization.allocate_units(units) is not None
            while name == "D0" and shadow.organization.state_pool.free:
                shadow.organization.allocate_checkpoint()
        assert shadow.prepare_decode([running]) == [running]
        shadow.launch()
        assert (running.live.live is live) is not room
        assert shadow.lifetime.pins_given_up == (not room)


@every_organization
def test_a_need_that_cannot_fit_evicts_nothing(name: str) -> None:
    shadow = scheduler(name)
    serve(shadow, T(1, 33))
    start(shadow, T(2, 9))
    before = shadow.organization.usage()
    assert not shadow.lifetime.make_room(Need(units=shadow.organization.units_reclaimable() + 1))
    assert not shadow.lifetime.make_room(Need(checkpoints=shadow.organization.state_pool.size))
    assert shadow.organization.usage() == before


def test_eviction_of_a_conv_line_leaves_its_neighbours_on_the_slab() -> None:
    shadow = scheduler("S2", model=CONV_ONLY)
    serve(shadow, T(1, 13))
    running = start(shadow, T(2, 2))
    pages = {checkpoint_at(shadow, T(1, 13), depth).pages for depth in (1, 2, 3)}
    assert len(pages) == 1  # nothing but a slot each, on one slab, where the running state lies too
    shadow.tree.evict_checkpoint(checkpoint_at(shadow, T(1, 13), 2))
    assert match(shadow, T(1, 13)).depth == 3 and match(shadow, T(1, 11)).depth == 1
    audit(shadow)
    decode(shadow, running)


def test_two_ranks_evict_alike() -> None:
    histories = []
    for _ in range(2):
        shadow = scheduler("S2", pages=40)
        for seed in (1, 2, 3, 1, 4, 2, 5, 6, 1):
            serve(shadow, T(seed, 5 + 3 * seed))
        histories.append([sorted(node.units) for node in shadow.tree.nodes()])
    assert histories[0] == histories[1]


def test_the_order_does_not_grow_with_what_was_filed_and_is_gone() -> None:
    usable: set[Checkpoint] = set()
    order = EvictionOrder(usable.__contains__)
    for stamp in range(5000):
        checkpoint = Checkpoint((), 1, (1,))
        checkpoint.stamp = stamp
        usable.add(checkpoint)
        order.file(checkpoint)
        if stamp >= 10:
            usable.discard(min(usable, key=lambda c: c.stamp))
        order.trim(len(usable))
        assert len(order) <= 2 * len(usable) + 64
    taken = [order.take(Tier.PINNED) for _ in range(11)]
    assert [c.stamp for c in taken if c] == sorted(c.stamp for c in usable)[: len(taken)]
    assert order.take(Tier.PINNED) is None
