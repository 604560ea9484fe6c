"""Launches under guard in Triton's interpreter: no address outside the arguments, no race.

The interpreter runs programs one after another; on a GPU they run at once and in any order.  So a launch is
right only if no program reads what another writes, and no address is written twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sglang_hybrid.kernels.launch import Launch

_allowed: list[tuple[int, int]] = []


def allow(tensors: Sequence[torch.Tensor]) -> None:
    """Tensors that launches reach through a table of addresses."""
    _allowed.extend(extent(tensor) for tensor in tensors)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First address of a view and the one past its last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    size = (last + 1) * tensor.element_size() if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + size


class Accesses:
    """Addresses that the programs of one launch load and store; all of one tensor, so of one width."""

    def __init__(self, bounds: Sequence[tuple[int, int]]) -> None:
        self.bounds = bounds
        self.loads: list[tuple[int, np.ndarray]] = []
        self.stores: list[tuple[int, np.ndarray]] = []

    def add(self, kind: list[tuple[int, np.ndarray]], program: int, pointers: Any, mask: Any) -> None:
        """Note the addresses wanted; raises AssertionError for one outside the arguments."""
        everywhere, wanted = np.broadcast_arrays(pointers.data, mask.data)
        addresses = everywhere[wanted.astype(bool)]  # a mask may be of ints
        inside = np.zeros(addresses.shape, dtype=bool)
        for low, high in self.bounds:
            inside |= (addresses >= low) & (addresses < high)
        assert inside.all(), f"{(~inside).sum()} of {inside.size} addresses lie outside the arguments"
        kind.append((program, addresses))

    def check(self) -> None:
        """Raise AssertionError where programs get in each other's way."""
        stored, writers = flat(self.stores)
        order = np.argsort(stored)
        stored, writers = stored[order], writers[order]
        twice = int((np.diff(stored) == 0).sum())
        assert not twice, f"{twice} addresses are written twice"
        loaded, readers = flat(self.loads)
        if not stored.size or not loaded.size:
            return
        place = np.minimum(np.searchsorted(stored, loaded), stored.size - 1)
        races = int(((stored[place] == loaded) & (writers[place] != readers)).sum())
        assert not races, f"{races} addresses are read by one program and written by another"


def flat(accesses: list[tuple[int, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """All addresses, and the program of each."""
    if not accesses:
        return np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64)
    programs = [np.full(addresses.size, program) for program, addresses in accesses]
    return np.concatenate([addresses for _, addresses in accesses]), np.concatenate(programs)


def guard_launches() -> None:
    """From now on every `Launch` is guarded."""
    from triton.runtime.interpreter import interpreter_builder as builder

    load, store, run = builder.create_masked_load, builder.create_masked_store, Launch.run
    now = Accesses(())

    def program() -> int:
        (x, y, z), (_, high, deep) = builder.grid_idx, builder.grid_dim
        return int((x * high + y) * deep + z)

    def guarded_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        now.add(now.loads, program(), pointers, mask)
        return load(pointers, mask, *rest)

    def guarded_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        now.add(now.stores, program(), pointers, mask)
        return store(pointers, value, mask, *rest)

    def guarded_run(launch: Launch) -> None:
        tensors = [value for value in launch.args.values() if isinstance(value, torch.Tensor)]
        now.__init__([*map(extent, tensors), *_allowed])  # type: ignore[misc]
        run(launch)
        now.check()

    builder.create_masked_load, builder.create_masked_store = guarded_load, guarded_store
    Launch.run = guarded_run  # type: ignore[method-assign, assignment]
