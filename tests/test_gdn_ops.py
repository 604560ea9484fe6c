"""The gated delta rule of stock SGLang on a CPU, and of our backend: called as Qwen3.5 calls them."""

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_hybrid.kernels import KernelError, choose, plan_segments
from sglang_hybrid.platforms import gdn_ops
from sglang_hybrid.pools.views import ConvView, StateView
from tests.support.delta import DeltaInputs, recur
from tests.support.recurrence import relative_error

HEADS, GROUPS, DIM, SIZE = 4, 2, 6, 8


def test_scan_and_update_in_a_stock_pool() -> None:
    """Two prefills, of which one goes on from what its slot holds, then a decode step of the other."""
    torch.manual_seed(1)
    inputs = DeltaInputs.random(9, HEADS, GROUPS, DIM, SIZE)
    pool = torch.randn(4, HEADS, DIM, SIZE)
    pool[1] = 0
    before = pool.clone()
    slots = torch.tensor([3, 1], dtype=torch.int32)
    some = inputs.part(0, 7)
    y, nothing, chunks = gdn_ops.chunk_gated_delta_rule(
        some.q[None], some.k[None], some.v[None], some.decay.float()[None], some.strength.float()[None],
        initial_state=pool, initial_state_indices=slots, cu_seqlens=torch.tensor([0, 5, 7]),
        head_first=False, use_qk_l2norm_in_kernel=True, inplace_update=True,
    )  # fmt: skip
    assert nothing is None and chunks is None
    for slot, low, high in ((3, 0, 5), (1, 5, 7)):
        want_y, want = recur(inputs.part(low, high), before[slot], torch.float32)
        assert relative_error(y[0, low:high], want_y) < 2e-6
        assert relative_error(pool[slot], want[-1]) < 2e-6
    assert torch.equal(pool[[0, 2]], before[[0, 2]])

    step = inputs.part(7, 9)
    mixed = torch.cat([step.q.flatten(1), step.k.flatten(1), step.v.flatten(1)], 1)
    before, out = pool.clone(), torch.empty(2, 1, HEADS, DIM)
    gdn_ops.fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv=mixed, a=step.a, b=step.b, A_log=step.a_log, dt_bias=step.dt_bias, scale=SIZE**-0.5,
        initial_state=pool, out=out, ssm_state_indices=torch.tensor([1, -1], dtype=torch.int32),
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    want_y, want = recur(step.part(0, 1), before[1], torch.float32)
    assert relative_error(out[0], want_y) < 2e-6 and relative_error(pool[1], want[0]) < 2e-6
    # The second row is padding: it reads zeros and writes to slot 0, which nobody owns.
    assert torch.equal(pool[2:], before[2:])


