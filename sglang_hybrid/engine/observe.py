"""What an operator can see: `/server_info`, one dict of plain numbers a scheduler."""

from __future__ import annotations

from typing import Any

from sglang_hybrid.engine.cache import GridPrefixCache


def report(cache: GridPrefixCache) -> dict[str, Any]:
    """Budget, pages by state, cached pieces, and counters since start."""
    organization = cache.organization
    usage = organization.usage()
    used = organization.used_bytes()
    return {
        "organization": organization.name,
        "grid": organization.grid,
        "budget_bytes": organization.budget_bytes,
        "used_bytes": used,
        "lost_bytes": organization.budget_bytes - used,
        **usage._asdict(),
        **organization.details(),
        "blocks_cached": cache.tree.blocks_evictable,
        "protected_tokens": cache.tree.blocks_locked * organization.grid,
        "namespaces": cache.tree.namespaces,
        "requests_running": cache.live.running,
        "pins": len(cache.pins),
        **{f"count_{name}": value for name, value in cache.live.counts._asdict().items()},
        **{f"count_evicted_{name}": value for name, value in cache.lifetime.counts._asdict().items()},
    }


def internal_state(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """After `Scheduler.get_internal_state`: add the report under "hybrid"."""
    result.internal_state["hybrid"] = report(scheduler.tree_cache)
    return result
