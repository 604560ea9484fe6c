"""Stock SGLang on a machine without an accelerator: an out-of-tree platform with its own defaults.

Entry point (group `sglang.srt.platforms`): `sglang_hybrid_cpu = sglang_hybrid.platforms.cpu:activate`.
SGLang imports and calls every platform plugin on every machine, so `activate` looks before it
imports anything heavy, and answers None wherever another platform should serve.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

PLATFORM_CLASS = "sglang_hybrid.platforms.cpu_platform:HybridCpuPlatform"
ENGINE_SWITCH = "SGLANG_USE_CPU_ENGINE"
"""SGLang's own CPU engine; whoever sets it wants that one."""

ACCELERATORS = ("cuda", "xpu", "npu", "musa", "hpu", "mtia")
"""Torch device modules to ask; ROCm answers as cuda.  Some exist only with their extension loaded."""

logger = logging.getLogger(__name__)


def _available(module: Any) -> bool:
    """Whether a torch device module sees a device; one that cannot even answer has none to serve with."""
    try:
        return bool(module is not None and module.is_available())
    except Exception:  # a driver that raises here is a driver that SGLang could not use either
        logger.debug("device query of %s failed", module, exc_info=True)
        return False


def visible_accelerator() -> str | None:
    """Name of an accelerator that torch can see, or None.  Only asks; creates no device context."""
    for name in ACCELERATORS:
        if _available(getattr(torch, name, None)):
            return name
    if _available(torch.backends.mps):
        return "mps"
    return None


def activate() -> str | None:
    """The platform's class for SGLang's discovery, or None when this machine is not ours to serve.

    None where an accelerator is visible or where the user chose SGLang's own CPU engine.  Source
    symbol: `_resolve_platform` of `sglang.srt.platforms`.
    """
    if os.environ.get(ENGINE_SWITCH, "0") == "1" or visible_accelerator() is not None:
        return None
    return PLATFORM_CLASS
