"""What the order of eviction expects of a checkpoint: each test is one rule of `radix.demand`."""

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from sglang_hybrid.pools.organization import Need
from sglang_hybrid.radix import demand
from sglang_hybrid.radix.demand import MOST_USES, Demand, Kind
from sglang_hybrid.radix.eviction import DemandEviction
from tests.core.serve import checkpoint_at, match, node_at, scheduler, serve
from tests.core.shadow import Shadow
from tests.core.worlds import GRID, NAMES
from tests.support.tokens import T

every_organization = pytest.mark.parametrize("name", NAMES)


def offered(shadow: Shadow) -> set[tuple[int, int]]:
    """(first token, depth) of every boundary that has a checkpoint."""
    nodes = [node for node in shadow.tree.nodes() if node.checkpoint is not None]
    return {(int.from_bytes(node.path()[0].key[:8], "little"), node.depth) for node in nodes}


def demand_of(shadow: Shadow) -> Demand:
    assert isinstance(shadow.lifetime.policy, DemandEviction)
    return shadow.lifetime.policy.demand


def order_of_eviction(shadow: Shadow) -> list[tuple[int, int]]:
    """What `offered` loses, one by one."""
    order: list[tuple[int, int]] = []
    before = offered(shadow)
    while before:
        free = shadow.organization.state_pool.free
        more = Need(checkpoints=free + 1) if shadow.organization.name == "D0" else Need(units=free + 1)
        assert shadow.lifetime.make_room(more)
        now = offered(shadow)
        order += sorted(before - now)
        before = now
    return order


def at(tokens: Sequence[int], depth: int) -> tuple[int, int]:
    return tokens[0], depth


@every_organization
def test_where_a_prompt_ended_outlives_what_it_passed(name: str) -> None:
    shadow = scheduler(name)
    serve(shadow, T(1, 17))
    serve(shadow, T(2, 17))
    order = order_of_eviction(shadow)
    assert order[-2:] == [at(T(1, 17), 4), at(T(2, 17), 4)]


@every_organization
def test_where_an_answer_ended_outlives_what_it_passed(name: str) -> None:
    shadow = scheduler(name)
    serve(shadow, T(1, 6), 15)  # 20 tokens are published: the prompt's one block, four of the answer
    order = order_of_eviction(shadow)
    assert set(order[-2:]) == {at(T(1, 6), 1), at(T(1, 6), 5)}


@every_organization
def test_where_a_conversation_has_moved_on_it_waits_no_longer(name: str) -> None:
    shadow = scheduler(name)
    serve(shadow, T(1, 9))
    serve(shadow, T(2, 9))
    assert serve(shadow, T(1, 9) + T(7, 9)).hit == 8
    order = order_of_eviction(shadow)
    assert order.index(at(T(1, 9), 2)) < order.index(at(T(2, 9), 2)) < order.index(at(T(1, 9), 4))


@every_organization
def test_where_prompts_branch_off_outlives_inner_checkpoints(name: str) -> None:
    shadow = scheduler(name)
    serve(shadow, T(1, 33))
    serve(shadow, T(2, 5))
    assert serve(shadow, T(1, 13) + T(3, 13)).hit == 12
    order = order_of_eviction(shadow)
    assert order.index(at(T(2, 1), 1)) < order.index(at(T(1, 1), 3))  # as good as an end, and younger


@every_organization
def test_a_prompt_takes_a_checkpoint_where_it_branches_off_though_memory_is_short(name: str) -> None:
    """The case of a prompt edited half-way: KV was there, the inner checkpoint had been evicted."""
    shadow = scheduler(name)
    serve(shadow, T(1, 33))
    for depth in (1, 2, 3, 4, 5, 6, 7):
        shadow.tree.evict_checkpoint(checkpoint_at(shadow, T(1, 33), depth))
    fill(shadow)
    assert serve(shadow, T(1, 33)).hit == 32  # it is still wanted
    edited = T(1, 13) + T(2, 20)
    assert serve(shadow, edited).hit == 0
    assert node_at(shadow, edited, 3).checkpoint is not None
    assert match(shadow, T(1, 13) + T(3, 5)).depth == 3
    order = order_of_eviction(shadow)
    assert order.index(at(T(1, 1), 3)) > len(order) // 2  # as good as an end, younger than the others


def fill(shadow: Shadow) -> None:
    """Fresh prompts until there is no room for three states, for all that nobody needs."""
    seed = 100
    while shadow.organization.fits(Need(units=4, checkpoints=3)):
        serve(shadow, T(seed, GRID + 1))
        seed += 1


