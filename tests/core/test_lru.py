"""`--hybrid-eviction lru`: each test is one rule of `radix.eviction.Lru`."""

import pytest

from sglang_hybrid.pools.organization import Need
from sglang_hybrid.radix.eviction import Lru
from sglang_hybrid.radix.order import LIKELY
from sglang_hybrid.radix.policy import Policy
from tests.core.serve import audit, checkpoint_at, match, serve
from tests.core.shadow import Shadow
from tests.core.worlds import NAMES, World
from tests.support.tokens import T

every_organization = pytest.mark.parametrize("name", NAMES)


def shadow(name: str = "S1") -> Shadow:
    return Shadow(World(name, pages=150, units=120, states=60).build(), Policy(eviction="lru"))


def go(one: Shadow) -> list[tuple[int, int]]:
    """Blocks that are left of three prompts of three, after each eviction."""
    found = []
    while one.lifetime.evict_next():
        audit(one)
        found.append(tuple(match(one, T(seed, 13)).attention_depth for seed in (1, 2, 3)))
    return found


@every_organization
def test_what_was_used_longest_ago_goes_first_and_ends_before_beginnings(name: str) -> None:
    one = shadow(name)
    for seed in (1, 2, 3, 1):
        serve(one, T(seed, 13))
    left = go(one)
    assert list(dict.fromkeys(left)) == [
        *[(3, depth, 3) for depth in (3, 2, 1, 0)],
        *[(3, 0, depth) for depth in (2, 1, 0)],
        *[(depth, 0, 0) for depth in (2, 1, 0)],
    ], "a hit refreshes its whole path"
    assert len(left) == 18, "a checkpoint and its block take their turns one by one"


@every_organization
def test_what_is_kept_yields_last(name: str) -> None:
    one = shadow(name)
    for seed in (1, 2, 3):
        serve(one, T(seed, 13))
    pinned, retained = checkpoint_at(one, T(1, 13), 3), checkpoint_at(one, T(2, 13), 3)
    one.lifetime.pin(pinned)
    one.lifetime.retain(retained)
    while one.lifetime.evict_next(limit=LIKELY):
        pass
    assert one.organization.checkpoints_cached == 2 and one.tree.blocks == 6
    one.lifetime.unretain(retained)
    while retained.owner is not None:
        assert one.lifetime.evict_next(limit=LIKELY)
    assert pinned.owner is not None and one.lifetime.counts.pins_given_up == 0
    while one.lifetime.evict_next():
        pass
    assert one.lifetime.counts.pins_given_up == 1 and one.tree.blocks == 0


def test_its_heap_does_not_grow_with_what_requests_do() -> None:
    one = shadow()
    policy = one.lifetime.policy
    assert isinstance(policy, Lru)
    for _ in range(300):
        serve(one, T(1, 13))
        assert len(policy) <= 2 * one.tree.blocks + 64
    assert one.lifetime.make_room(Need(units=one.organization.units_reclaimable()))
    assert one.tree.blocks == 0
