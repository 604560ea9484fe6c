"""The convolution equals the naive one, prefill and decode; its window is handed out, forked, resumed."""

from dataclasses import dataclass, replace

import pytest
import torch

from sglang_hybrid.kernels import KernelError, causal_conv, conv_update, plan_segments
from sglang_hybrid.kernels.segments import Segments
from sglang_hybrid.pools.views import NO_LINE, ConvView
from tests.support.recurrence import convolve, relative_error


@dataclass(frozen=True)
class Case:
    """One prefill; every other case varies one field of `BASE`."""

    lengths: tuple[int, ...] = (19, 25, 37)
    begins: tuple[int, ...] = (0, 16, 24)
    channels: int = 12
    width: int = 4
    grid: int | None = 8
    dtype: torch.dtype = torch.float32
    stored: torch.dtype = torch.float32
    bias: bool = True
    activation: str | None = "silu"


BASE = Case()
CASES = {
    "base": BASE,
    "one sequence": replace(BASE, lengths=(43,), begins=(0,)),
    "one token each": replace(BASE, lengths=(1, 1, 1), begins=(0, 7, 8)),
    "ends near the begin": replace(BASE, lengths=(2, 3, 12), begins=(7, 15, 6)),
    "one channel": replace(BASE, channels=1),
    "width 2": replace(BASE, width=2),
    "width 5": replace(BASE, width=5),
    "wider than the extend": replace(BASE, lengths=(1, 2, 3), width=6),
    "no grid": replace(BASE, grid=None),
    "grid 2, smaller than the window": replace(BASE, grid=2),
    "bf16 input": replace(BASE, dtype=torch.bfloat16, stored=torch.bfloat16),
    "bf16 window": replace(BASE, stored=torch.bfloat16),
    "no bias": replace(BASE, bias=False),
    "no activation": replace(BASE, activation=None),
}


def plan(case: Case) -> Segments:
    starts = [sum(case.lengths[:i]) for i in range(len(case.lengths) + 1)]
    return plan_segments(starts, case.begins, case.grid)