@every_organization
def test_an_inner_checkpoint_pushes_out_nothing_that_is_worth_more(name: str) -> None:
    shadow = scheduler(name, pages={"S0": 30, "S1": 45, "S2": 40}.get(name, 0), units=60, states=12)
    fill(shadow)
    ends = offered(shadow)
    serve(shadow, T(1, 6 * GRID + 1))
    kept = {one for one in offered(shadow) if one[0] == T(1, 1)[0]}
    assert at(T(1, 1), 6) in kept and len(kept) <= 2  # one more may find room that was left over
    assert len(ends - offered(shadow)) <= len(ends) // 2


@every_organization
def test_a_conversation_that_went_on_is_likelier_to_go_on_though_it_was_evicted_meanwhile(name: str) -> None:
    shadow = scheduler(name)
    serve(shadow, T(1, 9))
    order_of_eviction(shadow)
    assert serve(shadow, T(1, 9) + T(7, 4)).hit == 0  # missed, and remembered
    serve(shadow, T(2, 9))
    order = order_of_eviction(shadow)
    assert order.index(at(T(2, 9), 2)) < order.index(at(T(1, 9), 3))


def stripped(shadow: Shadow, seed: int) -> None:
    """A client that strips the answer from what it sends back: only the end of its prompt is asked for."""
    serve(shadow, T(seed, GRID + 1), 2 * GRID + 1)
    serve(shadow, T(seed, GRID + 1) + T(seed + 50, GRID))


def kept(shadow: Shadow, seed: int) -> None:
    """A client that sends back all: the end of its answer is asked for."""
    first = serve(shadow, T(seed, GRID + 1), 2 * GRID + 1)
    serve(shadow, first.tokens + T(seed + 50, GRID))


@every_organization
def test_ends_of_a_kind_that_is_not_asked_for_are_worth_no_more_than_what_is_passed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demand, "LEAST_COUNTED", 3)
    for client, first in ((stripped, at(T(9, 1), 3)), (kept, at(T(8, 1), 1))):
        shadow = scheduler(name)
        for seed in range(3):
            client(shadow, seed)
        serve(shadow, T(8, GRID + 1))
        serve(shadow, T(9, GRID + 1), 2 * GRID + 1)
        order = [one for one in order_of_eviction(shadow) if one[0] in (T(8, 1)[0], T(9, 1)[0])]
        order.remove(at(T(9, 1), 2))
        assert order[0] == first


def test_what_was_counted_long_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "LEAST_COUNTED", 2)
    monkeypatch.setattr(demand, "FORGET_AT", 8)
    shadow = scheduler()
    for seed in range(40):
        stripped(shadow, seed)
    assert demand_of(shadow).worth(Kind.ANSWER_END, 0) < 0
    for seed in range(40, 43):
        kept(shadow, seed)
    assert demand_of(shadow).worth(Kind.ANSWER_END, 0) == 0


def test_a_use_is_worth_the_time_in_which_its_chance_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "HALF_LIFE", 4)
    shadow = scheduler()
    serve(shadow, T(1, 5))
    serve(shadow, T(1, 5))
    for seed in range(2, 12):
        serve(shadow, T(seed, 5))
    order = [token for token, _ in order_of_eviction(shadow)]
    assert [T(seed, 1)[0] for seed in range(2, 12)] == [token for token in order if token != T(1, 1)[0]]
    assert 3 <= order.index(T(1, 1)[0]) <= 5


def test_uses_beyond_the_most_count_no_more() -> None:
    worth = Demand(100).worth
    assert worth(Kind.PROMPT_END, 1) < worth(Kind.PROMPT_END, MOST_USES) == worth(Kind.PROMPT_END, 1000)


def test_only_so_many_ends_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "LEAST_REMEMBERED", 3)
    shadow = scheduler(pages=12)
    for seed in range(30):
        serve(shadow, T(seed, 5))
    assert len(demand_of(shadow)._ends) == 12


def history() -> list[object]:
    """What is where after requests of several namespaces under pressure."""
    shadow = scheduler("S2", pages=40)
    for seed in (1, 2, 3, 1, 4, 2, 5, 6, 1, 3):
        serve(shadow, T(seed, 5 + 3 * seed), 5, key=(f"key {seed % 2}", None))
    assert shadow.lifetime.counts.checkpoints
    nodes = list(shadow.tree.nodes())
    return [sorted((node.depth, list(node.units), list(node.fingerprints())) for node in nodes)]


def test_ranks_agree_though_python_hashes_differently_in_each() -> None:
    command = [sys.executable, "-c", "from tests.core.test_lifetime import history; print(history())"]
    ranks = [
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True)
        for seed in ("1", "2")
    ]
    assert ranks[0].stdout == ranks[1].stdout and ranks[0].stdout
