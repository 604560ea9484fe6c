"""The ledger's answer as plain data: what `--json` prints and the table shows.

Sizes are KiB of one arena of one rank, `*_total` KiB of all its arenas, `*_bytes` bytes of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from sglang_hybrid.geometry import (
    CONV_SLOTS,
    DEFAULT_GRID,
    UNIT_TOKENS,
    GeometryError,
    ModelGeometry,
    PageGeometry,
    block_bytes,
    ceil_div,
    conv_slot_bytes,
    native_grid,
)
from sglang_hybrid.ledger import (
    Account,
    Capacity,
    Cost,
    Demand,
    PackedAccount,
    PagedAccount,
    break_even,
)
from sglang_hybrid.models import HybridShape
from sglang_hybrid.pools.factory import ORGANIZATIONS, default_grid
from sglang_hybrid.pools.shared import PackedConv

DTYPES = {
    "bf16": ("bf16", 2),
    "bfloat16": ("bf16", 2),
    "fp16": ("fp16", 2),
    "float16": ("fp16", 2),
    "half": ("fp16", 2),
    "fp32": ("fp32", 4),
    "float32": ("fp32", 4),
    "fp8": ("fp8", 1),
    "fp8_e4m3": ("fp8", 1),
    "fp8_e5m2": ("fp8", 1),
}
"""Short name and bytes of an element, by any spelling."""

CONV_DTYPE = "bf16"


class Question(NamedTuple):
    """What was asked.  `blocks` is None with `tokens`; `grid` None: each organization's default."""

    tp: int = 1
    grid: int | None = None
    ssm_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    blocks: int | None = 16
    checkpoints: int | None = 4
    tokens: int | None = None
    budget_bytes: int | None = None
    options: Mapping[str, Any] = MappingProxyType({})
    """Of single organizations, by name."""

    @property
    def shared_grid(self) -> int:
        return DEFAULT_GRID if self.grid is None else self.grid

    def of(self, organization: str) -> dict[str, Any]:
        """Options that this organization has."""
        return {
            option.name: self.options[option.name]
            for option in ORGANIZATIONS[organization].options
            if option.name in self.options
        }

    def demand(self, grid: int) -> Demand:
        """At one organization's grid: with `tokens` it sets blocks and checkpoints."""
        if self.tokens is None:
            tokens = (self.blocks or 0) * self.shared_grid
            return Demand(tokens, ceil_div(tokens, grid), self.checkpoints or 0)
        demand = Demand.of_tokens(self.tokens, grid)
        return demand if self.checkpoints is None else demand._replace(checkpoints=self.checkpoints)


def kib(size: int) -> int | float:
    """Bytes in KiB, a whole number where it is one."""
    return size // 1024 if size % 1024 == 0 else size / 1024


def report(shape: HybridShape, question: Question) -> dict[str, Any]:
    """Geometry, costs, break-even and packing.

    Raises `ConfigError` for a TP that does not divide.  An organization that does not go with the
    geometry is reported with the sentence that its pool refuses it with.
    """
    model = shape.geometry(
        question.tp,
        kv_bytes=DTYPES[question.kv_dtype][1],
        ssm_bytes=DTYPES[question.ssm_dtype][1],
        conv_bytes=DTYPES[CONV_DTYPE][1],
    )
    grid = question.shared_grid
    own_grid = native_grid(model, UNIT_TOKENS, shape.chunk)
    grids = {
        name: question.grid or default_grid(name, model, shape.chunk, **question.of(name))
        for name in ORGANIZATIONS
    }
    return {
        "family": shape.family,
        "tp": question.tp,
        "grid": grid,
        "kv_dtype": DTYPES[question.kv_dtype][0],
        "ssm_dtype": DTYPES[question.ssm_dtype][0],
        "conv_dtype": CONV_DTYPE,
        "unit": "KiB of one arena: an attention layer with its recurrent layers",
        "geometry": _geometry(model, grid) | {"scan_chunk": shape.chunk, "native_grid": own_grid},
        "demand": {
            "tokens": question.tokens,
            "attention_blocks": question.demand(grid).blocks,
            "checkpoints": question.demand(grid).checkpoints,
        },
        "budget_bytes": question.budget_bytes,
        "organizations": {name: _organization(name, model, at, question) for name, at in grids.items()},
        "break_even": _break_even(model, question),
        "packing": _packing(model, grids[PackedConv.name], question),
    }


