"""What needs the model, the platform's choices or the end of resolution; asked before weights load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from sglang_hybrid.engine.args import organization_class, organization_options, page_size_for
from sglang_hybrid.engine.budget_rules import HIT_MARGIN, beyond_machine, no_hit
from sglang_hybrid.engine.input_rules import KV_DTYPES, backend_sentence, backends
from sglang_hybrid.engine.rules import Facts, Rule
from sglang_hybrid.engine.served import architecture, kind_of, why_not_served
from sglang_hybrid.geometry import (
    GeometryError,
    ModelGeometry,
)
from sglang_hybrid.kernels import KernelError
from sglang_hybrid.kernels.flashinfer_state_update import need_whole_heads
from sglang_hybrid.models import FAMILIES
from sglang_hybrid.pools import factory
from sglang_hybrid.pools.arena import StateShape, check_alignment

AMPLE_PIECES = 64
"""Blocks and checkpoints an arena that no organization finds too small."""
LEAST_SHARE = 1e-4
"""Smallest side of a split for which ample means ample."""


def _architecture(facts: Facts) -> str | None:
    reason = why_not_served(facts.model)
    if reason is None:
        return None
    return (
        f"--hybrid-mem {facts.mem} does not serve {architecture(facts.model)} (--model-path "
        f"{facts.now('model_path')}): {reason}; leave --hybrid-mem out for stock SGLang, or serve one of "
        f"{', '.join(FAMILIES)}."
    )


def _attention_backend(facts: Facts) -> str | None:
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view

    prefill, decode = attention_backends_of(resolved_view(facts.record))
    for flag, value in (("--prefill-attention-backend", prefill), ("--decode-attention-backend", decode)):
        if value not in backends(facts):
            return backend_sentence("--attention-backend" if prefill == decode else flag, value, facts)
    return None


class RankState(NamedTuple):
    """State of one rank, and tokens of a chunk of the model's scan."""

    shape: StateShape
    model: ModelGeometry
    chunk: int


def rank_state(facts: Facts) -> RankState:
    """What a scheduler will find, from the arguments and config.json alone, of a model that is served.

    Raises GeometryError.
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.runtime_context import get_parallel

    from sglang_hybrid.engine import build

    rank = SimpleNamespace(
        model_config=facts.model,
        mambaish_config=mambaish_config(facts.model),
        kv_cache_dtype=KV_DTYPES[facts.now("kv_cache_dtype")] or facts.model.dtype,
        layer_info=SimpleNamespace(start_layer=0, end_layer=facts.model.num_hidden_layers),
    )
    with get_parallel().override(
        attn_tp_size=facts.now("tp_size") // facts.now("attn_dp_size"),
        tp_size=facts.now("tp_size"),
        # Says by which of the two sizes the heads of a gated delta rule are split.
        enable_cp_tp_group_sharing=facts.now("enable_cp_tp_group_sharing"),
    ):
        shape = build.state_shape(rank)
        return RankState(shape, shape.geometry(*build.layer_sets(rank)), build.scan_chunk(rank))


def _layout(facts: Facts) -> str | None:
    """Grid, model and, where it is given, budget: laid out once here, before weights load, on a small budget.

    The scheduler lays out again (`build.config_from_budget`); without `--hybrid-budget-bytes` only it
    knows the bytes.
    """
    from sglang_hybrid.engine.admission import longest_request

    try:
        shape, model, chunk = rank_state(facts)
        grid = facts.now("hybrid_grid") or factory.default_grid(facts.mem, model, chunk)
        ample = AMPLE_PIECES * model.arenas * (grid * model.kv_row_bytes + model.checkpoint_bytes)
        budget, options = facts.given("hybrid_budget_bytes"), organization_options(facts.record)
        for option in organization_class(facts.mem).options:
            if option.splits:
                if budget is None:
                    options.pop(option.name, None)
                part = options.get(option.name, option.default)
                ample = int(ample / max(min(part, 1 - part), LEAST_SHARE))
        organization = factory.make_organization(
            facts.mem, model, grid, min(budget or ample, ample), **options
        )
        if facts.given("hybrid_kernels") == "flashinfer":
            kind = kind_of(facts.model)
            if kind is None or not kind.flashinfer:
                raise KernelError(
                    f"it has a step for Mamba2 states and these layers are {kind and kind.name}; use auto"
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
        f"choose --attention-backend among {', '.join(backends(facts))}."
    )


def _graph_config(facts: Facts) -> str | None:
    config = facts.now("cuda_graph_config")
    decode = getattr(getattr(config, "decode", None), "backend", "full")
    if decode not in ("full", "disabled"):
        return (
            f"cuda_graph_config decode backend {decode} is not supported with --hybrid-mem {facts.mem}: only "
            'a graph of the whole step is tested; use {"decode": {"backend": "full"}}.'
        )
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
    Rule("attention_backend", _attention_backend),
    Rule("page_size", _final_page),
    Rule("hybrid_grid", _layout),
    Rule("hybrid_budget_bytes", beyond_machine),
    Rule("cuda_graph_config", _graph_config),
    Rule("mem_fraction_static", _post_capture),
)
