"""Budgets that no server should start with: one that no prompt can hit, one beyond the machine's memory
or beyond what is free of it."""

from __future__ import annotations

from sglang_hybrid.engine.args import organization_options
from sglang_hybrid.engine.rules import Facts
from sglang_hybrid.pools.factory import make_organization
from sglang_hybrid.pools.organization import Organization

HIT_MARGIN = 8
"""Tokens of a request beyond a grid step that make a hit possible: one to compute, and seven that SGLang
keeps (`TpModelWorker.get_worker_info`: a prompt is shorter than the capacity less six)."""


def no_hit(facts: Facts, made: Organization) -> str:
    """The sentence for an organization that holds no request of a grid step and `HIT_MARGIN` tokens."""
    from sglang_hybrid.engine.admission import longest_request

    grid, budget, options = made.grid, made.budget_bytes, organization_options(facts.record)
    while longest_request(made) < grid + HIT_MARGIN:
        budget += grid * made.model.kv_row_bytes * made.model.arenas
        made = make_organization(facts.mem, made.model, grid, budget, **options)
    return (
        f"--hybrid-budget-bytes {facts.given('hybrid_budget_bytes')} with --hybrid-mem {facts.mem} and "
        f"--hybrid-grid {grid} serves no prompt of more than {grid} tokens, so that nothing is reused; "
        f"use {made.used_bytes()} or more."
    )


def beyond_machine(facts: Facts) -> str | None:
    """More than there is: the scheduler would be ended by the kernel, after the weights are loaded."""
    from sglang.srt.utils.common import get_device_memory_capacity

    budget, device = facts.given("hybrid_budget_bytes"), facts.now("device")
    if budget is None:
        return None
    mebibytes = get_device_memory_capacity(device)
    if mebibytes is None:
        return None
    ranks = 1
    if device == "cpu":  # all of them in one memory
        ranks = facts.now("tp_size") * (1 if facts.now("enable_dp_attention") else facts.now("dp_size"))
    most = int(mebibytes * (1 << 20)) // ranks
    if budget < most:
        return None
    return (
        f"--hybrid-budget-bytes {budget} is more than the {most} bytes of memory that the {device} has for "
        f"each rank, weights included; use less, such as {most // 2}, or leave it out."
    )


def beyond_free(budget: int, free: int, device: str) -> str | None:
    """More than is free of the device for a rank once its weights are loaded."""
    if budget < free:
        return None
    return (
        f"--hybrid-budget-bytes {budget} does not fit: the {device} has {free} bytes free for each rank "
        "beside the weights; use less, or end what else takes memory there."
    )
