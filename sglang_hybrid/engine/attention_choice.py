"""A legal attention backend where the user named none and SGLang's own default would be refused.

S0's slots have gaps, which fa3, the default of a Hopper GPU, cannot address; trtllm_mha, the default of a
Blackwell GPU for most models, brings a page layout of its own.
"""

from __future__ import annotations

import logging

from sglang_hybrid.engine.input_rules import backends
from sglang_hybrid.engine.rules import Facts, flag_of

FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")

logger = logging.getLogger(__name__)


def choose_attention(facts: Facts) -> dict[str, str]:
    """Declarations, by field, in place of defaults that would be refused; empty where there are none.

    Only for a CUDA device: other platforms have a default that is legal, or none.  To be asked when
    SGLang's overrides for single models have spoken, and before it acts on a backend: it changes the page
    size for some, and disables decode graphs for others.
    """
    if facts.now("device") != "cuda":
        return {}
    legal = backends(facts)
    chosen: dict[str, str] = {}
    for field in FIELDS:
        default = facts.now(field) or (_stock_default(facts) if field == "attention_backend" else None)
        if facts.given(field) is not None or default in (None, *legal):
            continue
        chosen[field] = _first_choice(facts)
        logger.info(
            "%s is %s: SGLang's default here, %s, does not read these pages of --hybrid-mem %s; legal: %s.",
            flag_of(field),
            chosen[field],
            default,
            facts.mem,
            ", ".join(legal),
        )
    return chosen


def _stock_default(facts: Facts) -> str:
    """What SGLang will fill in for `attention_backend`, also where two others overrule it."""
    from sglang.srt.arg_groups.model_override_base import get_default_attn_backend, use_mla_backend

    name: str = get_default_attn_backend(facts.record, use_mla_backend(facts.record), facts.model)
    return name


def _first_choice(facts: Facts) -> str:
    """FlashInfer where SGLang itself would fall back to it, else Triton."""
    from sglang.srt.runtime_context import get_platform

    flashinfer = get_platform().has_flashinfer and not facts.model.has_attention_sinks
    return "flashinfer" if flashinfer else "triton"
