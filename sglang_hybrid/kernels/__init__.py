"""Kernels: torch only, never sglang, so that they run wherever torch does.

One file an operation.  This is the `torch` route: device-agnostic, fp32 sums, no wait for the
device in the decode operations; it is also the reference of every other route.
"""

from __future__ import annotations

from sglang_hybrid.kernels.causal_conv import causal_conv
from sglang_hybrid.kernels.checks import KernelError
from sglang_hybrid.kernels.conv_update import conv_update
from sglang_hybrid.kernels.segments import Segments, choose_chunk, plan_segments
from sglang_hybrid.kernels.ssd_scan import ssd_scan
from sglang_hybrid.kernels.state_io import (
    member_runs,
    read_states,
    read_windows,
    write_states,
    write_windows,
)
from sglang_hybrid.kernels.state_update import state_update

__all__ = [
    "KernelError",
    "Segments",
    "causal_conv",
    "choose_chunk",
    "conv_update",
    "member_runs",
    "plan_segments",
    "read_states",
    "read_windows",
    "ssd_scan",
    "state_update",
    "write_states",
    "write_windows",
]
