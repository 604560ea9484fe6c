"""Gated delta rule (GDN) over a ragged batch, with the state handed out on the way.

Source symbols: `chunk_gated_delta_rule` of SGLang's fla ops, `fused_gdn_gating` for the gates, which they
follow in meaning.  The recurrence of one value head, over tokens t, with unit-length keys and queries:

    S_t = exp(g_t) S_(t-1);   S_t += beta_t (v_t - S_t k_t) k_t^T
    y_t = S_t q_t / sqrt(K)

A state is [V, K]: its rows are (head, value dim) pairs, as those of a Mamba2 state are (head, head
dim) pairs.  A token reads the state before it writes, so a piece is a small triangular system:
(1) solve it inside all pieces at once, for the values a piece would write on its own and for how
it reads the state before it, (2) go from piece to piece, (3) what each entry state adds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_hybrid.kernels.checks import need_groups, need_shape
from sglang_hybrid.kernels.elementwise import softplus
from sglang_hybrid.kernels.segments import Segments
from sglang_hybrid.pools.views import StateView

EPS = 1e-6
"""Under the root of a key's and a query's length, as in the source."""


def gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Projections `a` and `b` [T, H] -> (log decay g, write strength beta), both [T, H] in fp32.

    `a_log` and `dt_bias` [H].
    """
    need_shape("a", a, (None, None))
    need_shape("b", b, tuple(a.shape))
    need_shape("A_log", a_log, (a.shape[1],))
    need_shape("dt_bias", dt_bias, (a.shape[1],))
    decay = -a_log.float().exp() * softplus(a.float() + dt_bias.float())
    return decay, 1 / (1 + torch.exp(-b.float()))


def unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors of the last dimension at length one, in fp32."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


def check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: int) -> None:
    """Raise `KernelError` unless `q` and `k` [rows, G, K] and `v` [rows, H, V] fit each other."""
    need_shape("q", q, (rows, None, None))
    need_shape("k", k, tuple(q.shape))
    need_shape("v", v, (rows, None, None))
    need_groups(v.shape[1], k.shape[1], "q and k", "v")


class DeltaInputs(NamedTuple):
    """What a layer brings to its state: `q` and `k` [rows, G, K] of any length, `v` [rows, H, V], projections
    `a` and `b` [rows, H] with `a_log` and `dt_bias` [H] as in `gates`.  A row is a token of its sequence."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor

    def gates(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Log decay and write strength [rows, H]."""
        return gates(self.a, self.b, self.a_log, self.dt_bias)

    def check(self, view: StateView, rows: int) -> None:
        """Raise `KernelError` unless `rows` rows fit each other and the layer; for every route."""
        check_heads(self.q, self.k, self.v, rows)
        need_shape("v", self.v, (rows, view.heads, view.head_dim))
        need_shape("q", self.q, (rows, None, view.state_size))
        need_shape("a", self.a, (rows, view.heads))
        need_shape("b", self.b, (rows, view.heads))
        need_shape("A_log", self.a_log, (view.heads,))
        need_shape("dt_bias", self.dt_bias, (view.heads,))


def _pieces(tensor: torch.Tensor, segments: Segments) -> torch.Tensor:
    """[T, heads, ...] -> packed fp32 [Q, heads, L, ...], zeros where a slot is padding.

    Zeros, unlike any token, leave a triangular system alone: a padding slot neither reads nor writes.
    """
    taken = tensor[segments.piece_tokens].float()
    mask = segments.piece_mask.view(*segments.piece_mask.shape, *[1] * (tensor.dim() - 1))
    return taken.masked_fill(~mask, 0.0).transpose(1, 2).contiguous()


def delta_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    segments: Segments,
    *,
    initial_states: torch.Tensor | None = None,
    state_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scan a ragged batch -> (y [T, H, V] in v's dtype, states [E, H, V, K] in `state_dtype`).

    `q` and `k` [T, G, K] of any length, `v` [T, H, V], `g` and `beta` [T, H] (`gates`), `segments`
    of the batch (E emissions, see `Segments`), `initial_states` [S, H, V, K] (None: zeros).  Sums
    are fp32.  The state passed over an emission is rounded to `state_dtype` there, so a scan that
    resumes from the emitted state continues bit for bit.
    """
    check_heads(q, k, v, segments.tokens)
    need_shape("g", g, tuple(v.shape[:2]))
    need_shape("beta", beta, tuple(v.shape[:2]))
    tokens, groups, size = q.shape
    heads, dim = v.shape[1:]
    if initial_states is None:
        initial_states = torch.zeros(segments.sequences, heads, dim, size, device=q.device)
    need_shape("initial_states", initial_states, (segments.sequences, heads, dim, size))
    if tokens == 0:
        return v.new_zeros(v.shape), v.new_zeros((0, heads, dim, size), dtype=state_dtype)

    ratio = heads // groups
    keys = _pieces(unit(k), segments).repeat_interleave(ratio, 1)
    queries = _pieces(unit(q) * size**-0.5, segments).repeat_interleave(ratio, 1)
    values, strength = _pieces(v, segments), _pieces(beta, segments)[..., None]
    log_decay = torch.cumsum(_pieces(g, segments), dim=-1)
    chunk = segments.chunk

    # Inside a piece: token i reads what tokens j < i wrote, decayed from j to i.
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    span = (log_decay[..., :, None] - log_decay[..., None, :]).masked_fill_(later, float("-inf")).exp_()
    entered = log_decay.exp()[..., None]
    transposed = keys.transpose(-1, -2).contiguous()
    system = torch.matmul(keys * strength, transposed) * span
    wanted = torch.cat([values * strength, keys * (strength * entered)], dim=-1)
    # `unitriangular` takes the diagonal for ones and looks at nothing above it.
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    own, reads = solved[..., :dim].contiguous(), solved[..., dim:].contiguous()
    scores = torch.matmul(queries, transposed) * span

    # From piece to piece: what the tokens really write depends on the state before them.
    leaving = (keys * (log_decay[..., -1:] - log_decay).exp()[..., None]).contiguous()
    decay = log_decay[..., -1].exp()[..., None, None]
    entry = torch.empty(segments.pieces, heads, dim, size, device=q.device)
    after = torch.empty_like(entry)
    carried = initial_states.float()
    for pieces, sequences, emits in segments.rounds:
        before = carried.index_select(0, sequences)
        written = own[pieces] - torch.matmul(reads[pieces], before.transpose(-1, -2))
        state = torch.addcmul(torch.matmul(written.transpose(-1, -2), leaving[pieces]), decay[pieces], before)
        if state_dtype != torch.float32:
            state = torch.where(emits, state.to(state_dtype).float(), state)
        entry[pieces], after[pieces] = before, state
        own[pieces] = written
        carried = carried.index_copy(0, sequences, state)

    y = torch.matmul(scores, own) + torch.matmul(queries * entered, entry.transpose(-1, -2))
    flat = y.transpose(1, 2).reshape(segments.pieces * chunk, heads, dim)[segments.token_slot]
    return flat.to(v.dtype), after[segments.emission_piece].to(state_dtype)
