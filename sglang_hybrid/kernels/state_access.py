"""Every access of a Triton kernel to recurrent state in pages, lines or checkpoints, and nothing else but
what the first launch of `paged_delta_scan` hands to the second.

One file, so that the check can tell these accesses from others in machine code, by source file.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_state(pointers: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Elements at `pointers`, zero where `mask` is false: there no address is touched."""
    return tl.load(pointers, mask=mask, other=0)


@triton.jit
def write_state(pointers: tl.tensor, values: tl.tensor, mask: tl.tensor) -> None:
    """Write `values`, rounded to the stored dtype, where `mask` is true."""
    tl.store(pointers, values, mask=mask)
