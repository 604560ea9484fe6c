"""Mamba2 recurrence in exact mode: a prefill is a row of decode steps.

The recurrence is that of `ssd_scan`, taken token by token.  After every token state and conv window
are rounded to their stored dtypes, as the next decode step would read them; so it makes no
difference where an extend begins or ends.  Products and sums are single IEEE operations (no fused
multiply-add, whose use depends on an element's place in a vector loop).
"""

from __future__ import annotations

import torch

from sglang_hybrid.kernels.causal_conv import check_weights
from sglang_hybrid.kernels.checks import need_activation, need_groups, need_shape
from sglang_hybrid.kernels.elementwise import silu
from sglang_hybrid.kernels.invariant import tree_sum
from sglang_hybrid.kernels.segments import Segments
from sglang_hybrid.kernels.ssd_scan import NO_LIMIT, time_steps

BLOCK_BYTES = 8 << 20
"""States kept at once, to take the outputs of several tokens together."""


def round_state(state: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a reader of the stored state gets: fp32 values of `dtype`."""
    return state if dtype == torch.float32 else state.to(dtype).float()


def exact_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    segments: Segments,
    *,
    activation: str | None = "silu",
    windows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`causal_conv` by the arithmetic of single steps -> (y [T, C], windows [K, C, W - 1]).

    `x` [T, C], `weight` [C, W], `bias` [C] or None, `windows` [S, C, W - 1] before each extend, in
    the stored dtype.  Every earlier token counts as the window stores it.
    """
    need_shape("x", x, (segments.tokens, None))
    need_activation(activation)
    width = check_weights(weight, bias, x.shape[1])
    memory = width - 1
    need_shape("windows", windows, (segments.sequences, x.shape[1], memory))
    # The line of `causal_conv`: each sequence's window in front of its tokens.
    offsets = torch.arange(memory, device=x.device)
    heads = segments.seq_flat_start + torch.arange(segments.sequences, device=x.device) * memory
    line = x.new_empty(
        segments.tokens + segments.sequences * memory, x.shape[1], dtype=windows.dtype
    )  # stored values only
    line[heads[:, None] + offsets] = windows.transpose(1, 2)
    place = torch.arange(segments.tokens, device=x.device) + (segments.token_seq + 1) * memory
    line[place] = x.to(windows.dtype)
    taps = weight.float()
    y = x.float() * taps[:, memory]
    for lag in range(1, width):
        y = y + line[place - lag].float() * taps[:, memory - lag]
    if bias is not None:
        y = y + bias.float()
    if activation is not None:
        y = silu(y)
    runs = (segments.emission_flat_end + segments.emission_seq * memory)[:, None] + offsets
    return y.to(x.dtype), line[runs].transpose(1, 2)


def exact_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    segments: Segments,
    *,
    d: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    initial_states: torch.Tensor,
    state_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ssd_scan` by single steps -> (y [T, H, P] in x's dtype, states [K, H, P, N] in `state_dtype`).

    Arguments as there: `x` [T, H, P], `dt` [T, H], `a` [H], `b` and `c` [T, G, N], `d` [H] or [H, P],
    `initial_states` [S, H, P, N].  y comes from the state before it is rounded.
    """
    tokens, heads, dim = x.shape
    need_shape("x", x, (segments.tokens, None, None))
    need_shape("dt", dt, (tokens, heads))
    need_shape("A", a, (heads,))
    need_shape("B", b, (tokens, None, None))
    need_shape("C", c, tuple(b.shape))
    need_groups(heads, b.shape[1])
    size = b.shape[2]
    need_shape("initial_states", initial_states, (segments.sequences, heads, dim, size))
    ratio = heads // b.shape[1]
    steps = time_steps(dt, dt_bias, dt_softplus, dt_limit)
    decay = torch.exp(steps * a.float())[..., None, None]
    weighted = (x.float() * steps[..., None])[..., None]
    keys = b.float().repeat_interleave(ratio, 1)[:, :, None]
    queries = c.float().repeat_interleave(ratio, 1)[:, :, None]

    y = torch.empty(tokens, heads, dim, device=x.device)
    emitted = x.new_empty(len(segments.emissions), heads, dim, size, dtype=state_dtype)
    state = initial_states.to(torch.float32, copy=True)
    for low, high, active, ends in _spans(segments, heads * dim * size * 4):
        # All sequences that still have tokens `low` to `high`: [steps, active] flat token indices.
        index = segments.seq_flat_start[active] + torch.arange(low, high, device=x.device)[:, None]
        history = weighted[index] * keys[index]
        carried = state[active]
        for row, decayed in zip(history, decay[index]):
            row += carried * decayed
            carried = round_state(row, state_dtype)
        state[active] = carried
        y[index] = tree_sum(history * queries[index])
        for emission, step, column in ends:
            emitted[emission] = history[step, column]
    if d is not None:
        y = y + x.float() * (d.float()[:, None] if d.dim() == 1 else d.float())
    return y.to(x.dtype), emitted


def _spans(
    segments: Segments, state_bytes: int
) -> list[tuple[int, int, torch.Tensor, list[tuple[int, int, int]]]]:
    """(first step, step past the last, sequences that take part, emissions) of each block of steps.

    A step is a token's index in its extend.  All sequences of a block take all of its steps.  An
    emission is (its index, step within the block, column of its sequence).
    """
    starts = segments.seq_flat_start.tolist()
    lengths = [high - low for low, high in zip(starts, [*starts[1:], segments.tokens])]
    begins = segments.token_position[segments.seq_flat_start].tolist()
    due = sorted(
        (end - begins[sequence] - 1, emission, sequence)
        for emission, (sequence, end) in enumerate(segments.emissions)
    )
    spans = []
    low = 0
    while low < max(lengths, default=0):
        active = [sequence for sequence, length in enumerate(lengths) if length > low]
        most = max(1, BLOCK_BYTES // max(1, state_bytes * len(active)))
        high = min(low + most, *(lengths[sequence] for sequence in active))
        column = {sequence: place for place, sequence in enumerate(active)}
        ends = [(emission, step - low, column[seq]) for step, emission, seq in due if low <= step < high]
        spans.append((low, high, segments.seq_flat_start.new_tensor(active), ends))
        low = high
    return spans
