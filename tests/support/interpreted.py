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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.support.guarded import guard_launches

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
        timeout=7200 if LONG else 1800,
    )
    assert done.returncode in (0, 1), done.stderr[-4000:]
    found: dict[str, str] = {}
    for line in done.stdout.splitlines():
        found.update(json.loads(line))
    return found


def main(cases: Mapping[str, Check], *, guarded: bool = True) -> None:
    """Command line of a table: one JSON object a case on stdout; exits 1 when a case failed.

    The guard knows a `Launch` of ours only.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("names", nargs="*", help="cases to run (default all)")
    options = parser.parse_args()
    failed = False
    if options.device == "cpu":
        if guarded:
            guard_launches()
        round_as_hardware_does()
        patch_language_once()
    for name in options.names or cases:
        try:
            cases[name](options.device)
            verdict = PASSED
        except Exception:
            verdict, failed = traceback.format_exc(), True
        print(json.dumps({name: verdict}), flush=True)
    sys.exit(failed)


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


def patch_language_once() -> None:
    """From now on a kernel's call of a function does not patch Triton's language again: that takes a third of
    the time.  A launch patches `tl` and undoes it; what functions of Triton's own patch nobody undoes."""
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set[str]()
    executing = interpreter.GridExecutor.__call__.__code__

    def patch_if_new(fn: Any) -> Any:
        if sys._getframe(1).f_code is executing:
            return patch(fn)
        ours = any(value is interpreter.tl for value in fn.__globals__.values())
        if not ours and fn.__module__ not in patched:
            patched.add(fn.__module__)
            patch(fn)
        return None

    interpreter._patch_lang = patch_if_new


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
