"""Our lookup and bookkeeping, filled and timed operation by operation; `stock_tree.py` is SGLang's."""

from __future__ import annotations

import random
import time
from array import array

from bench.falcon import organization
from sglang_hybrid.geometry import DEFAULT_GRID, ceil_div
from sglang_hybrid.pools.organization import Checkpoint, Need
from sglang_hybrid.radix.demand import Kind
from sglang_hybrid.radix.live_state import LiveState
from sglang_hybrid.radix.memory import Memory

FILLER_BLOCKS = 16
"""Blocks of the prompts that fill the cache."""


class GridCache:
    """Our core on S2 with room for so many cached blocks and two prompts more."""

    def __init__(self, blocks: int, spare: int) -> None:
        self.blocks = blocks
        # A filler has 16 blocks and two checkpoints of three pages and a slot.
        pages = ceil_div(blocks, FILLER_BLOCKS) * (FILLER_BLOCKS + 7) + 5 * spare + 64
        self.organization = organization("S2", pages)
        self.memory = Memory(self.organization)
        self.tree, self.lifetime, self.live = self.memory.tree, self.memory.lifetime, self.memory.live
        self.chance = random.Random(0)
        self._fillers = 0
        self._filled: list[Checkpoint] = []
        self._rest = array("q", range(DEFAULT_GRID * (FILLER_BLOCKS - 1))).tobytes()
        self.top_up()

    def top_up(self) -> None:
        """Fill up to the number of blocks, as far as checkpoints of short prompts leave room for them."""
        filler = Need(FILLER_BLOCKS, 3)
        while self.tree.blocks - self.tree.blocks_dead < self.blocks and self.organization.fits(filler):
            self._fillers += 1
            self._add_filler(array("q", [-self._fillers]) * DEFAULT_GRID)

    def _add_filler(self, first: array[int]) -> None:
        """A block of its own, then what all have alike; a checkpoint after either."""
        organization, tree = self.organization, self.tree
        lock = node = tree.lock(tree.match(None, b"", 0).node)
        for key in (first.tobytes(), self._rest):
            units = organization.allocate_units(len(key) // tree.block_bytes)
            assert units is not None
            node = tree.add(node, key, units)
            checkpoint = organization.allocate_checkpoint()
            assert checkpoint is not None
            tree.offer(node, checkpoint)
            self.lifetime.policy.offered(node, Kind.PROMPT_END)
            self._filled.append(checkpoint)
            organization.release_units(units)
            organization.release(checkpoint)
        tree.unlock(lock)
        self.lifetime.policy.finished(node, None)

    def allocate(self, tokens: int) -> float:
        """KV units and a live state for a prompt of so many tokens, of which nothing is reported."""
        state = LiveState()
        self.live.running += 1
        need = Need(tokens // DEFAULT_GRID, 1)
        begun = time.perf_counter()
        assert self.memory.could_fit(need)
        assert self.memory.make_room(need)
        units = self.organization.allocate_units(need.units)
        self.live.begin(state, 0, None)
        seconds = time.perf_counter() - begun
        assert units is not None
        state.units, state.prefilled = units, tokens
        self._state = state
        return seconds

    def insert_tree(self, prompt: array[int]) -> float:
        """What was allocated last, for this prompt, by tree and lifetime alone."""
        tree, state = self.tree, self._adopted()
        root = state.lease.node
        assert state.live is not None
        begun = time.perf_counter()
        grown = tree.grow(root, prompt.tobytes(), state.units, (len(prompt) // DEFAULT_GRID,))
        node = grown.path[-1]
        tree.offer(node, state.live)
        self.lifetime.policy.offered(node, Kind.PROMPT_END)
        seconds = time.perf_counter() - begun
        state.prompt_end = node
        state.lease.node = tree.lock(node)
        tree.unlock(root)
        self.organization.release_units(state.units)
        self.memory.finish(state)
        return seconds

    def insert_dense(self, prompt: array[int]) -> float:
        self.live.extend(self._state, 0, len(prompt))
        return self.insert(prompt)

    def insert(self, prompt: array[int]) -> float:
        """The same for a running request, which goes on with its path locked."""
        state = self._adopted()
        begun = time.perf_counter()
        self.memory.publish(state, prompt.tobytes(), len(prompt), len(prompt))
        seconds = time.perf_counter() - begun
        self.memory.finish(state)
        return seconds

    def _adopted(self) -> LiveState:
        """The request that was allocated last, with its lease on an empty path."""
        self._state.lease = self.memory.adopt(self.memory.match(None, b"", 0).node)
        return self._state

    def match(self, prompt: array[int]) -> float | None:
        """None when it has been evicted meanwhile."""
        begun = time.perf_counter()
        match = self.tree.match(None, memoryview(prompt).cast("B"), len(prompt) // DEFAULT_GRID)
        seconds = time.perf_counter() - begun
        return seconds if match.depth == len(prompt) // DEFAULT_GRID else None

    def evict(self, tokens: int) -> float:
        """So many tokens and a checkpoint more than are free."""
        need = Need(self.organization.units_free() + tokens // DEFAULT_GRID, 1)
        begun = time.perf_counter()
        assert self.memory.make_room(need)
        return time.perf_counter() - begun

    def reclaim(self) -> float | None:
        """A page of a checkpoint that nobody has asked for, and all that depends on it; None without one."""
        while self._filled:
            chosen = self.chance.randrange(len(self._filled))
            self._filled[chosen], self._filled[-1] = self._filled[-1], self._filled[chosen]
            checkpoint = self._filled.pop()
            if checkpoint.owner is not None:
                begun = time.perf_counter()
                assert self.organization.reclaim_state(checkpoint.pages[0]).run()
                return time.perf_counter() - begun
        return None
