"""What the arguments alone condemn: asked before stock steps, and once more after them.

A value of the user's that equals ours is no conflict.  Source symbols: the field classes of
`sglang.srt.arg_groups.fields`.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_hybrid.engine import trace
from sglang_hybrid.engine.args import (
    KERNELS,
    RADIX_BACKEND,
    grid_or_default,
    organization_class,
    page_size_for,
)
from sglang_hybrid.engine.rules import Facts, Rule, flag_of, off, one_of, only, positive, unset
from sglang_hybrid.kernels import why_not
from sglang_hybrid.pools.factory import ORGANIZATIONS, own_options
from sglang_hybrid.pools.organization import Option
from sglang_hybrid.radix.eviction import EVICTIONS
from sglang_hybrid.radix.placement import PLACEMENTS
from sglang_hybrid.radix.policy import WAITS

ATTENTION_BACKENDS = ["triton", "flashinfer", "fa3", "torch_native"]
"""Names of SGLang's registry that read our pages.  A plugin that registers a further backend there adds its
name here, as it does to SGLang's own choices."""
PAGE_TABLE_BACKENDS = ("fa3",)
"""Compute a page id as slot // page size; S0's slots have gaps, a page there holds more rows than a block.
Their tables of a captured decode step want a page size that is a power of two."""
KV_DTYPES = {
    "auto": None,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""Unpacked KV dtypes by SGLang's names; None: the model's."""


def _organization(facts: Facts) -> str | None:
    if facts.mem not in ORGANIZATIONS:
        return f"--hybrid-mem {facts.mem} is unknown; legal: {', '.join(ORGANIZATIONS)}."
    return None


def _kernels(facts: Facts) -> str | None:
    value, device = facts.given("hybrid_kernels"), facts.now("device") or "cpu"
    if value is None:
        return None
    if value not in KERNELS:
        return f"--hybrid-kernels {value} is unknown; legal: {', '.join(KERNELS)}."
    reason = why_not(value, device)
    return reason and f"--hybrid-kernels {value} is not served here: {reason}."


def _trace(facts: Facts) -> str | None:
    value = facts.given("hybrid_trace")
    if value is None:
        return None
    why = trace.problem(value) if isinstance(value, str) else "it is no text"
    return why and f"--hybrid-trace {value!r} cannot be written: {why}; use {trace.EXAMPLE}."


def _headroom(facts: Facts) -> str | None:
    value = facts.given("hybrid_headroom")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or (number and 0 <= value < 1):
        return None
    return f"--hybrid-headroom {value!r} must be a part of all blocks, 0 <= f < 1, such as 0.1."


def _page_size(facts: Facts) -> str | None:
    page = facts.given("page_size")
    ours = page_size_for(facts.mem, grid_or_default(facts.mem, facts.given("hybrid_grid")))
    if page in (None, ours):
        return None
    if organization_class(facts.mem).fixed_page:
        return (
            f"--page-size {page} conflicts with --hybrid-mem {facts.mem}; use --page-size {ours} or leave it "
            "out."
        )
    return (
        f"--page-size {page} conflicts with --hybrid-grid {ours}: a page is one grid step; "
        f"use --hybrid-grid {page}, or leave --page-size out."
    )


def _radix_backend(facts: Facts) -> str | None:
    value = facts.given("radix_cache_backend")
    if value in (None, RADIX_BACKEND):
        return None
    return (
        f"--radix-cache-backend {value} conflicts with --hybrid-mem {facts.mem}, which brings its own; "
        f"use --radix-cache-backend {RADIX_BACKEND} or leave it out."
    )


def _own_option(option: Option) -> Rule:
    """Only the organizations that have the option take it, with a value that it knows."""
    field = f"hybrid_{option.name}"

    def check(facts: Facts) -> str | None:
        value = facts.given(field)
        if value is None:
            return None
        having = [name for name, kind in ORGANIZATIONS.items() if option in kind.options]
        if facts.mem not in having:
            return (
                f"{option.flag} {value} has no meaning with --hybrid-mem {facts.mem}: {option.elsewhere}; "
                f"leave it out, or use --hybrid-mem {' or '.join(having)}."
            )
        problem = option.problem(value)
        return problem and f"{option.flag} {problem}"

    return Rule(field, check)


def backends(facts: Facts) -> tuple[str, ...]:
    """Attention backends that read the pages of this organization and grid, as far as the grid is known."""
    tables = organization_class(facts.mem).dense_slots and not _odd_page(facts)
    return tuple(name for name in ATTENTION_BACKENDS if tables or name not in PAGE_TABLE_BACKENDS)


def _odd_page(facts: Facts) -> int | None:
    """Tokens of a page, where they are no power of two."""
    page = page_size_for(facts.mem, grid_or_default(facts.mem, facts.now("hybrid_grid")))
    whole = isinstance(page, int) and page > 0
    return page if whole and page & (page - 1) else None


def _given_backend(field: str) -> Rule:
    def check(facts: Facts) -> str | None:
        value = facts.given(field)
        if value in (None, *backends(facts)):
            return None
        return backend_sentence(flag_of(field), value, facts)

    return Rule(field, check)


def backend_sentence(flag: str, value: Any, facts: Facts) -> str:
    page = _odd_page(facts)
    if value in PAGE_TABLE_BACKENDS and organization_class(facts.mem).dense_slots and page:
        return (
            f"{flag} {value} is not supported with --hybrid-grid {page}: its page tables need a power of "
            f"two; use --hybrid-grid {1 << page.bit_length()}, or one of {', '.join(backends(facts))}."
        )
    return (
        f"{flag} {value} is not supported with --hybrid-mem {facts.mem}: it brings its own page layout; "
        f"legal: {', '.join(backends(facts))}."
    )


def _decode_graph(facts: Facts) -> str | None:
    value = facts.given("cuda_graph_backend_decode")
    if value in (None, "full", "disabled"):
        return None
    return (
        f"--cuda-graph-backend-decode {value} is not supported with --hybrid-mem {facts.mem}: only a graph "
        "of the whole step is tested; legal: full, disabled."
    )


def _environment(name: str, why: str) -> Rule:
    """Refuse a switch of SGLang that has no flag."""

    def check(facts: Facts) -> str | None:
        from sglang.srt.environ import envs

        if not getattr(envs, name).get():
            return None
        return f"{name}=1 is not supported with --hybrid-mem {facts.mem}: {why}; unset it or set it to 0."

    return Rule("attention_backend", check)


def _prefill_graph(facts: Facts) -> str | None:
    value = facts.given("cuda_graph_backend_prefill")
    if value in (None, "disabled"):
        return None
    return (
        f"--cuda-graph-backend-prefill {value} is not supported with --hybrid-mem {facts.mem}: a captured "
        "prefill replays fixed state slots; use --cuda-graph-backend-prefill disabled or leave it out."
    )


INPUT_RULES: tuple[Rule, ...] = (
    Rule("hybrid_mem", _organization),
    Rule("hybrid_kernels", _kernels),
    Rule("hybrid_headroom", _headroom),
    positive("hybrid_retention", "requests", "1"),
    one_of("hybrid_checkpoints", PLACEMENTS),
    one_of("hybrid_wait", WAITS),
    one_of("hybrid_eviction", EVICTIONS),
    positive("hybrid_grid", "tokens", "512"),
    positive("hybrid_budget_bytes", "bytes", "8G"),
    Rule("hybrid_trace", _trace),
    *map(_own_option, own_options().values()),
    Rule("page_size", _page_size),
    Rule("radix_cache_backend", _radix_backend),
    unset("max_total_tokens", "the memory is given in bytes by --hybrid-budget-bytes"),
    only("mamba_max_states_per_path", (-1,), "the grid tree has its own retention"),
    off("disable_radix_cache", "the memory is owned by the grid tree"),
    off("speculative_algorithm", "a rejected draft would need a state rollback"),
    only("disaggregation_mode", ("null",), "states are not transferred between servers"),
    off("enable_pdmux", "prefill and decode share one stream order"),
    off("enable_hierarchical_cache", "checkpoints have no host tier"),
    off("hicache_storage_backend", "checkpoints have no storage tier"),
    off("enable_lmcache", "it replaces the tree"),
    off("enable_flexkv", "it replaces the tree"),
    off("enable_unified_cache_external_linker", "checkpoints have no storage tier"),
    off("enable_unified_memory", "it is another owner of the same memory"),
    off("enable_page_major_kv_layout", "the page format is the organization's"),
    off("enable_int8_mamba_checkpoint", "a checkpoint is the state itself, never a converted copy"),
    off("enable_mamba_cache_stochastic_rounding", "states are stored rounded to nearest"),
    off("enable_streaming_session", "a session's state would be resumed off the grid"),
    off("enable_session_radix_cache", "the grid tree has no session nodes"),
    only("radix_eviction_policy", ("lru",), "the grid tree has its own order, --hybrid-eviction"),
    only("pp_size", (1,), "a checkpoint spans all layers"),
    only("dcp_size", (1,), "a page holds whole tokens"),
    only("attn_cp_size", (1,), "a recurrent state has no token axis to split"),
    off("enable_prefill_cp", "a recurrent state has no token axis to split"),
    off("enable_kv_cache_sharding", "a page holds whole tokens"),
    off("prefill_only_disable_kv_cache", "reuse needs the KV"),
    off("dllm_algorithm", "blocks are rewritten after they are stored"),
    off("enable_hisparse", "KV would leave the page"),
    off("enable_two_batch_overlap", "half batches would fork twice"),
    off("enable_mis", "the items of a request would fork its state off the grid"),
    off("enable_linear_replayssm", "states are written every step"),
    off("enable_linear_replayssm_spec", "states are written every step"),
    only("kv_cache_dtype", tuple(KV_DTYPES), "its pool is packed"),
    _given_backend("attention_backend"),
    _given_backend("prefill_attention_backend"),
    _given_backend("decode_attention_backend"),
    _environment("SGLANG_USE_HND_KVCACHE", "K and V of a token lie side by side in the pages"),
    _environment("SGLANG_FLASHINFER_AUTOTUNE_EXTEND", "the prefills that it makes up have no state"),
    Rule("cuda_graph_backend_prefill", _prefill_graph),
    Rule("cuda_graph_backend_decode", _decode_graph),
    off("debug_cuda_graph", "only a graph of the whole step is tested"),
    off("enable_torch_compile", "its graphs break at every launch over pages, and nobody has tested that"),
    only("attn_dp_size", (1,), "the empty batches of idle ranks are not tested with paged states"),
    off("enable_prefill_delayer", "it is not tested with the admission of this memory"),
    off("enable_deterministic_inference", "it is not proven that a batch changes no row of a paged state"),
    off("rl_on_policy_target", "it needs deterministic inference, which is not proven here"),
    off("enable_single_batch_overlap", "nobody has tested it with paged states"),
    off("enable_layernorm_sp", "a recurrent layer needs all tokens of a sequence"),
    off("enable_attn_tp_input_scattered", "a recurrent layer needs all tokens of a sequence"),
    off("enable_nvidia_megakernel", "its steps pass by the layers that read paged states"),
    off("enable_amd_monokernel", "its steps pass by the layers that read paged states"),
    off("elastic_ep_backend", "a rank that joins later does not know the others' tree"),
    off("is_embedding", "a state is kept for the token that follows, and an embedding has none"),
    off("encoder_only", "encoders on servers of their own are not tested"),
    off("language_only", "encoders on servers of their own are not tested"),
    off("enable_return_routed_experts", "the experts of tokens from the cache are not kept"),
    off("strip_thinking_cache", "a checkpoint behind the thoughts is dropped, and nobody has tested that"),
    only("model_impl", ("auto", "sglang"), "the layers of another implementation do not read pages"),
    only("kv_canary", ("none",), "it walks SGLang's own pools"),
    only("decoupled_spec_role", ("null",), "a rejected draft would need a state rollback"),
    only("startup_weight_load_mode", ("serial",), "memory for state is measured beside loaded weights"),
    off("enable_memory_saver", "the pages are one allocation outside its regions"),
    off("kv_events_config", "the grid tree publishes no block events"),
    off("use_ray", "its workers load no plugins"),
)
