"""Copy and fill of whole checkpoints in Triton: one launch for many checkpoints and all arenas.

A program moves one chunk of one checkpoint in one arena: of a member page, or of the conv line.  Arenas
are separate allocations, so their addresses come from a table.  Words are 16 bytes a thread wherever
strides and lengths are multiples of 16, as on real geometries; otherwise as wide as they divide.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_hybrid.geometry import ceil_div
from sglang_hybrid.kernels.checkpoint_io import ArenaTable, CheckpointSpans, check_move, fill_word, need_fill
from sglang_hybrid.kernels.launch import Launch, vector
from sglang_hybrid.kernels.state_access import read_state, write_state

CHUNK_BYTES = 16384
"""Bytes of a program: 128 a thread at 4 warps, all asked for before the first is written."""


@triton.jit(do_not_specialize_on_alignment=["src_map", "dst_map", "src_line", "dst_line"])
def move_kernel(
    sources: tl.tensor,
    targets: tl.tensor,
    src_map: tl.tensor,
    src_line: tl.tensor,
    dst_map: tl.tensor,
    dst_line: tl.tensor,
    src_stride: tl.tensor,
    src_member: tl.tensor,
    src_lines: tl.tensor,
    dst_stride: tl.tensor,
    dst_member: tl.tensor,
    dst_lines: tl.tensor,
    PAGE: tl.constexpr,
    MEMBER: tl.constexpr,
    SSM: tl.constexpr,
    LINE: tl.constexpr,
    LINE_OFFSET: tl.constexpr,
    CONV: tl.constexpr,
    MEMBERS: tl.constexpr,
    MEMBER_CHUNKS: tl.constexpr,
    WORD: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
    COPY: tl.constexpr,
    FILL: tl.constexpr,
) -> None:
    """Lengths and strides in units of `UNIT` words; `CHUNK` in words."""
    chunk = tl.program_id(0)
    checkpoint = tl.program_id(1).to(tl.int64)
    arena = tl.program_id(2)
    dst_map += checkpoint * dst_stride
    dst_line += checkpoint * dst_lines
    if COPY:
        src_map += checkpoint * src_stride
        src_line += checkpoint * src_lines
    if chunk < MEMBERS * MEMBER_CHUNKS:
        member = chunk // MEMBER_CHUNKS
        low = (chunk % MEMBER_CHUNKS) * CHUNK
        size = tl.minimum(MEMBER, SSM - member * MEMBER) * UNIT
        to = tl.load(dst_map + member * dst_member).to(tl.int64) * PAGE * UNIT
        writes = tl.load(dst_map) > 0
        if COPY:
            at = tl.load(src_map + member * src_member).to(tl.int64) * PAGE * UNIT
            reads = tl.load(src_map) > 0
    else:
        low = (chunk - MEMBERS * MEMBER_CHUNKS) * CHUNK
        size = low * 0 + CONV * UNIT
        line = tl.load(dst_line).to(tl.int64)
        to = (line * LINE + LINE_OFFSET) * UNIT
        writes = line > 0
        if COPY:
            line = tl.load(src_line).to(tl.int64)
            at = (line * LINE + LINE_OFFSET) * UNIT
            reads = line > 0

    word = low + tl.arange(0, CHUNK)
    there = word // UNIT < size // UNIT
    pointer: tl.constexpr = tl.pointer_type(WORD)
    # An address read from memory says nothing of its alignment; the plan checked it.
    target = tl.multiple_of(tl.load(targets + arena).to(pointer), ALIGN)
    if COPY:
        source = tl.multiple_of(tl.load(sources + arena).to(pointer), ALIGN)
        values = read_state(source + at + word, there & reads)
    else:
        values = tl.full([CHUNK], FILL, WORD)
    write_state(target + to + word, values, there & writes)


def plan_move(
    spans: CheckpointSpans,
    target: ArenaTable,
    dst_map: torch.Tensor,
    dst_line: torch.Tensor,
    source: ArenaTable | None = None,
    src_map: torch.Tensor | None = None,
    src_line: torch.Tensor | None = None,
    fill: str = "zero",
) -> Launch:
    """The launch that copies from `source`, or fills where it is None; at least one checkpoint."""
    tables = (target,) if source is None else (source, target)
    lengths = (
        spans.page_bytes, spans.member_bytes, spans.ssm_bytes,
        spans.line_bytes, spans.line_offset, spans.conv_bytes,
    )  # fmt: skip
    addresses = (buffer.data_ptr() for table in tables for buffer in table.buffers)
    align = vector(1, *lengths, *addresses)
    word_bytes = min(align, 4)
    unit = align // word_bytes
    page, member, ssm, line, line_offset, conv = (length // align for length in lengths)
    chunk = CHUNK_BYTES // word_bytes
    member_chunks = max(1, ceil_div(member * unit, chunk))
    chunks = spans.members * member_chunks + ceil_div(conv * unit, chunk)
    src_strides = (0, 0) if src_map is None else src_map.stride()
    args = {
        "sources": None if source is None else source.bases, "targets": target.bases,
        "src_map": src_map, "src_line": src_line, "dst_map": dst_map, "dst_line": dst_line,
        "src_stride": src_strides[0], "src_member": src_strides[1],
        "src_lines": 0 if src_line is None else src_line.stride(0),
        "dst_stride": dst_map.stride(0), "dst_member": dst_map.stride(1), "dst_lines": dst_line.stride(0),
        "PAGE": page, "MEMBER": member, "SSM": ssm, "LINE": line, "LINE_OFFSET": line_offset, "CONV": conv,
        "MEMBERS": spans.members, "MEMBER_CHUNKS": member_chunks,
        "WORD": {1: tl.int8, 2: tl.int16, 4: tl.int32}[word_bytes], "UNIT": unit, "CHUNK": chunk,
        "ALIGN": align, "COPY": source is not None, "FILL": fill_word(fill, word_bytes),
    }  # fmt: skip
    return Launch(move_kernel, (chunks, dst_map.shape[0], len(target.buffers)), args, warps=4)


def copy_checkpoints(
    spans: CheckpointSpans,
    source: ArenaTable,
    target: ArenaTable,
    src_map: torch.Tensor,
    src_line: torch.Tensor,
    dst_map: torch.Tensor,
    dst_line: torch.Tensor,
) -> None:
    """`kernels.checkpoint_io.copy_checkpoints` as one Triton launch.

    The arenas of one side may be pinned host memory: the kernel reads or writes it over the bus.
    """
    if check_move(spans, (source, target), (src_map, dst_map), (src_line, dst_line)):
        plan_move(spans, target, dst_map, dst_line, source, src_map, src_line).run()


def fill_checkpoints(
    spans: CheckpointSpans, target: ArenaTable, dst_map: torch.Tensor, dst_line: torch.Tensor, fill: str
) -> None:
    """`kernels.checkpoint_io.fill_checkpoints` as one Triton launch."""
    need_fill(fill)
    if check_move(spans, (target,), (dst_map,), (dst_line,)):
        plan_move(spans, target, dst_map, dst_line, fill=fill).run()
