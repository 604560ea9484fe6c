"""What an operator can see: `/server_info`, one dict of plain numbers a scheduler, and Prometheus alike."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from sglang.srt.runtime_context import get_observability, get_parallel, get_serving

from sglang_hybrid.engine.cache import ENDED_AT, GridPrefixCache
from sglang_hybrid.engine.metrics import Exporter, Sample, histogram
from sglang_hybrid.engine.reuse import DEPTHS
from sglang_hybrid.engine.trace import open_trace
from sglang_hybrid.radix.account import REFUSED_AT, Resource, account, allocatable
from sglang_hybrid.radix.history import Cause


def report(cache: GridPrefixCache) -> dict[str, Any]:
    """Budget, bytes by kind, pages by state, cached pieces, reuse depth, and counters since start."""
    organization = cache.organization
    usage = organization.usage()
    used = organization.used_bytes()
    return {
        "organization": organization.name,
        "grid": organization.grid,
        "budget_bytes": organization.budget_bytes,
        "used_bytes": used,
        "lost_bytes": organization.budget_bytes - used,
        "bytes": account(organization, cache.tree)._asdict(),
        "largest_allocatable_bytes": allocatable(organization)._asdict(),
        **usage._asdict(),
        **organization.details(),
        "blocks_cached": cache.tree.blocks_evictable,
        "blocks_dead": cache.tree.blocks_dead,
        "protected_tokens": cache.tree.blocks_locked * organization.grid,
        "namespaces": cache.tree.namespaces,
        "requests_running": cache.live.running,
        "pins": len(cache.pins),
        "refusals": {"_".join(which): count for which, count in cache.refusals.counts.items()},
        "refused_last": "_".join(cache.refusals.last or ()) or None,
        "requests_ended": {stage: cache.ended[stage] for stage in ENDED_AT},
        "count_unpublished": cache.unpublished,
        "reuse": _reuse(cache),
        "checkpoints_retained": cache.live.retention.retained,
        "count_retained": cache.live.retention.retained_ever,
        "count_admission_waits": cache.admission.waits,
        **{f"count_{name}": value for name, value in cache.live.counts._asdict().items()},
        **{f"count_evicted_{name}": value for name, value in cache.lifetime.counts._asdict().items()},
    }


def _reuse(cache: GridPrefixCache) -> dict[str, Any]:
    log = cache.reuse
    return {
        "admissions": log.admitted_first,
        "admissions_resumed": log.admitted_again,
        "prompt_tokens": log.prompt_tokens,
        **{f"{name}_tokens": log.depths[name].total for name in DEPTHS},
        "resumed_tokens": log.resumed_tokens,
        "state_missing_tokens": log.state_missing_tokens,
        "gaps": {str(cause): log.gaps[cause] for cause in Cause},
        "lost_tokens": {str(cause): log.lost_tokens[cause] for cause in Cause},
        "remembered": len(cache.live.history),
        "remembered_most": cache.live.history.most,
        "trace_written": log.trace.written if log.trace else 0,
        "trace_dropped": log.trace.dropped if log.trace else 0,
    }


def internal_state(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """After `Scheduler.get_internal_state`: add the report under "hybrid"."""
    result.internal_state["hybrid"] = report(scheduler.tree_cache)
    return result


def connect(cache: GridPrefixCache, trace: str | None) -> None:
    """Give the cache of this scheduler its trace and its exporter, as far as they are asked for here.

    One of a group of tensor-parallel ranks speaks for all, as in SGLang: they do the same.

    Raises:
        OSError, zmq.ZMQError: the trace cannot be opened; the start ends with it.
    """
    parallel, asked = get_parallel(), get_observability()
    rank = parallel.dp_rank or 0
    if trace is not None and parallel.attn_tp_rank == 0:
        cache.reuse.trace = open_trace(trace, rank)
    # SGLang sets it before it starts its processes.
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    speaks = parallel.attn_tp_rank == 0 or asked.enable_metrics_for_all_schedulers
    if folder and asked.enable_metrics and speaks:
        labels = {
            "model_name": get_serving().served_model_name or "",
            "organization": cache.organization.name,
            "tp_rank": str(parallel.tp_rank),
            "dp_rank": str(rank),
        }
        cache.exporter = Exporter(folder, labels, lambda: samples(cache))
        cache.exporter.write()


# -- Prometheus -----------------------------------------------------------------------------


def samples(cache: GridPrefixCache) -> Iterator[Sample]:
    """Everything, from counters: nothing is walked."""
    yield from _memory(cache)
    yield from _reuse_depth(cache)
    log, live, lost = cache.reuse, cache.live.counts, cache.lifetime.counts
    for where in REFUSED_AT:
        for resource in Resource:
            labels = {"at": where, "resource": str(resource)}
            text = "Needs that could not be met, by the binding resource."
            yield Sample("counter", "refusals", text, labels, cache.refusals.counts[where, resource])
    for stage in ENDED_AT:
        text = "Requests ended by the plugin: refused at the door, or by an exception at a later stage."
        yield Sample("counter", "requests_ended", text, {"at": stage}, cache.ended[stage])
    text = "Times that an exception kept a request's blocks out of the cache."
    yield Sample("counter", "unpublished", text, {}, cache.unpublished)
    yield Sample("gauge", "requests_running", "Admitted requests.", {}, cache.live.running)
    yield Sample("gauge", "pins", "Preempted requests whose state is kept.", {}, len(cache.pins))
    for event, count in live._asdict().items():
        text = "Forks, what became of states, and requests that waited for a prefix."
        yield Sample("counter", "events", text, {"event": event}, count)
    for what, count in lost._asdict().items():
        yield Sample("counter", "evicted", "What had to go, in pieces.", {"what": what}, count)
    if log.trace is not None:
        for fate, count in (("written", log.trace.written), ("dropped", log.trace.dropped)):
            yield Sample("counter", "trace_records", "Records of --hybrid-trace.", {"fate": fate}, count)


def _memory(cache: GridPrefixCache) -> Iterator[Sample]:
    organization = cache.organization
    text = "Bytes by kind and state; the sum is the budget."
    for name, size in account(organization, cache.tree)._asdict().items():
        kind, state = name.split("_")
        yield Sample("gauge", "bytes", text, {"kind": kind, "state": state}, size)
    yield Sample("gauge", "budget_bytes", "The budget of this rank.", {}, organization.budget_bytes)
    text = "Largest object that fits without evicting."
    for kind, size in allocatable(organization)._asdict().items():
        yield Sample("gauge", "largest_allocatable_bytes", text, {"kind": kind}, size)


def _reuse_depth(cache: GridPrefixCache) -> Iterator[Sample]:
    log = cache.reuse
    for name, found in log.depths.items():
        text = "Reuse depth at first admissions, in tokens."
        yield from histogram(f"{name}_tokens", text, {}, found.bounds, found.counts, found.total)
    text = "Requests that began, and preempted ones that came back."
    for which, count in (("first", log.admitted_first), ("resumed", log.admitted_again)):
        yield Sample("counter", "admissions", text, {"admission": which}, count)
    yield Sample("counter", "prompt_tokens", "Of first admissions.", {}, log.prompt_tokens)
    yield Sample("counter", "cached_tokens", "Adopted at first admissions.", {}, log.depths["j_adopt"].total)
    yield Sample("counter", "resumed_tokens", "Adopted by preempted requests.", {}, log.resumed_tokens)
    text = "KV matched, state missing: attention depth less J_adopt."
    yield Sample("counter", "state_missing_tokens", text, {}, log.state_missing_tokens)
    for cause in Cause:
        labels = {"cause": str(cause)}
        yield Sample("counter", "gaps", "Admissions that were not reused deeper.", labels, log.gaps[cause])
        yield Sample("counter", "lost_tokens", "Tokens of these gaps.", labels, log.lost_tokens[cause])
