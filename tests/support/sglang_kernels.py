"""Cases of SGLang's own Triton kernels over our arenas; `python -m tests.support.sglang_kernels` runs them.

Every byte of an arena is NaN but the rows that the kernels themselves write: states, the gaps of S0, rows
behind a sequence's end.  So whatever they read beyond their tokens shows, as does a wrong stride.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch

from sglang_hybrid.geometry import ceil_div
from sglang_hybrid.pools.arena import Arenas, StateShape
from sglang_hybrid.pools.factory import make_organization, smallest_budget
from sglang_hybrid.pools.organization import Organization
from tests.support.interpreted import Check, main, norm_error, tolerance

MEMORIES = ("S0", "S1", "S2", "D0")
GRID = 64
ROWS = (5, 2, 7)
"""Request rows: none is the first, none follows another."""
LENGTHS = (37, GRID + 21, 2 * GRID)
QUERY_HEADS = 8
NOTHING = -7
"""In a table: no slot."""


class Arena(NamedTuple):
    """The first arena of an organization, all NaN, and SGLang's table of request rows over its units."""

    organization: Organization
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    slots: list[torch.Tensor]
    """Of every sequence, `[tokens]` int64: unit * slots_per_unit + offset."""


def make_arena(
    memory: str, dtype: torch.dtype, device: str, heads: int = 2, dim: int = 64, grid: int = GRID
) -> Arena:
    """Units handed out in company of states, so that a sequence's units do not lie side by side."""
    shape = StateShape(heads, dim, dtype, 8, 16, 64, torch.float32, 256, 3, torch.float32)
    model = shape.geometry((0,), (0,))
    organization = make_organization(memory, model, grid, 4 * smallest_budget(memory, model, grid))
    arenas = Arenas(organization.layout(), shape, model, device)
    arenas.kv_buffers[0].fill_(0xFF)
    size, stride = organization.unit_tokens, organization.slots_per_unit
    table = torch.full((9, 4 * grid), NOTHING, dtype=torch.int32, device=device)
    slots = []
    for length in LENGTHS:
        units: list[int] = []
        for _ in range(ceil_div(length, size)):
            organization.allocate_checkpoint()
            units += organization.allocate_units(1) or []
        first = torch.tensor(units, device=device)[:, None] * stride
        slots.append((first + torch.arange(size, device=device)).view(-1)[:length])
    kv = arenas.kv(0)
    return Arena(organization, kv[:, 0], kv[:, 1], table, slots)


