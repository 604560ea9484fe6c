"""Runs a table of kernel cases where Triton is an interpreter, and reads the verdicts.

`TRITON_INTERPRET` counts when a kernel is decorated, Triton's own library included, so the tables have a
process of their own.  Each also runs by itself, and on a GPU: `python -m tests.support.triton_state_update`.
SGLANG_HYBRID_LONG_TABLES=1 adds combinations and real shapes, for minutes instead of seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from sglang_hybrid.kernels.launch import Launch

ROOT = Path(__file__).parents[2]
PASSED = "passed"
LONG = os.environ.get("SGLANG_HYBRID_LONG_TABLES") == "1"

Check = Callable[[str], None]
"""Runs the kernels of one case on a device; raises when they are wrong."""


@cache
def verdicts(module: str) -> dict[str, str]:
    """Case name -> "passed" or a traceback, from `python -m module` under the interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", module, "--device", "cpu"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3600 if LONG else 600,
    )
    assert done.returncode in (0, 1), done.stderr[-4000:]
    found: dict[str, str] = {}
    for line in done.stdout.splitlines():
        found.update(json.loads(line))
    return found


def main(cases: Mapping[str, Check]) -> None:
    """Command line of a table: one JSON object a case on stdout; exits 1 when a case failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("names", nargs="*", help="cases to run (default all)")
    options = parser.parse_args()
    failed = False
    if options.device == "cpu":
        guard_launches()
        round_as_hardware_does()
    for name in options.names or cases:
        try:
            cases[name](options.device)
            verdict = PASSED
        except Exception:
            verdict, failed = traceback.format_exc(), True
        print(json.dumps({name: verdict}), flush=True)
    sys.exit(failed)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First address of a view and the one past its last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    size = (last + 1) * tensor.element_size() if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + size


_allowed: list[tuple[int, int]] = []


def allow(tensors: Sequence[torch.Tensor]) -> None:
    """Tensors that launches reach through a table of addresses."""
    _allowed.extend(extent(tensor) for tensor in tensors)


def guard_launches() -> None:
    """From now on an address outside a launch's arguments is an error, also where its value is not used."""
    from triton.runtime.interpreter import interpreter_builder as builder

    load, store, run = builder.create_masked_load, builder.create_masked_store, Launch.run
    bounds: list[tuple[int, int]] = []

    def check(pointers: Any, mask: Any) -> None:
        everywhere, wanted = np.broadcast_arrays(pointers.data, mask.data)
        addresses = everywhere[wanted.astype(bool)]
        inside = np.zeros(addresses.shape, dtype=bool)
        for low, high in bounds:
            inside |= (addresses >= low) & (addresses < high)
        assert inside.all(), f"{(~inside).sum()} of {inside.size} addresses lie outside the arguments"

    def guarded_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return load(pointers, mask, *rest)

    def guarded_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return store(pointers, value, mask, *rest)

    def guarded_run(launch: Launch) -> None:
        tensors = [value for value in launch.args.values() if isinstance(value, torch.Tensor)]
        bounds[:] = [*map(extent, tensors), *_allowed]
        run(launch)

    builder.create_masked_load, builder.create_masked_store = guarded_load, guarded_store
    Launch.run = guarded_run  # type: ignore[method-assign, assignment]


def round_as_hardware_does() -> None:
    """From now on fp32 becomes bf16 by rounding to the nearest; the interpreter cuts bits off."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        values = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32))
        return values.bfloat16().view(torch.uint16).numpy().reshape(data.shape)

    interpreter._convert_float = rounded


def norm_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm of what was wanted; inf when `got` is not finite."""
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    if not torch.isfinite(got).all():
        return float("inf")
    scale = float(want.norm())
    return float((got - want).norm()) / scale if scale else float((got - want).norm())


def tolerance(*dtypes: torch.dtype) -> float:
    """Largest norm error: 1e-5 where everything is fp32, 1e-2 where something is rounded to 16 bits."""
    return 1e-5 if all(dtype == torch.float32 for dtype in dtypes) else 1e-2


def same_bytes(now: torch.Tensor, before: torch.Tensor) -> bool:
    """Bit for bit, NaN included."""
    return torch.equal(now.contiguous().view(torch.uint8), before.contiguous().view(torch.uint8))


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Memory from `torch.empty` holds NaN, so that an element nobody writes shows."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **kwargs).fill_(float("nan"))

    with mock.patch("torch.empty", poisoned):
        yield
