"""Bytes of a hybrid model's state, per layer and rank (docs/paper.md, Geometry).

Pure arithmetic over ints.  `ModelGeometry` says what one token and one checkpoint of a model
weigh; `PageGeometry` says how a page size cuts a checkpoint into member pages and a conv line.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_GRID = 512
"""Tokens between two boundaries; inherited by the source, not tuned (docs/paper.md, Geometry)."""

GRID_STEP = 64
"""A default above `DEFAULT_GRID` is a multiple of it: whole tiles of an attention kernel."""

LARGEST_DEFAULT_GRID = 64 * DEFAULT_GRID
"""Beyond it no default is looked for: a prompt of up to one grid step is never reused."""

UNIT_TOKENS = 16
"""Tokens of D0's attention unit."""

DEFAULT_ATTENTION_SHARE = 0.5
"""Part of D0's budget that attention gets when nobody says otherwise."""

CONV_SLOTS = ("pow2", "tight")
"""How S2 rounds a conv slot: to the next power of two, or to whole KiB."""

LEAST_PIECES = 2
"""Units and checkpoints that a pool must hold beside its sink, the least that serves a hit: the block that is
hit and the one that follows, the live state and the checkpoint that it starts from."""

SCAN_CHUNK = 256
"""Tokens of a chunk of the scan, for a model whose config names none."""


class GeometryError(ValueError):
    """A model, grid or budget that cannot be laid out; the message names a legal choice."""


