"""What a start says of its memory: what a checkpoint weighs and takes, and what a bf16 state would give."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from sglang_hybrid.geometry import GeometryError, block_bytes
from sglang_hybrid.pools.arena import StateShape
from sglang_hybrid.pools.organization import Organization

LayOut = Callable[[StateShape], Organization]
"""The organization of a start, for another shape of the state."""


def budget_line(organization: Organization, checkpoints: int) -> str:
    """What the bytes became; `checkpoints`: as many as fit where nothing else is."""
    used, budget = organization.used_bytes(), organization.budget_bytes
    both = "or" if len(organization.pools) == 1 else "and"
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
        f"and takes {organization.checkpoint_place()}; a block of {organization.grid} tokens is "
        f"{block_bytes(model, organization.grid)} bytes and takes {organization.block_place()}."
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
        f"take {other.checkpoint_place()}{at}: {capacity(other)} checkpoints would fit instead of "
        f"{capacity(organization)}."
    )


def _dtypes(shape: StateShape) -> str:
    parts = [("SSM", shape.ssm_dtype)] * bool(shape.state_size)
    parts += [("conv", shape.conv_dtype)] * bool(shape.channels * shape.window)
    return ", ".join(f"{part} {str(dtype).removeprefix('torch.')}" for part, dtype in parts)
