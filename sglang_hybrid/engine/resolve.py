"""Three steps of SGLang's argument resolution, wrapped: derive what the hybrid memory needs from the user's
input, adapt it to model and device, then refuse.

Registered by `plugin.py` with `sglang.srt.arg_groups.resolution_hooks.register_resolution_hook`; all
run in the parent, once, before a child is started or a weight is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_hybrid.engine import refusals, rules, seams
from sglang_hybrid.engine.args import (
    MAMBA_STRATEGY,
    RADIX_BACKEND,
    extra_fields,
    grid_or_default,
    organization,
    organization_class,
    organization_options,
    page_size_for,
)
from sglang_hybrid.engine.attention_choice import choose_attention
from sglang_hybrid.engine.model_rules import rank_state
from sglang_hybrid.engine.served import untested
from sglang_hybrid.geometry import GRID_STEP, GeometryError
from sglang_hybrid.pools.factory import default_grid

SOURCE = "sglang_hybrid"
Step = Callable[[Any], None]

logger = logging.getLogger(__name__)


def legal_chunk(chunk: int, page: int) -> int:
    """The nearest `chunked_prefill_size` in whole pages, at least one; `chunk` <= 0 means no chunking.

    The stock check (`check_server_args` of `validation_hook`) asks for whole pages.  Ours would not
    need them: a prefill leaves a checkpoint at every boundary it passes, wherever it ends.
    """
    return chunk if chunk <= 0 else max(page, chunk // page * page)


def derive(server_args: Any, previous: Step) -> None:
    """Step `handle_missing_default_values`: refuse what the user's input alone condemns, derive the rest.

    Raises:
        Refusal: one sentence for the user.
        SeamError: this SGLang is not the one the adapters were written against.
    """
    previous(server_args)
    mem = organization(server_args)
    if mem is None:
        refusals.refuse_orphans(extra_fields(server_args), server_args)
        return
    # Early, since stock steps in between have messages of their own for half of these.
    refusals.refuse_input(server_args)
    rules.speak_plainly(server_args)  # for what the next line may raise
    seams.check_parent()

    from sglang.srt.arg_groups.overrides import declare_resolution

    _ignore(mem, server_args)
    grid = grid_or_default(mem, server_args.hybrid_grid)
    declare_resolution(
        server_args,
        SOURCE,
        hybrid_grid=grid,
        hybrid_kernels=server_args.hybrid_kernels or "auto",
        page_size=page_size_for(mem, grid),
        radix_cache_backend=RADIX_BACKEND,
        # Its warm-up clears stock state slots and replays fixed indices.
        disable_prefill_cuda_graph=True,
    )
    # Now for what the user gave, since the memory heuristic reads it; SGLang's default follows later.
    _fit_chunk(server_args)


SLOT_POOL = {
    "mamba_full_memory_ratio": None,
    "max_mamba_cache_size": None,
    # Explicit: at "auto" stock would pick no_buffer together with disable_overlap_schedule.
    "mamba_radix_cache_strategy": MAMBA_STRATEGY,
}
"""Fields that size SGLang's own pool of state slots, and what they are here, where there is no such pool."""

STATE_KERNELS = {
    "mamba_backend": "triton",
    "linear_attn_backend": "triton",
    "linear_attn_decode_backend": "triton",
    "linear_attn_prefill_backend": "triton",
    "linear_attn_verify_backend": "triton",
}
"""Fields that choose kernels for SGLang's own state slots, and what they are here: stock classes that ours
derive from load no more than they need, and the models call them as they do in our tests."""


def _ignore(mem: str, server_args: Any) -> None:
    """Take back what the user gave of `SLOT_POOL` and `STATE_KERNELS`, with one warning each that says what
    counts instead.  They stand in nearly every published command for a hybrid model."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    own = organization_class(mem).options
    split = "".join(f", split by {option.flag}" for option in own if option.splits)
    for fields, instead in (
        (
            SLOT_POOL,
            "recurrent states live in one memory with the KV: its size is --hybrid-budget-bytes, by default "
            f"what --mem-fraction-static leaves{split}",
        ),
        (STATE_KERNELS, "paged states have kernels of their own: --hybrid-kernels chooses among them"),
    ):
        given = {name: getattr(server_args, name) for name in fields}
        ignored = [
            f"{rules.flag_of(name)} {value}"
            for name, value in given.items()
            if value not in (None, "auto", fields[name])
        ]
        if ignored:
            logger.warning("Ignored: %s. With --hybrid-mem %s %s.", ", ".join(ignored), mem, instead)
        declare_resolution(server_args, SOURCE, **fields)


def adapt(server_args: Any, previous: Step) -> None:
    """Step `handle_attention_backend_compatibility`: what follows from the model and the device.

    SGLang's overrides for single models have spoken, and it has not yet acted on an attention backend.
    """
    if organization(server_args) is not None:
        from sglang.srt.arg_groups.overrides import declare_resolution

        facts = rules.Facts(server_args)
        refusals.refuse_model(facts)
        if facts.given("page_size") is None:
            grid = facts.given("hybrid_grid") or _default_grid(facts)
            # A model's override may have set the page that its own default backend wants.
            page = page_size_for(facts.mem, grid)
            declare_resolution(server_args, SOURCE, hybrid_grid=grid, page_size=page)
        # Not every backend reads every page.
        declare_resolution(server_args, SOURCE, **choose_attention(facts))
    previous(server_args)


def _default_grid(facts: rules.Facts) -> int | None:
    """The grid of a user who named none, and no page size; one line where it is not the usual default."""
    usual = grid_or_default(facts.mem, None)
    if usual is None:
        return None
    try:
        state = rank_state(facts)
        grid = default_grid(facts.mem, state.model, state.chunk, **organization_options(facts.record))
    except GeometryError:
        return usual  # `validate` says why not
    if grid != usual:
        logger.info(
            "--hybrid-grid is %d: the smallest from %d up, in steps of %d, whose pages hold this model's "
            "state with --hybrid-mem %s.",
            grid,
            usual,
            GRID_STEP,
            facts.mem,
        )
    return grid


def validate(server_args: Any, previous: Step) -> None:
    """Step `handle_other_validations`: model, backends and derived values are known by now.

    Raises:
        Refusal: one sentence for the user.
    """
    previous(server_args)
    if organization(server_args) is None:
        return
    refusals.refuse_resolved(server_args)
    if warning := untested(rules.Facts(server_args).model):
        logger.warning(warning)
    _fit_chunk(server_args)


def _fit_chunk(server_args: Any) -> None:
    """Declare a legal `chunked_prefill_size`; one warning with both numbers when it had to change."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    view = resolving_view(server_args)
    chunk = view.chunked_prefill_size
    legal = None if chunk is None else legal_chunk(chunk, view.page_size)
    if legal == chunk:
        return
    logger.warning(
        "chunked_prefill_size changed from %d to %d: it must be a multiple of the page size of %d tokens.",
        chunk,
        legal,
        view.page_size,
    )
    declare_resolution(server_args, SOURCE, chunked_prefill_size=legal)


def allow_no_buffer(original: Callable[[Any, str], None], view: Any, model_arch: str) -> None:
    """Around `validate_mamba_no_buffer`: pages above one token and overlap are safe here.

    Stock forbids both, since its one live slot may already hold the next step's state when the
    previous step is published; a forked page is never written again.
    """
    if organization(view) is None:
        original(view, model_arch)
