"""Where an organization's bytes are, and which resource was short: counters only, nothing is walked."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import NamedTuple

from sglang_hybrid.geometry import block_bytes
from sglang_hybrid.pools.organization import Need, Organization
from sglang_hybrid.radix.tree import GridTree


class Account(NamedTuple):
    """Bytes of all arenas of one rank.  They add up to the budget, at any moment.

    Held: a running request executes on it.  Cached: of use to later requests.  Dead: KV that no
    checkpoint at or below it can use.  Wasted: rounding of a page, slots of slabs without a conv
    line, and, for no kind, sink pages and what whole pages could not use of the budget.
    """

    attention_held: int
    attention_cached: int
    attention_dead: int
    attention_wasted: int
    attention_free: int
    """0 where both kinds share one pool: that is free for any."""
    checkpoint_held: int
    checkpoint_cached: int
    checkpoint_wasted: int
    checkpoint_free: int
    """0 where both kinds share one pool."""
    slab_wasted: int
    any_free: int
    any_reclaiming: int
    """Taken from the lookup by a reclaim that has not given the page back yet."""
    any_wasted: int


class Allocatable(NamedTuple):
    """Bytes of the largest object that could be allocated now without evicting, rounding left out.

    KV of one sequence may take every free unit; a checkpoint fits as a whole or not at all.
    """

    attention: int
    checkpoint: int


def account(organization: Organization, tree: GridTree) -> Account:
    """The account at this moment, in constant time."""
    layout, model, per_block = organization.layout(), organization.model, organization.units_per_block
    unit, page = block_bytes(model, organization.unit_tokens), layout.kv_page_bytes
    checkpoint, taken, arenas = model.checkpoint_bytes, organization.checkpoint_bytes, model.arenas
    units, checkpoints = organization.units_allocated, organization.checkpoints_allocated
    cached_units = (tree.blocks - tree.blocks_locked - tree.blocks_dead) * per_block
    dead_units = tree.blocks_dead * per_block
    cached = organization.checkpoints_cached
    separate = organization.state_pool is not organization.unit_pool
    unit_free = organization.unit_pool.free * page
    state_free = organization.state_pool.free * layout.state_page_bytes if separate else 0
    pages = organization.unit_pool.size * page
    pages += organization.state_pool.size * layout.state_page_bytes if separate else 0
    used = units * page + checkpoints * taken + organization.idle_slab_bytes
    return Account(
        attention_held=(units - cached_units - dead_units) * unit * arenas,
        attention_cached=cached_units * unit * arenas,
        attention_dead=dead_units * unit * arenas,
        attention_wasted=units * (page - unit) * arenas,
        attention_free=unit_free * arenas if separate else 0,
        checkpoint_held=(checkpoints - cached) * checkpoint * arenas,
        checkpoint_cached=cached * checkpoint * arenas,
        checkpoint_wasted=checkpoints * (taken - checkpoint) * arenas,
        checkpoint_free=state_free * arenas,
        slab_wasted=organization.idle_slab_bytes * arenas,
        any_free=0 if separate else unit_free * arenas,
        any_reclaiming=(pages - used - unit_free - state_free) * arenas,
        any_wasted=organization.budget_bytes - pages * arenas,
    )


def allocatable(organization: Organization) -> Allocatable:
    model = organization.model
    unit = block_bytes(model, organization.unit_tokens)
    checkpoint = model.checkpoint_bytes if organization.fits(Need(checkpoints=1)) else 0
    return Allocatable(organization.units_free() * unit * model.arenas, checkpoint * model.arenas)


class Resource(StrEnum):
    """What a refusal is bound by.  Headroom is part of the need that did not fit."""

    ATTENTION = "attention"
    """The KV alone would not fit."""
    CHECKPOINT = "checkpoint"
    """The states would not fit beside it, while the KV alone would."""


REFUSED_AT = ("admission", "chunk", "decode")
"""A waiting request, a prompt that goes on in chunks, the next step of those that run."""


class Refusals:
    """Needs that could not be met, by where it was found and by the binding resource.

    A waiting request is asked about in every pass, and counted as often.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, Resource]] = Counter()
        self.last: tuple[str, Resource] | None = None

    def add(self, where: str, resource: Resource) -> None:
        """`where` is one of `REFUSED_AT`."""
        self.last = (where, resource)
        self.counts[self.last] += 1


def binding(organization: Organization, need: Need) -> Resource:
    """The resource that keeps a need from fitting, even after evicting all that nobody executes on."""
    fits = organization.could_fit(Need(units=need.units))
    return Resource.CHECKPOINT if fits else Resource.ATTENTION
