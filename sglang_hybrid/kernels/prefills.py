"""Prefills of 8,192 tokens at the shapes of real models: whose chains of instructions are read."""

from __future__ import annotations

from sglang_hybrid.kernels.launch import Launch
from sglang_hybrid.kernels.samples import BF16, FALCON_H1_7B, FP32, Mixer, scan_launches

FALCON_H1_05B = Mixer(heads=24, dim=64, size=128, groups=1, kv_heads=2, kv_dim=64)
NEMOTRON_3_NANO = Mixer(heads=64, dim=64, size=128, groups=8, kv_heads=2, kv_dim=128)


def ranks(name: str, mixer: Mixer, *parts: int) -> dict[str, Mixer]:
    """The layer on one rank of 1 and of `parts`, as SGLang divides it: a rank has one group at least."""
    return {
        f"{name} TP{part}": mixer._replace(
            heads=mixer.heads // part,
            groups=max(1, mixer.groups // part),
            kv_heads=max(1, mixer.kv_heads // part),
        )
        for part in (1, *parts)
    }


PREFILLS = {
    **ranks("Falcon-H1-0.5B", FALCON_H1_05B, 4, 8),
    **ranks("Falcon-H1-7B", FALCON_H1_7B, 4, 8),
    **ranks("Nemotron-3-Nano-30B", NEMOTRON_3_NANO, 4, 8),
}
"""Mamba2 layers whose prefill of `PREFILL_TOKENS` is compared with the stock kernels'."""
PREFILL_TOKENS = 8192


def prefill_launches(mixer: Mixer) -> tuple[Launch, ...]:
    """The launches of a layer of `PREFILLS` for one sequence, state fp32 and inputs bf16, as on a GPU."""
    _, launches = scan_launches(mixer, "S1", FP32, BF16, PREFILL_TOKENS)
    return launches
