"""Exact mode's arithmetic: a token's bits depend on its sequence up to it, and on nothing else."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from sglang_hybrid.kernels import exact_attention as attention
from sglang_hybrid.kernels import exact_recurrence as recurrence
from sglang_hybrid.kernels import invariant, plan_segments, segments
from sglang_hybrid.kernels.exact_attention import exact_attention
from sglang_hybrid.kernels.exact_recurrence import exact_conv, exact_scan
from sglang_hybrid.platforms import exact_ops
from tests.support.recurrence import MixerInputs, convolve, relative_error, scan

GRID = 8
LENGTH = 3 * GRID + 5
CUTS = ((), (GRID,), (2 * GRID, 3 * GRID), (3, 11, 12), tuple(range(1, LENGTH)))
"""Where a sequence is interrupted: cold, a hit, chunks, off the grid, decode."""


# -- operations by row -----------------------------------------------------------------------------


@pytest.fixture
def exact() -> Iterator[None]:
    exact_ops.install()
    try:
        yield
    finally:
        exact_ops.remove()


WEIGHT = torch.randn(96, 64, generator=torch.Generator().manual_seed(3))
ROWWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear": lambda x: F.linear(x, WEIGHT.to(x.dtype)),
    "linear with bias": lambda x: F.linear(x, WEIGHT.to(x.dtype), WEIGHT[:, 0].to(x.dtype)),
    "linear of three dims": lambda x: F.linear(x[:, None], WEIGHT.to(x.dtype)),
    "logits": lambda x: torch.matmul(x, WEIGHT.to(x.dtype).T),
    "sum": lambda x: x.sum(-1),
    "mean of squares": lambda x: x.float().pow(2).mean(-1, keepdim=True),
    "silu": F.silu,
    "silu of half a row": lambda x: F.silu(x[..., :33]) * x[..., -33:],
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "gate of a norm": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
}


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROWWISE)
def test_a_row_does_not_depend_on_its_company(name: str, dtype: torch.dtype) -> None:
    function = ROWWISE[name]
    x = torch.randn(75, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.inference_mode():
        want = function(x)
        for count in (1, 2, 3, 4, 7, 16, 17, 40):
            for low in (0, 1, 19):
                assert torch.equal(function(x[low : low + count]), want[low : low + count]), (count, low)
        assert torch.equal(function(x.t().contiguous().t()), want), "other strides"


@pytest.mark.parametrize("name", ROWWISE)
def test_exact_operations_compute_what_torch_computes(name: str) -> None:
    x = torch.randn(21, 64, generator=torch.Generator().manual_seed(2))
    want = ROWWISE[name](x)
    exact_ops.install()
    try:
        got = ROWWISE[name](x)
    finally:
        exact_ops.remove()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(ROWWISE[name](x), want), "not removed"


@pytest.mark.usefixtures("exact")
def test_sums_that_are_not_by_row_stay_torchs() -> None:
    ones = torch.ones(3, 4, dtype=torch.int64)
    assert ones.sum(1).tolist() == [4, 4, 4] and ones.sum(1).dtype == torch.int64
    assert ones.sum(0).tolist() == [3] * 4 and int(ones.sum()) == 12
    assert (ones > 0).sum(-1).tolist() == [4, 4, 4]
    assert ones.float().mean(0, keepdim=True).shape == (1, 4) and float(ones.float().mean()) == 1.0
    assert ones.float().mean((0, 1)).tolist() == 1.0
    assert torch.mm(ones, ones.t()).tolist() == [[4] * 3] * 3
    assert ones.sum(-1, dtype=torch.float32).dtype == torch.float32


def test_torchs_own_products_do_depend_on_the_number_of_rows() -> None:
    """Otherwise these tests prove nothing on this machine."""
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(4))
    weight = torch.randn(512, 96, generator=torch.Generator().manual_seed(5))
    whole = x @ weight
    if all(torch.equal(x[:n] @ weight, whole[:n]) for n in (1, 2, 3, 5, 17)):
        pytest.skip("this BLAS is batch-invariant by itself")


def test_a_tile_that_is_not_proved_falls_back_to_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant, "rows_are_free", lambda *_: False)
    monkeypatch.setattr(invariant, "_rows_of_shape", {})
    weight = torch.randn(24, 40)
    assert invariant.tile_rows(weight, torch.float32) == 1
    x = torch.randn(5, 24)
    torch.testing.assert_close(invariant.matmul_rows(x, weight), x @ weight)


def test_the_proof_sees_a_product_that_depends_on_place_or_company() -> None:
    def placed(tile: torch.Tensor) -> torch.Tensor:
        return tile * torch.arange(1, tile.shape[0] + 1)[:, None]

    def mixed(tile: torch.Tensor) -> torch.Tensor:
        return tile + tile.sum(0)

    assert not invariant.rows_are_free(placed, 8, 4, torch.float32)
    assert not invariant.rows_are_free(mixed, 8, 4, torch.float32)
    assert invariant.rows_are_free(lambda tile: tile * 2, 8, 4, torch.float32)


# -- attention -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("free", [True, False], ids=["tiles of queries", "single queries"])
def test_attention_of_a_query_is_that_of_any_cut(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, free: bool
) -> None:
    if not free:
        monkeypatch.setattr(attention, "query_tile", lambda *_: 1)
    generator = torch.Generator().manual_seed(6)
    length = (2 if free else 1) * attention.KEY_TILE + 9
    q = torch.randn(length, 6, 16, generator=generator).to(dtype)
    k, v = (torch.randn(length, 2, 16, generator=generator).to(dtype) for _ in range(2))
    want = exact_attention(q, k, v, 0, 0.25)
    for low, high in ((0, 1), (0, 65), (1, 17), (63, 65), (64, length), (70, 71), (length - 1, length)):
        got = exact_attention(q[low:high], k[:high], v[:high], low, 0.25)
        assert torch.equal(got, want[low:high]), (low, high)
    heads = (t.float().repeat_interleave(3, 1).transpose(0, 1) for t in (k, v))
    reference = F.scaled_dot_product_attention(
        q.float().transpose(0, 1), *heads, is_causal=True, scale=0.25
    ).transpose(0, 1)
    torch.testing.assert_close(want.float(), reference.to(dtype).float(), rtol=1e-2, atol=1e-5)


# -- recurrence ------------------------------------------------------------------------------------


def run(
    inputs: MixerInputs, cuts: tuple[int, ...], dtype: torch.dtype, window_dtype: torch.dtype
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """One sequence, interrupted at `cuts`: its outputs, and its (state, window) at every boundary."""
    assert inputs.d is not None and inputs.dt_bias is not None
    length, heads, dim = inputs.x.shape
    size = inputs.b.shape[2]
    weight, bias = torch.randn(heads * dim, 4, generator=torch.Generator().manual_seed(8)), None
    state = torch.zeros(1, heads, dim, size)
    window = torch.zeros(1, heads * dim, 3, dtype=window_dtype)
    outs, kept = [], {}
    for low, high in zip((0, *cuts), (*cuts, length)):
        plan = plan_segments([0, high - low], [low], GRID)
        x, windows = exact_conv(inputs.x[low:high].flatten(1), weight, bias, plan, windows=window)
        y, states = exact_scan(
            x.view(-1, heads, dim), inputs.dt[low:high], inputs.a, inputs.b[low:high], inputs.c[low:high],
            plan, d=inputs.d, dt_bias=inputs.dt_bias, dt_softplus=True, initial_states=state,
            state_dtype=dtype,
        )  # fmt: skip
        for (_, end), one_state, one_window in zip(plan.emissions, states, windows, strict=True):
            kept[end] = torch.cat([one_state.flatten().float(), one_window.flatten().float()])
        state, window = states[-1:].float(), windows[-1:]
        outs.append(y)
    return torch.cat(outs), {end: kept[end] for end in kept if end % GRID == 0 or end == length}


@pytest.mark.parametrize("window_dtype", [torch.float32, torch.bfloat16], ids=lambda d: f"window {d}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: f"state {d}")
def test_an_interrupted_recurrence_is_the_whole_one(dtype: torch.dtype, window_dtype: torch.dtype) -> None:
    torch.manual_seed(9)
    inputs = MixerInputs.random(LENGTH, 4, 2, 6, 10, torch.float32)
    want, kept = run(inputs, (), dtype, window_dtype)
    for cuts in CUTS:
        got, states = run(inputs, cuts, dtype, window_dtype)
        assert torch.equal(got, want), cuts
        assert states.keys() == kept.keys() and all(torch.equal(states[e], kept[e]) for e in kept), cuts


def test_without_the_rounding_a_resumed_bf16_state_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(9)
    inputs = MixerInputs.random(LENGTH, 4, 2, 6, 10, torch.float32)
    monkeypatch.setattr(recurrence, "round_state", lambda state, dtype: state)
    want, _ = run(inputs, (), torch.bfloat16, torch.float32)
    got, _ = run(inputs, (GRID,), torch.bfloat16, torch.float32)
    assert torch.equal(got[:GRID], want[:GRID]) and not torch.equal(got[GRID:], want[GRID:])


def test_a_piece_that_straddles_a_boundary_leaves_no_state_there(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(9)
    inputs = MixerInputs.random(LENGTH, 4, 2, 6, 10, torch.float32)
    _, kept = run(inputs, (), torch.float32, torch.float32)
    assert list(kept) == [GRID, 2 * GRID, 3 * GRID, LENGTH]
    monkeypatch.setattr(segments, "piece_bounds", lambda begin, length, *_: [(begin, begin + length)])
    _, straddled = run(inputs, (), torch.float32, torch.float32)
    assert list(straddled) == [LENGTH]


def test_a_batch_of_extends_is_each_alone() -> None:
    torch.manual_seed(10)
    inputs = MixerInputs.random(40, 4, 2, 6, 10, torch.float32)
    starts, begins = [0, 1, 14, 15, 40], [7, 3, 0, 16]
    initial = torch.randn(4, 4, 6, 10)
    window = torch.randn(4, 24, 3)
    weight, bias = torch.randn(24, 4), torch.randn(24)

    def ask(low: int, high: int, firsts: list[int], which: slice) -> tuple[torch.Tensor, ...]:
        plan = plan_segments([s - low for s in starts if low <= s <= high], firsts, GRID)
        x, windows = exact_conv(inputs.x[low:high].flatten(1), weight, bias, plan, windows=window[which])
        part = inputs.part(low, high)
        y, states = exact_scan(
            x.view(-1, 4, 6), part.dt, part.a, part.b, part.c, plan, d=part.d, dt_bias=part.dt_bias,
            dt_softplus=True, initial_states=initial[which],
        )  # fmt: skip
        return y, states, windows

    whole = ask(0, 40, begins, slice(0, 4))
    alone = [ask(starts[i], starts[i + 1], [begins[i]], slice(i, i + 1)) for i in range(4)]
    for parts, together in zip(zip(*alone), whole):
        assert torch.equal(torch.cat(parts), together)


def test_the_recurrence_is_the_one_of_the_reference() -> None:
    torch.manual_seed(11)
    inputs = MixerInputs.random(LENGTH, 4, 2, 6, 10, torch.float32)
    plain = MixerInputs(**{**vars(inputs), "z": None})
    initial = torch.randn(1, 4, 6, 10)
    plan = plan_segments([0, LENGTH], [0], GRID)
    y, states = exact_scan(
        plain.x, plain.dt, plain.a, plain.b, plain.c, plan, d=plain.d, dt_bias=plain.dt_bias,
        dt_softplus=True, initial_states=initial,
    )  # fmt: skip
    want_y, want = scan(plain, initial[0], torch.float32)
    assert relative_error(y, want_y) < 2e-6 and relative_error(states[-1], want[-1]) < 2e-6
    assert [end for _, end in plan.emissions] == [8, 16, 24, LENGTH]
    assert relative_error(states[0], want[GRID - 1]) < 2e-6

    x, weight, bias = torch.randn(LENGTH, 5), torch.randn(5, 4), torch.randn(5)
    got, windows = exact_conv(x, weight, bias, plan, windows=torch.zeros(1, 5, 3))
    conv, ends = convolve(x, weight, bias, True, torch.zeros(5, 3))
    assert relative_error(got, conv) < 2e-6 and torch.equal(windows[-1], ends[-1])
