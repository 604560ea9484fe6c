"""Published policies against their papers: the exact placement, what eviction weighs, what is admitted."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations

import pytest

from bench.falcon import organization
from bench.peers import (
    BOUND,
    KNOWS_THE_FUTURE,
    POLICIES,
    Policy,
    first_eviction,
    flops,
    marconi,
    measure,
    sparse_prefix,
)
from bench.peers import served as serve
from bench.policies.clairvoyant import Clairvoyant, Future
from bench.policies.few_states import LastStates, PathCap
from bench.policies.marconi import MarconiEviction, PrefixFlops
from bench.policies.quick_demotion import QuickDemotion
from bench.policies.recency import NodeRecency
from bench.policies.sparse_prefix import best_places
from bench.trace import Request
from sglang_hybrid.pools.organization import EITHER, Checkpoint
from sglang_hybrid.radix.demand import Kind
from sglang_hybrid.radix.interfaces import EvictionPolicy
from sglang_hybrid.radix.node import Node
from sglang_hybrid.radix.order import Limit
from sglang_hybrid.radix.placement import Branch
from sglang_hybrid.radix.tree import GridTree
from sglang_hybrid.simulator.core import Core
from sglang_hybrid.simulator.keys import key_of


def saved(weights: Sequence[float], places: Sequence[int]) -> float:
    """Tokens that overlaps save: of each, the deepest place that it covers."""
    return sum(
        weight * max((place for place in places if place <= depth), default=0)
        for depth, weight in enumerate(weights)
    )


@pytest.mark.parametrize("seed", range(30))
def test_the_dynamic_programme_finds_the_best_placement(seed: int) -> None:
    chance = random.Random(seed)
    weights = [chance.random() ** 3 for _ in range(chance.randint(2, 10))]
    for count in range(5):
        places = best_places(weights, count)
        assert len(places) <= count and list(places) == sorted(set(places))
        every = (p for n in range(count + 1) for p in combinations(range(1, len(weights)), n))
        assert saved(weights, places) == pytest.approx(max(saved(weights, one) for one in every))


def test_a_place_is_where_overlaps_end() -> None:
    assert best_places([0, 0, 9, 0, 0, 1], 1) == (2,)
    assert best_places([0, 0, 9, 0, 0, 1], 2) == (2, 5)
    assert best_places([1.0, 0, 0], 3) == (), "nothing is saved by a checkpoint that nobody comes to"


def test_flops_are_those_of_the_papers_table() -> None:
    one = PrefixFlops(width=2, state=3, attention=1, recurrent=10, mlp=100)
    attention, recurrent, mlp = 8 * 5 * 4 + 4 * 25 * 2, 12 * 5 * 4 + 16 * 5 * 2 * 3 + 10 * 5, 16 * 5 * 4
    assert one.of(5) == attention + 10 * recurrent + 100 * mlp


def served(policy: Policy, prompts: Sequence[Sequence[int]], pages: int) -> Core:
    """Prompts one after another, each a little longer than these blocks."""
    requests = [Request(512 * len(ids) + 100, 8, (*ids, -n)) for n, ids in enumerate(prompts, 1)]
    return serve(policy, pages, 1, requests).core


def checkpoints(core: Core, first: int) -> list[int]:
    """Depths of checkpoints on paths that begin with this block."""
    key = key_of([(first, 512)], 512)
    nodes = [node for node in core.memory.tree.nodes() if node.path()[0].key.startswith(key)]
    return sorted(node.depth for node in nodes if node.checkpoint is not None)


def test_marconi_admits_the_end_and_the_branching_point() -> None:
    core = served(marconi(0.0), [(1, 2, 3, 4, 5), (1, 2, 3, 8, 9)], pages=200)
    assert checkpoints(core, 1) == [3, 5, 5] and core.memory.organization.checkpoints_cached == 3


def test_marconi_weighs_recency_alone_without_alpha_and_saved_work_with_it() -> None:
    long, short = tuple(range(1, 13)), (100, 101)
    for alpha, first in ((0.0, 12), (4.0, 2)):
        core = served(marconi(alpha), [long, short], pages=200)
        chosen = core.memory.lifetime.policy.next(EITHER, Limit())
        assert chosen is not None and chosen.owner.depth == first, alpha  # type: ignore[attr-defined]


def test_a_hit_refreshes_what_it_used() -> None:
    long, short = tuple(range(1, 13)), (100, 101)
    core = served(marconi(0.0), [long, short, (*long, 13)], pages=200)
    chosen = core.memory.lifetime.policy.next(EITHER, Limit())
    assert chosen is not None and chosen.owner.depth == 2  # type: ignore[attr-defined]


def test_marconi_keeps_a_node_with_two_children() -> None:
    core = served(marconi(0.0), [(1, 2, 3, 4), (1, 2, 8, 9), (1, 2, 6, 7)], pages=200)
    policy = core.memory.lifetime.policy
    gone = []
    while len(gone) < 3 and (one := policy.next(EITHER, Limit())) is not None:
        gone.append(one.owner.depth)  # type: ignore[attr-defined]
    assert gone == [4, 4, 4], "the ends before the branching point, though it was used longest ago"


def test_the_bootstrap_window_begins_with_the_first_eviction() -> None:
    prompts = [tuple(range(10 * n, 10 * n + 5)) for n in range(1, 20)]
    requests = [Request(512 * 5 + 100, 8, (*ids, -ids[0])) for ids in prompts]
    first = first_eviction(60, 1, requests)
    assert 0 < first < len(requests)
    for count in (first - 1, first):
        core = serve(marconi(0.0), 60, 1, requests[:count]).core
        assert bool(core.memory.lifetime.checkpoints_evicted) == (count == first)


def test_efficiency_grows_with_the_prefix() -> None:
    policy = MarconiEviction(GridTree(organization("S2", 50)), flops())
    efficiencies = [policy.efficiency(blocks) for blocks in (1, 2, 4, 8, 16)]
    assert efficiencies == sorted(efficiencies)
    assert efficiencies[0] == pytest.approx(flops().of(512) / (44 * (512 + 1557) * 1024))


def test_sparse_placement_learns_where_prompts_part() -> None:
    shared = [(1, 2, 3, 10 * n + 100, 10 * n + 101, 10 * n + 102) for n in range(70)]
    core = served(sparse_prefix(1), shared, pages=2000)
    assert core.memory.live.placement.places(6) == (3,)  # type: ignore[attr-defined]
    assert core.memory.live.placement.places(2) == (2,)  # type: ignore[attr-defined]


def turns(count: int) -> list[tuple[int, ...]]:
    """Prompts of a conversation: each repeats the one before it, and three blocks more."""
    return [tuple(range(1, 4 + 3 * turn)) for turn in range(count)]


def test_a_conversation_keeps_its_last_states() -> None:
    """The boundary where two conversations part is nobody's own."""
    last = Policy(NodeRecency, partial(LastStates, most=2))
    assert checkpoints(served(Policy(NodeRecency, Branch), turns(6), pages=1000), 1) == [3, 6, 9, 12, 15, 18]
    assert checkpoints(served(last, turns(6), pages=1000), 1) == [15, 18]
    other = [(1, 2, 3, 90, 91), *turns(6)]
    assert checkpoints(served(last, other, pages=1000), 1) == [3, 5, 15, 18]


