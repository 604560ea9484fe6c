"""Cases of the kernel bench by a stopped clock; `python -m tests.support.triton_bench` runs them."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch

from bench import kernels as bench
from bench.kernel_cases import OPERATIONS, Case, check, make_case
from sglang_hybrid.kernels import choose
from sglang_hybrid.kernels.samples import Mixer
from tests.support.guarded import allow
from tests.support.interpreted import Check, main

MIXER = Mixer(heads=2, dim=16, size=32, groups=1, kv_heads=1, kv_dim=8)
MEMORIES = ("D0", "S2")


def make_allowed(*args: Any, **kwargs: Any) -> Case:
    """`make_case`, whose arenas some kernels reach through a table of addresses."""
    case = make_case(*args, **kwargs)
    allow(case.cell.arenas.state_buffers)
    return case


def runs_every_variant(operation: str, device: str) -> None:
    """Each variant agrees with the torch route, is run as it is timed, and gets a row."""

    def stopped(run: object, sets: int) -> float:
        run(sets - 1)  # type: ignore[operator]
        return 10.0

    with (
        mock.patch.object(bench, "median_us", stopped),
        mock.patch.object(bench, "make_case", make_allowed),
        mock.patch.object(bench, "MEMORIES", MEMORIES),
        mock.patch.object(bench, "PREFILL_TOKENS", 9),
        mock.patch.dict(bench.SHAPES, {"tiny": (MIXER, torch.float32)}),
    ):
        rows = list(bench.measure(operation, "tiny", [2], 1e9, device))
    ours = [row for row in rows if row.variant[0] != "F"]
    modes = 2 if OPERATIONS[operation].in_place else 1
    assert [row.variant.split()[0] for row in ours] == [m for m in MEMORIES for _ in range(modes)]
    assert all(row.copy_share > 0 for row in rows)


def another_output_is_refused(device: str) -> None:
    """The comparison is one: it fails on another launch's output."""
    case = make_allowed(MIXER, torch.float32, "S2", 2, 2, grid=192, device=device)
    triton, reference = choose("triton", device), choose("torch", device)
    for name in ("state_update", "delta_update", "conv_update", "copy_checkpoints"):
        step, written = OPERATIONS[name].step, OPERATIONS[name].written or torch.float32
        try:
            check(
                case, written, partial(step, case, triton, 0, True), partial(step, case, reference, 1, True)
            )
        except SystemExit as error:
            assert "wrong result" in str(error)
        else:
            raise AssertionError(f"{name}: another launch's output passed")


def cases() -> dict[str, Check]:
    """All cases by name."""
    table: dict[str, Check] = {name: partial(runs_every_variant, name) for name in OPERATIONS}
    table["another output"] = another_output_is_refused
    return table


if __name__ == "__main__":
    main(cases())
