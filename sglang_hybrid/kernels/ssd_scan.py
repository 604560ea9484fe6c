"""Mamba2 scan (SSD, state space duality) over a ragged batch, with the state handed out on the way.

Source symbol: `mamba_chunk_scan_combined` of SGLang's Mamba Triton ops, which it follows in meaning.
The recurrence of one head, over tokens t:

    dt_t = clamp(softplus(dt_t + dt_bias))
    S_t = exp(dt_t A) S_(t-1) + dt_t x_t B_t^T
    y_t = S_t C_t + D x_t

is done in three moves: (1) inside all pieces at once by batched matrix products, (2) from piece to
piece, one short step for each piece of the longest sequence, (3) what each entry state adds.
"""

from __future__ import annotations

import torch

from sglang_hybrid.kernels.checks import KernelError, need_groups, need_shape
from sglang_hybrid.kernels.elementwise import silu, softplus
from sglang_hybrid.kernels.segments import Segments

NO_LIMIT = (0.0, float("inf"))


def time_steps(
    dt: torch.Tensor,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float] = NO_LIMIT,
) -> torch.Tensor:
    """dt [..., H] -> the discretisation steps in fp32, same shape.  Steps of scan and update agree.

    A limit of (0, inf) clamps nothing: softplus is positive already, and without it SGLang's
    decode kernel does not clamp either.
    """
    steps = dt.float()
    if dt_bias is not None:
        steps = steps + dt_bias.float()
    if dt_softplus:
        steps = softplus(steps)
    return steps if dt_limit == NO_LIMIT else steps.clamp(*dt_limit)


def check_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    segments: Segments,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
) -> None:
    """Raise `KernelError` unless the inputs of a scan fit each other; for every route."""
    need_shape("x", x, (segments.tokens, None, None))
    heads = x.shape[1]
    need_shape("dt", dt, (segments.tokens, heads))
    need_shape("A", a, (heads,))
    need_shape("B", b, (segments.tokens, None, None))
    need_shape("C", c, tuple(b.shape))
    need_groups(heads, b.shape[1])
    dim = x.shape[2]
    if d is not None and d.shape not in ((heads,), (heads, dim)):
        raise KernelError(f"D has shape {list(d.shape)}, needs [{heads}] or [{heads}, {dim}]")
    if z is not None:
        need_shape("z", z, (segments.tokens, heads, dim))


def _pieces(tensor: torch.Tensor, segments: Segments) -> torch.Tensor:
    """[T, heads, ...] -> fp32 [Q, heads, L, ...], padding slots hold the batch's first token.

    Packed: matrix products of other strides take another route on a CPU and round differently, and
    strides would depend on the number of pieces.
    """
    return tensor[segments.piece_tokens].transpose(1, 2).float().contiguous()


def _carry(
    local: torch.Tensor,
    decay: torch.Tensor,
    initial: torch.Tensor,
    segments: Segments,
    state_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """States before every piece [Q, H, P, N] (fp32) and at every emission [K, H, P, N].

    `local` is what a piece adds, `decay` [Q, H, 1, 1] what it leaves of the state before it.  The
    carried state is rounded at an emission: the next piece must see what a resume would read.
    """
    entry = torch.empty_like(local)
    after = torch.empty_like(local)
    carried = initial.float()
    for pieces, sequences, emits in segments.rounds:
        before = carried if pieces.shape[0] == carried.shape[0] else carried[sequences]
        entry[pieces] = before
        state = torch.addcmul(local[pieces], decay[pieces], before)
        if state_dtype != torch.float32:
            state = torch.where(emits, state.to(state_dtype).float(), state)
        after[pieces] = state
        if pieces.shape[0] == carried.shape[0]:
            carried = state
        else:
            carried = carried.index_copy(0, sequences, state)
    return entry, after[segments.emission_piece].to(state_dtype)


def ssd_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    segments: Segments,
    *,
    d: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    initial_states: torch.Tensor | None = None,
    state_dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scan a ragged batch -> (y [T, H, P] in x's dtype, states [K, H, P, N] in `state_dtype`).

    `x` [T, H, P], `dt` [T, H], `a` [H] (negative), `b` and `c` [T, G, N], `segments` of the batch
    (K emissions, see `Segments`), `d` [H] or [H, P], `z` [T, H, P] (y is multiplied by silu(z)),
    `dt_bias` [H], `initial_states` [S, H, P, N] (None: zeros), `out` [T, H, P] to write y into.
    Sums are fp32 whatever the inputs.  The state passed over an emission is rounded to
    `state_dtype` there, so a scan that resumes from the emitted state continues bit for bit.
    """
    check_scan(x, dt, a, b, c, segments, d, z)
    tokens, heads, dim = x.shape
    groups, size = b.shape[1:]
    if initial_states is None:
        initial_states = torch.zeros(segments.sequences, heads, dim, size, device=x.device)
    need_shape("initial_states", initial_states, (segments.sequences, heads, dim, size))
    if out is not None:
        need_shape("out", out, (tokens, heads, dim))
    if tokens == 0:
        empty = x.new_zeros(x.shape) if out is None else out
        return empty, x.new_zeros((0, heads, dim, size), dtype=state_dtype)

    ratio = heads // groups
    # A padding slot has step 0: it neither decays the state nor adds to it.
    steps = torch.where(
        segments.piece_mask[..., None],
        time_steps(dt, dt_bias, dt_softplus, dt_limit)[segments.piece_tokens],
        0.0,
    )
    steps = steps.transpose(1, 2).contiguous()
    log_decay = torch.cumsum(steps * a.float()[:, None], dim=-1)
    xs, bs, cs = _pieces(x, segments), _pieces(b, segments), _pieces(c, segments)
    pieces, _, chunk = steps.shape
    weighted = xs * steps[..., None]

    # Inside a piece: weights[l, s] = (C_l . B_s) exp(decay from s to l), s <= l.
    scores = torch.matmul(cs, bs.transpose(-1, -2))
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    span = log_decay[..., :, None] - log_decay[..., None, :]
    weights = span.masked_fill_(later, float("-inf")).exp_().view(pieces, groups, ratio, chunk, chunk)
    weights = (weights * scores[:, :, None]).view(pieces, heads, chunk, chunk)
    y = torch.matmul(weights, weighted)

    # What a piece adds to the state, then the state before every piece.
    to_end = (log_decay[..., -1:] - log_decay).exp()
    added = (weighted * to_end[..., None]).transpose(-1, -2).view(pieces, groups, ratio, dim, chunk)
    local = torch.matmul(added, bs[:, :, None]).view(pieces, heads, dim, size)
    decay = log_decay[..., -1].exp()[..., None, None]
    entry, emitted = _carry(local, decay, initial_states, segments, state_dtype)

    # What the state before a piece gives to its tokens.
    seen = torch.matmul(cs[:, :, None], entry.view(pieces, groups, ratio, dim, size).transpose(-1, -2))
    y = y + seen.view(pieces, heads, chunk, dim) * log_decay.exp()[..., None]

    flat = y.transpose(1, 2).reshape(pieces * chunk, heads, dim)[segments.token_slot]
    if d is not None:
        flat = flat + x.float() * (d.float()[:, None] if d.dim() == 1 else d.float())
    if z is not None:
        flat = flat * silu(z.float())
    if out is None:
        return flat.to(x.dtype), emitted
    out.copy_(flat)
    return out, emitted
