"""Typed windows on an arena: where one layer's recurrent state lies, row by row.

An arena is raw bytes.  A kernel never sees it; it sees a `StateView` and a `ConvView` of one
recurrent layer, plus page maps.  Both views are strided aliases of the arena: nothing is copied.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

NO_LINE = -1
"""Conv line and page sentinel: "no state here".  Kernels test it before they form an address."""

SINK_PAGE = 0
"""Padding rows of a batch write here; nothing is ever read from it."""


class StateView(NamedTuple):
    """SSM state of one recurrent layer, scattered over member pages.

    `rows` is `[pages, rows_per_page, state_size]`.  A checkpoint owns `members` pages; its rows,
    all stripes of the arena end to end, fill them in order, so row `r` of this layer lies at
    `rows[map[(first_row + r) // rows_per_page], (first_row + r) % rows_per_page]`.
    A row is one (head, dim) pair; `heads * head_dim` rows make the layer's state.
    """

    rows: torch.Tensor
    first_row: int
    heads: int
    head_dim: int

    @property
    def state_size(self) -> int:
        return self.rows.shape[2]

    @property
    def rows_per_page(self) -> int:
        return self.rows.shape[1]


class ConvView(NamedTuple):
    """Conv windows of one recurrent layer: `lines` is `[lines, channels, width - 1]`, oldest first."""

    lines: torch.Tensor
