"""Checkpoints in the order of eviction: a heap that is put right where it is read, not where keys change."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from sglang_hybrid.pools.organization import Checkpoint


class Tier(IntEnum):
    """Retention is policy and yields first; a pin goes last, and each one given up is counted."""

    USEFUL = 0
    RETAINED = 1
    PINNED = 2


class Limit(NamedTuple):
    """Up to where eviction may go: no tier above `tier`, nothing stamped `before` or later."""

    tier: Tier = Tier.PINNED
    before: int | None = None


LIKELY = Limit(Tier.USEFUL)
"""What a checkpoint pushes out that is likely to be used: anything but what policy or a request keeps."""


def tier_of(checkpoint: Checkpoint) -> Tier:
    if checkpoint.pins:
        return Tier.PINNED
    return Tier.RETAINED if checkpoint.retained else Tier.USEFUL


class EvictionOrder:
    """`usable(checkpoint)` says whether it may be evicted now; one that may not is filed again later."""

    def __init__(self, usable: Callable[[Checkpoint], bool]) -> None:
        self._usable = usable
        self._sequence = 0
        self._heap: list[tuple[int, int, int, Checkpoint]] = []
        self._filed: dict[Checkpoint, int] = {}
        """Sequence number of the valid entry; others are left over."""

    def __len__(self) -> int:
        """Entries, those included that are of no use any more."""
        return len(self._heap)

    def file(self, checkpoint: Checkpoint) -> None:
        """Put it in, once: a later stamp or a higher tier is noticed when it comes to the top."""
        if checkpoint not in self._filed:
            self._push(checkpoint)

    def refile(self, checkpoint: Checkpoint) -> None:
        """Its tier or stamp has sunk: where it stands now, it would be noticed too late."""
        if checkpoint in self._filed:
            self._push(checkpoint)

    def take(self, last: Tier, before: int | None = None) -> Checkpoint | None:
        """The next one to evict, taken out; None when all that are left stand above `last` or `before`."""
        while self._heap:
            tier, stamp, sequence, checkpoint = self._heap[0]
            if self._filed.get(checkpoint) != sequence:
                heapq.heappop(self._heap)
            elif not self._usable(checkpoint):
                heapq.heappop(self._heap)
                del self._filed[checkpoint]
            elif (tier, stamp) != (tier_of(checkpoint), checkpoint.stamp):
                heapq.heappop(self._heap)
                self._push(checkpoint)
            elif tier > last or (before is not None and stamp >= before):
                return None
            else:
                heapq.heappop(self._heap)
                del self._filed[checkpoint]
                return checkpoint
        return None

    def trim(self, most: int) -> None:
        """Throw out what is of no use, when that is more than half; `most` may be usable at once."""
        if len(self._heap) > 2 * most + 64:
            self._filed = {
                checkpoint: sequence
                for _, _, sequence, checkpoint in self._heap
                if self._filed.get(checkpoint) == sequence and self._usable(checkpoint)
            }
            self._heap = [entry for entry in self._heap if self._filed.get(entry[3]) == entry[2]]
            heapq.heapify(self._heap)

    def _push(self, checkpoint: Checkpoint) -> None:
        self._sequence += 1
        self._filed[checkpoint] = self._sequence
        heapq.heappush(self._heap, (tier_of(checkpoint), checkpoint.stamp, self._sequence, checkpoint))