def _geometry(model: ModelGeometry, grid: int) -> dict[str, Any]:
    stripes = model.arenas * model.stripes
    try:
        members: int | None = PageGeometry(model, block_bytes(model, grid)).members
    except GeometryError:
        members = None
    return {
        "attention_layers": len(model.attention_layers),
        "recurrent_layers": len(model.recurrent_layers),
        "arenas": model.arenas,
        "stripes": model.stripes,
        "empty_stripes": stripes - len(model.recurrent_layers),
        "kv_row_kib": kib(model.kv_row_bytes),
        "block_kib": kib(block_bytes(model, grid)),
        "ssm_kib": kib(model.ssm_bytes),
        "conv_kib": kib(model.conv_bytes),
        "conv_line_kib": kib(model.conv_line_bytes),
        "checkpoint_kib": kib(model.checkpoint_bytes),
        "checkpoint_bytes": model.checkpoint_bytes,
        "checkpoint_kib_total": kib(model.checkpoint_bytes * model.arenas),
        "members": members,
    }


def _organization(name: str, model: ModelGeometry, grid: int, question: Question) -> dict[str, Any]:
    kind = ORGANIZATIONS[name]
    split = any(option.splits for option in kind.options)
    try:
        account = kind.prices(model, grid, **question.of(name))
    except GeometryError as error:
        return {"grid": grid, "refused": str(error), "kib": None, "split": split}
    demand = question.demand(grid)
    cost = account.cost(demand)
    budget = question.budget_bytes
    capacity = None if budget is None else account.capacity(demand, budget)
    lost = None if capacity is None else capacity.lost_bytes / model.arenas / 1024
    return {
        "grid": grid,
        "refused": None,
        "split": split,
        "page_kib": kib(account.page_bytes),
        "checkpoints": demand.checkpoints,
        "kib": kib(cost.total),
        "kib_total": kib(cost.total * model.arenas),
        "attention_kib": kib(cost.attention),
        "state_kib": kib(cost.state),
        "useful_kib": kib(cost.useful),
        "slabs": cost.slabs,
        "waste": _waste(cost) | {"lost_budget": lost},
        "budget": None if capacity is None else _budget(account, demand, capacity),
    }


def _waste(cost: Cost) -> dict[str, Any]:
    """By kind.  `checkpoint_rounding` is its two parts together; `total` is what the cost holds."""
    waste = cost.waste
    return {
        "attention_padding": kib(waste.attention_padding),
        "attention_tail": kib(waste.attention_tail),
        "checkpoint_rounding": kib(waste.checkpoint_rounding),
        "member_rounding": kib(waste.member_rounding),
        "conv_page": kib(waste.conv_page),
        "conv_slab": kib(waste.conv_slab),
        "total": kib(sum(waste)),
    }


def _budget(account: Account, demand: Demand, capacity: Capacity) -> dict[str, Any]:
    return {
        "used_bytes": capacity.used_bytes,
        "lost_bytes": capacity.lost_bytes,
        "sink_bytes": capacity.sink_bytes,
        "pages": capacity.pages,
        "feasible": capacity.fits,
        "holds": capacity.holds,
    } | account.split(demand, capacity)


def _break_even(model: ModelGeometry, question: Question) -> dict[str, Any]:
    """S1 is cheaper than S0 when blocks / checkpoints is above `ratio`."""
    try:
        even = break_even(model, question.shared_grid)
    except GeometryError as error:
        return {"refused": str(error), "ratio": None, "fraction": None}
    demand = question.demand(question.shared_grid)
    saving = even.saved_per_block * demand.blocks - even.extra_per_checkpoint * demand.checkpoints
    extra, saved = kib(even.extra_per_checkpoint), kib(even.saved_per_block)
    return {
        "refused": None,
        "extra_per_checkpoint_kib": extra,
        "saved_per_block_kib": saved,
        "ratio": even.ratio,
        "fraction": f"{extra}/{saved}",
        "s1_saves_kib": kib(saving),
    }


def _packing(model: ModelGeometry, grid: int, question: Question) -> dict[str, Any]:
    """`pays`: the source's power-of-two slot is legal, and S2 with it is cheaper than S1 for the demand."""
    whole, tight = (_slot(model, grid, question, slots) for slots in CONV_SLOTS)
    return {
        "line_kib": kib(model.conv_line_bytes),
        "pays": whole["saved_kib"] > 0,
        "power_of_two": whole,
        "tight": tight,
    }


def _slot(model: ModelGeometry, grid: int, question: Question, slots: str) -> dict[str, Any]:
    demand = question.demand(grid)
    slot = {"slot_kib": kib(conv_slot_bytes(model, slots))}
    try:
        packed = PackedAccount(model, grid, conv_slots=slots)
        saved = PagedAccount(model, grid).cost(demand).total - packed.cost(demand).total
    except GeometryError as error:
        return slot | {"slots_per_page": 0, "slabs": 0, "saved_kib": 0, "refused": str(error)}
    return slot | {
        "slots_per_page": packed.slots,
        "slabs": packed.slabs(demand.checkpoints),
        "saved_kib": kib(saved),
        "refused": None,
    }
