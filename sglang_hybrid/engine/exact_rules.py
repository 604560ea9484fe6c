"""What `--hybrid-exact` refuses beside the other rules: all that was not proven exact."""

from __future__ import annotations

from sglang_hybrid.engine.rules import Facts, Rule, flag_of
from sglang_hybrid.engine.served import architecture
from sglang_hybrid.models import tested

ATTENTION = "torch_native"


def _platform(facts: Facts) -> str | None:
    from sglang.srt.platforms import current_platform

    from sglang_hybrid.platforms.cpu_platform import HybridCpuPlatform

    device = facts.now("device")
    if device == "cpu" and isinstance(current_platform, HybridCpuPlatform):
        return None
    where = "SGLang's own CPU engine" if device == "cpu" else device
    return (
        f"--hybrid-exact is not proven on {where}, only on the CPU platform of this package; leave it out, "
        "and compare runs with `sglang-hybrid verify`."
    )


def _architecture(facts: Facts) -> str | None:
    name, proven = architecture(facts.model), tested(exact=True)
    if name in proven:
        return None
    return f"--hybrid-exact is not proven for {name}; proven: {', '.join(proven)}; leave it out."


def _attention(facts: Facts) -> str | None:
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view

    for backend in attention_backends_of(resolved_view(facts.record)):
        if backend != ATTENTION:
            return (
                f"--attention-backend {backend} is not supported with --hybrid-exact, which brings its own "
                f"arithmetic; legal: {ATTENTION}."
            )
    return None


def _need(field: str, legal: tuple[object, ...], why: str) -> Rule:
    def check(facts: Facts) -> str | None:
        value = facts.now(field)
        if value in legal:
            return None
        shown = flag_of(field) if value is True else f"{flag_of(field)} {value}"
        choice = "leave it out" if legal[0] in (None, False) else f"use {flag_of(field)} {legal[0]}"
        return f"{shown} is not supported with --hybrid-exact: {why}; {choice}."

    return Rule(field, check)


EXACT_RULES: tuple[Rule, ...] = (
    Rule("device", _platform),
    Rule("model_path", _architecture),
    Rule("attention_backend", _attention),
    _need("hybrid_kernels", ("auto", "torch"), "only its own steps are proven"),
    _need("tp_size", (1,), "the sum over ranks is not proven"),
    _need("quantization", (None,), "quantized products are not proven"),
    _need("kv_cache_dtype", ("auto", "bf16", "bfloat16"), "rounded KV is not proven"),
    _need("enable_lora", (None, False), "adapters are not proven"),
)
"""Asked last, when the platform and all other choices are known."""
