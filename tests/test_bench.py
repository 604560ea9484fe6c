"""The benches on little input: their fields, and what must hold for any input."""

import random

import pytest
from tqdm import tqdm

from bench.capacity import KINDS, composites, measure, serve
from bench.overhead import COMMON, OPERATIONS
from bench.overhead import measure as measure_overhead
from bench.trace import Request, clairvoyant, load, reuse
from sglang_hybrid.pools.factory import ORGANIZATIONS

BUDGETS = (100, 254)


def conversations(count: int) -> list[Request]:
    """Turns of conversations that come and go, a system prompt of one block before them all."""
    chance = random.Random(0)
    open_ones: list[list[int]] = []
    requests = []
    fresh = 1
    for _ in range(count):
        if not open_ones or chance.random() < 0.4:
            open_ones.append([0])
        blocks = chance.choice(open_ones[-20:])
        more = chance.randint(1, 4)
        blocks += range(fresh, fresh + more)
        fresh += more
        if len(blocks) > 15:
            open_ones.remove(blocks)
        requests.append(Request(512 * len(blocks) - chance.randrange(512), 200, tuple(blocks)))
    return requests


@pytest.fixture(scope="module")
def capacity() -> dict[str, object]:
    return measure(conversations(160), pages=300, budgets=BUDGETS, steps=300)


def test_capacity_reports_its_fields(capacity: dict[str, dict]) -> None:
    assert set(capacity["composites"]) == set(ORGANIZATIONS)
    assert 0 < capacity["slab_occupancy"] <= 1
    assert capacity["adopted_tokens"].keys() == {str(pages) for pages in BUDGETS}
    assert all({"lru", "ours"} <= one.keys() for one in capacity["adopted_tokens"].values())


def test_every_byte_of_the_budget_has_a_kind(capacity: dict[str, dict]) -> None:
    for orders in capacity["organizations"].values():
        for one in orders.values():
            assert one["shares"].keys() == KINDS.keys()
            assert sum(one["shares"].values()) == pytest.approx(1, abs=0.001)


def test_no_order_serves_more_than_the_future_allows(capacity: dict[str, dict]) -> None:
    endless = capacity["endless_cache"]
    for pages, served in capacity["adopted_tokens"].items():
        assert max(served["lru"], served["ours"]) <= capacity["clairvoyant"][pages] <= endless


def test_our_order_serves_more_of_the_public_trace_than_plain_lru() -> None:
    requests = load(most=300)
    ours, lru = (
        serve("S2", 254, order, 1, requests, tqdm(disable=True))["adopted_tokens"]
        for order in ("ours", "lru")
    )
    assert ours > 1.2 * lru


def test_packing_pays_after_churn() -> None:
    found = composites(pages=3000, steps=1500, progress=tqdm(disable=True))
    assert found["composites"]["S2"] >= 2.05 * found["composites"]["S0"]
    assert found["slab_occupancy_at_end"] >= 0.9


def test_what_an_endless_cache_serves_is_counted_by_hand() -> None:
    one, two = Request(1100, 10, (1, 2, 3)), Request(1600, 10, (1, 2, 9, 10))
    assert reuse([one, two, one]).tokens == 2 * 1024
    # The first block is held once for all; the second one and its state wait for one request each time.
    assert clairvoyant([one, two, one], 100, 3) == 2 * 1024
    assert clairvoyant([one, two, one], 0, 3) == 2 * 512


def test_overhead_reports_its_fields() -> None:
    answer = measure_overhead((100, 1000), stock_blocks=1000, lengths=(1024, 8192), count=2)
    assert answer["match_8k_ratio"] > 0 and answer["insert_8k_ratio"] > 0
    assert answer["growth"] == {}, "growth is told of 10^6 blocks over 10^3"
    for core in ("rust", "python"):
        assert answer["ratios"][core]["1000"]["8192"].keys() == set(COMMON)
    ours = answer["microseconds"]["ours"]
    assert ours["1000"]["8192"].keys() == set(OPERATIONS)
    assert "8192" not in ours["100"], "few such prompts fit"
