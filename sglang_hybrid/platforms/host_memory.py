"""Pinned host memory, which SGLang's LoRA asks for to copy faster to an accelerator: plain memory here.

Without an accelerator torch refuses to pin.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

PINNING = (
    "sglang.srt.lora.layers",
    "sglang.srt.lora.backend.torch_backend",
)
"""Modules that create pinned tensors and that a CPU can run."""


class Unpinned(ModuleType):
    """torch, whose factories create plain host memory."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return _plain(found) if name in ("tensor", "empty", "zeros", "ones", "arange", "full") else found


def _plain(factory: Any) -> Any:
    def create(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        tensor: torch.Tensor = factory(*args, **kwargs)
        return tensor

    return create


def _as_it_is(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return self


def install() -> None:
    """In each worker.  Idempotent."""
    torch.Tensor.pin_memory = _as_it_is  # type: ignore[method-assign, assignment]
    for name in PINNING:
        importlib.import_module(name).torch = Unpinned("torch")  # type: ignore[attr-defined]
