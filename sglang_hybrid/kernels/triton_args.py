"""Arguments that the Triton kernels of a recurrent layer share: state, maps, inputs, weights and strides."""

from __future__ import annotations

from typing import Any

import torch

from sglang_hybrid.kernels.delta_rule import DeltaInputs
from sglang_hybrid.kernels.launch import interpreting, vector
from sglang_hybrid.kernels.segments import Segments
from sglang_hybrid.kernels.ssd_scan import NO_LIMIT
from sglang_hybrid.kernels.triton_parts import OPERANDS
from sglang_hybrid.kernels.triton_rows import in_one_page, need_packed_rows
from sglang_hybrid.pools.views import StateView


def strided(name: str, tensor: torch.Tensor | None, *axes: str) -> dict[str, Any]:
    """`tensor` and its strides, `name_axis` each; None becomes a constant whose branch is not compiled."""
    strides = (0,) * len(axes) if tensor is None else tensor.stride()
    return {name: tensor} | {f"{name}_{axis}": stride for axis, stride in zip(axes, strides, strict=True)}


def state_args(view: StateView, block: int, src_map: torch.Tensor, dst_map: torch.Tensor) -> dict[str, Any]:
    """Where the rows of a layer lie, for programs of `block` rows."""
    need_packed_rows(view)
    rows = view.rows
    unit = vector(rows.element_size(), rows.stride(0), view.state_size)
    return {
        "rows": rows, "src_map": src_map, "dst_map": dst_map,
        "first_row": view.first_row, "page_units": rows.stride(0) // unit,
        "src_stride": src_map.stride(0), "src_member": src_map.stride(1),
        "dst_stride": dst_map.stride(0), "dst_member": dst_map.stride(1),
        "DIM": view.head_dim, "SIZE": view.state_size,
        "PER_PAGE": view.rows_per_page, "ONE_PAGE": in_one_page(view, block), "UNIT": unit, "BLOCK": block,
    }  # fmt: skip


def scan_args(segments: Segments, inputs: torch.dtype) -> dict[str, Any]:
    """The pieces of a ragged batch, and how a program multiplies matrices of `inputs`."""
    return {
        "piece_start": segments.piece_start, "piece_length": segments.piece_length,
        "piece_emission": segments.piece_emission, "first_piece": segments.first_piece,
        "sequences": segments.sequences, "pieces": segments.pieces,
        "LENGTH": segments.chunk,
        # Three products of tf32 make one of nearly fp32; 16-bit operands do not ask.
        "OPERAND": OPERANDS[inputs], "PRECISION": "tf32x3",
        "CARRIER": OPERANDS[torch.float32 if interpreting() else inputs],
    }  # fmt: skip


def layer_args(
    view: StateView,
    block: int,
    src_map: torch.Tensor,
    dst_map: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    y: torch.Tensor,
    *,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
) -> dict[str, Any]:
    """Named arguments for programs of `block` rows; `y` contiguous, the rest as in the operation."""
    return {
        **state_args(view, block, src_map, dst_map),
        **strided("x", x, "stride", "head", "dim"), **strided("dt", dt, "stride", "head"),
        **strided("a", a, "head"), **strided("b", b, "stride", "group", "size"),
        **strided("c", c, "stride", "group", "size"),
        **strided("d", d if d is None or d.dim() == 2 else d[:, None].expand(x.shape[1:]), "head", "dim"),
        **strided("z", z, "stride", "head", "dim"), **strided("dt_bias", dt_bias, "head"),
        "y": y, "y_stride": y.stride(0), "dt_low": float(dt_limit[0]), "dt_high": float(dt_limit[1]),
        "RATIO": view.heads // b.shape[1], "SOFTPLUS": dt_softplus, "LIMIT": dt_limit != NO_LIMIT,
    }  # fmt: skip


def delta_args(
    view: StateView,
    block: int,
    src_map: torch.Tensor,
    dst_map: torch.Tensor,
    inputs: DeltaInputs,
    y: torch.Tensor,
) -> dict[str, Any]:
    """`layer_args` of a gated delta rule layer."""
    # One decay a head is one for all channels, a stride of zero.
    a, dt_bias = inputs.a, inputs.dt_bias
    if not inputs.by_channel:
        a, dt_bias = (x[..., None].expand(*x.shape, view.state_size) for x in (a, dt_bias))
    return {
        **state_args(view, block, src_map, dst_map),
        **strided("q", inputs.q, "stride", "group", "size"),
        **strided("k", inputs.k, "stride", "group", "size"),
        **strided("v", inputs.v, "stride", "head", "dim"),
        **strided("a", a, "stride", "head", "size"), **strided("b", inputs.b, "stride", "head"),
        **strided("a_log", inputs.a_log, "head"), **strided("dt_bias", dt_bias, "head", "size"),
        "CHANNELS": inputs.by_channel, "BOUND": inputs.lower_bound,
        "y": y, "y_stride": y.stride(0), "RATIO": view.heads // inputs.k.shape[1],
    }  # fmt: skip
