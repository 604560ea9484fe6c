"""What the hybrid memory cannot serve, refused in the parent before weights load.

One row a combination; each answers with one sentence that names the value given and a legal choice.
A value of the user's that equals ours is no conflict.  Source symbols: the field classes of
`sglang.srt.arg_groups.fields`.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch

from sglang_hybrid.engine import trace
from sglang_hybrid.engine.args import (
    CONV_SLOTS,
    KERNELS,
    MAMBA_STRATEGY,
    ORGANIZATIONS,
    RADIX_BACKEND,
    grid_or_default,
    organization_options,
    page_size_for,
)
from sglang_hybrid.engine.budget_rules import HIT_MARGIN, beyond_machine, no_hit
from sglang_hybrid.engine.exact_rules import EXACT_RULES
from sglang_hybrid.engine.rules import Facts, Rule, flag_of, off, one_of, only, positive, refuse, unset
from sglang_hybrid.geometry import DEFAULT_ATTENTION_SHARE, UNIT_TOKENS, GeometryError, native_grid
from sglang_hybrid.kernels import KernelError, why_not
from sglang_hybrid.kernels.flashinfer_state_update import need_whole_heads
from sglang_hybrid.pools import factory
from sglang_hybrid.pools.arena import check_alignment
from sglang_hybrid.radix.placement import PLACEMENTS
from sglang_hybrid.radix.policy import WAITS

BUILT_ORGANIZATIONS = tuple(factory.ORGANIZATIONS)
RECOMMENDED = "S1"
"""The organization a sentence proposes to somebody who named none."""
ATTENTION_BACKENDS = ("triton", "flashinfer", "fa3", "torch_native")
PAGE_TABLE_BACKENDS = ("fa3",)
"""Compute a page id as slot // page size; S0's slots have gaps, a page there holds more rows than a block."""
KV_DTYPES = {
    "auto": None,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""Unpacked KV dtypes by SGLang's names; None: the model's."""
AMPLE_PIECES = 64
"""Blocks and checkpoints an arena that no organization finds too small."""
LEAST_SHARE = 1e-4
"""Smallest side of a split for which ample means ample."""
SERVED = {
    "FalconH1ForCausalLM": "every layer holds attention and a Mamba2 mixer, so one page serves both",
    "GraniteMoeHybridForCausalLM": "Mamba2 layers lie in stripes over the pages of the attention layers",
    "Qwen3_5ForCausalLM": "gated delta rule layers lie in stripes, too",
}
"""Architectures with an adapter for their recurrent layers, and why the page format fits."""
DELTA_RULE = ("Qwen3_5ForCausalLM",)
"""Those whose recurrent layers are not Mamba2."""
DENSE = ("GraniteMoeHybridForCausalLM",)
"""Those that may have experts, and are served without."""


def _organization(facts: Facts) -> str | None:
    if facts.mem not in ORGANIZATIONS:
        return f"--hybrid-mem {facts.mem} is unknown; legal: {', '.join(BUILT_ORGANIZATIONS)}."
    if facts.mem not in BUILT_ORGANIZATIONS:
        return f"--hybrid-mem {facts.mem} is not built yet; legal: {', '.join(BUILT_ORGANIZATIONS)}."
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
    if facts.mem == "D0":
        return f"--page-size {page} conflicts with --hybrid-mem D0; use --page-size {ours} or leave it out."
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


def _strategy(facts: Facts) -> str | None:
    value = facts.given("mamba_radix_cache_strategy")
    if value in ("auto", MAMBA_STRATEGY):
        return None
    return (
        f"--mamba-radix-cache-strategy {value} conflicts with --hybrid-mem {facts.mem}, which forks states; "
        f"use --mamba-radix-cache-strategy {MAMBA_STRATEGY} or leave it out."
    )


def _attention_share(facts: Facts) -> str | None:
    value = facts.given("hybrid_attention_share")
    if value is None:
        return None
    if facts.mem != "D0":
        return (
            f"--hybrid-attention-share {value} has no meaning with --hybrid-mem {facts.mem}: attention and "
            "state share one pool; leave it out, or use --hybrid-mem D0."
        )
    if isinstance(value, int | float) and 0 < value < 1:
        return None
    return f"--hybrid-attention-share {value!r} leaves D0 one pool: use a value between 0 and 1, like 0.5."


def _conv_slots(facts: Facts) -> str | None:
    value = facts.given("hybrid_conv_slots")
    if value is None:
        return None
    if facts.mem != "S2":
        return (
            f"--hybrid-conv-slots {value} has no meaning with --hybrid-mem {facts.mem}: only S2 packs conv "
            "states; leave it out, or use --hybrid-mem S2."
        )
    if value in CONV_SLOTS:
        return None
    return f"--hybrid-conv-slots {value} is unknown; legal: {', '.join(CONV_SLOTS)}."


def _backends(mem: str) -> tuple[str, ...]:
    return tuple(name for name in ATTENTION_BACKENDS if mem != "S0" or name not in PAGE_TABLE_BACKENDS)


def _given_backend(field: str) -> Rule:
    def check(facts: Facts) -> str | None:
        value = facts.given(field)
        if value in (None, *_backends(facts.mem)):
            return None
        return _backend_sentence(flag_of(field), value, facts)

    return Rule(field, check)


def _backend_sentence(flag: str, value: Any, facts: Facts) -> str:
    return (
        f"{flag} {value} is not supported with --hybrid-mem {facts.mem}: it brings its own page layout; "
        f"legal: {', '.join(_backends(facts.mem))}."
    )


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
    positive("hybrid_grid", "tokens", "512"),
    positive("hybrid_budget_bytes", "bytes", "8G"),
    Rule("hybrid_trace", _trace),
    Rule("hybrid_attention_share", _attention_share),
    Rule("hybrid_conv_slots", _conv_slots),
    Rule("page_size", _page_size),
    Rule("radix_cache_backend", _radix_backend),
    Rule("mamba_radix_cache_strategy", _strategy),
    unset("max_mamba_cache_size", "states and KV share one memory"),
    unset("max_total_tokens", "the memory is given in bytes by --hybrid-budget-bytes"),
    unset("mamba_full_memory_ratio", "states and KV share one memory"),
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
    only("radix_eviction_policy", ("lru",), "the grid tree has its own eviction order"),
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
    Rule("cuda_graph_backend_prefill", _prefill_graph),
    off("enable_memory_saver", "the pages are one allocation outside its regions"),
    off("kv_events_config", "the grid tree publishes no block events"),
    off("use_ray", "its workers load no plugins"),
)
"""Decided by the arguments alone; asked before stock steps and once more after them."""


def _architecture(facts: Facts) -> str | None:
    names = facts.model.hf_config.architectures or ["?"]
    if names[0] in SERVED:
        return None
    return (
        f"--hybrid-mem {facts.mem} does not serve {names[0]} (--model-path {facts.now('model_path')}); "
        f"served: {', '.join(SERVED)}; leave --hybrid-mem out for stock SGLang."
    )


def _experts(facts: Facts) -> str | None:
    """Granite-4 has one architecture for models with and without experts."""
    name = (facts.model.hf_config.architectures or ["?"])[0]
    count = getattr(facts.model.hf_config, "num_local_experts", 0)
    if name not in DENSE or not count:
        return None
    return (
        f"--hybrid-mem {facts.mem} is tested with {name} without experts, not with {count} "
        f"(num_local_experts, --model-path {facts.now('model_path')}): serve a dense one, or leave "
        "--hybrid-mem out for stock SGLang."
    )


def _attention_backend(facts: Facts) -> str | None:
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view

    prefill, decode = attention_backends_of(resolved_view(facts.record))
    for flag, value in (("--prefill-attention-backend", prefill), ("--decode-attention-backend", decode)):
        if value not in _backends(facts.mem):
            return _backend_sentence("--attention-backend" if prefill == decode else flag, value, facts)
    return None


def _layout(facts: Facts) -> str | None:
    """Grid, model and, where it is given, budget: laid out once here, before weights load, on a small budget.

    The scheduler lays out again (`build.config_from_budget`); without `--hybrid-budget-bytes` only it
    knows the bytes.
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.runtime_context import get_parallel

    from sglang_hybrid.engine import build
    from sglang_hybrid.engine.admission import longest_request

    rank = SimpleNamespace(
        model_config=facts.model,
        mambaish_config=mambaish_config(facts.model),
        kv_cache_dtype=KV_DTYPES[facts.now("kv_cache_dtype")] or facts.model.dtype,
        layer_info=SimpleNamespace(start_layer=0, end_layer=facts.model.num_hidden_layers),
    )
    try:
        with get_parallel().override(
            attn_tp_size=facts.now("tp_size") // facts.now("attn_dp_size"),
            tp_size=facts.now("tp_size"),
            # Says by which of the two sizes the heads of a gated delta rule are split.
            enable_cp_tp_group_sharing=facts.now("enable_cp_tp_group_sharing"),
        ):
            shape = build.state_shape(rank)
            model = shape.geometry(*build.layer_sets(rank))
        grid = facts.now("hybrid_grid") or native_grid(model, UNIT_TOKENS, build.scan_chunk(rank))
        ample = AMPLE_PIECES * model.arenas * (grid * model.kv_row_bytes + model.checkpoint_bytes)
        budget, options = facts.given("hybrid_budget_bytes"), organization_options(facts.record)
        if budget is None:
            options.pop("attention_share", None)  # of bytes that are not known yet, any share may do
        share = options.get("attention_share", DEFAULT_ATTENTION_SHARE)
        ample = int(ample / max(min(share, 1 - share), LEAST_SHARE))
        organization = factory.make_organization(
            facts.mem, model, grid, min(budget or ample, ample), **options
        )
        if facts.given("hybrid_kernels") == "flashinfer":
            if facts.model.hf_config.architectures[0] in DELTA_RULE:
                raise KernelError(
                    "its state update is Mamba2's and these layers go by the delta rule; use auto"
                )
            need_whole_heads(shape, organization)
        check_alignment(organization.layout(), shape, model)
        if longest_request(organization) < grid + HIT_MARGIN:
            return no_hit(facts, organization)
    except GeometryError as error:
        return f"{error} (--hybrid-mem {facts.mem}, --model-path {facts.now('model_path')})."
    except KernelError as error:
        return f"--hybrid-kernels flashinfer is not served with --hybrid-mem {facts.mem}: {error}."
    return None


def _final_page(facts: Facts) -> str | None:
    ours = page_size_for(facts.mem, facts.now("hybrid_grid"))
    page = facts.now("page_size")
    if page == ours:
        return None
    return (
        f"page size {page} was forced by another option, but --hybrid-mem {facts.mem} needs {ours}; "
        f"choose --attention-backend among {', '.join(_backends(facts.mem))}."
    )


def _graph_config(facts: Facts) -> str | None:
    config = facts.now("cuda_graph_config")
    backend = getattr(getattr(config, "prefill", None), "backend", "disabled")
    if backend == "disabled":
        return None
    return (
        f"cuda_graph_config prefill backend {backend} is not supported with --hybrid-mem {facts.mem}: a "
        'captured prefill replays fixed state slots; use {"prefill": {"backend": "disabled"}}.'
    )


def _post_capture(facts: Facts) -> str | None:
    from sglang.srt.arg_groups.overrides import post_capture_kv_sizing_planned

    if not post_capture_kv_sizing_planned(facts.record):
        return None
    return (
        f"SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1 is not supported with --hybrid-mem {facts.mem}: "
        "the pages are allocated once; unset it or set it to 0."
    )


MODEL_RULES: tuple[Rule, ...] = (
    Rule("model_path", _architecture),
    Rule("model_path", _experts),
    Rule("attention_backend", _attention_backend),
    Rule("page_size", _final_page),
    Rule("hybrid_grid", _layout),
    Rule("hybrid_budget_bytes", beyond_machine),
    Rule("cuda_graph_config", _graph_config),
    Rule("mem_fraction_static", _post_capture),
)
"""Need the model, the platform's choices or the end of resolution."""


def refuse_orphans(extras: dict[str, Any], record: Any) -> None:
    """Refuse our options without `--hybrid-mem`: they would silently do nothing."""
    for field, value in extras.items():
        shown = flag_of(field) if value is True else f"{flag_of(field)} {value}"
        refuse(
            f"{shown} has no effect without --hybrid-mem; add --hybrid-mem {RECOMMENDED}.",
            record,
        )


def refuse_input(record: Any) -> None:
    """Apply INPUT_RULES.  Raises Refusal with the first sentence."""
    _apply(INPUT_RULES, record)


def refuse_resolved(record: Any) -> None:
    """Apply MODEL_RULES, then INPUT_RULES again: a model's override may have switched something on."""
    exact = EXACT_RULES if record.hybrid_exact else ()
    _apply((*MODEL_RULES, *INPUT_RULES, *exact), record)


def _apply(rules: Iterable[Rule], record: Any) -> None:
    facts = Facts(record)
    for rule in rules:
        sentence = rule.check(facts)
        if sentence is not None:
            refuse(sentence, record)
