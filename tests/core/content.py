"""Contents that knows what it holds: every cell of an arena carries the tag of the prefix it was made from.

Addresses are formed exactly as `pools.arena` forms them, so two pieces that overlap destroy each other.
A freed page or conv line is poisoned; reading poison, or a tag of another prefix, raises.

KV is positive and state negative: an attention kernel may read KV of others behind a sequence's end, and
multiply it by zero, but never the bits of a state, which may be NaN.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

from sglang_hybrid.geometry import PageGeometry, ceil_div
from sglang_hybrid.pools.organization import Checkpoint, Organization
from sglang_hybrid.pools.shared import PackedConv
from sglang_hybrid.pools.slabs import NO_LINE

CELL_BYTES = 4
POISON = -1
"""What a freed state leaves."""
LOUD = 1 << 61
"""What freed KV leaves: the tag of no prefix."""
CLEARED = 0
_MASK = (1 << 60) - 1


class ContentError(AssertionError):
    """A forward read, or the tree offers, something else than it should."""


class Place(NamedTuple):
    """Where a state lies: its member pages and its conv line."""

    pages: tuple[int, ...]
    line: int


NOWHERE = Place((), NO_LINE)
"""No state: the forward begins from zeros.  Tested before an address is formed."""


def root_tag(namespace: Hashable) -> int:
    """Tag of the empty prefix; namespaces differ, so a block that leaks between them is noticed."""
    return crc32(repr(namespace).encode())


def next_tag(tag: int, token: int) -> int:
    """Tag of a prefix that is one token longer; never poison."""
    return hash((tag, token)) & _MASK


def place_of(checkpoint: Checkpoint | None) -> Place:
    """What `engine.requests.PageMaps` tells a kernel about a source or destination."""
    return NOWHERE if checkpoint is None else Place(checkpoint.members, checkpoint.line)


class Contents:
    """The first arena of an organization, as cells."""

    def __init__(self, organization: Organization) -> None:
        self.organization = organization
        self.layout = organization.layout()
        model = organization.model
        self.kv = [LOUD] * (self.layout.kv_pages * self.layout.kv_page_bytes // CELL_BYTES)
        pages = self.layout.state_pages * self.layout.state_page_bytes // CELL_BYTES
        self.state = self.kv if self.layout.shared else [POISON] * pages
        self._token_cells = model.kv_row_bytes // CELL_BYTES
        self._slots_per_unit = organization.slots_per_unit
        self._unit_tokens = organization.unit_tokens
        self._rows = model.stripes * model.ssm_rows
        self._per_page = PageGeometry(model, self.layout.state_page_bytes).rows_per_page
        self._row_bytes = model.ssm_row_bytes
        self._conv_bytes = model.conv_line_bytes
        self._cells: dict[Place, tuple[int, ...]] = {}
        organization.unit_pool.on_free = self._poison_unit
        if not self.layout.shared:
            organization.state_pool.on_free = self._poison_state
        if isinstance(organization, PackedConv):
            organization.slabs.on_line_free = self._poison_line

    def clear(self) -> None:
        """A flush: nothing in it may be read again."""
        if not self.layout.shared:
            self.state[:] = [POISON] * len(self.state)
        for unit in range(self.layout.kv_pages):
            self._poison_unit(unit)

    # -- attention --------------------------------------------------------------------------

    def _span(self, units: Sequence[int], index: int, first: int, last: int) -> slice:
        start = units[index] * self._slots_per_unit
        return slice((start + first) * self._token_cells, (start + last) * self._token_cells)

    def write_kv(self, units: Sequence[int], tags: Sequence[int], start: int, end: int) -> None:
        """KV of tokens `start..end` of the request whose prefixes have these tags."""
        size = self._unit_tokens
        for index in range(start // size, ceil_div(end, size)):
            low, high = max(start, index * size), min(end, (index + 1) * size)
            span = self._span(units, index, low - index * size, high - index * size)
            self.kv[span] = self._row_tags(tags, low, high)

    def check_kv(self, units: Sequence[int], tags: Sequence[int], end: int) -> None:
        """Raise unless KV of tokens `0..end` is what a cold run would have written."""
        size = self._unit_tokens
        for index in range(ceil_div(end, size)):
            low, high = index * size, min(end, (index + 1) * size)
            if self.kv[self._span(units, index, 0, high - low)] != self._row_tags(tags, low, high):
                raise ContentError(f"unit {units[index]} does not hold the KV of tokens {low}..{high}")

    def clear_tails(self, due: Mapping[int, int]) -> None:
        """As `engine.unit_tails`: from this row on, at the beginning of a forward."""
        for unit, first in due.items():
            span = self._span((unit,), 0, first, self._unit_tokens)
            self.kv[span] = [CLEARED] * (span.stop - span.start)

    def check_tail(self, units: Sequence[int], end: int) -> None:
        """Raise unless all that lies between a sequence's end and the end of its last unit is KV."""
        index, first = divmod(end, self._unit_tokens)
        if first and min(self.kv[self._span(units, index, first, self._unit_tokens)]) < CLEARED:
            raise ContentError(f"unit {units[index]} holds bits of a state behind token {end}")

    def _row_tags(self, tags: Sequence[int], low: int, high: int) -> list[int]:
        return [tag for tag in tags[low + 1 : high + 1] for _ in range(self._token_cells)]

    # -- recurrent state --------------------------------------------------------------------

    def cells(self, place: Place) -> tuple[int, ...]:
        """Cells of a state: SSM rows over its members, then its conv line."""
        cells = self._cells.get(place)
        if cells is None:
            cells = self._cells[place] = tuple(self._ssm_cells(place.pages)) + self._conv_cells(place.line)
        return cells

    def _ssm_cells(self, pages: tuple[int, ...]) -> list[int]:
        cells: list[int] = []
        for row in range(self._rows):
            page, offset = divmod(row, self._per_page)
            byte = pages[page] * self.layout.state_page_bytes + offset * self._row_bytes
            cells += range(byte // CELL_BYTES, (byte + self._row_bytes) // CELL_BYTES)
        return cells

    def _conv_cells(self, line: int) -> tuple[int, ...]:
        if not self._conv_bytes:
            return ()
        byte = line * self.layout.line_bytes + self.layout.line_offset
        return tuple(range(byte // CELL_BYTES, (byte + self._conv_bytes) // CELL_BYTES))

    def write_state(self, place: Place, tag: int) -> None:
        """The complete state after the prefix with this tag."""
        for index, cell in enumerate(self.cells(place)):
            self.state[cell] = -(tag + index + 2)

    def check_state(self, place: Place, tag: int, root: int) -> None:
        """Raise unless the place holds the state after this prefix; nowhere means zeros."""
        if place == NOWHERE:
            if tag != root:
                raise ContentError("a forward begins from zeros though tokens stand before it")
            return
        for index, cell in enumerate(self.cells(place)):
            if self.state[cell] != -(tag + index + 2):
                what = "poison" if self.state[cell] == POISON else "another state"
                raise ContentError(f"state on pages {place.pages}, line {place.line} holds {what}")

    # -- poison -----------------------------------------------------------------------------

    def _poison_unit(self, unit: int) -> None:
        size = self.layout.kv_page_bytes // CELL_BYTES
        cells = slice(unit * size, (unit + 1) * size)
        # By what lies there, not by what the organization knows of it. An S0 page that holds KV keeps bits of
        # an earlier state behind its tokens; nobody addresses them.
        tokens = self._span((unit,), 0, 0, self._unit_tokens)
        found = POISON if min(self.kv[tokens]) < CLEARED else LOUD
        self.kv[cells] = [POISON] * size
        self.kv[tokens] = [found] * (tokens.stop - tokens.start)

    def _poison_state(self, page: int) -> None:
        size = self.layout.state_page_bytes // CELL_BYTES
        self.state[page * size : (page + 1) * size] = [POISON] * size

    def _poison_line(self, line: int) -> None:
        for cell in self._conv_cells(line):
            self.state[cell] = POISON
