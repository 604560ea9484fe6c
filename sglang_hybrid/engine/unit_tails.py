"""Clears what a forward could read behind the tokens of its attention units, before any of its layers runs.

Both classes work at metadata preparation: on the forward's stream, outside of a captured graph.  There all
that was launched before has ended, and nothing of this forward has begun.  On the stream of the scheduler,
which prepares the next batch while a forward runs, a page that was freed meanwhile may still be read.
"""

from __future__ import annotations

import torch

from sglang_hybrid.kernels import ArenaTable, Route, Runs
from sglang_hybrid.pools.arena import Arenas
from sglang_hybrid.pools.organization import Organization


class UnitTails:
    """The contract: from a sequence's last token to the end of its last unit, every arena holds finite KV."""

    def __init__(self, organization: Organization, arenas: Arenas) -> None:
        self.organization = organization
        self.poison: Poison | None = None
        self.row_bytes = organization.model.kv_row_bytes
        self.table = ArenaTable(arenas.kv_buffers)

    def due(self, route: Route) -> Runs:
        """Rows that `clear` has to be called for before the forward that begins now."""
        if self.poison is not None:
            self.poison.spread(route)
        stride, end = self.organization.slots_per_unit, self.organization.unit_tokens
        due = self.organization.leftovers.take()
        return [(unit * stride + first, end - first) for unit, first in due.items() if first < end]

    def clear(self, route: Route, runs: Runs, placed: torch.Tensor | None = None) -> None:
        """One launch over all arenas, if a unit of this forward was a state's; `placed` as in `fill_rows`."""
        if runs:
            route.fill_rows(self.table, runs, self.row_bytes, "zero", placed)


class Poison:
    """Fills what was freed, so that whoever reads it is found out (`SGLANG_HYBRID_POISON=1`, for tests).

    Bytes of a state become NaN.  A unit that held KV becomes "loud", which is finite: a kernel may read it
    behind a sequence's end, as long as it masks the scores.
    """

    def __init__(self, organization: Organization, arenas: Arenas) -> None:
        self.organization = organization
        self.units = ArenaTable(arenas.kv_buffers)
        self.states = ArenaTable(arenas.state_buffers)
        self.layout = layout = arenas.layout
        self.line_bytes = arenas.model.conv_line_bytes
        self._units: list[int] = []
        self._pages: list[int] = []
        self._lines: list[int] = []
        organization.unit_pool.on_free = self._units.append
        self._units += range(1, layout.kv_pages)
        if not layout.shared:
            organization.state_pool.on_free = self._pages.append
            self._pages += range(1, layout.state_pages)
        organization.watch_lines(self._lines.append)

    def spread(self, route: Route) -> None:
        """Fill what was freed since the last forward began."""
        layout, leftovers = self.layout, self.organization.leftovers
        units, pages, lines = (sorted(set(freed)) for freed in (self._units, self._pages, self._lines))
        were_states = [(unit, 1) for unit in units if unit in leftovers]
        were_kv = [(unit, 1) for unit in units if unit not in leftovers]
        conv = [(line * layout.line_bytes + layout.line_offset, self.line_bytes) for line in lines]
        route.fill_rows(self.units, were_states, layout.kv_page_bytes, "poison")
        route.fill_rows(self.units, were_kv, layout.kv_page_bytes, "loud")
        route.fill_rows(self.states, [(page, 1) for page in pages], layout.state_page_bytes, "poison")
        route.fill_rows(self.states, conv, 1, "poison")
        for freed in (self._units, self._pages, self._lines):
            freed.clear()
