"""Lightning attention of stock SGLang on a CPU, and of our backend: called as Ling-2.5 calls them.

`test_sglang_kernels` holds the first beside SGLang's own kernels.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_hybrid.geometry import GeometryError
from sglang_hybrid.kernels import KernelError, choose, plan_segments
from sglang_hybrid.models import FAMILIES, KINDS, Fields
from sglang_hybrid.platforms import lightning_ops
from sglang_hybrid.pools.arena import StateShape
from sglang_hybrid.pools.factory import make_organization
from sglang_hybrid.pools.views import StateView
from tests.support.ling import slopes
from tests.support.recurrence import relative_error

HEADS, DIM, LAYER, LAYERS = 4, 8, 2, 6
SCALE = DIM**-0.5
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def drawn(tokens: int) -> Rows:
    """q, k and v [T, heads, dim]."""
    q, k, v = torch.randn(3, tokens, HEADS, DIM)
    return q, k, v


def recur(rows: Rows, state: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """y [T, heads, dim] and the state [heads, value, key] after each token, in float64."""
    decay = torch.exp(-slopes(HEADS, LAYER, LAYERS).double())[:, None, None]
    state, y, states = state.double(), [], []
    for q, k, v in zip(*(one.double() for one in rows), strict=True):
        state = decay * state + v[:, :, None] * k[:, None]
        y.append(SCALE * (state * q[:, None]).sum(-1))
        states.append(state)
    return torch.stack(y), states


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ours over eight pages of a state each, with the slopes that SGLang's own builds."""
    from sglang.srt.layers.attention.linear import lightning_backend

    from sglang_hybrid.engine.lightning import HybridLightningBackend

    class Plain:
        def __init__(self, runner: Any) -> None:
            self.device, self.linear_backend = "cpu", "seg_la"
            self.tp_slope = lightning_backend.LightningAttentionBackend._build_slope_tensor(
                HEADS, LAYERS, "cpu"
            )

    one = SimpleNamespace(attn_tp_size=1, attn_tp_rank=0)
    monkeypatch.setattr(lightning_backend, "get_parallel", lambda: one)
    monkeypatch.setattr(lightning_backend.LightningAttentionBackend, "__init__", Plain.__init__)
    pages = torch.full((8, HEADS * DIM, DIM), float("nan"))

    def attach(self: Any, runner: Any) -> None:
        self.states = {LAYER: StateView(pages, 0, HEADS, DIM)}

    def route(self: Any) -> None:
        self.route = choose("torch", "cpu")

    monkeypatch.setattr(HybridLightningBackend, "attach", attach)
    monkeypatch.setattr(HybridLightningBackend, "choose_route", route)
    return HybridLightningBackend(None)


ATTENTION = SimpleNamespace(layer_id=LAYER, scaling=SCALE)


def test_prefill_and_decode_of_our_backend(backend: Any) -> None:
    """A prefill that passes a boundary, then a step of two requests that both go on from there.  Rows past
    the batch's tokens are padding: none of it is read, and zeros come out in its place."""
    from sglang_hybrid.engine.page_maps import DecodeMaps, ExtendMaps

    torch.manual_seed(4)
    rows = drawn(13)
    pages = backend.states[LAYER].rows
    nothing, target = torch.tensor([-1]), torch.tensor([5, 6])
    backend.forward_metadata = ExtendMaps(
        plan_segments([0, 11], [0], 8), nothing[:, None], nothing, target[:, None], nothing.expand(2)
    )
    padded = [one.clone() for one in rows]
    for one in padded:
        one[11:] = float("nan")
    y = backend.forward_extend(*padded, layer=ATTENTION, forward_batch=None)
    want_y, want = recur(tuple(one[:11] for one in rows), torch.zeros(HEADS, DIM, DIM))
    assert y.shape == (13, HEADS * DIM) and not y[11:].any()
    assert relative_error(y[:11], want_y.flatten(1)) < 2e-6
    for page, tokens in ((5, 8), (6, 11)):
        assert relative_error(pages[page].view(HEADS, DIM, DIM), want[tokens - 1]) < 2e-6

    source, target = torch.tensor([6, 6]), torch.tensor([2, 3])
    backend.forward_metadata = DecodeMaps(source[:, None], nothing, target[:, None], nothing)
    step, held = [one[11:] for one in rows], pages[6].clone()
    y = backend.forward_decode(*step, layer=ATTENTION, forward_batch=None)
    for i in range(2):
        want_y, after = recur(tuple(one[i : i + 1] for one in step), held.view(HEADS, DIM, DIM))
        assert relative_error(y[i], want_y.flatten()) < 2e-6
        assert relative_error(pages[2 + i].view(HEADS, DIM, DIM), after[0]) < 2e-6
    assert torch.equal(pages[6], held)


