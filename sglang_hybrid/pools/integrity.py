"""What must hold between a pool's pages and the checkpoints on them, at any moment between two calls."""

from __future__ import annotations

from sglang_hybrid.pools.checkpoint import Checkpoint
from sglang_hybrid.pools.pages import IntegrityError, PagePool


def check_checkpoints(pool: PagePool, cached: int, shared: int) -> None:
    """Raise `IntegrityError` unless pages, reverse index and the counts of checkpoints offered agree."""
    offered: set[Checkpoint] = set()
    for page in range(1, pool.size + 1):
        entries = [entry for entry in pool.dependents(page) if isinstance(entry, Checkpoint)]
        offered.update(entries)
        if pool.references(page) < sum(entry.references for entry in entries):
            raise IntegrityError(f"page {page} has fewer references than its checkpoints")
        if any(page not in entry.pages for entry in entries):
            raise IntegrityError(f"page {page} knows a checkpoint that lies elsewhere")
    idle = sum(not checkpoint.references for checkpoint in offered)
    if (cached, shared) != (idle, len(offered) - idle):
        raise IntegrityError(
            f"{idle} idle and {len(offered) - idle} executed checkpoints are cached, "
            f"counters say {cached} and {shared}"
        )
