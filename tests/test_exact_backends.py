"""The exact backends alone, on a toy pool: prefill in any pieces, then decode, gives the same bits."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.radix_attention import AttentionType

from sglang_hybrid.engine.exact import ExactAttention, ExactMamba2Backend, _same_logprobs
from sglang_hybrid.engine.page_maps import DecodeMaps, ExtendMaps
from sglang_hybrid.engine.seams import SeamError
from sglang_hybrid.kernels import plan_segments
from sglang_hybrid.pools.views import ConvView, StateView

GRID, LENGTH = 4, 11
HEADS, DIM, SIZE, GROUPS = 4, 6, 8, 2
CHANNELS = HEADS * DIM + 2 * GROUPS * SIZE


def mixer() -> Any:
    """What the backend reads of `MambaMixer2`."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return SimpleNamespace(
        conv1d=SimpleNamespace(weight=normal(CHANNELS, 1, 4), bias=normal(CHANNELS)),
        activation="silu", A=-torch.exp(normal(HEADS) - 3), D=normal(HEADS), dt_bias=normal(HEADS),
        head_dim=DIM, n_groups=GROUPS, tp_size=1, intermediate_size=HEADS * DIM,
        groups_ssm_state_size=GROUPS * SIZE,
    )  # fmt: skip


def recurrent(cuts: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs of a sequence interrupted at `cuts`, its final state and window; one token is a decode step."""
    backend = ExactMamba2Backend.__new__(ExactMamba2Backend)
    rows = torch.full((8, HEADS * DIM, SIZE), float("nan")).to(dtype)
    lines = torch.full((8, CHANNELS, 3), float("nan"))
    backend.states = {0: StateView(rows, 0, HEADS, DIM)}
    backend.convs = {0: ConvView(lines)}
    generator = torch.Generator().manual_seed(2)
    conv_in = torch.randn(LENGTH, CHANNELS, generator=generator)
    dt = torch.randn(LENGTH, HEADS, generator=generator)
    outs, source = [], -1
    for low, high in zip((0, *cuts), (*cuts, LENGTH)):
        # Forked at each step: read the old page, write a new one; boundaries in between have no page.
        target = 1 + (source + 1) % 7
        src = torch.tensor([[source]], dtype=torch.int32)
        plan = plan_segments([0, high - low], [low], GRID)
        dst = torch.tensor([[target if end == high else -1] for _, end in plan.emissions], dtype=torch.int32)
        if high - low == 1:
            step = DecodeMaps(src, src[:, 0], dst, dst[:, 0])
            y = backend._decode(mixer(), 0, conv_in[low:high], dt[low:high], step)
        else:
            maps = ExtendMaps(plan, src, src[:, 0], dst, dst[:, 0])
            y = backend._extend(mixer(), 0, conv_in[low:high], dt[low:high], maps)
        outs.append(y)
        source = target
    return torch.cat(outs), rows[source].float(), lines[source]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cuts", [(4,), (3, 8), (10,), (8, 9, 10), tuple(range(1, LENGTH))], ids=str)
def test_recurrent_layer(cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    for got, want in zip(recurrent(cuts, dtype), recurrent((), dtype)):
        assert torch.isfinite(want).all() and torch.equal(got, want)


class Pool:
    """KV of one layer; slots scattered and poisoned."""

    def __init__(self) -> None:
        self.k = torch.full((64, 2, 8), float("nan"))
        self.v = torch.full((64, 2, 8), float("nan"))

    def set_kv_buffer(self, layer: Any, where: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k[where.loc], self.v[where.loc] = k.view(-1, 2, 8), v.view(-1, 2, 8)

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.k

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.v


def attended(batches: list[list[tuple[int, int, int]]]) -> dict[int, torch.Tensor]:
    """Outputs by request row; a batch is a list of (row, tokens before, new tokens)."""
    backend = ExactAttention.__new__(ExactAttention)
    slots = torch.randperm(63, generator=torch.Generator().manual_seed(3)) + 1
    backend.token_to_kv_pool = Pool()
    backend.req_to_token_pool = SimpleNamespace(req_to_token=slots.view(3, 21).int())
    layer = SimpleNamespace(
        is_cross_attention=False, attn_type=AttentionType.DECODER, sliding_window_size=-1, logit_cap=0.0,
        layer_id=0, tp_q_head_num=4, tp_k_head_num=2, qk_head_dim=8, v_head_dim=8, scaling=0.3,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(3, 21, 32, generator=generator)
    k, v = torch.randn(2, 3, 21, 2, 8, generator=generator)
    outs: dict[int, list[torch.Tensor]] = {}
    for batch in batches:
        take = [(row, slice(begin, begin + length)) for row, begin, length in batch]
        table = backend.req_to_token_pool.req_to_token
        decode = all(length == 1 for _, _, length in batch)
        forward = SimpleNamespace(
            req_pool_indices=torch.tensor([row for row, _, _ in batch]),
            out_cache_loc=torch.cat([table[row, part] for row, part in take]).long(),
            seq_lens=torch.tensor([begin + length for _, begin, length in batch]),
            extend_prefix_lens_cpu=[begin for _, begin, _ in batch],
            extend_seq_lens_cpu=[length for _, _, length in batch],
        )
        queries, keys, values = (torch.cat([t[row, part] for row, part in take]) for t in (q, k, v))
        run = backend.forward_decode if decode else backend.forward_extend
        y = run(queries, keys, values, layer, forward)
        for (row, _), part in zip(take, y.split([length for _, _, length in batch])):
            outs.setdefault(row, []).append(part)
    return {row: torch.cat(parts) for row, parts in outs.items()}


def test_attention_layer() -> None:
    want = attended([[(0, 0, 21)], [(1, 0, 19)], [(2, 0, 20)]])
    steps = [[(0, 0, 20), (1, 0, 7)], [(1, 7, 11), (2, 0, 19)], [(2, 19, 1), (0, 20, 1), (1, 18, 1)]]
    got = attended(steps)
    for row in want:
        assert torch.isfinite(want[row]).all() and torch.equal(got[row], want[row])


def runner(**processor: Any) -> Any:
    """A model runner with a sampler and a logits processor."""
    model = torch.nn.Module()
    model.logits_processor = torch.nn.Module()
    model.logits_processor.input_logprob_processor = SimpleNamespace(**processor)
    return SimpleNamespace(model=model, sampler=SimpleNamespace(enable_deterministic=False))


def test_logprobs_are_computed_alike_on_both_sides() -> None:
    one = runner(enable_fast_input_logprobs=True)
    _same_logprobs(one)
    assert one.sampler.enable_deterministic
    assert not one.model.logits_processor.input_logprob_processor.enable_fast_input_logprobs
    with pytest.raises(SeamError, match="enable_fast_input_logprobs"):
        _same_logprobs(runner(renamed=True))
    with pytest.raises(SeamError, match="of the model"):
        _same_logprobs(SimpleNamespace(model=torch.nn.Module(), sampler=one.sampler))
