"""Cases of the Triton conv step; `python -m tests.support.triton_conv_update` runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from sglang_hybrid.pools.views import NO_LINE, ConvView
from tests.support.interpreted import Check, main, norm_error, poisoned_outputs, same_bytes, tolerance
from tests.support.recurrence import convolve

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """Lines at `offset + i * stride` elements; every other case varies one field of `BASE`."""

    batch: int = 2
    channels: int = 40
    width: int = 4
    stride: int = 128
    offset: int = 0
    inner: tuple[int, int] | None = None
    """Strides of a channel and of a tap; None: (width - 1, 1), as in an arena."""
    stored: torch.dtype = torch.float32
    dtype: torch.dtype = torch.float32
    index: torch.dtype = torch.int32
    bias: bool = True
    activation: str | None = "silu"


BASE = Case()
TABLE = {
    "base": BASE,
    "batch 1": replace(BASE, batch=1),
    "batch 33": replace(BASE, batch=33),
    "one channel": replace(BASE, channels=1),
    "channels 13, no whole word": replace(BASE, channels=13),
    "channels 36, a word short of a power of two": replace(BASE, channels=36),
    "channels 300, three programs": replace(BASE, channels=300, stride=1024),
    "width 2": replace(BASE, width=2),
    "width 3": replace(BASE, width=3),
    "width 6": replace(BASE, width=6, stride=256),
    "lines of S1, a page apart": replace(BASE, stride=4096),
    "lines of S2, a slot apart": replace(BASE, stride=128),
    "lines of S0 and D0, behind a checkpoint": replace(BASE, stride=1500, offset=1200),
    "lines without a gap": replace(BASE, stride=120),
    "lines at odd strides": replace(BASE, stride=131, offset=3),
    "taps four apart": replace(BASE, inner=(4, 1), stride=192),
    "time first": replace(BASE, inner=(1, 40)),
    "int64 lines": replace(BASE, index=torch.int64),
    "no bias": replace(BASE, bias=False),
    "no activation": replace(BASE, activation=None),
    "bf16": replace(BASE, stored=BF16, dtype=BF16),
    "bf16, channels 300": replace(BASE, stored=BF16, dtype=BF16, channels=300, stride=1024),
    "bf16, channels 36": replace(BASE, stored=BF16, dtype=BF16, channels=36),
    "bf16 lines, fp32 input": replace(BASE, stored=BF16),
    "fp32 lines, bf16 input": replace(BASE, dtype=BF16),
}


class Lines:
    """`2 x batch + 1` poisoned lines in an arena of raw elements; line 0 is the sink's."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(1)
        memory = case.width - 1
        count = 2 * case.batch + 1
        self.arena = torch.full((case.offset + count * case.stride,), float("nan")).to(case.stored)
        self.shape = (count, case.channels, memory)
        self.strides = (case.stride, *(case.inner or (memory, 1)))
        self.offset = case.offset
        ids = (1 + torch.randperm(count - 1)).to(case.index)
        self.source, self.fresh = ids[: case.batch], ids[case.batch :]
        for line in self.source:
            self.on(self.arena)[line] = torch.randn(case.channels, memory).to(case.stored)

    def on(self, arena: torch.Tensor) -> torch.Tensor:
        """The lines as a window on an arena."""
        return arena.as_strided(self.shape, self.strides, self.offset)

    def untouched(self, before: torch.Tensor, written: list[int]) -> bool:
        """Every byte outside the written lines is as before, the sink line's too."""
        marks = torch.ones(self.arena.shape, dtype=torch.bool)
        self.on(marks)[written] = False
        return same_bytes(self.arena[marks], before[marks])


