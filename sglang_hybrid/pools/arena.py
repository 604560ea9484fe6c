"""The tensors behind an organization: one raw buffer an attention layer, and typed windows on it.

The only module of `pools/` that imports torch.  An arena belongs to one attention layer and also
holds the recurrent layers dealt to it, stripe by stripe (docs/architecture.md, Page format).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from sglang_hybrid.geometry import GeometryError, ModelGeometry, PageGeometry, ceil_div
from sglang_hybrid.pools.organization import Layout
from sglang_hybrid.pools.views import ConvView, StateView


class StateShape(NamedTuple):
    """Shapes and dtypes of one rank's state: KV row `[kv_parts, kv_heads, kv_dim]`, SSM `[heads, head_dim,
    state_size]`, conv window `[channels, width - 1]`.

    `kv_parts` is 2 for keys and values, 1 for a latent row (MLA), which holds both and has one head.
    """

    kv_heads: int
    kv_dim: int
    kv_dtype: torch.dtype
    heads: int
    head_dim: int
    state_size: int
    ssm_dtype: torch.dtype
    channels: int
    window: int
    conv_dtype: torch.dtype
    kv_parts: int = 2

    def geometry(self, attention_layers: tuple[int, ...], recurrent_layers: tuple[int, ...]) -> ModelGeometry:
        """Bytes of this state."""
        return ModelGeometry(
            attention_layers=attention_layers,
            recurrent_layers=recurrent_layers,
            kv_row_bytes=self.kv_parts * self.kv_heads * self.kv_dim * self.kv_dtype.itemsize,
            ssm_rows=self.heads * self.head_dim if self.state_size else 0,
            ssm_row_bytes=self.state_size * self.ssm_dtype.itemsize,
            conv_bytes=self.channels * self.window * self.conv_dtype.itemsize,
        )


def check_alignment(layout: Layout, shape: StateShape, model: ModelGeometry) -> None:
    """Raise `GeometryError`, naming what would do, unless every view begins on its dtype."""
    for what, stride, dtype in (
        ("page", layout.state_page_bytes, shape.ssm_dtype),
        ("conv line", layout.line_bytes, shape.conv_dtype),
        ("conv offset", layout.line_offset, shape.conv_dtype),
    ):
        if stride % dtype.itemsize == 0:
            continue
        # A page of whole blocks that holds a checkpoint, in steps that are aligned; S1 has no offset.
        step = dtype.itemsize // math.gcd(model.kv_row_bytes, dtype.itemsize)
        grid = step * ceil_div(layout.state_page_bytes, step * model.kv_row_bytes)
        choice = "--hybrid-mem S1" if what == "conv offset" or not layout.shared else ""
        if what != "conv offset":
            choice = " and ".join(filter(None, (choice, f"--hybrid-grid {grid}")))
        raise GeometryError(f"a {what} of {stride} bytes is no multiple of {dtype}: use {choice}")


class Arenas:
    """All buffers of one rank; every view aliases them."""

    def __init__(self, layout: Layout, shape: StateShape, model: ModelGeometry, device: str) -> None:
        self.layout = layout
        self.shape = shape
        self.model = model
        check_alignment(layout, shape, model)
        kv_bytes = layout.kv_pages * layout.kv_page_bytes
        state_bytes = layout.state_pages * layout.state_page_bytes
        self.kv_buffers = [
            torch.zeros(kv_bytes, dtype=torch.uint8, device=device) for _ in range(model.arenas)
        ]
        self.state_buffers = (
            self.kv_buffers
            if layout.shared
            else [torch.zeros(state_bytes, dtype=torch.uint8, device=device) for _ in range(model.arenas)]
        )

    @property
    def slots(self) -> int:
        """KV slots of an arena, sink page included."""
        return self.layout.kv_pages * self.layout.kv_page_bytes // self.model.kv_row_bytes

    def kv(self, arena: int) -> torch.Tensor:
        """`[slots, kv_parts, kv_heads, kv_dim]`: K and V of a token lie side by side."""
        shape = self.shape
        rows = self.kv_buffers[arena].view(shape.kv_dtype)
        return rows.view(self.slots, shape.kv_parts, shape.kv_heads, shape.kv_dim)

    def state(self, recurrent_index: int) -> StateView:
        """SSM rows of the recurrent layer at this index of `model.recurrent_layers`."""
        arena, stripe = self.model.place(recurrent_index)
        shape, layout = self.shape, self.layout
        per_page = PageGeometry(self.model, layout.state_page_bytes).rows_per_page
        rows = self.state_buffers[arena].view(shape.ssm_dtype)
        return StateView(
            rows.as_strided(
                (layout.state_pages, per_page, shape.state_size),
                (layout.state_page_bytes // shape.ssm_dtype.itemsize, shape.state_size, 1),
            ),
            stripe * self.model.ssm_rows,
            shape.heads,
            shape.head_dim,
        )

    def conv(self, recurrent_index: int) -> ConvView:
        """Conv windows of the recurrent layer at this index of `model.recurrent_layers`."""
        arena, stripe = self.model.place(recurrent_index)
        shape, layout = self.shape, self.layout
        size = shape.conv_dtype.itemsize
        lines = self.state_buffers[arena].view(shape.conv_dtype)
        return ConvView(
            lines.as_strided(
                (layout.lines, shape.channels, shape.window),
                (layout.line_bytes // size, shape.window, 1),
                (layout.line_offset + stripe * self.model.conv_bytes) // size,
            )
        )
