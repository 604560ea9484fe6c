"""Cases of the Triton copy and fill; `python -m tests.support.triton_checkpoint_io` runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from sglang_hybrid.geometry import ModelGeometry
from sglang_hybrid.kernels.checkpoint_io import ArenaTable, CheckpointSpans
from sglang_hybrid.pools.factory import make_organization
from sglang_hybrid.pools.organization import Checkpoint, Organization
from tests.support.guarded import allow
from tests.support.interpreted import Check, main, same_bytes


@dataclass(frozen=True)
class Case:
    """Checkpoints of a small model in a real organization; every other case varies one field of `BASE`."""

    memory: str = "S1"
    grid: int = 16
    attention: int = 2
    recurrent: int = 2
    kv_row_bytes: int = 64
    rows: int = 24
    row_bytes: int = 64
    conv_bytes: int = 192
    index: torch.dtype = torch.int32

    def organization(self) -> Organization:
        layers = tuple(range(self.attention)), tuple(range(self.recurrent))
        model = ModelGeometry(*layers, self.kv_row_bytes, self.rows, self.row_bytes, self.conv_bytes)
        page = max(self.grid * self.kv_row_bytes, model.checkpoint_bytes)
        return make_organization(self.memory, model, self.grid, 60 * page * self.attention)


BASE = Case()
TABLE = {
    "S0": replace(BASE, memory="S0"),
    "S1": BASE,
    "S2": replace(BASE, memory="S2"),
    "D0": replace(BASE, memory="D0"),
    "one arena": replace(BASE, attention=1, recurrent=1),
    "three stripes": replace(BASE, recurrent=6),
    "one member": replace(BASE, rows=16),
    "five members": replace(BASE, rows=70),
    "rows that do not divide a page": replace(BASE, row_bytes=48, rows=50),
    "several chunks a member": replace(BASE, grid=640, rows=1000, attention=1, recurrent=1),
    "words of 8 bytes": replace(BASE, conv_bytes=200),
    "words of 4 bytes": replace(BASE, conv_bytes=204, memory="S0"),
    "words of 2 bytes": replace(BASE, conv_bytes=190, memory="S0", kv_row_bytes=66, row_bytes=62),
    "single bytes": replace(BASE, conv_bytes=191, memory="S0"),
    "no SSM state": replace(BASE, rows=0, row_bytes=0),
    "no conv state": replace(BASE, conv_bytes=0),
    "int64 maps": replace(BASE, index=torch.int64),
}


class World:
    """Arenas of random bytes and checkpoints that an organization handed out."""

    def __init__(self, case: Case, checkpoints: int, device: str) -> None:
        torch.manual_seed(3)
        self.device, self.index = device, case.index
        organization = case.organization()
        self.spans = CheckpointSpans.of(organization.layout(), organization.model)
        size = organization.layout().state_pages * organization.layout().state_page_bytes
        # The end of an arena is guarded by bytes that belong to nobody.
        arenas = [torch.randint(0, 256, (size + 64,), dtype=torch.uint8) for _ in range(case.attention)]
        self.buffers = [arena.to(device) for arena in arenas]
        allow(self.buffers)
        taken = [organization.allocate_checkpoint() for _ in range(checkpoints)]
        self.checkpoints = [checkpoint for checkpoint in taken if checkpoint is not None]
        assert len(self.checkpoints) == checkpoints, "the budget is too small for the case"

    def maps(self, chosen: list[Checkpoint | None]) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages [n, members] and lines [n] as the engine builds them; None is nowhere."""
        width = max(self.spans.members, 1)
        pages = [[-1] * width if c is None else list(c.members or c.pages[:1]) for c in chosen]
        lines = [-1 if c is None else c.line for c in chosen]
        return tuple(torch.tensor(v, dtype=self.index, device=self.device) for v in (pages, lines))  # type: ignore[return-value]

    def pieces(self, checkpoint: Checkpoint) -> list[slice]:
        """Byte runs of a checkpoint in an arena, by the definition of members and lines."""
        spans, runs, left = self.spans, [], self.spans.ssm_bytes
        for page in checkpoint.members:
            begin = page * spans.page_bytes
            runs.append(slice(begin, begin + min(left, spans.member_bytes)))
            left -= min(left, spans.member_bytes)
        assert left == 0
        begin = checkpoint.line * spans.line_bytes + spans.line_offset
        return [*runs, slice(begin, begin + spans.conv_bytes)] if spans.conv_bytes else runs


