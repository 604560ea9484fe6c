"""Published policies against their papers: the exact placement, what eviction weighs, what is admitted."""

import random
from collections.abc import Sequence
from itertools import combinations

import pytest

from bench.falcon import organization
from bench.peers import POLICIES, Policy, first_eviction, flops, marconi, measure, sparse_prefix
from bench.peers import served as serve
from bench.policies.marconi import MarconiEviction, PrefixFlops
from bench.policies.sparse_prefix import best_places
from bench.trace import Request
from sglang_hybrid.pools.organization import EITHER
from sglang_hybrid.radix.order import Limit
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


def test_the_bench_reports_every_policy() -> None:
    chance = random.Random(0)
    turns = [Request(700 + 512 * n % 4000, 90, tuple(range(k, k + 9))) for n in range(9) for k in (0, 20, 40)]
    chance.shuffle(turns)
    answer = measure(turns, budgets=(60,), concurrency=(1, 4))
    for row in (answer["running"][running]["60"] for running in ("1", "4")):
        assert row.keys() == POLICIES.keys()
        assert all(0 <= one["hit_rate"] <= answer["endless_cache"] for one in row.values())
