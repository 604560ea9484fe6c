"""Copy and fill of whole checkpoints by map, all arenas of a rank: for host tiers, tests and fallbacks.

A kernel of a layer sees rows; here a checkpoint is bytes: its member pages, as far as SSM rows reach in
them, and its conv line.  Nothing else of a page is touched, so neighbours in a slab or in the rest of a
page keep their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_hybrid.geometry import ModelGeometry, PageGeometry, ceil_div
from sglang_hybrid.kernels.checks import KernelError, need_index
from sglang_hybrid.pools.organization import Layout
from sglang_hybrid.pools.views import SINK_PAGE

FILLS = {"zero": 0x00, "poison": 0xFF, "loud": 0x77}
"""Byte of a fill.  0xFF in every byte is NaN in every float format that SGLang stores; 0x77 is finite in all
of them, and so large that whoever reads it unmasked gets nonsense."""


def fill_word(fill: str, word_bytes: int) -> int:
    """The fill in a signed word of so many bytes."""
    return int.from_bytes(bytes([FILLS[fill]]) * word_bytes, "little", signed=True)


class CheckpointSpans(NamedTuple):
    """Where the checkpoints of an arena lie, in bytes; `pages` and `lines` count the sink's too."""

    pages: int
    page_bytes: int
    member_bytes: int
    """SSM bytes that a full member page holds."""
    ssm_bytes: int
    """SSM bytes of a checkpoint, all stripes; members are filled in order."""
    lines: int
    line_bytes: int
    line_offset: int
    conv_bytes: int

    @classmethod
    def of(cls, layout: Layout, model: ModelGeometry) -> CheckpointSpans:
        """Spans of an organization's layout for a model."""
        page = PageGeometry(model, layout.state_page_bytes)
        return cls(
            layout.state_pages,
            layout.state_page_bytes,
            page.rows_per_page * model.ssm_row_bytes,
            model.stripes * model.ssm_bytes,
            layout.lines,
            layout.line_bytes,
            layout.line_offset,
            model.conv_line_bytes,
        )

    @property
    def members(self) -> int:
        return ceil_div(self.ssm_bytes, self.member_bytes) if self.ssm_bytes else 0

    @property
    def reach(self) -> int:
        """Bytes from an arena's first byte to the end of its last page or line."""
        ssm = self.pages * self.page_bytes if self.ssm_bytes else 0
        return max(ssm, (self.lines - 1) * self.line_bytes + self.line_offset + self.conv_bytes)


class ArenaTable:
    """Arenas of one kind and their addresses, `bases` [A] int64 on their device, for kernels that walk all.

    The table keeps the buffers alive.  Raises `KernelError` for buffers that are no contiguous uint8
    vectors, or on different devices.
    """

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        for buffer in buffers:
            if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
                raise KernelError(
                    f"an arena has shape {list(buffer.shape)} of {buffer.dtype}, "
                    "needs contiguous [*] of uint8"
                )
            if buffer.device != buffers[0].device:
                raise KernelError(f"arenas lie on {buffers[0].device} and {buffer.device}, need one device")
        if not buffers:
            raise KernelError("there are 0 arenas, needs at least 1")
        self.buffers = tuple(buffers)
        self.bases = torch.tensor(
            [buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=buffers[0].device
        )


def check_move(
    spans: CheckpointSpans,
    tables: Sequence[ArenaTable],
    maps: Sequence[torch.Tensor],
    lines: Sequence[torch.Tensor],
) -> int:
    """Raise `KernelError` unless arenas reach all pages and maps fit each other; number of checkpoints."""
    for table in tables:
        if len(table.buffers) != len(tables[0].buffers):
            raise KernelError(
                f"there are {len(tables[0].buffers)} source arenas and {len(table.buffers)} target arenas, "
                "need as many"
            )
        for buffer in table.buffers:
            if buffer.numel() < spans.reach:
                raise KernelError(f"an arena has {buffer.numel()} bytes, needs {spans.reach} or more")
    count = maps[0].shape[0] if maps[0].dim() else 0
    for pages, line in zip(maps, lines):
        need_index("page_map", pages, (count, None))
        need_index("lines", line, (count,))
        if pages.shape[1] < max(spans.members, 1):
            raise KernelError(
                f"page_map has shape {list(pages.shape)}, needs [*, {spans.members}] or more members"
            )
    return count


def _parts(spans: CheckpointSpans, arena: torch.Tensor) -> list[torch.Tensor]:
    """Windows on the bytes of every member, `[pages, bytes]`, then on the conv lines, `[lines, bytes]`."""
    parts = []
    for member in range(spans.members):
        used = min(spans.member_bytes, spans.ssm_bytes - member * spans.member_bytes)
        parts.append(arena.as_strided((spans.pages, used), (spans.page_bytes, 1)))
    parts.append(arena.as_strided((spans.lines, spans.conv_bytes), (spans.line_bytes, 1), spans.line_offset))
    return parts


def _columns(spans: CheckpointSpans, pages: torch.Tensor, lines: torch.Tensor) -> list[torch.Tensor]:
    """Index [n] of every part; the sink's for what is nowhere."""
    there = pages[:, 0] > SINK_PAGE
    members = [torch.where(there, pages[:, member], SINK_PAGE).long() for member in range(spans.members)]
    return [*members, lines.clamp(min=SINK_PAGE).long()]


def copy_checkpoints(
    spans: CheckpointSpans,
    source: ArenaTable,
    target: ArenaTable,
    src_map: torch.Tensor,
    src_line: torch.Tensor,
    dst_map: torch.Tensor,
    dst_line: torch.Tensor,
) -> None:
    """Copy n checkpoints from the arenas of `source` to those of `target`, which may be the same.

    `src_map`, `dst_map` [n, members] int, `src_line`, `dst_line` [n] int.  A piece without a source (column
    0, or the line, at most 0) is written as zeros, one without a destination is not written.  No page or line
    may be both read and written, or written twice.
    """
    check_move(spans, (source, target), (src_map, dst_map), (src_line, dst_line))
    read, write = _columns(spans, src_map, src_line), _columns(spans, dst_map, dst_line)
    for from_arena, to_arena in zip(source.buffers, target.buffers, strict=True):
        for a, b, i, j in zip(_parts(spans, from_arena), _parts(spans, to_arena), read, write, strict=True):
            b.index_copy_(0, j, a.index_select(0, i).masked_fill_((i == SINK_PAGE)[:, None], 0).to(b.device))


def fill_checkpoints(
    spans: CheckpointSpans, target: ArenaTable, dst_map: torch.Tensor, dst_line: torch.Tensor, fill: str
) -> None:
    """Fill n checkpoints of all arenas with "zero" or "poison" (NaN); maps as in `copy_checkpoints`."""
    need_fill(fill)
    check_move(spans, (target,), (dst_map,), (dst_line,))
    for arena in target.buffers:
        for part, index in zip(_parts(spans, arena), _columns(spans, dst_map, dst_line), strict=True):
            part.index_fill_(0, index, FILLS[fill])


def need_fill(fill: str) -> None:
    """Raise `KernelError` for an unknown fill."""
    if fill not in FILLS:
        raise KernelError(f"fill is {fill!r}, needs one of {', '.join(map(repr, FILLS))}")
