"""Bytes of state that a launch moves, counted from the kernel's own addresses in the interpreter.

For every program and direction: the bytes asked for, or the 32-byte sectors that they touch where those
are more.  So reading twice counts twice, also from another program, and so does using half a sector.
The interpreter must be on (`TRITON_INTERPRET=1`) before Triton is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from sglang_hybrid.kernels.launch import Launch

SECTOR = 32


class Traffic(NamedTuple):
    """`state`: bytes of state moved; `other`: bytes of everything else asked for, before any cache."""

    state: int
    other: int


class _Counter:
    def __init__(self, state: tuple[torch.Tensor, ...]) -> None:
        self.ranges = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in state]
        self.program: tuple[int, ...] | None = None
        self.asked: dict[str, int] = {}
        self.sectors: dict[str, list[np.ndarray]] = {}
        self.state = self.other = 0

    def access(self, program: tuple[int, ...], direction: str, pointers: Any, mask: Any) -> None:
        if program != self.program:
            self.settle()
            self.program = program
        size = pointers.get_element_ty().primitive_bitwidth // 8
        everywhere, wanted = np.broadcast_arrays(pointers.data, mask.data)
        addresses = everywhere[wanted.astype(bool)]  # a mask may be of ints
        of_state = np.zeros(addresses.shape, dtype=bool)
        for low, high in self.ranges:
            of_state |= (addresses >= low) & (addresses < high)
        self.other += int((~of_state).sum()) * size
        self.asked[direction] = self.asked.get(direction, 0) + int(of_state.sum()) * size
        self.sectors.setdefault(direction, []).append(np.unique(addresses[of_state] // SECTOR))

    def settle(self) -> None:
        """Add up what the program that ends has moved."""
        for direction, asked in self.asked.items():
            touched = np.unique(np.concatenate(self.sectors[direction])).size * SECTOR
            self.state += max(asked, touched)
        self.asked, self.sectors = {}, {}


@contextmanager
def _counted(counter: _Counter) -> Iterator[None]:
    from triton.runtime.interpreter import interpreter_builder as builder

    load, store = builder.create_masked_load, builder.create_masked_store

    def counting_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        counter.access(tuple(builder.grid_idx), "in", pointers, mask)
        return load(pointers, mask, *rest)

    def counting_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        counter.access(tuple(builder.grid_idx), "out", pointers, mask)
        return store(pointers, value, mask, *rest)

    with (
        mock.patch.object(builder, "create_masked_load", counting_load),
        mock.patch.object(builder, "create_masked_store", counting_store),
    ):
        yield


def traffic(launch: Launch, state: tuple[torch.Tensor, ...]) -> Traffic:
    """Run the launch in the interpreter and count; `state` are the tensors whose bytes are state."""
    counter = _Counter(state)
    with _counted(counter):
        launch.run()
    counter.settle()
    return Traffic(counter.state, counter.other)