def draw(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """x, weight, bias, windows of a case."""
    torch.manual_seed(1)
    return (
        torch.randn(sum(case.lengths), case.channels).to(case.dtype),
        torch.randn(case.channels, case.width),
        torch.randn(case.channels) if case.bias else None,
        torch.randn(len(case.lengths), case.channels, case.width - 1).to(case.stored),
    )


@pytest.mark.parametrize("name", CASES)
def test_prefill_equals_the_naive_convolution(name: str) -> None:
    case = CASES[name]
    x, weight, bias, windows = draw(case)
    cut = plan(case)
    y, emitted = causal_conv(
        x, weight, bias, cut, activation=case.activation, windows=windows, window_dtype=case.stored
    )
    assert y.dtype == case.dtype and emitted.dtype == case.stored
    ys, want_windows, done = [], {}, 0
    for seq, (begin, length) in enumerate(zip(case.begins, case.lengths, strict=True)):
        one = x[done : done + length]
        want, after = convolve(one, weight, bias, case.activation is not None, windows[seq])
        ys.append(want)
        want_windows |= {(seq, begin + t + 1): after[t] for t in range(length)}
        done += length
    # With a narrower window only taps behind a boundary are rounded, so the naive y is near, not equal.
    assert relative_error(y, torch.cat(ys)) < (1e-6 if case.dtype == case.stored == torch.float32 else 2e-2)
    for index, key in enumerate(cut.emissions):
        assert torch.equal(emitted[index], want_windows[key]), key


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grid", [2, 8, 64])
def test_resume_at_a_boundary_is_bit_identical(grid: int, stored: torch.dtype) -> None:
    torch.manual_seed(2)
    tokens = 3 * grid + 5
    x, weight, bias = torch.randn(tokens, 13), torch.randn(13, 4), torch.randn(13)
    cold_cut = plan_segments([0, tokens], [0], grid)
    cold_y, cold_windows = causal_conv(x, weight, bias, cold_cut, window_dtype=stored)
    for hit in (grid, 2 * grid, 3 * grid):
        cut = plan_segments([0, tokens - hit], [hit], grid)
        saved = cold_windows[cold_cut.emission_index[0, hit]][None]
        y, windows = causal_conv(x[hit:], weight, bias, cut, windows=saved, window_dtype=stored)
        assert torch.equal(y, cold_y[hit:])
        for index, key in enumerate(cut.emissions):
            assert torch.equal(windows[index], cold_windows[cold_cut.emission_index[key]])


def test_neighbours_in_the_batch_change_nothing() -> None:
    x, weight, bias, windows = draw(BASE)
    y, _ = causal_conv(x, weight, bias, plan(BASE), windows=windows)
    done = 0
    for seq, (begin, length) in enumerate(zip(BASE.begins, BASE.lengths, strict=True)):
        cut = plan_segments([0, length], [begin], BASE.grid)
        alone, _ = causal_conv(x[done : done + length], weight, bias, cut, windows=windows[seq : seq + 1])
        assert torch.equal(y[done : done + length], alone)
        done += length


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_decode_is_bit_identical_to_prefill(stored: torch.dtype) -> None:
    """Token by token through a conv line; a grid of 1 rounds the window at every token, as the line does."""
    torch.manual_seed(3)
    x, weight, bias = torch.randn(11, 13), torch.randn(13, 4), torch.randn(13)
    want, windows = causal_conv(x, weight, bias, plan_segments([0, 11], [0], 1), window_dtype=stored)
    view = ConvView(torch.full((3, 13, 3), float("nan"), dtype=stored))
    source, line = torch.tensor([NO_LINE]), torch.tensor([2])
    for t in range(11):
        y = conv_update(view, source, line, x[t : t + 1], weight, bias)
        assert torch.equal(y[0], want[t]) and torch.equal(view.lines[2], windows[t])
        source = line


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_decode_reads_forks_and_skips(dtype: torch.dtype) -> None:
    """Rows: in place, forked, fresh, nowhere to write, padding (twice, to the sink). All else stays."""
    torch.manual_seed(4)
    arena = torch.full((10, 2, 13, 4), float("nan"))
    lines = arena[:, 1, :, :3]  # strided, as a line in an arena page is
    for line in (1, 2, 7):
        lines[line] = torch.randn(13, 3)
    before = arena.clone()
    source = torch.tensor([1, 2, NO_LINE, 7, 0, 0], dtype=dtype)
    target = torch.tensor([1, 3, 4, NO_LINE, 0, 0], dtype=dtype)
    x, weight, bias = torch.randn(6, 13), torch.randn(13, 4), torch.randn(13)
    y = conv_update(ConvView(lines), source, target, x, weight, bias)
    for row, window in enumerate((before[1, 1, :, :3], before[2, 1, :, :3], torch.zeros(13, 3))):
        want, after = convolve(x[row : row + 1], weight, bias, True, window)
        assert relative_error(y[row], want[0]) < 1e-6
        assert torch.equal(lines[target[row]], after[0])
    want, _ = convolve(x[3:4], weight, bias, True, before[7, 1, :, :3])
    assert relative_error(y[3], want[0]) < 1e-6
    written = torch.zeros(10, 2, 13, 4, dtype=torch.bool)
    written[[0, 1, 3, 4], 1, :, :3] = True
    assert torch.equal(arena[~written].nan_to_num(9), before[~written].nan_to_num(9))


def test_two_rows_may_swap_lines() -> None:
    torch.manual_seed(5)
    view = ConvView(torch.randn(3, 4, 3))
    before = view.lines.clone()
    x, weight = torch.randn(2, 4), torch.randn(4, 4)
    conv_update(view, torch.tensor([1, 2]), torch.tensor([2, 1]), x, weight, None)
    assert torch.equal(view.lines[2], torch.cat([before[1, :, 1:], x[0][:, None]], 1))
    assert torch.equal(view.lines[1], torch.cat([before[2, :, 1:], x[1][:, None]], 1))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"weight": torch.zeros(11, 4)}, r"weight has shape \[11, 4\], needs \[12, \*\]"),
        ({"weight": torch.zeros(12, 1)}, r"weight has shape \[12, 1\], needs \[12, 2 or more\]"),
        ({"bias": torch.zeros(3)}, r"bias has shape \[3\], needs \[12\]"),
        ({"activation": "gelu"}, "activation is 'gelu'"),
    ],
)
def test_wrong_weights_are_named(wrong: dict[str, object], message: str) -> None:
    x, weight, bias, _ = draw(BASE)
    given = {"weight": weight, "bias": bias, "activation": "silu"} | wrong
    lines = torch.tensor([1, 2, 3])
    with pytest.raises(KernelError, match=message):
        causal_conv(x, given["weight"], given["bias"], plan(BASE), activation=given["activation"])  # type: ignore[arg-type]
    with pytest.raises(KernelError, match=message):
        conv_update(
            ConvView(torch.zeros(4, 12, 3)), lines, lines, x[:3], given["weight"], given["bias"],
            activation=given["activation"],
        )  # type: ignore[arg-type]  # fmt: skip


def test_wrong_windows_and_lines_are_named() -> None:
    x, weight, bias, windows = draw(BASE)
    with pytest.raises(KernelError, match=r"windows has shape \[3, 12, 2\], needs \[3, 12, 3\]"):
        causal_conv(x, weight, bias, plan(BASE), windows=windows[..., 1:])
    with pytest.raises(KernelError, match=r"x has shape \[80, 12\], needs \[81, \*\]"):
        causal_conv(x[1:], weight, bias, plan(BASE))
    view = ConvView(torch.zeros(4, 12, 3))
    with pytest.raises(KernelError, match="lines is float32, needs int32 or int64"):
        conv_update(view, torch.zeros(3), torch.tensor([1, 2, 3]), x[:3], weight, bias)
    with pytest.raises(KernelError, match=r"lines has shape \[2\], needs \[3\]"):
        conv_update(view, torch.tensor([1, 2, 3]), torch.tensor([1, 2]), x[:3], weight, bias)
    with pytest.raises(KernelError, match=r"conv lines has shape \[4, 12, 2\], needs \[\*, 12, 3\]"):
        conv_update(
            ConvView(torch.zeros(4, 12, 2)),
            torch.tensor([1, 2, 3]),
            torch.tensor([1, 2, 3]),
            x[:3],
            weight,
            bias,
        )


def test_an_empty_batch_gives_nothing() -> None:
    weight = torch.randn(12, 4)
    y, windows = causal_conv(torch.zeros(0, 12), weight, None, plan_segments([0], [], 8))
    assert y.shape == (0, 12) and windows.shape == (0, 12, 3)
    nothing = torch.zeros(0, dtype=torch.int32)
    assert conv_update(
        ConvView(torch.zeros(4, 12, 3)), nothing, nothing, torch.zeros(0, 12), weight, None
    ).shape == (0, 12)