def ints(values: Any, device: str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def fill_table(arena: Arena, device: str) -> None:
    """`write_req_to_token_pool_triton`: the first half of every sequence is a prefix, the rest is new."""
    from sglang.kernels.ops.memory.common import write_req_to_token_pool_triton

    before = [length // 2 for length in LENGTHS]
    prefixes = [slots[:cut].contiguous() for slots, cut in zip(arena.slots, before, strict=True)]
    fresh = torch.cat([slots[cut:] for slots, cut in zip(arena.slots, before, strict=True)])
    write_req_to_token_pool_triton[(len(ROWS),)](
        arena.table, ints(ROWS, device),
        ints([prefix.data_ptr() for prefix in prefixes], device, torch.uint64),
        ints(before, device), ints(LENGTHS, device),
        ints([length - cut for length, cut in zip(LENGTHS, before, strict=True)], device), fresh,
        arena.table.shape[1],
    )  # fmt: skip


def store(arena: Arena, dtype: torch.dtype, device: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """`masked_set_kv_buffer_kernel` writes K and V of all tokens; returns them by sequence."""
    from sglang.srt.mem_cache.memory_pool import masked_set_kv_buffer_kernel

    torch.manual_seed(1)
    heads, dim = arena.k.shape[1:]
    keys = [torch.randn(length, heads, dim).to(dtype).to(device) for length in LENGTHS]
    values = [torch.randn(length, heads, dim).to(dtype).to(device) for length in LENGTHS]
    k, v, loc = torch.cat(keys), torch.cat(values), torch.cat(arena.slots)
    masked_set_kv_buffer_kernel[(len(k),)](
        k, v, arena.k, arena.v, loc, torch.ones(len(k), dtype=torch.bool, device=device),
        len(k), heads, dim, 128, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        arena.k.stride(0), arena.v.stride(0),
    )  # fmt: skip
    return keys, values


def indices_of(arena: Arena, lengths: list[int], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`create_flashinfer_kv_indices_triton`, which SGLang's Triton backend uses too: (indptr, slots)."""
    from sglang.kernels.ops.attention.kv_indices import create_flashinfer_kv_indices_triton

    indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=device)
    indptr[1:] = ints(lengths, device).cumsum(0)
    found = torch.full((sum(lengths),), NOTHING, dtype=torch.int64, device=device)
    create_flashinfer_kv_indices_triton[(len(lengths),)](
        arena.table, ints(ROWS, device), ints(lengths, device), indptr, None, found, arena.table.stride(0)
    )
    return indptr, found


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, begin: int) -> torch.Tensor:
    """Causal attention of queries `[n, heads, dim]` at positions from `begin` on, in fp64."""
    groups = q.shape[1] // k.shape[1]
    keys, values = (t.double().repeat_interleave(groups, 1) for t in (k, v))
    scores = torch.einsum("qhd,thd->hqt", q.double(), keys) * q.shape[-1] ** -0.5
    seen = torch.arange(len(k), device=q.device) <= begin + torch.arange(len(q), device=q.device)[:, None]
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
    return torch.einsum("hqt,thd->qhd", weights, values)


def decode(
    arena: Arena, q: torch.Tensor, indptr: torch.Tensor, found: torch.Tensor, page: int = 1
) -> torch.Tensor:
    """`decode_attention_fwd`, in two splits where a sequence is long enough."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    out, most = torch.full_like(q, float("nan")), 4
    decode_attention_fwd(
        q, arena.k, arena.v, out, indptr, found,
        torch.zeros(*q.shape[:2], most, q.shape[2], device=q.device),
        torch.zeros(*q.shape[:2], most, device=q.device),
        torch.full((len(q),), 2, dtype=torch.int32, device=q.device), most, q.shape[2] ** -0.5, 1.0, 1.0,
        page_size=page,
    )  # fmt: skip
    return out


def extend(
    arena: Arena, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, counts: list[int],
    indptr: torch.Tensor, found: torch.Tensor, page: int = 1,
) -> torch.Tensor:  # fmt: skip
    """`extend_attention_fwd` of `counts` new tokens behind prefixes in the arena."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    out = torch.full_like(q, float("nan"))
    starts = torch.zeros(len(counts) + 1, dtype=torch.int32, device=q.device)
    starts[1:] = ints(counts, str(q.device)).cumsum(0)
    extend_attention_fwd(
        q, k, v, out, arena.k, arena.v, starts, indptr, found, None, True, None, max(counts), 1.0, 1.0,
        q.shape[2] ** -0.5, page_size=page,
    )  # fmt: skip
    return out


def build_tables(arena: Arena, width: int, device: str) -> tuple[torch.Tensor, ...]:
    """fa3's page tables: of `build_trtllm_mha_page_table`; of `normal_decode_set_metadata`, with tokens and
    their sums; and `get_last_loc`."""
    from sglang.kernels.ops.attention.metadata import normal_decode_set_metadata
    from sglang.kernels.ops.attention.trtllm_mha_page_table import build_trtllm_mha_page_table
    from sglang.kernels.ops.memory.common import get_last_loc_triton

    page = arena.organization.unit_tokens
    rows, lengths = ints(ROWS, device), ints(LENGTHS, device)
    first, second = torch.full((2, len(ROWS), width), NOTHING, dtype=torch.int32, device=device)
    tokens = torch.zeros(len(ROWS), dtype=torch.int32, device=device)
    ends = torch.zeros(len(ROWS) + 1, dtype=torch.int32, device=device)
    build_trtllm_mha_page_table(arena.table, rows, lengths.int(), first, page)
    normal_decode_set_metadata(tokens, ends, second, arena.table, rows, width, lengths, 0, page)
    return first, second, tokens, ends, get_last_loc_triton(arena.table, rows, lengths)


def decodes(memory: str, dtype: torch.dtype, device: str) -> None:
    """Table, store, indices, then `decode_attention_fwd`, with the server's page size and with 1."""
    arena = make_arena(memory, dtype, device)
    fill_table(arena, device)
    for row, slots in zip(ROWS, arena.slots, strict=True):
        assert torch.equal(arena.table[row, : len(slots)], slots.int())
        assert (arena.table[row, len(slots) :] == NOTHING).all()
    keys, values = store(arena, dtype, device)
    indptr, found = indices_of(arena, list(LENGTHS), device)
    assert torch.equal(found, torch.cat(arena.slots))
    q = torch.randn(len(ROWS), QUERY_HEADS, arena.k.shape[2]).to(dtype).to(device)
    for page in (1, arena.organization.unit_tokens):
        out = decode(arena, q, indptr, found, page)
        for index, (k, v) in enumerate(zip(keys, values, strict=True)):
            want = reference(q[index : index + 1], k, v, len(k) - 1)
            assert norm_error(out[index : index + 1], want) < tolerance(dtype)


def sees_a_row_too_many(device: str) -> None:
    """Indices that go one row past a sequence's end give NaN, or these tables would prove nothing."""
    arena = make_arena("S1", torch.float32, device)
    store(arena, torch.float32, device)
    slots = torch.cat([arena.slots[0], arena.slots[0][-1:] + 1])
    q = torch.randn(1, QUERY_HEADS, arena.k.shape[2], device=device)
    assert decode(arena, q, ints([0, len(slots)], device, torch.int32), slots).isnan().any()


def extends(memory: str, dtype: torch.dtype, device: str) -> None:
    """The second half of every sequence by `extend_attention_fwd`, the first read from the arena."""
    arena = make_arena(memory, dtype, device)
    fill_table(arena, device)
    keys, values = store(arena, dtype, device)
    begins = [length // 2 for length in LENGTHS]
    indptr, found = indices_of(arena, begins, device)
    # What this extend brings lies in its own tensors; its rows in the arena must not be read.
    for slots, begin in zip(arena.slots, begins, strict=True):
        arena.k[slots[begin:]] = float("nan")
        arena.v[slots[begin:]] = float("nan")
    k = torch.cat([part[begin:] for part, begin in zip(keys, begins, strict=True)])
    v = torch.cat([part[begin:] for part, begin in zip(values, begins, strict=True)])
    q = torch.randn(len(k), QUERY_HEADS, k.shape[2]).to(dtype).to(device)
    counts = [length - begin for length, begin in zip(LENGTHS, begins, strict=True)]
    for page in (1, arena.organization.unit_tokens):
        parts = torch.split(extend(arena, q, k, v, counts, indptr, found, page), counts)
        for index, (asked, got) in enumerate(zip(torch.split(q, counts), parts, strict=True)):
            want = reference(asked, keys[index], values[index], begins[index])
            assert norm_error(got, want) < tolerance(dtype)


def page_tables(memory: str, device: str) -> None:
    """slot // page is a unit's number wherever units lie a page apart; nothing is written behind the last."""
    arena = make_arena(memory, torch.float32, device)
    fill_table(arena, device)
    page = arena.organization.unit_tokens
    assert page == arena.organization.slots_per_unit
    width = ceil_div(max(LENGTHS), page)
    want = torch.full((len(ROWS), width), NOTHING, dtype=torch.int32, device=device)
    for index, slots in enumerate(arena.slots):
        want[index, : ceil_div(len(slots), page)] = (slots[::page] // page).int()
    first, second, tokens, ends, last = build_tables(arena, width, device)
    assert torch.equal(first, want) and torch.equal(second, want)
    assert tokens.tolist() == list(LENGTHS)
    assert ends.tolist() == [sum(LENGTHS[:count]) for count in range(len(LENGTHS) + 1)]
    assert last.tolist() == [int(slots[-1]) for slots in arena.slots]


def lightning(lengths: tuple[int, ...], device: str) -> None:
    """`seg_la_fwd`, prefill or decode, and our torch function in its place on a CPU: the same outputs, the
    same states in the same slots.  The first sequence begins where it has more than one token, the others go
    on; the third has no slot."""
    from sglang.kernels.ops.attention.linear.seg_la import SegLaMeta, seg_la_fwd

    from sglang_hybrid.platforms import lightning_ops

    torch.manual_seed(2)
    heads, dim, tokens = 2, 128, sum(lengths)
    q, k, v = (torch.randn(tokens, heads, dim, device=device) for _ in range(3))
    pool = torch.randn(5, heads, dim, dim, device=device)
    slopes = torch.tensor([0.25, 0.01], device=device).view(heads, 1, 1)
    begun = [int(length == 1 or index > 0) for index, length in enumerate(lengths)]
    starts = ints([0, *lengths], device, torch.int32).cumsum(0).int()
    meta = SegLaMeta(
        batch_size=len(lengths), max_q_length=None, q_offsets=starts, q_lengths=starts.diff(),
        s_offsets=ints([3, 1, -1][: len(lengths)], device, torch.int32), s_scales=ints(begun, device),
    )  # fmt: skip
    theirs, ours = pool.clone(), pool.clone()
    want = seg_la_fwd(q, k, v, theirs, slopes, meta, softmax_scale=0.3)
    got = lightning_ops.seg_la_fwd(q, k, v, ours, slopes, meta, softmax_scale=0.3)
    placed = sum(lengths[:2])
    assert norm_error(got[:placed], want[:placed]) < tolerance(torch.float32)
    assert norm_error(ours, theirs) < tolerance(torch.float32)
    assert torch.equal(ours[[0, 2, 4]], pool[[0, 2, 4]]) and not torch.equal(ours, pool)


def normed(gated: bool, device: str) -> None:
    """`layernorm_fn` as Ling calls it: of heads under a sigmoid, and of queries and keys."""
    from sglang.kernels.ops.attention.fla import layernorm_gated

    from sglang_hybrid.platforms import gdn_ops

    torch.manual_seed(3)
    x, gate = torch.randn(5, 96, device=device), torch.randn(5, 96, device=device) if gated else None
    given: dict[str, Any] = {
        "z": gate, "eps": 1e-5, "group_size": 24 if gated else None, "is_rms_norm": True,
        "activation": "sigmoid" if gated else "swish",
    }  # fmt: skip
    weight = torch.randn(96, device=device)
    # Around its kernel it asks the GPU.
    with (
        mock.patch.object(layernorm_gated, "_get_sm_count", return_value=2),
        mock.patch.object(layernorm_gated, "device_context", return_value=nullcontext()),
    ):
        want = layernorm_gated.layernorm_fn(x, weight, None, **given)
    got = gdn_ops.rms_norm_gated(x=x, weight=weight, bias=None, **given)
    assert norm_error(got, want) < tolerance(torch.float32)


def cases() -> dict[str, Check]:
    """All cases by name.  No bf16: the interpreter multiplies such operands of a dot as integers."""
    dtypes = {"fp32": torch.float32, "fp16": torch.float16}
    table: dict[str, Callable[[str], None]] = {}
    for memory in MEMORIES:
        for name, dtype in dtypes.items():
            if name == "fp32" or memory == "S1":
                table[f"decode {memory} {name}"] = partial(decodes, memory, dtype)
                table[f"extend {memory} {name}"] = partial(extends, memory, dtype)
        if memory != "S0":  # which fa3 is refused for
            table[f"page tables {memory}"] = partial(page_tables, memory)
    table |= {
        "lightning attention, prefill": partial(lightning, (40, 33, 5)),
        "lightning attention, decode": partial(lightning, (1, 1, 1)),
        "norm of heads under a sigmoid": partial(normed, True),
        "norm without a gate": partial(normed, False),
    }
    return table | {"a row too many": sees_a_row_too_many}


if __name__ == "__main__":
    main(cases(), guarded=False)