def ceil_div(numerator: int, denominator: int) -> int:
    """Smallest integer >= numerator / denominator (denominator > 0)."""
    return -(-numerator // denominator)


@dataclass(frozen=True)
class ModelGeometry:
    """State of one tensor-parallel rank, in bytes.

    `kv_row_bytes`: K and V of one token in one attention layer.  A recurrent layer keeps
    `ssm_rows` rows of `ssm_row_bytes` (a row is one (head, dim) pair; zero rows for conv-only
    families) and `conv_bytes` of convolution window.
    """

    attention_layers: tuple[int, ...]
    recurrent_layers: tuple[int, ...]
    kv_row_bytes: int
    ssm_rows: int
    ssm_row_bytes: int
    conv_bytes: int

    def __post_init__(self) -> None:
        if not self.attention_layers or not self.recurrent_layers:
            raise GeometryError(
                f"a hybrid model needs attention and recurrent layers, this one has "
                f"{len(self.attention_layers)} and {len(self.recurrent_layers)}"
            )
        if self.kv_row_bytes < 1:
            raise GeometryError(f"a KV row of {self.kv_row_bytes} bytes cannot be stored")
        if self.conv_bytes == 0 and self.ssm_rows == 0:
            raise GeometryError("the recurrent layers of this model keep no state")

    @property
    def arenas(self) -> int:
        """One arena an attention layer."""
        return len(self.attention_layers)

    @property
    def stripes(self) -> int:
        """Recurrent layers an arena holds; arena i has recurrent layers i, i + arenas, ..."""
        return ceil_div(len(self.recurrent_layers), self.arenas)

    @property
    def ssm_bytes(self) -> int:
        """SSM state of one recurrent layer."""
        return self.ssm_rows * self.ssm_row_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """SSM and conv state of all stripes of one arena: the paper's C."""
        return self.stripes * (self.ssm_bytes + self.conv_bytes)

    @property
    def conv_line_bytes(self) -> int:
        """Conv windows of all stripes of one arena, end to end."""
        return self.stripes * self.conv_bytes

    def place(self, recurrent_index: int) -> tuple[int, int]:
        """(arena, stripe) of the recurrent layer at this index of `recurrent_layers`."""
        return recurrent_index % self.arenas, recurrent_index // self.arenas


@dataclass(frozen=True)
class PageGeometry:
    """How pages of `page_bytes` hold a checkpoint's SSM rows, stripes end to end."""

    model: ModelGeometry
    page_bytes: int

    @property
    def rows_per_page(self) -> int:
        """Whole SSM rows in a page; 0 when the model keeps no SSM state.

        When a head's bytes divide the page, whole heads fall on a page by themselves.
        """
        return self.page_bytes // self.model.ssm_row_bytes if self.model.ssm_bytes else 0

    @property
    def members(self) -> int:
        """SSM member pages of a checkpoint: rounding is paid once an arena, not once a layer."""
        rows = self.model.stripes * self.model.ssm_rows
        if rows == 0:
            return 0
        if self.rows_per_page == 0:
            least = max(self.model.ssm_row_bytes, self.model.conv_line_bytes)
            raise GeometryError(
                f"a page of {self.page_bytes} bytes does not hold one SSM row of "
                f"{self.model.ssm_row_bytes}: use --hybrid-grid "
                f"{ceil_div(least, self.model.kv_row_bytes)} or larger"
            )
        return ceil_div(rows, self.rows_per_page)

    @property
    def conv_pages(self) -> int:
        """Dedicated conv pages of a checkpoint in S1: one, none when the model keeps no conv state.

        Raises `GeometryError` when a conv line does not fit a page.
        """
        line = self.model.conv_line_bytes
        if line > self.page_bytes:
            rows = ceil_div(line, self.model.kv_row_bytes)
            raise GeometryError(
                f"a conv line of {line} bytes does not fit a page of {self.page_bytes} "
                f"(--hybrid-grid {self.page_bytes // self.model.kv_row_bytes}): "
                f"use --hybrid-grid {rows} or larger"
            )
        return 1 if line else 0

    def slots_per_page(self, slot_bytes: int) -> int:
        """Conv slots of a slab page in S2.  Raises `GeometryError` when packing does not pay."""
        line = self.model.conv_line_bytes
        rows = ceil_div(max(4 * slot_bytes, self.model.ssm_row_bytes), self.model.kv_row_bytes)
        if line == 0:
            raise GeometryError("S2 packs conv states and this model keeps none: use --hybrid-mem S1")
        if not packs_conv(slot_bytes, self.page_bytes):
            raise GeometryError(
                f"S2 does not pack a conv line of {line} bytes: its slot of {slot_bytes} is more than a "
                f"quarter of a page of {self.page_bytes} "
                f"(--hybrid-grid {self.page_bytes // self.model.kv_row_bytes}); "
                f"use --hybrid-mem S1, or --hybrid-grid {rows} or larger"
            )
        return self.page_bytes // slot_bytes


def block_bytes(model: ModelGeometry, grid: int) -> int:
    """One attention block: the KV of one grid step in one attention layer, the paper's A."""
    return grid * model.kv_row_bytes


def whole_rows_bytes(model: ModelGeometry, size: int) -> int:
    """`size` bytes rounded up to whole KV rows."""
    return ceil_div(size, model.kv_row_bytes) * model.kv_row_bytes


def coarse_page_bytes(model: ModelGeometry, grid: int) -> int:
    """S0's page: a checkpoint in whole KV rows, or a block where that is larger: it must hold either."""
    return max(block_bytes(model, grid), whole_rows_bytes(model, model.checkpoint_bytes))


def conv_slot_bytes(model: ModelGeometry, slots: str = CONV_SLOTS[0]) -> int:
    """Bytes of a packed conv slot, by its name in `CONV_SLOTS`.

    Lines below 1 KiB, as small test models have, are rounded to a multiple of 64 bytes instead.
    """
    line = max(model.conv_line_bytes, 1)
    if slots != "tight":
        return 1 << (line - 1).bit_length()
    quantum = 1024 if line > 1024 else 64
    return ceil_div(line, quantum) * quantum


def packs_conv(slot_bytes: int, page_bytes: int) -> bool:
    """Packing pays only when a slot is at most a quarter of a page (docs/architecture.md, Page format)."""
    return 4 * slot_bytes <= page_bytes


def native_grid(model: ModelGeometry, unit_tokens: int, chunk: int) -> int:
    """D0's grid: tokens of KV that weigh at least a checkpoint, on whole units and scan chunks.

    Falcon-H1-7B: 1,594,368 B at 1 KiB a token is 1557 tokens, on the chunk of 256: 1792.
    """
    tokens = ceil_div(ceil_div(model.checkpoint_bytes, model.kv_row_bytes), unit_tokens) * unit_tokens
    return ceil_div(tokens, chunk) * chunk


def check_unit_grid(grid: int) -> None:
    """Raises `GeometryError` when D0's units do not divide the grid."""
    if grid % UNIT_TOKENS:
        raise GeometryError(
            f"--hybrid-grid {grid} is no multiple of D0's unit of {UNIT_TOKENS} tokens: use "
            f"{ceil_div(grid, UNIT_TOKENS) * UNIT_TOKENS}"
        )


def arena_pages(model: ModelGeometry, page_bytes: int, budget_bytes: int) -> int:
    """Pages an arena gets from a budget for all arenas, sink page included: it is memory like any other."""
    return budget_bytes // (page_bytes * model.arenas)


def dual_pages(model: ModelGeometry, budget_bytes: int, attention_share: float) -> tuple[int, int]:
    """D0's (units, checkpoints) of an arena, each with its sink page; what the units leave goes to state."""
    if not 0.0 < attention_share < 1.0:
        raise GeometryError(
            f"--hybrid-attention-share {attention_share} leaves one pool empty: use a value between 0 and 1"
        )
    arena = budget_bytes // model.arenas
    units = int(arena * attention_share) // block_bytes(model, UNIT_TOKENS)
    rest = arena - units * block_bytes(model, UNIT_TOKENS)
    return units, rest // whole_rows_bytes(model, model.checkpoint_bytes)


def dual_least(grid: int) -> tuple[int, int]:
    """D0's least (units, checkpoints) beside the sinks: `LEAST_PIECES`, where a block is many units."""
    return grid // UNIT_TOKENS + LEAST_PIECES - 1, LEAST_PIECES


def dual_starts(model: ModelGeometry, grid: int, budget_bytes: int, attention_share: float) -> bool:
    """Whether both of D0's sides hold what they must: free bytes of one cannot serve the other."""
    units, checkpoints = dual_pages(model, budget_bytes, attention_share)
    least_units, least_checkpoints = dual_least(grid)
    return units > least_units and checkpoints > least_checkpoints


def dual_shares(model: ModelGeometry, grid: int, budget_bytes: int) -> tuple[float, float] | None:
    """Least and largest attention share, in thousandths, at which D0 starts; None: at no share."""
    tried = (share / 1000 for share in range(1, 1000))
    found = [share for share in tried if dual_starts(model, grid, budget_bytes, share)]
    return (found[0], found[-1]) if found else None
