"""Which kernels run, chosen once by name and device: `auto`, `triton`, `flashinfer`, `torch`.

A route is a table of operations with one signature each, that of the torch reference.  Triton is
imported when it is chosen, so this package needs it on no CPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch

from sglang_hybrid.kernels.checkpoint_io import copy_checkpoints, fill_checkpoints
from sglang_hybrid.kernels.checks import KernelError
from sglang_hybrid.kernels.conv_update import conv_update
from sglang_hybrid.kernels.delta_update import delta_update
from sglang_hybrid.kernels.launch import interpreting
from sglang_hybrid.kernels.paged_conv import paged_conv
from sglang_hybrid.kernels.paged_delta_scan import paged_delta_scan
from sglang_hybrid.kernels.paged_scan import paged_scan
from sglang_hybrid.kernels.state_update import state_update

ROUTES = ("auto", "triton", "flashinfer", "torch")


class Route(NamedTuple):
    """Operations of one backend; see the functions of these names in `sglang_hybrid.kernels`."""

    name: str
    state_update: Callable[..., torch.Tensor]
    delta_update: Callable[..., torch.Tensor]
    conv_update: Callable[..., torch.Tensor]
    paged_conv: Callable[..., torch.Tensor]
    paged_scan: Callable[..., torch.Tensor]
    paged_delta_scan: Callable[..., torch.Tensor]
    copy_checkpoints: Callable[..., None]
    fill_checkpoints: Callable[..., None]


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
        return Route(
            "torch",
            state_update,
            delta_update,
            conv_update,
            paged_conv,
            paged_scan,
            paged_delta_scan,
            copy_checkpoints,
            fill_checkpoints,
        )
    from sglang_hybrid.kernels import (
        triton_checkpoint_io,
        triton_conv_update,
        triton_delta_update,
        triton_paged_conv,
        triton_paged_delta_scan,
        triton_paged_scan,
        triton_state_update,
    )

    route = Route(
        "triton",
        triton_state_update.state_update,
        triton_delta_update.delta_update,
        triton_conv_update.conv_update,
        triton_paged_conv.paged_conv,
        triton_paged_scan.paged_scan,
        triton_paged_delta_scan.paged_delta_scan,
        triton_checkpoint_io.copy_checkpoints,
        triton_checkpoint_io.fill_checkpoints,
    )
    if name != "flashinfer":
        return route
    from sglang_hybrid.kernels import flashinfer_state_update

    # FlashInfer has the state update alone; what it cannot serve its function refuses.
    return route._replace(name="flashinfer", state_update=flashinfer_state_update.state_update)
