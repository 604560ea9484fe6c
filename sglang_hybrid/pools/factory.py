"""The organizations by name; a further one is one class and one line here."""

from __future__ import annotations

from typing import Any

from sglang_hybrid.geometry import ModelGeometry
from sglang_hybrid.pools.dual import DualPools
from sglang_hybrid.pools.organization import Organization
from sglang_hybrid.pools.shared import CoarsePages, PackedConv, PagedCheckpoints

ORGANIZATIONS: dict[str, type[CoarsePages | PagedCheckpoints | PackedConv | DualPools]] = {
    kind.name: kind for kind in (CoarsePages, PagedCheckpoints, PackedConv, DualPools)
}


def make_organization(
    name: str, model: ModelGeometry, grid: int, budget_bytes: int, **options: Any
) -> Organization:
    """The organization called `name` over a byte budget for all arenas of one rank.

    `options` are keyword arguments of that class, such as D0's `attention_share`.
    Raises `GeometryError` when grid, model and budget do not go together; the message names a
    legal choice.
    """
    return ORGANIZATIONS[name](model, grid, budget_bytes, **options)
