"""Boundaries that running prefills are about to publish: who waits for one need not compute it too.

A burst of prompts behind one new context finds nothing in the tree: the first of them is still being
computed.  Compared are fingerprints (`history.Trail`): a wrong one, once in some 10^19 comparisons, costs a
wait, never a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

from sglang_hybrid.radix.history import History, Trail

MOST_PASSED_OVER = 64
"""Waiting requests that an admission pass steps over for what is coming before it ends."""


class Coming:
    """Of the prefills that were entered by `begin` and have not come past or to an `end`."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._computed: Counter[int] = Counter()
        """Keyed fingerprint of a boundary -> prefills that compute it."""
        self._left: Counter[int] = Counter()
        """Of these, the ones that mean to leave a checkpoint there."""
        self._ahead: dict[Trail, list[tuple[int, int, bool]]] = {}
        """(block, fingerprint, leaves a checkpoint) of each prefill, the deepest first."""

    def __bool__(self) -> bool:
        return bool(self._ahead)

    def begin(self, trail: Trail, first: int, last: int, leaves: Container[int]) -> None:
        """A prefill from block `first` to `last` will publish its checkpoints at the blocks in `leaves`.

        The trail must reach to `last`.
        """
        if first >= last:
            return
        ahead = []
        for block in range(last, first, -1):
            fingerprint = self._history.boundary(trail, block)
            ahead.append((block, fingerprint, block in leaves))
            self._count(fingerprint, block in leaves, 1)
        self._ahead[trail] = ahead

    def passed(self, trail: Trail, block: int) -> None:
        """The prefill has published its text up to here."""
        ahead = self._ahead.get(trail)
        if ahead is None:
            return
        while ahead and ahead[-1][0] <= block:
            self._count(*ahead.pop()[1:], -1)
        if not ahead:
            del self._ahead[trail]

    def end(self, trail: Trail) -> None:
        """It computes no more of its prompt."""
        for _, fingerprint, leaves in self._ahead.pop(trail, ()):
            self._count(fingerprint, leaves, -1)

    def _count(self, fingerprint: int, leaves: bool, more: int) -> None:
        for counts in (self._computed, self._left) if leaves else (self._computed,):
            counts[fingerprint] += more
            if not counts[fingerprint]:
                del counts[fingerprint]

    def deepest(self, trail: Trail, first: int, last: int) -> int:
        """The deepest block in `first + 1 .. last` of this text where a checkpoint is to come; 0 for none.

        Work is in proportion to what the text shares with a prefill beyond `first`.
        """
        found = 0
        for block in range(first + 1, last + 1):
            fingerprint = self._history.boundary(trail, block)
            if fingerprint not in self._computed:
                break
            if fingerprint in self._left:
                found = block
        return found
