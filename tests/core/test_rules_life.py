"""Headroom, retention, pins and placement: who is admitted, what stays, where checkpoints are."""

import random
from collections import Counter

import pytest

from sglang_hybrid.pools.factory import make_organization, smallest_budget
from sglang_hybrid.pools.organization import Checkpoint, Need, part_of
from sglang_hybrid.radix.order import LIKELY
from sglang_hybrid.radix.placement import PLACEMENTS, Sparse
from sglang_hybrid.radix.policy import Policy
from tests.core.driver import Driver
from tests.core.serve import audit, checkpoint_at, decode, serve, start, step
from tests.core.shadow import Shadow
from tests.core.worlds import CONV_ONLY, FALCON_7B, GRID, NAMES, SMALL, SSM_ONLY, World
from tests.support.tokens import T

ROOM = {"pages": 60, "units": 80, "states": 20}


def shadow(name: str, policy: Policy, **room: int) -> Shadow:
    return Shadow(World(name, **{**ROOM, **room}).build(), policy)


def depths(one: Shadow) -> list[int]:
    """Depths in blocks of all checkpoints."""
    return sorted(node.depth for node in one.tree.nodes() if node.checkpoint is not None)


# -- headroom -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("f", [0.0, 0.1, 0.29, 0.5, 0.99])
def test_headroom_is_the_floor_of_f_b_in_each_pool(name: str, f: float) -> None:
    """What is asked while others run: the need, the prefill's checkpoints, one for a fork, and H."""
    one = shadow(name, Policy(headroom=f))
    one.live.running = one.live._alive = 1
    organization = one.organization
    pools = [pool.size for pool in organization.pools]
    for leaves in range(3):
        for units in range(pools[0] + 1):
            got = one.admission.missing(units, 0, leaves) is None
            if name == "D0":
                want = units + int(f * 1000 * pools[0] // 1000) <= pools[0]
                want &= 2 + leaves + int(f * 1000 * pools[1] // 1000) <= pools[1]
            else:
                states = organization.unit_equivalent(1) + organization.unit_equivalent(leaves + 1)
                want = units + states + int(f * 1000 * pools[0] // 1000) <= pools[0]
            assert got == want, (units, leaves)
    assert part_of(0.29, 100) == 29


@pytest.mark.parametrize("name", NAMES)
def test_headroom_holds_back_waiting_and_preempted_requests_and_nobody_when_nothing_runs(name: str) -> None:
    one = shadow(name, Policy(headroom=0.95))
    first = start(one, T(1, 9), new=20)
    second = one.submit(T(2, 9), 4)
    assert second is not None and one.prepare_extend(64) == []
    one.preempt(first)
    assert one.prepare_extend(64) == [second], "the first in the queue begins when nothing runs"
    step(one)
    assert one.prepare_extend(64) == [], "the preempted one waits like any other"
    while second in one.running:
        decode(one, second)
    assert one.prepare_extend(64) == [first]
    step(one)
    assert one.admission.waits == 3


@pytest.mark.parametrize("name", NAMES)
def test_without_headroom_both_run(name: str) -> None:
    one = shadow(name, Policy())
    start(one, T(1, 9), new=20)
    second = one.submit(T(2, 9), 4)
    assert one.prepare_extend(64) == [second]


def test_a_headroom_of_everything_is_refused() -> None:
    with pytest.raises(ValueError, match="0 <= f < 1"):
        shadow("S1", Policy(headroom=1.0))


# -- retention ------------------------------------------------------------------------------


def wanted_twice(one: Shadow) -> Checkpoint:
    """A producer that runs, and the checkpoint at block 2 that it made and that others came to."""
    stem = T(1, 2 * GRID)
    start(one, stem + T(2, 2), new=90)
    for seed in (3, 4):
        serve(one, stem + T(seed, 2))
    return checkpoint_at(one, stem, 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("threshold", "kept"), [(None, False), (1, True), (2, True), (3, False)])
def test_what_n_distinct_requests_wanted_is_kept_while_its_producer_runs(
    name: str, threshold: int | None, kept: bool
) -> None:
    one = shadow(name, Policy(retention=threshold))
    checkpoint = wanted_twice(one)
    assert (checkpoint.retained == 1) is kept
    while one.lifetime.evict_next(limit=LIKELY):
        pass  # everything that an optional checkpoint may push out
    assert (checkpoint.owner is not None) is kept
    (producer,) = one.running
    one.release(producer)
    assert checkpoint.retained == 0, "normal rules once the producer is gone"
    assert one.live.retention.retained == 0
    audit(one)


def test_a_preempted_producer_retains_nothing() -> None:
    one = shadow("S1", Policy(retention=1))
    checkpoint = wanted_twice(one)
    assert checkpoint.retained
    one.preempt(one.running[0])
    assert not checkpoint.retained


def test_a_request_wants_once_however_often_it_comes_back() -> None:
    one = shadow("S1", Policy(retention=2))
    stem = T(1, 2 * GRID)
    start(one, stem + T(2, 2), new=90)
    again = start(one, stem + T(3, 2), new=40)
    for _ in range(3):
        one.preempt(again)
        one.prepare_extend(64)
        step(one)
    assert not checkpoint_at(one, stem, 2).retained
    serve(one, stem + T(4, 2))
    assert checkpoint_at(one, stem, 2).retained == 1


def test_requests_apart_want_nothing_of_each_other() -> None:
    one = shadow("S1", Policy(retention=1))
    stem = T(1, 2 * GRID)
    one.submit(stem + T(2, 2), 90, ("a", None))
    one.prepare_extend(64)
    step(one)
    for key in ("b", "c", "ab"):
        serve(one, stem + T(3, 2), key=(key, None))
    assert one.live.retention.retained_ever == 0


@pytest.mark.parametrize("name", NAMES)
def test_retention_goes_before_any_pin_and_neither_for_a_waiting_request(name: str) -> None:
    one = shadow(name, Policy(retention=1))
    retained = wanted_twice(one)
    serve(one, T(7, 9), 2)
    pinned = checkpoint_at(one, T(7, 9), 2)
    one.lifetime.pin(pinned)
    path = 2 * one.organization.units_per_block
    assert one.lifetime.kept() == Need(path, 2), "the producer's path is locked, the pin's is not"
    assert one.admission.reserve(0) == one.organization.displaced(3).plus(Need(units=path))
    while retained.owner is not None:
        assert pinned.owner is not None, "a pin went before retention"
        assert one.lifetime.evict_next()
    assert one.lifetime.kept() == Need(path, 1)
    counts = one.lifetime.counts
    assert (counts.retained_given_up, counts.pins_given_up) == (1, 0)
    one.lifetime.unpin(pinned)


# -- pins -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_pin_outlasts_waiting_requests_while_anything_runs(name: str) -> None:
    """Room for two requests: who was preempted is not robbed by those that wait behind it."""
    pieces = {"pages": 32, "units": 32, "states": 7}
    one = shadow(name, Policy(), **pieces)
    chance = random.Random(0)
    victim = start(one, T(1, 4 * GRID + 1), new=20)
    other = start(one, T(2, 5), new=30)
    one.preempt(victim)
    (pinned,) = one.pins.values()
    one.waiting.remove(victim)  # it comes last
    for seed in range(12):
        one.submit(T(10 + seed, GRID + chance.randrange(3 * GRID)), 6)
    one.waiting.append(victim)
    admitted = 0
    while other in one.running and victim not in one.running and pinned.owner is not None:
        admitted += len(one.prepare_extend(64))
        assert pinned.owner is not None, "a waiting request has taken the pin"
        if one.prepared:
            step(one)
        if one.prepare_decode(one.decodable()):
            step(one)
    assert admitted


@pytest.mark.parametrize("name", NAMES)
def test_a_pin_is_given_up_when_nothing_else_can_go_on_and_counted_by_request(name: str) -> None:
    pieces = {"pages": 14, "units": 14, "states": 2}
    one = shadow(name, Policy(), **pieces)
    lost: list[Checkpoint] = []
    one.lifetime.on_given_up = lost.append
    victim = start(one, T(1, 2 * GRID + 1), new=4)
    one.preempt(victim)
    (pinned,) = one.pins.values()
    one.lifetime.pin(pinned)  # a second request stopped at the same place
    size = one.organization.token_capacity()
    while one.submit(T(5, size), 1) is None:
        size -= 1
    large = one.waiting.pop()
    one.waiting.insert(0, large)
    assert one.prepare_extend(1 << 20)[0] is large, "nothing runs, and yet it waits"
    step(one)
    assert lost == [pinned] and one.lifetime.counts.pins_given_up == 2


# -- placement ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_all_is_every_boundary(name: str) -> None:
    one = shadow(name, Policy(checkpoints="all"), units=80)
    serve(one, T(1, 5 * GRID + 1), 2 * GRID + 2)
    assert depths(one) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [GRID, 2 * GRID + 1, 1 << 20])
def test_branch_is_ends_and_where_paths_part(name: str, chunk: int) -> None:
    one = shadow(name, Policy(checkpoints="branch"), units=80)
    first = serve(one, T(1, 5 * GRID + 1), 3 * GRID, chunk=chunk)
    assert depths(one) == [5, 8], "the ends of prompt and answer"
    forked = first.tokens[: 3 * GRID] + T(2, 2 * GRID)
    assert serve(one, forked, chunk=chunk).hit == 0
    assert depths(one) == [3, 5, 5, 8] or depths(one) == [3, 4, 5, 8]
    again = first.tokens[: 3 * GRID] + T(3, 2 * GRID)
    assert serve(one, again, chunk=chunk).hit == 3 * GRID, "where the second left the first"
    assert serve(one, first.tokens[: 5 * GRID + 1], chunk=chunk).hit == 5 * GRID
    assert serve(one, first.tokens[: 8 * GRID] + T(4, 1), chunk=chunk).hit == 8 * GRID


@pytest.mark.parametrize("name", NAMES)
def test_sparse_adds_the_spacing(name: str) -> None:
    one = shadow(name, Policy(checkpoints="sparse"), units=160, states=60, pages=200)
    rule = PLACEMENTS["sparse"](one.organization)
    serve(one, T(1, 13 * GRID + 1), 3 * GRID)
    assert depths(one) == sorted({13, 16, *[depth for depth in range(1, 17) if rule.keeps(depth)]})


def test_spacing_minimizes_what_is_expected_to_be_computed_again() -> None:
    """The closed form against a search, over the price of a checkpoint and the length of a path."""
    for name, most in (("S0", 1.0), ("S1", 4.0), ("S2", 3.0625)):
        sparse = Sparse(make_organization(name, FALCON_7B, 512, 1 << 40))
        assert sparse.weight == most
        for n in range(1, 200):
            saved = {s: s / (s + most) * (n - (s - 1) / 2) for s in range(1, 201)}
            best = max(saved, key=saved.__getitem__)
            assert sparse.spacing(n) <= max(best, 1) + 1 <= 2 * sparse.spacing(n) + 2
        spacings = [sparse.spacing(n) for n in range(1, 500)]
        assert spacings == sorted(spacings), "a deeper boundary never has a closer spacing"


# -- nothing wedges -------------------------------------------------------------------------

POLICIES = (
    Policy(),
    Policy(headroom=0.9, retention=1),
    Policy(headroom=0.3, retention=2, checkpoints="branch"),
    Policy(retention=1, checkpoints="sparse"),
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("extra", [0, 1, 3])
def test_every_request_is_served_down_to_the_smallest_budget(name: str, extra: int) -> None:
    """Preemptions, aborts and retention at will; in the end nothing waits for ever, whatever the policy."""
    reached: Counter[str] = Counter()
    for model in (SMALL, CONV_ONLY) + (() if name == "S2" else (SSM_ONLY,)):
        for seed in range(8):
            chance = random.Random(seed)
            world = World(name, units=3 + extra, states=2 + extra, model=model)
            organization = (
                world.build()
                if name == "D0"
                else make_organization(
                    name,
                    model,
                    GRID,
                    smallest_budget(name, model, GRID) + extra * GRID * model.kv_row_bytes * model.arenas,
                )
            )
            driver = Driver(organization, POLICIES[seed % len(POLICIES)])
            half = organization.token_capacity() // 2
            for _ in range(150):
                driver.step(chance)
                if chance.random() < 0.2:
                    driver.do("submit", *(chance.randrange(limit) for limit in (10, half, half, half)))
                if chance.random() < 0.05:
                    driver.do("preempt", chance.randrange(8))
            driver.drain()
            assert not driver.shadow.waiting and not driver.shadow.running
            reached += driver.reached()
    assert reached["finished"] > 50, reached
    assert not extra or (reached["hits"] and reached["given_up"]), reached
