"""Arguments that the Triton kernels of a recurrent layer share: state, maps, inputs, weights and strides."""

from __future__ import annotations

from typing import Any

import torch

from sglang_hybrid.kernels.launch import vector
from sglang_hybrid.kernels.ssd_scan import NO_LIMIT
from sglang_hybrid.kernels.triton_rows import in_one_page, need_packed_rows
from sglang_hybrid.pools.views import StateView


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
    """Named arguments for programs of `block` rows; `y` contiguous, the rest as in the operation.

    A parameter that is None becomes a constant whose branch is not compiled; its strides are then idle.
    """
    need_packed_rows(view)
    rows = view.rows
    heads, dim = x.shape[1:]
    unit = vector(rows.element_size(), rows.stride(0), view.state_size)
    d_strides = (0, 0) if d is None else (d.stride(0), d.stride(1) if d.dim() == 2 else 0)
    z_strides = (0, 0, 0) if z is None else z.stride()
    return {
        "rows": rows, "src_map": src_map, "dst_map": dst_map,
        "x": x, "dt": dt, "a": a, "b": b, "c": c, "d": d, "z": z, "dt_bias": dt_bias, "y": y,
        "first_row": view.first_row, "page_units": rows.stride(0) // unit,
        "src_stride": src_map.stride(0), "src_member": src_map.stride(1),
        "dst_stride": dst_map.stride(0), "dst_member": dst_map.stride(1),
        "x_stride": x.stride(0), "x_head": x.stride(1), "x_dim": x.stride(2),
        "dt_stride": dt.stride(0), "dt_head": dt.stride(1), "a_head": a.stride(0),
        "b_stride": b.stride(0), "b_group": b.stride(1), "b_size": b.stride(2),
        "c_stride": c.stride(0), "c_group": c.stride(1), "c_size": c.stride(2),
        "d_head": d_strides[0], "d_dim": d_strides[1],
        "z_stride": z_strides[0], "z_head": z_strides[1], "z_dim": z_strides[2],
        "bias_head": 0 if dt_bias is None else dt_bias.stride(0),
        "y_stride": y.stride(0), "dt_low": float(dt_limit[0]), "dt_high": float(dt_limit[1]),
        "DIM": dim, "SIZE": view.state_size, "RATIO": heads // b.shape[1],
        "PER_PAGE": view.rows_per_page, "ONE_PAGE": in_one_page(view, block), "UNIT": unit,
        "SOFTPLUS": dt_softplus, "LIMIT": dt_limit != NO_LIMIT, "BLOCK": block,
    }  # fmt: skip
