"""FlashInfer's state update where it cannot run: its signature and its checks, computed in float64.

The checks are those of `run_selective_state_update_stp` and `invokeSelectiveStateUpdate` in FlashInfer 0.7.2
(`csrc/selective_state_update.cu`, `mamba/kernel_selective_state_update_stp.cuh`), strides included.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional


def stand_in(calls: list[dict[str, Any]]) -> Callable[..., torch.Tensor]:
    """A function to call in place of `flashinfer.mamba.selective_state_update`; appends its arguments."""
    from flashinfer.mamba import selective_state_update

    signature = inspect.signature(selective_state_update)

    def update(*args: Any, **kwargs: Any) -> torch.Tensor:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        calls.append(bound.arguments)
        check(bound.arguments)
        return compute(bound.arguments)

    return update


def check(given: dict[str, Any]) -> None:
    """Assert what the C++ side checks."""
    state, x, dt, a, b, c = (given[name] for name in ("state", "x", "dt", "A", "B", "C"))
    slots, heads, dim, size = state.shape
    assert state.stride()[1:] == (dim * size, size, 1) and slots >= x.shape[0]
    assert x.shape[1:] == (heads, dim) and x.stride()[1:] == (dim, 1)
    assert dt.shape == x.shape and dt.stride()[1:] == (1, 0)
    assert a.shape == (heads, dim, size) and a.stride() == (1, 0, 0)
    assert b.shape == c.shape == (x.shape[0], b.shape[1], size) and heads % b.shape[1] == 0
    assert b.stride()[1:] == c.stride()[1:] == (size, 1)
    for name in ("D", "dt_bias"):
        if given[name] is not None:
            assert given[name].shape == (heads, dim) and given[name].stride() == (1, 0)
            assert given[name].dtype == dt.dtype, f"{name} must have the same dtype as dt"
    assert given["D"] is not None
    assert b.dtype == c.dtype == x.dtype
    if given["z"] is not None:
        assert given["z"].shape == x.shape and given["z"].stride()[1:] == (dim, 1)
        assert given["z"].dtype == x.dtype
    if given["out"] is not None:
        assert given["out"].shape == x.shape and given["out"].is_contiguous()
    source, target = given["state_batch_indices"], given["dst_state_batch_indices"]
    assert source.dtype == target.dtype and source.shape == target.shape == (x.shape[0],)
    for tensor in (x, b, c, given["z"]):
        if tensor is not None:
            assert tensor.stride(0) * tensor.element_size() % 16 == 0
            assert tensor.storage_offset() * tensor.element_size() % 16 == 0
    assert state.storage_offset() * state.element_size() % 16 == 0
    assert state.stride(0) * state.element_size() % 16 == 0 and dim % 16 == 0 and size % 32 == 0


def compute(given: dict[str, Any]) -> torch.Tensor:
    """What the kernel does; a row whose source is `pad_slot_id` starts from zeros and writes nothing."""
    state, x, target = given["state"], given["x"], given["dst_state_batch_indices"]
    out = torch.empty_like(x) if given["out"] is None else given["out"]
    ratio = state.shape[1] // given["B"].shape[1]
    for row, slot in enumerate(given["state_batch_indices"].tolist()):
        padding = slot == given["pad_slot_id"]
        old = torch.zeros_like(state[0]).double() if padding else state[slot].double()
        step = given["dt"][row].double()
        if given["dt_bias"] is not None:
            step = step + given["dt_bias"].double()
        if given["dt_softplus"]:
            step = functional.softplus(step)
        b, c = (given[name][row].double().repeat_interleave(ratio, 0)[:, None] for name in ("B", "C"))
        token = x[row].double()
        new = (step[..., None] * given["A"].double()).exp() * old + (step * token)[..., None] * b
        y = (new * c).sum(-1) + given["D"].double() * token
        out[row] = y if given["z"] is None else y * functional.silu(given["z"][row].double())
        if not padding:
            state[int(target[row])] = new.to(state.dtype)
    return out
