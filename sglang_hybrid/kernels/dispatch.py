"""Which kernels run, chosen once by name and device: `auto`, `triton`, `flashinfer`, `torch`.

A route is a table of operations with one signature each, that of the torch reference.  Triton is
imported when it is chosen, so this package needs it on no CPU.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import NamedTuple

import torch

from sglang_hybrid.kernels.checkpoint_io import copy_checkpoints, fill_checkpoints
from sglang_hybrid.kernels.checks import KernelError
from sglang_hybrid.kernels.conv_update import conv_update
from sglang_hybrid.kernels.paged_scan import paged_scan
from sglang_hybrid.kernels.state_update import state_update

ROUTES = ("auto", "triton", "flashinfer", "torch")


class Route(NamedTuple):
    """Operations of one backend; see the functions of these names in `sglang_hybrid.kernels`."""

    name: str
    state_update: Callable[..., torch.Tensor]
    conv_update: Callable[..., torch.Tensor]
    paged_scan: Callable[..., torch.Tensor]
    copy_checkpoints: Callable[..., None]
    fill_checkpoints: Callable[..., None]


def choose(name: str, device: torch.device | str) -> Route:
    """The route called `name` for tensors on `device`; `auto` is triton on CUDA and torch elsewhere.

    Raises `KernelError`, with the reason and a legal choice, for an unknown name and for a route that does
    not run there.
    """
    kind = torch.device(device).type
    if name not in ROUTES:
        raise KernelError(f"kernels are {name!r}, needs one of {', '.join(ROUTES)}")
    if name == "flashinfer":
        raise KernelError(
            "kernels 'flashinfer' are not built yet: FlashInfer's state update knows no member pages and "
            "would need one launch a member; use 'triton'"
        )
    if name == "torch" or (name == "auto" and kind != "cuda"):
        return Route("torch", state_update, conv_update, paged_scan, copy_checkpoints, fill_checkpoints)
    if importlib.util.find_spec("triton") is None:
        raise KernelError("kernels 'triton' need the package triton, which is not installed; use 'torch'")
    if kind != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise KernelError(
            f"kernels 'triton' run on a CUDA device, not on {kind}: use 'torch', or set TRITON_INTERPRET=1 "
            "to interpret them"
        )
    from sglang_hybrid.kernels import (
        triton_checkpoint_io,
        triton_conv_update,
        triton_paged_scan,
        triton_state_update,
    )

    return Route(
        "triton",
        triton_state_update.state_update,
        triton_conv_update.conv_update,
        triton_paged_scan.paged_scan,
        triton_checkpoint_io.copy_checkpoints,
        triton_checkpoint_io.fill_checkpoints,
    )
