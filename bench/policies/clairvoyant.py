"""An order of eviction that knows the trace: what is asked for again, when, and how deep.

An arm of the simulator, not a bound: it buys greedily, as `bench.trace.clairvoyant` does, but holds what it
buys in real pages, beside what running requests hold, and cannot know which state will be asked for before
the prefill that leaves it has ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence

from bench.policies.marconi import ScannedOrder
from bench.trace import HASHED_TOKENS, Request
from sglang_hybrid.pools.organization import Checkpoint
from sglang_hybrid.radix.eviction import ByStamp, node_of
from sglang_hybrid.radix.order import EvictionOrder
from sglang_hybrid.radix.tree import GridTree
from sglang_hybrid.simulator.keys import DIGEST_BYTES, key_of


class Future:
    """When the state at the end of a block is what an endless cache would start from."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.now = 0
        """The first request that still waits; the caller's to set."""
        self._asks: dict[bytes, list[int]] = defaultdict(list)
        seen: set[int] = set()
        for number, request in enumerate(requests):
            depth = 0
            while depth < request.usable_blocks and request.ids[depth] in seen:
                depth += 1
            if depth:
                self._asks[key_of([(request.ids[depth - 1], HASHED_TOKENS)], HASHED_TOKENS)].append(number)
            seen.update(request.ids[: request.whole_blocks])

    def next_use(self, block: bytes) -> int | None:
        """The request that will start from the end of this block."""
        asks = self._asks.get(block)
        if asks is None:
            return None
        place = bisect_left(asks, self.now)
        return asks[place] if place < len(asks) else None


class Clairvoyant(ByStamp):
    """The one that saves least for a page and a request waited goes first."""

    def __init__(self, tree: GridTree, future: Future) -> None:
        self.future = future
        super().__init__(tree)

    def order(self, usable: Callable[[Checkpoint], bool]) -> EvictionOrder:
        return ScannedOrder(usable, self.worst)

    def worst(self, candidates: Sequence[Checkpoint]) -> Checkpoint:
        return min(candidates, key=self.worth)

    def worth(self, checkpoint: Checkpoint) -> float:
        """Blocks saved for a page and a request waited; those beyond the first block are its own."""
        node = node_of(checkpoint)
        number = self.future.next_use(node.key[-DIGEST_BYTES:])
        if number is None:
            return 0.0
        pages = node.depth - 1 + self.organization.members
        return node.depth / (pages * (number - self.future.now + 1))
