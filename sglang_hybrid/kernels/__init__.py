"""Kernels: torch and Triton, never sglang, so that they run wherever torch does.

One file an operation.  The functions named here are the `torch` route: device-agnostic, fp32 sums, no
wait for the device in the decode operations; it is also the reference of every other route.  `choose`
gives the operations of a route; Triton is imported only then (`triton_*`, one file an operation).
"""

from __future__ import annotations

from sglang_hybrid.kernels.causal_conv import causal_conv
from sglang_hybrid.kernels.checkpoint_io import (
    ArenaTable,
    CheckpointSpans,
    copy_checkpoints,
    fill_checkpoints,
)
from sglang_hybrid.kernels.checks import KernelError
from sglang_hybrid.kernels.conv_update import conv_update
from sglang_hybrid.kernels.delta_rule import DeltaInputs, delta_scan, gates
from sglang_hybrid.kernels.delta_update import delta_update
from sglang_hybrid.kernels.dispatch import ROUTES, Route, choose, why_not
from sglang_hybrid.kernels.paged_conv import paged_conv
from sglang_hybrid.kernels.paged_delta_scan import paged_delta_scan
from sglang_hybrid.kernels.paged_scan import paged_scan
from sglang_hybrid.kernels.row_fill import Runs, fill_rows
from sglang_hybrid.kernels.segments import Segments, choose_chunk, cut_segments, plan_segments
from sglang_hybrid.kernels.ssd_scan import ssd_scan
from sglang_hybrid.kernels.state_io import (
    member_runs,
    read_states,
    read_windows,
    write_states,
    write_windows,
)
from sglang_hybrid.kernels.state_update import state_update
from sglang_hybrid.kernels.upload import upload, upload_lists

__all__ = [
    "ROUTES",
    "ArenaTable",
    "CheckpointSpans",
    "DeltaInputs",
    "KernelError",
    "Route",
    "Runs",
    "Segments",
    "causal_conv",
    "choose",
    "choose_chunk",
    "conv_update",
    "copy_checkpoints",
    "cut_segments",
    "fill_checkpoints",
    "fill_rows",
    "delta_scan",
    "delta_update",
    "gates",
    "member_runs",
    "paged_conv",
    "paged_delta_scan",
    "paged_scan",
    "plan_segments",
    "read_states",
    "read_windows",
    "ssd_scan",
    "state_update",
    "upload",
    "upload_lists",
    "why_not",
    "write_states",
    "write_windows",
]
