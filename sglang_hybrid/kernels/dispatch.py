"""Which kernels run, chosen once by name and device: `auto`, `triton`, `flashinfer`, `torch`.

A route is a table of operations with one signature each, that of the torch reference.  The recurrences come
from the registry of models: operation `NAME` is the function `NAME` of module `NAME`, and of `triton_NAME`.
Triton is imported when it is chosen, so this package needs it on no CPU.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sglang_hybrid.kernels.checks import KernelError
from sglang_hybrid.kernels.launch import interpreting
from sglang_hybrid.models.kinds import KINDS

ROUTES = ("auto", "triton", "flashinfer", "torch")

SHARED = {
    "conv_update": "conv_update",
    "paged_conv": "paged_conv",
    "copy_checkpoints": "checkpoint_io",
    "fill_checkpoints": "checkpoint_io",
    "fill_rows": "row_fill",
}
"""Operations that no kind of layer brings, and the modules that they are in."""


def operations() -> dict[str, str]:
    """Every operation of a route and its module (Triton's: with `triton_` before it)."""
    steps = [name for kind in KINDS.values() for name in (kind.step, kind.scan) if name]
    return {**SHARED, **{name: name for name in steps}}


@dataclass(frozen=True)
class Route:
    """Operations of one backend, as attributes; see the functions of these names in this package."""

    name: str
    table: Mapping[str, Callable[..., Any]]

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        try:
            return self.__dict__["table"][operation]
        except KeyError:
            raise AttributeError(f"route has no operation {operation!r}") from None


def _route(name: str, prefix: str) -> Route:
    modules = {
        module: importlib.import_module(f"{__package__}.{prefix}{module}") for module in operations().values()
    }
    return Route(name, {name: getattr(modules[module], name) for name, module in operations().items()})


def why_not(name: str, device: torch.device | str) -> str | None:
    """Why the route called `name` does not run on `device`, with a legal choice; None where it does."""
    kind = torch.device(device).type
    if name not in ROUTES:
        return f"kernels are {name!r}, needs one of {', '.join(ROUTES)}"
    if name == "torch" or (name == "auto" and kind != "cuda"):
        return None
    if name == "flashinfer" and kind != "cuda":
        return f"kernels 'flashinfer' run on a CUDA device, not on {kind}: use 'torch'"
    if name == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        return "kernels 'flashinfer' need the package flashinfer-python, which is not installed; use 'triton'"
    if importlib.util.find_spec("triton") is None:
        return f"kernels {name!r} need the package triton, which is not installed; use 'torch'"
    if kind != "cuda" and not interpreting():
        return (
            f"kernels 'triton' run on a CUDA device, not on {kind}: use 'torch', or set TRITON_INTERPRET=1 "
            "to interpret them"
        )
    return None


def choose(name: str, device: torch.device | str) -> Route:
    """The route called `name` for tensors on `device`; `auto` is triton on CUDA and torch elsewhere.

    Raises `KernelError`, with the reason and a legal choice, for an unknown name and for a route that does
    not run there.
    """
    if reason := why_not(name, device):
        raise KernelError(reason)
    kind = torch.device(device).type
    if name == "torch" or (name == "auto" and kind != "cuda"):
        return _route("torch", "")
    route = _route("triton", "triton_")
    if name != "flashinfer":
        return route
    from sglang_hybrid.kernels import flashinfer_state_update

    # FlashInfer has the state update alone; what it cannot serve its function refuses.
    return Route(name, {**route.table, "state_update": flashinfer_state_update.state_update})