def test_projections_norm_and_gate() -> None:
    torch.manual_seed(2)
    qkv, z = torch.randn(3, 2 * GROUPS * SIZE + HEADS * DIM), torch.randn(3, HEADS * DIM)
    b, a = torch.randn(3, HEADS), torch.randn(3, HEADS)
    got = gdn_ops.fused_qkvzba_split_reshape_cat_contiguous(
        torch.cat([qkv, z], 1), torch.cat([b, a], 1), GROUPS, HEADS, SIZE, DIM
    )
    for mine, want in zip(got, (qkv, z.view(3, HEADS, DIM), b, a), strict=True):
        assert torch.equal(mine, want) and mine.is_contiguous()
    x, gate, weight = torch.randn(5, DIM), torch.randn(5, DIM), torch.randn(DIM)
    normed = torch.nn.functional.rms_norm(x, (DIM,), weight, 1e-6) * torch.nn.functional.silu(gate)
    mine = gdn_ops.rms_norm_gated(x=x, weight=weight, bias=None, z=gate, is_rms_norm=True)
    assert relative_error(mine, normed) < 1e-6
    # Of each of several groups, under another gate or none, as Ling asks for it.
    norm = {"bias": None, "is_rms_norm": True, "group_size": DIM // 2}
    normed = torch.nn.functional.rms_norm(x.view(5, 2, -1), (DIM // 2,), None, 1e-6).view(5, DIM) * weight
    assert relative_error(gdn_ops.rms_norm_gated(x=x, weight=weight, **norm), normed) < 1e-6
    mine = gdn_ops.rms_norm_gated(x=x, weight=weight, z=gate, activation="sigmoid", **norm)
    assert relative_error(mine, normed * gate.sigmoid()) < 1e-6
    flat, wide = torch.randn(5, HEADS * DIM), torch.randn(5, HEADS, 2 * DIM)[..., DIM:]
    gated = flat * wide.reshape(5, -1).sigmoid()
    assert relative_error(gdn_ops.fused_sigmoid_mul(flat, wide), gated) < 1e-6
    assert gdn_ops.fused_sigmoid_mul(flat, wide, inplace=True) is flat
    assert relative_error(flat, gated) < 1e-6


X = torch.zeros(1, 2, 1, 4)
SCAN: dict[str, Any] = {
    "initial_state": X, "initial_state_indices": X[0, 0, 0], "cu_seqlens": X[0, 0, 0],
    "use_qk_l2norm_in_kernel": True,
}  # fmt: skip
NORM: dict[str, Any] = {"x": X, "weight": X, "bias": None, "z": X, "is_rms_norm": True}
DECODE: dict[str, Any] = {"scale": 0.5, "use_qk_l2norm_in_kernel": True}


@pytest.mark.parametrize(
    ("operation", "given", "wrong", "message"),
    [
        ("fused_gdn_gating", {}, {"beta": 2.0}, r"beta 2\.0 and threshold 20\.0 bend softplus"),
        ("fused_gdn_gating", {}, {"threshold": 5.0}, r"needs 1\.0 and 20\.0"),
        *(
            ("chunk_gated_delta_rule", SCAN, {name: None}, "needs initial_state, its indices and cu_seqlens")
            for name in ("initial_state", "initial_state_indices", "cu_seqlens")
        ),
        ("chunk_gated_delta_rule", SCAN, {"scale": 1.0}, "no own scale"),
        ("chunk_gated_delta_rule", SCAN, {"head_first": True}, "tokens first"),
        ("chunk_gated_delta_rule", SCAN, {"use_qk_l2norm_in_kernel": False}, "unit keys"),
        ("fused_recurrent_gated_delta_rule_packed_decode", DECODE, {"scale": 1.0}, r"scale is 1\.0, needs"),
        (
            "fused_recurrent_gated_delta_rule_packed_decode",
            DECODE,
            {"use_qk_l2norm_in_kernel": False},
            "needs unit keys",
        ),
        ("rms_norm_gated", NORM, {"activation": "relu"}, "activation is 'relu', needs 'swish'"),
        *(
            ("rms_norm_gated", NORM, wrong, "an RMS norm in front of its gate on this platform")
            for wrong in ({"bias": X}, {"norm_before_gate": False}, {"is_rms_norm": False})
        ),
        ("fused_sigmoid_mul", {}, {"quant": True}, "quant is True, needs False"),
    ],
)  # fmt: skip
def test_what_the_platform_cannot_do_is_refused(
    operation: str, given: dict[str, Any], wrong: dict[str, Any], message: str
) -> None:
    """Every tensor that a call has besides is a small one."""
    function = getattr(gdn_ops, operation)
    needed = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    with pytest.raises(KernelError, match=message):
        function(**dict.fromkeys(needed, X) | given | wrong)


def test_replacements_reach_whoever_imported_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    definition, user = SimpleNamespace(), SimpleNamespace(other=1)

    def stock() -> None: ...

    definition.fused_gdn_gating = user.fused_gdn_gating = stock
    monkeypatch.setitem(sys.modules, "sglang.toy", definition)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "sglang.toy_user", user)  # type: ignore[arg-type]
    monkeypatch.setattr(gdn_ops, "REPLACEMENTS", {"sglang.toy": (gdn_ops.fused_gdn_gating,)})
    for _ in range(2):
        gdn_ops.install()
        assert definition.fused_gdn_gating is user.fused_gdn_gating is gdn_ops.fused_gdn_gating


def delta_layer(inputs: DeltaInputs) -> Any:
    """What our backend reads of a layer, weights of `inputs`; its convolution passes its input on."""
    keys, values = GROUPS * SIZE, HEADS * DIM
    taps = torch.zeros(2 * keys + values, 4)
    taps[:, 3] = 1.0
    return SimpleNamespace(
        layer_id=7, q_dim=keys, k_dim=keys, v_dim=values, num_q_heads=GROUPS, num_k_heads=GROUPS,
        num_v_heads=HEADS, head_q_dim=SIZE, head_k_dim=SIZE, head_v_dim=DIM, bias=None, activation=None,
        conv_weights=taps, A_log=inputs.a_log, dt_bias=inputs.dt_bias,
        lower_bound=None,
    )  # fmt: skip


def delta_backend(rows: torch.Tensor, lines: torch.Tensor) -> Any:
    """Our backend over one layer's pages and lines, a page a state."""
    from sglang_hybrid.engine.gdn_mixer import HybridGDNBackend

    backend = object.__new__(HybridGDNBackend)
    backend.route = choose("torch", "cpu")
    backend.states, backend.convs = {7: StateView(rows, 0, HEADS, DIM)}, {7: ConvView(lines)}
    return backend


def test_prefill_of_our_backend() -> None:
    """Two sequences, one resumed: y and the states at a boundary and at the ends.  Rows behind the batch's
    tokens are padding (here NaN) and no part of the result."""
    from sglang_hybrid.engine.page_maps import ExtendMaps

    torch.manual_seed(4)
    inputs = DeltaInputs.random(16, HEADS, GROUPS, DIM, SIZE)
    mixed = torch.cat([inputs.q.flatten(1), inputs.k.flatten(1), inputs.v.flatten(1)], 1)
    a, b = inputs.a.clone(), inputs.b.clone()
    mixed[14:] = a[14:] = b[14:] = float("nan")
    pages, lines = torch.full((8, HEADS * DIM, SIZE), float("nan")), torch.zeros(8, mixed.shape[1], 3)
    pages[3] = torch.randn(HEADS * DIM, SIZE)
    before = pages.clone()
    backend = delta_backend(pages, lines)
    segments = plan_segments([0, 11, 14], [0, 8], 8)
    source, target = torch.tensor([-1, 3]), torch.tensor([5, 6, 7])
    backend.forward_metadata = ExtendMaps(segments, source[:, None], source, target[:, None], target)
    y = backend.forward_extend(delta_layer(inputs), None, mixed, a, b)
    assert y.shape == (1, 14, HEADS, DIM)
    for begin, end, initial, emitted in (
        (0, 11, torch.zeros(HEADS, DIM, SIZE), {8: 5, 11: 6}),
        (11, 14, before[3].view(HEADS, DIM, SIZE), {3: 7}),
    ):
        want_y, want = recur(inputs.part(begin, end), initial, torch.float32)
        assert relative_error(y[0, begin:end], want_y) < 2e-6
        for tokens, page in emitted.items():
            assert relative_error(pages[page].view(HEADS, DIM, SIZE), want[tokens - 1]) < 2e-6
    assert torch.equal(pages[3], before[3])


def test_raw_projections_of_a_cuda_decode_step() -> None:
    """`SGLANG_ENABLE_GDN_DECODE_FUSED_PROJ_CONV` hands the backend what the layer's projections gave."""
    from sglang_hybrid.engine.page_maps import DecodeMaps

    torch.manual_seed(3)
    keys, values = GROUPS * SIZE, HEADS * DIM
    layer = delta_layer(DeltaInputs.random(1, HEADS, GROUPS, DIM, SIZE))
    pages, lines = torch.randn(5, values, SIZE), torch.randn(5, 2 * keys + values, 3)
    qkv, z = torch.randn(2, 2 * keys + values), torch.randn(2, HEADS, DIM)
    b, a = torch.randn(2, HEADS), torch.randn(2, HEADS)

    def step(mixed: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
        rows, windows = pages.clone(), lines.clone()
        backend = delta_backend(rows, windows)
        source, target = torch.tensor([1, 2]), torch.tensor([3, 4])
        backend.forward_metadata = DecodeMaps(source[:, None], source, target[:, None], target)
        return backend.forward_decode(layer, None, mixed, a, b), rows, windows

    y, rows, windows = step(qkv)
    assert y.shape == (1, 2, HEADS, DIM) and not torch.equal(rows[3:], pages[3:])
    assert torch.equal(rows[:3], pages[:3]) and torch.equal(windows[:3], lines[:3])
    (raw_y, raw_z), raw_rows, raw_windows = step((torch.cat([qkv, z.flatten(1)], 1), torch.cat([b, a], 1)))
    assert torch.equal(raw_y, y) and torch.equal(raw_z, z)
    assert torch.equal(raw_rows, rows) and torch.equal(raw_windows, windows)