def copies(case: Case, device: str) -> None:
    """Copied, fresh (zeros, by sentinel and by the sink), nowhere, padding: all other bytes stay."""
    from sglang_hybrid.kernels.triton_checkpoint_io import copy_checkpoints

    world = World(case, 6, device)
    a, b, c, d, e, f = world.checkpoints
    table = ArenaTable(world.buffers)
    src_map, src_line = world.maps([a, b, None, None, a, None])
    dst_map, dst_line = world.maps([c, d, e, f, None, None])
    for maps in (src_map, src_line):
        maps[3] = 0
    for maps in (dst_map, dst_line):
        maps[5] = 0  # the sink, as padding rows have it
    want = [arena.cpu().clone() for arena in world.buffers]
    for arena in want:
        before = arena.clone()
        for source, target in ((a, c), (b, d), (None, e), (None, f)):
            reads = [None] * 9 if source is None else world.pieces(source)
            for to, at in zip(world.pieces(target), reads):
                arena[to] = 0 if at is None else before[at]
    copy_checkpoints(world.spans, table, table, src_map, src_line, dst_map, dst_line)
    for arena, expected in zip(world.buffers, want, strict=True):
        assert same_bytes(arena.cpu(), expected)


def copies_between_buffers(device: str) -> None:
    """Source and target arenas may be different ones, as a host tier's."""
    from sglang_hybrid.kernels.triton_checkpoint_io import copy_checkpoints

    world = World(BASE, 2, device)
    there = [torch.full_like(arena, 9) for arena in world.buffers]
    allow(there)
    maps = world.maps([world.checkpoints[0]]), world.maps([world.checkpoints[1]])
    copy_checkpoints(world.spans, ArenaTable(world.buffers), ArenaTable(there), *maps[0], *maps[1])
    for arena, other in zip(world.buffers, there, strict=True):
        want = torch.full_like(arena, 9)
        for to, at in zip(*(world.pieces(c) for c in reversed(world.checkpoints))):
            want[to] = arena[at]
        assert same_bytes(other, want)


def fills(case: Case, fill: str, device: str) -> None:
    """Every byte of the chosen checkpoints is the fill's, all others stay."""
    from sglang_hybrid.kernels.triton_checkpoint_io import fill_checkpoints

    world = World(case, 3, device)
    dst_map, dst_line = world.maps([world.checkpoints[0], None, world.checkpoints[2]])
    want = [arena.cpu().clone() for arena in world.buffers]
    for arena in want:
        for checkpoint in (world.checkpoints[0], world.checkpoints[2]):
            for piece in world.pieces(checkpoint):
                arena[piece] = {"zero": 0, "poison": 255}[fill]
    fill_checkpoints(world.spans, ArenaTable(world.buffers), dst_map, dst_line, fill)
    for arena, expected in zip(world.buffers, want, strict=True):
        assert same_bytes(arena.cpu(), expected)


def equals_the_torch_route(case: Case, device: str) -> None:
    """The reference moves the same bytes, the sink page apart."""
    from sglang_hybrid.kernels import checkpoint_io, triton_checkpoint_io

    results = []
    for route in (checkpoint_io, triton_checkpoint_io):
        world = World(case, 4, device)
        a, b, c, d = world.checkpoints
        table = ArenaTable(world.buffers)
        route.copy_checkpoints(world.spans, table, table, *world.maps([a, None]), *world.maps([b, c]))
        route.fill_checkpoints(world.spans, table, *world.maps([d, None]), "poison")
        results.append([arena.cpu()[world.spans.page_bytes :] for arena in world.buffers])
    for reference, got in zip(*results, strict=True):
        assert same_bytes(reference, got)


def cases() -> dict[str, Check]:
    """All cases by name."""
    table: dict[str, Callable[[str], None]] = {
        f"copy: {name}": partial(copies, case) for name, case in TABLE.items()
    }
    for name in ("S0", "S1", "S2", "D0", "single bytes", "no SSM state"):
        table[f"poison: {name}"] = partial(fills, TABLE[name], "poison")
        table[f"torch route: {name}"] = partial(equals_the_torch_route, TABLE[name])
    table["zero"] = partial(fills, BASE, "zero")
    table["copy: between buffers"] = copies_between_buffers
    return table


if __name__ == "__main__":
    main(cases())
