"""The organizations by name; a further one is one class and one line here, or a call of `register`."""

from __future__ import annotations

from functools import cache
from typing import Any

from sglang_hybrid.geometry import ModelGeometry
from sglang_hybrid.pools.dual import DualPools
from sglang_hybrid.pools.organization import Option, Organization
from sglang_hybrid.pools.shared import CoarsePages, PackedConv, PagedCheckpoints

ORGANIZATIONS: dict[str, type[Organization]] = {}


def register(kind: type[Organization]) -> type[Organization]:
    """Make a class known by its name, before SGLang parses arguments; a decorator as well."""
    ORGANIZATIONS[kind.name] = kind
    return kind


for _kind in (CoarsePages, PagedCheckpoints, PackedConv, DualPools):
    register(_kind)


def own_options() -> dict[str, Option]:
    """Options that single organizations have, by name."""
    return {option.name: option for kind in ORGANIZATIONS.values() for option in kind.options}


def make_organization(
    name: str, model: ModelGeometry, grid: int, budget_bytes: int, **options: Any
) -> Organization:
    """The organization called `name` over a byte budget for all arenas of one rank.

    `options` are keyword arguments of that class, such as D0's `attention_share`.
    Raises `GeometryError` when grid, model and budget do not go together; the message names a
    legal choice.
    """
    return ORGANIZATIONS[name](model, grid, budget_bytes, **options)


@cache
def default_grid(name: str, model: ModelGeometry, chunk: int, **options: Any) -> int:
    """`Organization.default_grid` of the organization called `name`."""
    return ORGANIZATIONS[name].default_grid(model, chunk, **options)


def smallest_budget(name: str, model: ModelGeometry, grid: int, **options: Any) -> int:
    """`Organization.smallest_budget` of the organization called `name`."""
    return ORGANIZATIONS[name].smallest_budget(model, grid, **options)