def test_queries_that_come_scaled_are_not_scaled_again(backend: Any) -> None:
    """As the layers do it for SGLang's other kernel of this attention."""
    from sglang_hybrid.engine.page_maps import DecodeMaps

    torch.manual_seed(5)
    q, k, v = drawn(1)
    nothing, target = torch.tensor([-1]), torch.tensor([[1]])
    backend.forward_metadata = DecodeMaps(nothing[:, None], nothing, target, nothing)
    said = backend.forward_decode(q, k, v, layer=ATTENTION, forward_batch=None)
    backend.linear_backend = "minimax"
    again = backend.forward_decode(q * SCALE, k, v, layer=ATTENTION, forward_batch=None)
    assert torch.equal(said, again)


def meta(**changes: Any) -> Any:
    """A prefill of 5 tokens that goes on from its slot, and one of 2 that begins."""
    fields = {
        "q_offsets": torch.tensor([0, 5, 7]), "s_offsets": torch.tensor([3, 1]),
        "s_scales": torch.tensor([1, 0]), "mask": None,
    }  # fmt: skip
    return SimpleNamespace(**fields | changes)


def test_scan_in_a_stock_pool() -> None:
    """SGLang's states are key by value; a slot of nobody is neither read nor written."""
    torch.manual_seed(1)
    rows, pool = drawn(7), torch.randn(4, HEADS, DIM, DIM)
    before, slope = pool.clone(), slopes(HEADS, LAYER, LAYERS).view(HEADS, 1, 1)
    y = lightning_ops.seg_la_fwd(*rows, pool, slope, meta(), softmax_scale=SCALE)
    for slot, low, high, initial in ((3, 0, 5, before[3].transpose(1, 2)), (1, 5, 7, torch.zeros(()))):
        part = tuple(one[low:high] for one in rows)
        want_y, want = recur(part, initial.expand(HEADS, DIM, DIM))
        assert relative_error(y[low:high], want_y) < 2e-6
        assert relative_error(pool[slot].transpose(1, 2), want[-1]) < 2e-6
    assert torch.equal(pool[[0, 2]], before[[0, 2]])
    nobody, held = meta(s_offsets=torch.tensor([3, -1])), pool.clone()
    lightning_ops.seg_la_fwd(*rows, pool, slope, nobody)
    assert torch.equal(pool[:3], held[:3]) and not torch.equal(pool[3], held[3])


@pytest.mark.parametrize(
    ("given", "changes", "message"),
    [
        ({"caches": torch.zeros(1)}, {}, "verifies no drafts"),
        ({}, {"mask": torch.zeros(1)}, "verifies no drafts"),
        ({"track_lens": torch.zeros(1)}, {}, "leaves no snapshots"),
        ({"track_state_indices": torch.zeros(1)}, {}, "leaves no snapshots"),
    ],
)
def test_what_the_platform_cannot_do_is_refused(
    given: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(KernelError, match=message):
        lightning_ops.seg_la_fwd(*drawn(7), torch.zeros(4), torch.zeros(1), meta(**changes), **given)


def test_rotary_positions_are_those_of_every_platform() -> None:
    """Where SGLang's function for its CPU engine knows one kind alone."""
    from sglang.srt.layers.rotary_embedding import factory

    plain = {"rope_type": "default", "rope_theta": 10_000.0}
    made = lightning_ops.get_rope_cpu(DIM, DIM, 64, 10_000, True, plain, torch.float32, device="cpu")
    assert made is factory.get_rope(DIM, DIM, 64, 10_000, True, plain, torch.float32)


def test_the_organizations_of_a_state_without_a_conv_line() -> None:
    """S0, S1 and D0 hold it; in S1 a checkpoint is its members.  S2 would pack lines that do not exist."""
    dims = KINDS["lightning"].dims((4, 24, 24), (0, 0))
    shape = StateShape(1, 512, torch.float32, *dims[:3], torch.float32, *dims[3:], torch.float32, kv_parts=1)
    model = shape.geometry((2, 5), (0, 1, 3, 4))
    assert model.conv_bytes == 0 and model.checkpoint_bytes == 2 * 96 * 24 * 4
    for memory in ("S0", "S1", "D0"):
        assert make_organization(memory, model, 16, 1 << 22).allocate_checkpoint() is not None
    assert make_organization("S1", model, 8, 1 << 22).unit_equivalent(1) == 2
    with pytest.raises(GeometryError, match="keeps none: use --hybrid-mem S1"):
        make_organization("S2", model, 16, 1 << 22)


def test_heads_are_those_that_sglang_makes_states_for() -> None:
    """`num_linear_key_value_heads`, which SGLang takes from the attention heads where a config has none."""
    config = {
        "num_hidden_layers": 8, "layer_group_size": 4, "num_attention_heads": 8, "head_dim": 16,
        "kv_lora_rank": 64,
    }  # fmt: skip
    read = FAMILIES["ling-2.5"].read
    assert read(Fields(config, "bailing_hybrid", "here")).heads == 8
    assert read(Fields(config | {"num_linear_key_value_heads": 4}, "bailing_hybrid", "here")).heads == 4
