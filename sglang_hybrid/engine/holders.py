"""Every page with exactly its holders: what must be true after an exception was caught between two steps."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from sglang_hybrid.pools.organization import Checkpoint
from sglang_hybrid.pools.pages import IntegrityError, PagePool

if TYPE_CHECKING:
    from sglang_hybrid.engine.cache import GridPrefixCache


def check(cache: GridPrefixCache) -> None:
    """Walk tree, running requests and pools.

    Raises:
        IntegrityError: they contradict each other, or a page has more or fewer execution references than
            requests and locked blocks account for.
    """
    cache.check_integrity()
    units, states = Counter[int](), Counter[int]()
    for node in cache.tree.nodes():
        if node.locks:
            units.update(node.units)
    requests, organization = cache.req_to_token_pool, cache.organization
    for state in requests.states():
        units.update(state.units[state.lease.node.depth * organization.units_per_block :])
        boundaries = [boundary.checkpoint for boundary in state.boundaries]
        for held in (state.live, state.source, state.lease.adopted, *state.kept.values(), *boundaries):
            if held is not None:
                states.update(held.pages)
    if organization.unit_pool is organization.state_pool:
        _compare(organization.unit_pool, units + states)
    else:
        _compare(organization.unit_pool, units)
        _compare(organization.state_pool, states)


def _compare(pool: PagePool, known: Counter[int]) -> None:
    for page in range(1, pool.size + 1):
        held = pool.references(page)
        # A request that was admitted in this pass and has no row yet holds what it is going to start from.
        adopted = any(isinstance(entry, Checkpoint) for entry in pool.dependents(page))
        if held < known[page] or (held > known[page] and not adopted):
            raise IntegrityError(
                f"page {page} has {held} execution references, its holders are {known[page]}"
            )
