"""Sparse prefix caching (Shirokikh and Nikolenko, arXiv 2605.05219): where a cached prompt has checkpoints.

A later prompt has some depth in common with a cached one, resumes from the deepest checkpoint at or above
it and recomputes the rest.  Given how likely each depth is, and how many checkpoints a prompt may have, the
placement with the least recomputation on average is found exactly, by a dynamic programme.  The
distribution is learnt from the overlaps seen so far.  The paper leaves eviction open: it is LRU here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

from sglang_hybrid.pools.organization import Organization
from sglang_hybrid.radix.node import Node
from sglang_hybrid.radix.placement import Branch

RELEARN = 64
"""Overlaps after which placements are computed anew."""

REMEMBERED = 1 << 16
"""Ends of prompts by which it is known whether an overlap covered a whole one."""


def best_places(weights: Sequence[float], count: int) -> tuple[int, ...]:
    """Depths of at most `count` checkpoints that save the most, ascending.

    `weights[d]` is how likely an overlap of depth d is, d from 0.  An overlap saves the deepest chosen
    depth that it covers.  A depth c after a chosen depth b saves c - b for all overlaps of c or more, so
    saved[m][c] = max over b < c of saved[m - 1][b] + (c - b) x P(overlap >= c).
    """
    deepest = len(weights) - 1
    beyond = list(accumulate(reversed(weights)))[::-1]
    saved = [0.0] * (deepest + 1)
    best: tuple[float, tuple[int, ...]] = (0.0, ())
    chosen: list[tuple[int, ...]] = [() for _ in weights]
    for placed in range(count):
        start = 0 if placed == 0 else 1
        saved_now, chosen_now = [-1.0] * (deepest + 1), list(chosen)
        for depth in range(1, deepest + 1):
            # The first one follows depth 0 only; later ones any depth that holds the one before.
            before = range(1) if placed == 0 else range(start, depth)
            for last in before:
                gain = saved[last] + (depth - last) * beyond[depth]
                if saved[last] >= 0 and gain > saved_now[depth]:
                    saved_now[depth] = gain
                    chosen_now[depth] = (*chosen[last], depth)
            if saved_now[depth] > best[0]:
                best = saved_now[depth], chosen_now[depth]
        saved, chosen = saved_now, chosen_now
    return best[1]


class SparsePlacement(Branch):
    """Checkpoints of a prompt by `best_places`; the last one of an answer stays too."""

    def __init__(self, organization: Organization, count: int = 2) -> None:
        super().__init__(organization)
        self.count = count
        self._partial: dict[int, int] = {}
        """Overlaps that ended inside a cached prompt, by depth in grid steps."""
        self._whole = 0
        """Overlaps that covered all of one."""
        self._seen = 0
        self._known_ends: dict[int, None] = {}
        self._places: dict[int, tuple[int, ...]] = {}

    def planned(self, start: int, end: int, likely: Collection[int] = ()) -> list[int]:
        places = self.places(end // self.grid)
        return [place * self.grid for place in reversed(places) if start < place * self.grid < end]

    def places(self, blocks: int) -> tuple[int, ...]:
        """Where a prompt of so many whole blocks has its checkpoints, in grid steps."""
        if blocks not in self._places:
            weights = [float(self._partial.get(depth, 0)) for depth in range(blocks + 1)]
            weights[blocks] += self._whole + 1  # before anything is known: its end
            self._places[blocks] = best_places(weights, self.count)
        return self._places[blocks]

    def came(self, node: Node) -> None:
        self._seen += 1
        if node.fingerprints()[-1] in self._known_ends:
            self._whole += 1
        else:
            self._partial[node.depth] = self._partial.get(node.depth, 0) + 1
        if self._seen % RELEARN == 0:
            self._places.clear()

    def published(self, prompt_end: Node | None, answer_end: Node | None) -> None:
        for node in (prompt_end, answer_end):
            if node is not None:
                self._known_ends[node.fingerprints()[-1]] = None
        if len(self._known_ends) > REMEMBERED:
            del self._known_ends[next(iter(self._known_ends))]
