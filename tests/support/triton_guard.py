"""Cases of the guard itself; `python -m tests.support.triton_guard` runs them, in the interpreter only."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from sglang_hybrid.kernels.launch import Launch
from tests.support.interpreted import Check, main


@triton.jit  # type: ignore[untyped-decorator]
def meddle(out: tl.tensor, READ: tl.constexpr, WRITE: tl.constexpr) -> None:
    """Program p reads element 4 p + READ and writes element 4 p + WRITE, two programs."""
    base = out + tl.program_id(0) * 4
    tl.store(base + WRITE, tl.load(base + READ) + 1)


def is_seen(read: int, write: int, fault: str | None, device: str) -> None:
    """Fails with `fault`, which None means not at all."""
    out = torch.zeros(9)
    try:
        Launch(meddle, (2,), {"out": out, "READ": read, "WRITE": write}, warps=1).run()
    except Exception as error:
        assert fault is not None and fault in str(error), error
    else:
        assert fault is None, "not seen"


def same_address(device: str) -> None:
    """Both lanes of a program write one element."""
    try:
        Launch(scribble, (1,), {"out": torch.zeros(8)}, warps=1).run()
    except AssertionError as error:
        assert "1 addresses are written twice" in str(error)
    else:
        raise AssertionError("not seen")


@triton.jit  # type: ignore[untyped-decorator]
def scribble(out: tl.tensor) -> None:
    tl.store(out + tl.arange(0, 2) * 0, tl.arange(0, 2).to(tl.float32))


def cases() -> dict[str, Check]:
    """All cases by name."""
    return {
        "in place": partial(is_seen, 1, 1, None),
        "apart": partial(is_seen, 1, 2, None),
        "a race": partial(is_seen, 4, 0, "1 addresses are read by one program and written by another"),
        "outside": partial(is_seen, 6, 0, "lie outside the arguments"),
        "the same address": same_address,
    }


if __name__ == "__main__":
    main(cases())
