"""What an operation costs, counted in executed instructions, not timed: it must not grow with the cache."""

import gc
import sys
from array import array
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import pytest

from sglang_hybrid.pools.organization import Need, Organization
from sglang_hybrid.pools.pages import PageState
from sglang_hybrid.radix.eviction import EVICTIONS
from sglang_hybrid.radix.lifetime import Lifetime
from sglang_hybrid.radix.live import LiveStates
from sglang_hybrid.radix.live_state import LiveState
from sglang_hybrid.radix.policy import DEFAULT_POLICY
from sglang_hybrid.radix.tree import GridTree, Node
from tests.core.worlds import GRID, NAMES, World

SMALL_CACHE, LARGE_CACHE = 10**3, 10**6
"""Cached pages."""

CHAIN = 8
"""Blocks of a cached prompt."""


class Cache:
    """A tree of prompts of `CHAIN` blocks, a checkpoint at every boundary; as good as full."""

    def __init__(self, name: str, pages: int, eviction: str = DEFAULT_POLICY.eviction) -> None:
        # D0: two units and one state a block.
        organization = World(name, pages=pages, units=pages * 2 // 3, states=pages // 3).build()
        self.tree = GridTree(organization)
        self.lifetime = Lifetime(self.tree, EVICTIONS[eviction])
        self.live = LiveStates(self.tree, self.lifetime)
        self.chains = 0
        gc.disable()  # a million objects that stay
        while organization.fits(Need(CHAIN * organization.units_per_block, CHAIN + 1)):
            self.add_chain()
        gc.enable()
        assert organization.usage().pages_cached > 0.9 * pages

    @property
    def organization(self) -> Organization:
        return self.tree.organization

    def add_chain(self) -> None:
        organization, node = self.organization, self.tree.match(None, b"", 0).node
        node = lock = self.tree.lock(node)
        for _ in range(CHAIN):
            units = organization.allocate_units(organization.units_per_block)
            assert units is not None
            node = self.tree.add(node, array("q", [self.chains] * GRID).tobytes(), units)
            checkpoint = organization.allocate_checkpoint()
            assert checkpoint is not None
            self.tree.offer(node, checkpoint)
            self.lifetime.touch(checkpoint)
            organization.release_units(units)
            organization.release(checkpoint)
        self.tree.unlock(lock)
        self.chains += 1

    def chain(self, index: int) -> list[Node]:
        key = array("q", [index] * GRID).tobytes()
        nodes = [self.tree.match(None, key, 1).node]
        while nodes[-1].children:
            nodes += nodes[-1].children.values()
        return nodes


def instructions(action: Callable[[Cache], Any], cache: Cache) -> int:
    """Bytecode instructions that the action executes on the cache, in all frames."""
    if sys.version_info >= (3, 12):
        return monitored(action, cache)
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        action(cache)
    finally:
        sys.settrace(None)
    return count


def monitored(action: Callable[[Cache], Any], cache: Cache) -> int:
    """From 3.12 on a frame that asks `settrace` for its instructions gets them only the next time."""
    count = 0

    def counted(code: CodeType, offset: int) -> None:
        nonlocal count
        count += 1

    tool, events = sys.monitoring.PROFILER_ID, sys.monitoring.events
    sys.monitoring.use_tool_id(tool, "instructions")
    sys.monitoring.register_callback(tool, events.INSTRUCTION, counted)
    sys.monitoring.set_events(tool, events.INSTRUCTION)
    try:
        action(cache)
    finally:
        sys.monitoring.set_events(tool, 0)
        sys.monitoring.free_tool_id(tool)
    return count


def reclaim_member(cache: Cache) -> None:
    checkpoint = cache.chain(3)[2].checkpoint
    assert checkpoint is not None
    page = checkpoint.pages[0]
    assert cache.organization.reclaim_state(page).run()
    assert cache.organization.state_pool.state(page) is PageState.FREE


def reclaim_last_page(cache: Cache) -> None:
    """S1's conv page; S2's slab, with all that lies on it."""
    checkpoint = cache.chain(5)[2].checkpoint
    assert checkpoint is not None
    assert cache.organization.reclaim_state(checkpoint.pages[-1]).run()


def reclaim_unit(cache: Cache) -> None:
    """An inner block takes everything below it along."""
    assert cache.organization.reclaim_unit(cache.chain(7)[CHAIN // 2].units[0]).run()


def make_room_for_units(cache: Cache) -> None:
    assert cache.lifetime.make_room(Need(units=cache.organization.units_free() + 2))


def make_room_for_a_checkpoint(cache: Cache) -> None:
    assert cache.lifetime.make_room(Need(checkpoints=1))


def begin_and_leave_a_boundary(cache: Cache) -> None:
    state = LiveState()
    cache.live.running += 1
    cache.live.begin(state, 0, None)
    cache.live.extend(state, 0, 2 * GRID)
    cache.live.begin(state, 2 * GRID, None)
    cache.live.release(state)
    cache.live.running -= 1


def could_fit(cache: Cache) -> None:
    assert cache.organization.could_fit(Need(4, 4))
    assert not cache.organization.could_fit(Need(10**7, 4))


OPERATIONS = (
    reclaim_member,
    reclaim_last_page,
    reclaim_unit,
    make_room_for_units,
    make_room_for_a_checkpoint,
    begin_and_leave_a_boundary,
    could_fit,
)


@pytest.mark.parametrize(("name", "eviction"), [*((name, "demand") for name in NAMES), ("D0", "lru")])
def test_no_operation_costs_more_in_a_large_cache(name: str, eviction: str) -> None:
    costs = [
        {operation.__name__: instructions(operation, cache) for operation in OPERATIONS}
        for cache in (Cache(name, SMALL_CACHE, eviction), Cache(name, LARGE_CACHE, eviction))
    ]
    small, large = costs
    assert min(small.values()) > 0
    grown = {name: (small[name], large[name]) for name in small if large[name] > 1.5 * small[name]}
    assert not grown, f"instructions at {SMALL_CACHE} and {LARGE_CACHE} cached pages: {grown}"


def test_the_count_notices_work_that_grows() -> None:
    costs = [instructions(lambda c: c.organization.check_integrity(), Cache("S1", n)) for n in (100, 1000)]
    assert costs[1] > 5 * costs[0]
