"""Gated delta rule over a ragged batch, with the state handed out on the way.

Source symbols: `chunk_gated_delta_rule` (GDN) and `chunk_kda` (KDA) of SGLang's fla ops, `fused_gdn_gating`
and `kda_gate_chunk_cumsum` for the gates, which they follow in meaning.  The recurrence of one value head,
over tokens t, with unit-length keys and queries:

    S_t = S_(t-1) diag(exp(g_t));   S_t += beta_t (v_t - S_t k_t) k_t^T
    y_t = S_t q_t / sqrt(K)

GDN has one decay g a head, KDA one for each of the K key channels.

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
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Projections -> (log decay g, shaped as `a`; write strength beta [T, H]), both in fp32.

    `a` [T, H] with `dt_bias` [H], or [T, H, K] with [H, K] for a decay a key channel; `b` [T, H], `a_log`
    [H].  With a `lower_bound` (negative; KDA's safe gate) g lies between it and 0.
    """
    need_shape("b", b, (None, None))
    heads = b.shape[1]
    need_shape("a", a, (b.shape[0], heads, *[None] * (a.dim() == 3)))
    need_shape("A_log", a_log, (heads,))
    need_shape("dt_bias", dt_bias, tuple(a.shape[1:]))
    rate = a_log.float().exp().view(heads, *[1] * (a.dim() - 2))
    step = a.float() + dt_bias.float()
    decay = -rate * softplus(step) if lower_bound is None else lower_bound * _sigmoid(rate * step)
    return decay, _sigmoid(b)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x.float()))


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
    """What a layer brings to its state: `q` and `k` [rows, G, K] of any length, `v` [rows, H, V], and what
    `gates` takes: `a` [rows, H] or [rows, H, K], `b` [rows, H], `a_log` [H], `dt_bias` [H] or [H, K].  A row
    is a token of its sequence."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    lower_bound: float | None = None

    @property
    def by_channel(self) -> bool:
        """Whether each key channel has a decay of its own."""
        return self.a.dim() == 3

    def gates(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Log decay [rows, H] or [rows, H, K], and write strength [rows, H]."""
        return gates(self.a, self.b, self.a_log, self.dt_bias, self.lower_bound)

    def check(self, view: StateView, rows: int) -> None:
        """Raise `KernelError` unless `rows` rows fit each other and the layer; for every route."""
        check_heads(self.q, self.k, self.v, rows)
        need_shape("v", self.v, (rows, view.heads, view.head_dim))
        need_shape("q", self.q, (rows, None, view.state_size))
        channels = (view.state_size,) if self.by_channel else ()
        need_shape("a", self.a, (rows, view.heads, *channels))
        need_shape("b", self.b, (rows, view.heads))
        need_shape("A_log", self.a_log, (view.heads,))
        need_shape("dt_bias", self.dt_bias, (view.heads, *channels))


def _pieces(tensor: torch.Tensor, segments: Segments) -> torch.Tensor:
    """[T, heads, ...] -> packed fp32 [Q, heads, L, ...], zeros where a slot is padding.

    Zeros, unlike any token, leave a triangular system alone: a padding slot neither reads nor writes.
    """
    taken = tensor[segments.piece_tokens].float()
    mask = segments.piece_mask.view(*segments.piece_mask.shape, *[1] * (tensor.dim() - 1))
    return taken.masked_fill(~mask, 0.0).transpose(1, 2).contiguous()


def _inside(
    readers: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, log_decay: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `readers` and `queries` [Q, H, L, K] find of the keys written up to them, decayed on the way:
    [Q, H, L, L] each, row i of the reader, column j <= i of the key.

    `log_decay` [Q, H, L, 1 or K] sums from the piece's first token on.  Its differences are never positive,
    so nothing overflows, however fast a state decays.
    """
    chunk, channels = log_decay.shape[2:]
    if channels == 1:
        later = torch.ones(chunk, chunk, dtype=torch.bool, device=keys.device).triu(1)
        sums = log_decay[..., 0]
        span = (sums[..., :, None] - sums[..., None, :]).masked_fill_(later, float("-inf")).exp_()
        transposed = keys.transpose(-1, -2).contiguous()
        return torch.matmul(readers, transposed) * span, torch.matmul(queries, transposed) * span
    system = keys.new_zeros(*keys.shape[:3], chunk)
    scores = torch.zeros_like(system)
    for j in range(chunk):
        left = (log_decay[..., j:, :] - log_decay[..., j : j + 1, :]).exp() * keys[..., j : j + 1, :]
        system[..., j:, j] = (readers[..., j:, :] * left).sum(-1)
        scores[..., j:, j] = (queries[..., j:, :] * left).sum(-1)
    return system, scores


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

    `q` and `k` [T, G, K] of any length, `v` [T, H, V], `g` [T, H] or [T, H, K] and `beta` [T, H] (`gates`),
    `segments` of the batch (E emissions, see `Segments`), `initial_states` [S, H, V, K] (None: zeros).  Sums
    are fp32.  The state passed over an emission is rounded to `state_dtype` there, so a scan that
    resumes from the emitted state continues bit for bit.
    """
    check_heads(q, k, v, segments.tokens)
    need_shape("g", g, (*v.shape[:2], *q.shape[2:][: g.dim() - 2]))
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
    log_decay = torch.cumsum(_pieces(g if g.dim() == 3 else g[..., None], segments), dim=-2)
    chunk = segments.chunk

    # Inside a piece: token i reads what tokens j < i wrote, decayed from j to i.
    system, scores = _inside(keys * strength, queries, keys, log_decay)
    entered = log_decay.exp()
    wanted = torch.cat([values * strength, keys * (strength * entered)], dim=-1)
    # `unitriangular` takes the diagonal for ones and looks at nothing above it.
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    own, reads = solved[..., :dim].contiguous(), solved[..., dim:].contiguous()

    # From piece to piece: what the tokens really write depends on the state before them.
    leaving = (keys * (log_decay[..., -1:, :] - log_decay).exp()).contiguous()
    decay = log_decay[..., -1:, :].exp()
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