def inputs_of(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x as a mixer hands it over, a slice of a wider row; weight; bias."""
    row = torch.randn(case.batch, case.channels + 48).to(case.dtype)
    weight = torch.randn(case.channels, case.width).to(case.dtype)
    bias = torch.randn(case.channels).to(case.dtype) if case.bias else None
    return row[:, 16 : 16 + case.channels], weight, bias


def step(
    lines: Lines,
    source: torch.Tensor,
    target: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    activation: str | None,
    device: str,
) -> torch.Tensor:
    """The kernel over poisoned memory; lines and maps go to the device and back."""
    from sglang_hybrid.kernels.triton_conv_update import conv_update

    x, weight, bias = inputs
    wide = torch.zeros(x.shape[0], x.stride(0), dtype=x.dtype, device=device)
    wide[:, 16 : 16 + x.shape[1]] = x.to(device)
    arena = lines.arena.to(device)
    with poisoned_outputs():
        y = conv_update(
            ConvView(lines.on(arena)),
            source.to(device),
            target.to(device),
            wide[:, 16 : 16 + x.shape[1]],
            weight.to(device),
            None if bias is None else bias.to(device),
            activation=activation,
        )
    lines.arena.copy_(arena)
    return y.cpu()


def equals_the_convolution(case: Case, device: str) -> None:
    """Even rows forked, odd rows in place: y is the convolution's, windows are exact, the rest stays."""
    lines = Lines(case)
    inputs = inputs_of(case)
    target = lines.source.clone()
    target[::2] = lines.fresh[::2]
    before = lines.arena.clone()
    y = step(lines, lines.source, target, inputs, case.activation, device)
    for row in range(case.batch):
        window = lines.on(before)[lines.source[row]]
        want, after = convolve(inputs[0][row : row + 1], *inputs[1:], case.activation is not None, window)
        assert norm_error(y[row], want[0]) < tolerance(case.stored, case.dtype), f"y of row {row}"
        got = lines.on(lines.arena)[target[row]]
        assert torch.equal(got, after[0]), f"window of row {row}"
    assert lines.untouched(before, target.tolist()), "bytes outside the destinations changed"


def skips_what_is_nowhere(stored: torch.dtype, device: str) -> None:
    """Rows: forked, fresh, nowhere to write, padding by the invalid line, by the sink's (poisoned)."""
    case = replace(BASE, batch=5, stored=stored, dtype=stored)
    lines = Lines(case)
    inputs = inputs_of(case)
    source, target = lines.source.clone(), lines.fresh.clone()
    source[1], target[2] = NO_LINE, NO_LINE
    source[3], target[3] = NO_LINE, 0
    source[4], target[4] = 0, 0
    before = lines.arena.clone()
    y = step(lines, source, target, inputs, "silu", device)
    for row in range(5):
        window = lines.on(before)[source[row]] if row in (0, 2) else torch.zeros(40, 3, dtype=stored)
        want, after = convolve(inputs[0][row : row + 1], *inputs[1:], True, window)
        assert norm_error(y[row], want[0]) < tolerance(stored), f"y of row {row}"
        if row < 2:
            assert torch.equal(lines.on(lines.arena)[target[row]], after[0]), f"window of row {row}"
    assert lines.untouched(before, target[:2].tolist()), "a row without a destination wrote"


def an_empty_batch_gives_nothing(device: str) -> None:
    lines = Lines(replace(BASE, batch=1))
    before = lines.arena.clone()
    nothing = torch.zeros(0, dtype=torch.int32)
    x, weight, bias = inputs_of(BASE)
    assert step(lines, nothing, nothing, (x[:0], weight, bias), "silu", device).shape == (0, 40)
    assert same_bytes(lines.arena, before)


def cases() -> dict[str, Check]:
    """All cases by name."""
    table: dict[str, Callable[[str], None]] = {
        name: partial(equals_the_convolution, case) for name, case in TABLE.items()
    }
    table["sentinels and padding"] = partial(skips_what_is_nowhere, torch.float32)
    table["sentinels and padding, bf16"] = partial(skips_what_is_nowhere, BF16)
    table["empty batch"] = an_empty_batch_gives_nothing
    return table


if __name__ == "__main__":
    main(cases())