def test_a_path_has_no_more_states_than_its_cap_but_forks_stay() -> None:
    cap = Policy(NodeRecency, partial(PathCap, most=2))
    assert checkpoints(served(cap, turns(6), pages=1000), 1) == [15, 18]
    assert checkpoints(served(cap, [(1, 2, 3, 90, 91), *turns(6)], pages=1000), 1) == [3, 5, 18]


def first_gone(eviction: Callable[[GridTree], EvictionPolicy], prompts: Sequence[Sequence[int]]) -> int:
    """First block of the path whose state goes first."""
    core = served(Policy(eviction, Branch), prompts, pages=1000)
    chosen = core.memory.lifetime.policy.next(EITHER, Limit())
    assert isinstance(chosen, Checkpoint) and isinstance(chosen.owner, Node)
    keys = {key_of([(first, 512)], 512): first for first in range(1000)}
    return keys[chosen.owner.path()[0].key[:8]]


def test_who_was_asked_for_once_is_demoted_before_who_was_asked_for_before() -> None:
    prompts = [(1, 2, 3), (1, 2, 3), (11, 12, 13), (21, 22, 23)]
    assert first_gone(NodeRecency, prompts) == 1
    assert first_gone(QuickDemotion, prompts) == 11


def test_who_was_demoted_and_comes_back_is_no_newcomer() -> None:
    core = served(Policy(QuickDemotion, Branch), [(1, 2, 3), (11, 12, 13)], pages=1000)
    policy = core.memory.lifetime.policy
    assert isinstance(policy, QuickDemotion) and len(policy.newcomers) == 2
    assert core.memory.lifetime.evict_next() and len(policy.newcomers) == 1 and len(policy.demoted) == 1
    (node,) = [one for one in core.memory.tree.nodes() if one.checkpoint is None]
    checkpoint = core.memory.organization.allocate_checkpoint()
    assert checkpoint is not None
    core.memory.tree.offer(node, checkpoint)
    policy.offered(node, Kind.PROMPT_END)
    assert len(policy.newcomers) == 1 and not policy.demoted


def test_the_clairvoyant_gives_up_what_is_asked_for_last() -> None:
    prompts = [(1, 2, 3), (11, 12, 13), (21, 22, 23), (11, 12, 13), (1, 2, 3)]
    requests = [Request(512 * len(ids) + 100, 8, (*ids, -n)) for n, ids in enumerate(prompts, 1)]
    future = Future(requests)
    future.now = 3
    eviction = partial(Clairvoyant, future=future)
    assert [first_gone(eviction, prompts[:count]) for count in (2, 3)] == [1, 21]
    future.now = 4
    assert first_gone(eviction, prompts[:2]) == 11, "nobody will ask for it any more"


def test_the_bound_is_above_the_arm_that_knows_the_trace() -> None:
    chance = random.Random(1)
    paths = [tuple(range(k, k + 6)) for k in range(0, 120, 10)]
    requests = [Request(512 * 6 + 100, 8, (*chance.choice(paths), -n)) for n in range(1, 200)]
    row = measure(requests, budgets=(70,), concurrency=(1,))["running"]["1"]["70"]
    others = [one["tokens"] for name, one in row.items() if name not in (KNOWS_THE_FUTURE, BOUND)]
    assert max(others) < row[KNOWS_THE_FUTURE]["tokens"] <= row[BOUND]["tokens"]


def test_the_bench_reports_every_policy() -> None:
    chance = random.Random(0)
    turns = [Request(700 + 512 * n % 4000, 90, tuple(range(k, k + 9))) for n in range(9) for k in (0, 20, 40)]
    chance.shuffle(turns)
    answer = measure(turns, budgets=(60,), concurrency=(1, 4))
    for row in (answer["running"][running]["60"] for running in ("1", "4")):
        assert row.keys() == {*POLICIES, BOUND}
        assert all(0 <= one["hit_rate"] <= answer["endless_cache"] for one in row.values())
    assert answer["ours_at_least_every_peer"] is not bool(answer["ours_is_behind"])
