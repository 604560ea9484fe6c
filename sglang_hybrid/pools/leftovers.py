"""Which units of attention KV still hold the bytes of a recurrent state, and which rows must be cleared.

An attention kernel reads whole tiles of a unit and multiplies the rows behind the sequence's end by zero.
State bits read as KV may be NaN, and 0 x NaN is NaN.  KV that another sequence left there is finite (unless a
model overflowed, which a flush heals): units that held KV before cost nothing.

Nothing here touches a tensor: the forward that is about to run clears what `take` names, on its own stream.
Until then a unit stays a leftover, so that one that is given back before its forward runs is not forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable


class Leftovers:
    """Pages of one pool for both kinds; a pool for KV alone never gets `became_state` and costs nothing."""

    def __init__(self) -> None:
        self._state: set[int] = set()
        self._due: dict[int, int] = {}
        """Unit that the coming forward may read -> its first row that this forward does not write."""

    def __contains__(self, page: int) -> bool:
        """Whether the page's bytes may be a state's."""
        return page in self._state

    def became_state(self, pages: Iterable[int]) -> None:
        """A checkpoint takes these pages."""
        self._state.update(pages)
        self.given_back(pages)

    def became_unit(self, units: Iterable[int]) -> None:
        """These units are handed out for KV: all rows are to be cleared, unless `will_write` says less."""
        if self._state:
            self._due.update((unit, 0) for unit in units if unit in self._state)

    def will_write(self, unit: int, rows: int) -> None:
        """The coming forward writes the first `rows` rows of a unit that was just handed out."""
        if unit in self._due:
            self._due[unit] = rows

    def given_back(self, units: Iterable[int]) -> None:
        """Nobody has these any more: a forward that did not run yet wrote nothing."""
        if self._due:
            for unit in units:
                self._due.pop(unit, None)

    def take(self) -> dict[int, int]:
        """Unit -> first row to clear, for a forward that begins now; they hold KV from here on."""
        due, self._due = self._due, {}
        self._state.difference_update(due)
        return due

    def reset(self, pages: Iterable[int]) -> None:
        """All pages are free, with the bytes that they had.

        KV that a model made NaN goes with the flush too: each page is cleared before its first use as a unit.
        """
        self._due = {}
        self._state = set(pages)
