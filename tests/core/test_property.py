"""Random histories over every organization, everything checked after every operation.

`SGLANG_HYBRID_PROPERTY_OPS` is the number of operations of the seeded run (200,000 unless set);
what fails there is repeated by `replay(name, seed)`.  The hypothesis machine below drives the same
operations and shrinks what it finds.
"""

import os
import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from sglang_hybrid.geometry import GeometryError, ModelGeometry
from sglang_hybrid.pools.organization import Need
from sglang_hybrid.radix.eviction import EVICTIONS
from sglang_hybrid.radix.placement import PLACEMENTS
from sglang_hybrid.radix.policy import DEFAULT_POLICY, WAITS, Policy
from tests.core.driver import Driver
from tests.core.worlds import CONV_ONLY, NAMES, SMALL, SSM_ONLY, STRIPED, World

OPERATIONS = int(os.environ.get("SGLANG_HYBRID_PROPERTY_OPS", 200_000))
HISTORY = 500
"""Operations before everything is brought to its end and a new world begins."""

MODELS: dict[str, tuple[ModelGeometry, ...]] = {
    name: (SMALL, STRIPED, CONV_ONLY) + (() if name == "S2" else (SSM_ONLY,)) for name in NAMES
}


def world(name: str, chance: random.Random) -> World:
    """Small enough that memory is short nearly all the time."""
    while True:
        drawn = World(
            name,
            pages=chance.choice([8, 10, 12, 16, 24]),
            units=chance.choice([6, 12, 20]),
            states=chance.choice([2, 3, 5, 8]),
            model=chance.choice(MODELS[name]),
        )
        try:
            drawn.build()
        except GeometryError:
            continue
        return drawn


def policy(chance: random.Random, seed: int) -> Policy:
    """The defaults as often as anything else; every fourth seed has another order of eviction."""
    others = [name for name in EVICTIONS if name != DEFAULT_POLICY.eviction]
    order = others[seed // 4 % len(others)] if seed % 4 == 3 else DEFAULT_POLICY.eviction
    if chance.random() < 0.5:
        return DEFAULT_POLICY._replace(eviction=order)
    return Policy(
        eviction=order,
        headroom=chance.choice([0.0, 0.1, 0.3, 0.9]),
        retention=chance.choice([None, 1, 2]),
        checkpoints=chance.choice(sorted(PLACEMENTS)),
        wait=chance.choice(WAITS),
    )


def replay(name: str, seed: int) -> Driver:
    """One history; raises where it goes wrong, naming the operation."""
    chance = random.Random(seed)
    drawn = world(name, chance)
    driver = Driver(drawn.build(), policy(chance, seed))
    if chance.random() < 0.5:
        # Policy asks for room beside the need; correctness must not hang on it.
        driver.shadow.admission.reserve = lambda leaves: Need()  # type: ignore[method-assign]
    try:
        for _ in range(HISTORY):
            driver.step(chance)
        driver.drain()
    except BaseException as error:
        error.add_note(f"replay({name!r}, {seed}): operation {sum(driver.done.values())} in {drawn}")
        raise
    return driver


@pytest.mark.parametrize("name", NAMES)
def test_random_histories_keep_every_rule(name: str) -> None:
    done: Counter[str] = Counter()
    reached: Counter[str] = Counter()
    orders: Counter[object] = Counter()
    seed = 0
    while sum(done.values()) < OPERATIONS // len(NAMES):
        driver = replay(name, seed)
        done += driver.done
        reached += driver.reached()
        orders[type(driver.shadow.lifetime.policy)] += driver.shadow.lifetime.counts.checkpoints
        seed += 1
    assert sum(done.values()) >= OPERATIONS // len(NAMES)
    assert done["flush"] and done["resume"] and done["abandon"] and done["preempt"], done
    # A history that never gets there proves nothing about it.
    expected = {"hits", "forks", "in_place", "skipped", "published", "duplicates", "finished"}
    expected |= {"retained", "superseded", "waits", "prefix_waits"}
    expected |= {"dead", "checkpoints", "given_up", "leaves" if name == "D0" else "checkpoints"}
    if OPERATIONS >= 20_000:
        assert (+orders).keys() == set(EVICTIONS.values()), "an order of eviction has evicted nothing"
    if OPERATIONS >= 200_000:
        assert not expected - (+reached).keys(), reached


class Machine(RuleBasedStateMachine):
    """The same operations, drawn and shrunk by hypothesis."""

    name = "S1"

    @initialize(seed=st.integers(0, 1000))
    def build(self, seed: int) -> None:
        chance = random.Random(seed)
        self.driver = Driver(world(self.name, chance).build(), policy(chance, seed))

    @rule(stem=st.integers(0, 9), shared=st.integers(0, 17), tail=st.integers(0, 7), new=st.integers(0, 11))
    def submit(self, stem: int, shared: int, tail: int, new: int) -> None:
        self.driver.do("submit", stem, shared, tail, new)

    @rule(chunk=st.integers(0, 13), most=st.integers(0, 2), margin=st.integers(0, 2))
    def extend(self, chunk: int, most: int, margin: int) -> None:
        self.driver.do("extend", chunk, most, margin)

    @precondition(lambda self: self.driver.shadow.decodable())
    @rule(most=st.integers(0, 3))
    def decode(self, most: int) -> None:
        self.driver.do("decode", most)

    @precondition(lambda self: self.driver.shadow.prepared)
    @rule()
    def launch(self) -> None:
        self.driver.do("launch")

    @precondition(lambda self: self.driver.shadow.launched and not self.driver.shadow.prepared)
    @rule()
    def process(self) -> None:
        self.driver.do("process")

    @rule(which=st.integers(0, 7), how=st.sampled_from(["preempt", "abort", "retain", "unretain"]))
    def choose(self, which: int, how: str) -> None:
        self.driver.do(how, which)

    @rule(units=st.integers(0, 5), checkpoints=st.integers(0, 3))
    def probe(self, units: int, checkpoints: int) -> None:
        self.driver.do("probe", units, checkpoints)

    @rule(which=st.integers(0, 1), page=st.integers(0, 63), steps=st.integers(0, 5))
    def reclaim(self, which: int, page: int, steps: int) -> None:
        self.driver.do("reclaim", which, page, steps)

    @precondition(lambda self: self.driver.shadow.reclaims)
    @rule(which=st.integers(0, 3), how=st.sampled_from(["resume", "abandon"]))
    def go_on(self, which: int, how: str) -> None:
        self.driver.do(how, which)

    @rule()
    def flush(self) -> None:
        self.driver.do("flush")

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.drain()


@pytest.mark.parametrize("name", NAMES)
def test_hypothesis_finds_no_history_that_breaks_a_rule(name: str) -> None:
    machine = type(f"Machine{name}", (Machine,), {"name": name}).TestCase  # type: ignore[attr-defined]
    machine.settings = settings(
        max_examples=80,
        stateful_step_count=60,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    machine().runTest()
