"""Bytes of an organization, as `pools.arena` allocates them."""

from __future__ import annotations

from typing import NamedTuple


class Layout(NamedTuple):
    """Bytes of one arena.

    `kv_pages` pages of `kv_page_bytes` hold attention; `state_pages` pages of `state_page_bytes`
    hold SSM members.  `shared` says that both name the same pages of the same buffer.  Conv line
    `l` begins at byte `l * line_bytes + line_offset` of the state buffer; there are `lines` of
    them.  Page counts include the sink page 0.
    """

    kv_pages: int
    kv_page_bytes: int
    state_pages: int
    state_page_bytes: int
    members: int
    lines: int
    line_bytes: int
    line_offset: int
    shared: bool

    @property
    def arena_bytes(self) -> int:
        kv = self.kv_pages * self.kv_page_bytes
        return kv if self.shared else kv + self.state_pages * self.state_page_bytes
