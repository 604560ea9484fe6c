"""What a start says of its memory: what a checkpoint weighs and takes, and what a bf16 state would give."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from sglang_hybrid.geometry import GeometryError, block_bytes
from sglang_hybrid.pools.arena import StateShape
from sglang_hybrid.pools.dual import DualPools
from sglang_hybrid.pools.organization import Organization
from sglang_hybrid.pools.shared import PackedConv

LayOut = Callable[[StateShape], Organization]
"""The organization of a start, for another shape of the state."""


def budget_line(organization: Organization, checkpoints: int) -> str:
    """What the bytes became; `checkpoints`: as many as fit where nothing else is."""
    used, budget = organization.used_bytes(), organization.budget_bytes
    both = "and" if _dual(organization) else "or"
    return (
        f"{organization.name}: grid {organization.grid}, budget {budget} bytes, used {used}, lost "
        f"{budget - used}; holds {organization.unit_pool.size} units of {organization.unit_tokens} tokens "
        f"{both} {checkpoints} checkpoints."
    )


def state_lines(
    shape: StateShape, organization: Organization, capacity: Callable[[Organization], int], lay_out: LayOut
) -> Iterator[str]:
    """One sentence on a checkpoint, and a second one where its SSM state is wider than bf16.

    `capacity`: checkpoints that an organization holds where nothing else is.
    """
    model = organization.model
    yield (
        f"A checkpoint is {model.checkpoint_bytes} bytes ({_dtypes(shape)}) in each of {model.arenas} arenas "
        f"and takes {_place(organization)}; a block of {organization.grid} tokens is "
        f"{block_bytes(model, organization.grid)} bytes and takes {_block(organization)}."
    )
    if not shape.state_size or shape.ssm_dtype.itemsize <= torch.bfloat16.itemsize:
        return
    try:
        other = lay_out(shape._replace(ssm_dtype=torch.bfloat16))
    except GeometryError:
        return
    at = f" at a grid of {other.grid}" if other.grid != organization.grid else ""
    yield (
        f"With --mamba-ssm-dtype bfloat16 a checkpoint would be {other.model.checkpoint_bytes} bytes and "
        f"take {_place(other)}{at}: {capacity(other)} checkpoints would fit instead of "
        f"{capacity(organization)}."
    )


def _dtypes(shape: StateShape) -> str:
    parts = [("SSM", shape.ssm_dtype)] * bool(shape.state_size)
    parts += [("conv", shape.conv_dtype)] * bool(shape.channels * shape.window)
    return ", ".join(f"{part} {str(dtype).removeprefix('torch.')}" for part, dtype in parts)


def _place(organization: Organization) -> str:
    if isinstance(organization, PackedConv):
        slots = organization.slabs.slots_per_page
        return f"{_pages(organization.members)} and one of the {slots} conv slots of another"
    if _dual(organization):
        return _pages(organization.members, "state page")
    return _pages(organization.unit_equivalent(1))


def _block(organization: Organization) -> str:
    units = organization.grid // organization.unit_tokens
    return _pages(units, "unit" if _dual(organization) else "page")


def _dual(organization: Organization) -> bool:
    return isinstance(organization, DualPools)


def _pages(count: int, what: str = "page") -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
