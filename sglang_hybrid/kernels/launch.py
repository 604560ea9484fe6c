"""A Triton launch as a value: what to run, over which grid, with which arguments.

Operations plan a launch and run it; the check compiles the same plan without a GPU, the interpreter
counts the bytes it moves.  So what is checked is what runs.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

WORD_BYTES = 16
"""Widest access of one thread."""


class Launch(NamedTuple):
    """`kernel` is a `triton.jit` function; `args` name every parameter, constants included."""

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    warps: int
    stages: int = 3
    """Depth of software pipelining, where a kernel has loops over loads."""
    fused: bool = True
    """Whether the compiler may round a product and its sum once.  Kernels that have to agree to the bit
    forbid it: it might fuse in one what it does not in the other."""
    trips: tuple[int, ...] = ()
    """How often the longest program goes through each of its loops, in the order in which they begin; for an
    inner loop, each time the outer one comes by."""

    @property
    def options(self) -> dict[str, Any]:
        """Compiler options."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": self.fused}

    def run(self) -> None:
        self.kernel[self.grid](**self.args, **self.options)


def power_of_two(size: int) -> int:
    """Smallest power of two that is at least `size` (at least 1)."""
    return 1 << (size - 1).bit_length()


def vector(itemsize: int, *strides: int) -> int:
    """Elements of the widest access (16 bytes at most) that keeps every one of `strides` (elements) aligned.

    A kernel gets a stride as stride // vector and multiplies it again: so the compiler sees how far the
    product divides, also for strides that are multiples of 8 elements and not of 16.
    """
    size = WORD_BYTES // itemsize
    while any(stride % size for stride in strides):
        size //= 2
    return size


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, which multiplies bf16 operands of a dot as integers."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def taken(kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Those of `args` that the kernel has parameters for."""
    return {name: args[name] for name in kernel.arg_names}
