"""Kimi delta attention of stock SGLang on a CPU, and of our backend: called as Kimi-Linear calls them."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_hybrid.kernels import KernelError, choose, plan_segments
from sglang_hybrid.platforms import kda_ops
from sglang_hybrid.pools.views import ConvView, StateView
from tests.support.delta import Decays, DeltaInputs, recur
from tests.support.recurrence import relative_error

HEADS, DIM = 3, 8
DECAYS: tuple[Decays, ...] = ("channel", "bounded")


def drawn(tokens: int, decays: Decays = "channel") -> DeltaInputs:
    return DeltaInputs.random(tokens, HEADS, HEADS, DIM, DIM, decays=decays)


def mixed(inputs: DeltaInputs) -> torch.Tensor:
    return torch.cat([inputs.q.flatten(1), inputs.k.flatten(1), inputs.v.flatten(1)], 1)


@pytest.mark.parametrize("decays", DECAYS)
def test_scan_and_update_in_a_stock_pool(decays: Decays) -> None:
    """Two prefills, of which one goes on from what its slot holds, then a decode step of the other."""
    torch.manual_seed(1)
    inputs = drawn(9, decays)
    pool = torch.randn(4, HEADS, DIM, DIM)
    pool[1] = 0
    before = pool.clone()
    some = inputs.part(0, 7)
    weights: dict[str, Any] = {
        "A_log": inputs.a_log.view(1, 1, -1, 1), "dt_bias": inputs.dt_bias.flatten(),
        "lower_bound": inputs.lower_bound, "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    y = kda_ops.chunk_kda(
        some.q[None], some.k[None], some.v[None], some.a[None], some.b[None],
        initial_state=pool, initial_state_indices=torch.tensor([3, 1], dtype=torch.int32),
        cu_seqlens=torch.tensor([0, 5, 7]), beta_is_raw=True, **weights,
    )  # fmt: skip
    for slot, low, high in ((3, 0, 5), (1, 5, 7)):
        want_y, want = recur(inputs.part(low, high), before[slot], torch.float32)
        assert relative_error(y[0, low:high], want_y) < 2e-6
        assert relative_error(pool[slot], want[-1]) < 2e-6
    assert torch.equal(pool[[0, 2]], before[[0, 2]])

    step = inputs.part(7, 9)
    before, out = pool.clone(), torch.empty(2, 1, HEADS, DIM)
    weights["A_log"] = inputs.a_log
    kda_ops.fused_recurrent_kda_packed_decode(
        mixed(step), step.a.flatten(1), step.b, scale=DIM**-0.5, initial_state=pool, out=out,
        ssm_state_indices=torch.tensor([1, -1], dtype=torch.int32), **weights,
    )  # fmt: skip
    want_y, want = recur(step.part(0, 1), before[1], torch.float32)
    assert relative_error(out[0], want_y) < 2e-6 and relative_error(pool[1], want[0]) < 2e-6
    assert torch.equal(pool[2:], before[2:])


@pytest.mark.parametrize("activation", ["sigmoid", "swish", "silu"])
def test_norm_and_gate(activation: str) -> None:
    torch.manual_seed(2)
    x, gate, weight = torch.randn(1, 5, HEADS, DIM), torch.randn(5, HEADS, DIM), torch.randn(DIM)
    opened = gate.sigmoid() if activation == "sigmoid" else torch.nn.functional.silu(gate)
    want = torch.nn.functional.rms_norm(x, (DIM,), weight, 1e-5) * opened
    assert relative_error(kda_ops.rms_norm_gated(x, gate, weight, None, activation, eps=1e-5), want) < 1e-6


X = torch.zeros(1, 2, 1, 4)
SCAN: dict[str, Any] = {
    "initial_state": X, "initial_state_indices": X[0, 0, 0], "cu_seqlens": X[0, 0, 0], "A_log": X,
    "dt_bias": X, "use_qk_l2norm_in_kernel": True, "beta_is_raw": True,
}  # fmt: skip
NORM: dict[str, Any] = {"bias": None}


@pytest.mark.parametrize(
    ("operation", "given", "wrong", "message"),
    [
        *(
            ("chunk_kda", SCAN, {name: None}, "needs initial_state, its indices, cu_seqlens")
            for name in ("initial_state", "initial_state_indices", "cu_seqlens")
        ),
        *(
            ("chunk_kda", SCAN, wrong, "needs raw gates and unit keys")
            for wrong in (
                {"A_log": None}, {"dt_bias": None}, {"beta_is_raw": False},
                {"use_qk_l2norm_in_kernel": False},
            )
        ),
        ("chunk_kda", SCAN, {"scale": 1.0}, "no own scale"),
        ("chunk_kda", SCAN, {"output_intermediate_states": True}, "no states on the way"),
        ("fused_recurrent_kda_packed_decode", {"scale": 0.5}, {}, "needs unit keys"),
        (
            "fused_recurrent_kda_packed_decode", {"use_qk_l2norm_in_kernel": True}, {"scale": 1.0},
            r"scale is 1\.0, needs",
        ),
        ("rms_norm_gated", NORM, {"activation": "relu"}, "activation is 'relu', needs 'swish'"),
        *(
            ("rms_norm_gated", NORM, wrong, "no bias, no residual and no second result")
            for wrong in ({"bias": X}, {"residual": X}, {"prenorm": True})
        ),
    ],
)  # fmt: skip
def test_what_the_platform_cannot_do_is_refused(
    operation: str, given: dict[str, Any], wrong: dict[str, Any], message: str
) -> None:
    function = getattr(kda_ops, operation)
    needed = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    with pytest.raises(KernelError, match=message):
        function(**dict.fromkeys(needed, X) | given | wrong)


def backend(rows: torch.Tensor, lines: torch.Tensor, maps: Any) -> Any:
    from sglang_hybrid.engine.gdn_mixer import HybridKDABackend

    made = object.__new__(HybridKDABackend)
    made.route, made.forward_metadata = choose("torch", "cpu"), maps
    made.states, made.convs = {7: StateView(rows, 0, HEADS, DIM)}, {7: ConvView(lines)}
    return made


def layer(inputs: DeltaInputs) -> Any:
    """What our backend reads of a layer; its convolution passes its input on."""
    width = HEADS * DIM
    taps = torch.zeros(3 * width, 4)
    taps[:, 3] = 1.0
    return SimpleNamespace(
        layer_id=7, q_dim=width, k_dim=width, v_dim=width, num_q_heads=HEADS, num_k_heads=HEADS,
        num_v_heads=HEADS, head_q_dim=DIM, head_k_dim=DIM, head_v_dim=DIM, bias=None, activation=None,
        conv_weights=taps, A_log=inputs.a_log.view(1, 1, -1, 1), dt_bias=inputs.dt_bias.flatten(),
        lower_bound=inputs.lower_bound,
    )  # fmt: skip


@pytest.mark.parametrize("decays", DECAYS)
def test_prefill_and_decode_of_our_backend(decays: Decays) -> None:
    """A prefill that passes a boundary, then a step of two requests that both go on from there.  Rows past
    the batch's tokens are padding: none of it is read, and zeros come out in its place."""
    from sglang_hybrid.engine.page_maps import DecodeMaps, ExtendMaps

    torch.manual_seed(4)
    inputs = drawn(13, decays)
    pages, lines = torch.full((8, HEADS * DIM, DIM), float("nan")), torch.zeros(8, 3 * HEADS * DIM, 3)
    nothing, target = torch.tensor([-1]), torch.tensor([5, 6])
    maps = ExtendMaps(plan_segments([0, 11], [0], 8), nothing[:, None], nothing, target[:, None], target)
    some = inputs.part(0, 13)
    row, a, b = mixed(some), some.a.clone(), some.b.clone()
    row[11:], a[11:], b[11:] = float("nan"), float("nan"), float("nan")
    made, one = backend(pages, lines, maps), layer(inputs)
    y = made.forward_extend(one, None, row, a[None], b[None])
    want_y, want = recur(inputs.part(0, 11), torch.zeros(HEADS, DIM, DIM), torch.float32)
    assert y.shape == (1, 13, HEADS, DIM) and not y[0, 11:].any()
    assert relative_error(y[0, :11], want_y) < 2e-6
    for page, tokens in ((5, 8), (6, 11)):
        assert relative_error(pages[page].view(HEADS, DIM, DIM), want[tokens - 1]) < 2e-6

    source, target = torch.tensor([6, 6]), torch.tensor([2, 3])
    made.forward_metadata = DecodeMaps(source[:, None], source, target[:, None], target)
    step, held = inputs.part(11, 13), pages[6].clone()
    y = made.forward_decode(one, None, mixed(step), step.a.flatten(1), step.b[None])
    for i in range(2):
        want_y, after = recur(step.part(i, i + 1), held.view(HEADS, DIM, DIM), torch.float32)
        assert relative_error(y[0, i], want_y[0]) < 2e-6
        assert relative_error(pages[2 + i].view(HEADS, DIM, DIM), after[0]) < 2e-6
    assert torch.equal(pages[6], held)
