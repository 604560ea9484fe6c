"""The recurrences by one face: inputs, Triton kernels of a decode step and of a prefill, reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from sglang_hybrid.kernels.segments import Segments
from sglang_hybrid.pools.views import StateView
from tests.support.delta import Decays, DeltaInputs, recur
from tests.support.paged_state import Case
from tests.support.recurrence import MixerInputs, scan

Inputs = Any
"""`MixerInputs` or `DeltaInputs`."""
Step = Callable[[StateView, torch.Tensor, torch.Tensor, Inputs], torch.Tensor]
Prefill = Callable[[StateView, torch.Tensor, torch.Tensor, Inputs, Segments], torch.Tensor]


class Rule(NamedTuple):
    """`draw(case, tokens, dtype)` random inputs as a layer hands them over, `update` and `scan` over pages,
    `recur(inputs, initial, stored, round_at)` one sequence in float64."""

    draw: Callable[[Case, int, torch.dtype], Inputs]
    update: Step
    scan: Prefill
    recur: Callable[..., tuple[torch.Tensor, list[torch.Tensor]]]


def on(device: str, inputs: Inputs) -> Inputs:
    """The same values on a device."""
    fields = inputs._asdict() if isinstance(inputs, DeltaInputs) else vars(inputs)
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in fields.items()}
    return type(inputs)(**moved)


def _draw_mamba2(case: Case, tokens: int, dtype: torch.dtype) -> MixerInputs:
    """x, B and C are slices of one row."""
    drawn = MixerInputs.random(tokens, case.heads, case.groups, case.dim, case.size, dtype, case.extras)
    inner, grouped = case.heads * case.dim, case.groups * case.size
    row = torch.cat([drawn.x.flatten(1), drawn.b.flatten(1), drawn.c.flatten(1)], 1)
    x, b, c = torch.split(row, [inner, grouped, grouped], 1)
    shape = (tokens, case.groups, case.size)
    return replace(drawn, x=x.view(tokens, case.heads, case.dim), b=b.view(shape), c=c.view(shape))


def _mamba2_update(view: StateView, src: torch.Tensor, dst: torch.Tensor, given: MixerInputs) -> torch.Tensor:
    from sglang_hybrid.kernels.triton_state_update import state_update

    return state_update(
        view, src, dst, given.x, given.dt, given.a, given.b, given.c,
        d=given.d, z=given.z, dt_bias=given.dt_bias, dt_softplus=True,
    )  # fmt: skip


def _mamba2_scan(
    view: StateView, src: torch.Tensor, dst: torch.Tensor, given: MixerInputs, segments: Segments
) -> torch.Tensor:
    from sglang_hybrid.kernels.triton_paged_scan import paged_scan

    return paged_scan(
        view, src, dst, given.x, given.dt, given.a, given.b, given.c, segments,
        d=given.d, z=given.z, dt_bias=given.dt_bias, dt_softplus=True,
    )  # fmt: skip


def _draw_delta(case: Case, tokens: int, dtype: torch.dtype, decays: Decays = "head") -> DeltaInputs:
    return DeltaInputs.random(tokens, case.heads, case.groups, case.dim, case.size, dtype, decays)


def _delta_update(view: StateView, src: torch.Tensor, dst: torch.Tensor, given: DeltaInputs) -> torch.Tensor:
    from sglang_hybrid.kernels.triton_delta_update import delta_update

    return delta_update(view, src, dst, given)


def _delta_scan(
    view: StateView, src: torch.Tensor, dst: torch.Tensor, given: DeltaInputs, segments: Segments
) -> torch.Tensor:
    from sglang_hybrid.kernels.triton_paged_delta_scan import paged_delta_scan

    return paged_delta_scan(view, src, dst, given, segments)


def _draw_lightning(case: Case, tokens: int, dtype: torch.dtype) -> MixerInputs:
    """As `engine.lightning` hands them over: keys and queries of each head, one 1 for all steps."""
    drawn = MixerInputs.random(tokens, case.heads, case.heads, case.dim, case.size, dtype, extras=False)
    return replace(drawn, dt=torch.ones(()).expand(tokens, case.heads))


def _lightning_update(
    view: StateView, src: torch.Tensor, dst: torch.Tensor, given: MixerInputs
) -> torch.Tensor:
    from sglang_hybrid.kernels.triton_state_update import state_update

    return state_update(view, src, dst, given.x, given.dt, given.a, given.b, given.c)


def _lightning_scan(
    view: StateView, src: torch.Tensor, dst: torch.Tensor, given: MixerInputs, segments: Segments
) -> torch.Tensor:
    from sglang_hybrid.kernels.triton_paged_scan import paged_scan

    return paged_scan(view, src, dst, given.x, given.dt, given.a, given.b, given.c, segments)


def _lightning(
    given: MixerInputs, initial: torch.Tensor, stored: torch.dtype, round_at: Sequence[int] = ()
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """S_t = exp(-slope) S_(t-1) + v_t k_t^T, y_t = S_t q_t, without a step."""
    state, y, states = initial.double(), [], []
    for t in range(given.x.shape[0]):
        v, k, q = (rows[t].double() for rows in (given.x, given.b, given.c))
        state = given.a.double().exp()[:, None, None] * state + v[:, :, None] * k[:, None]
        y.append((state * q[:, None]).sum(-1))
        if t + 1 in round_at:
            state = state.to(stored).double()
        states.append(state)
    return torch.stack(y), states


MAMBA2 = Rule(_draw_mamba2, _mamba2_update, _mamba2_scan, scan)
DELTA = Rule(_draw_delta, _delta_update, _delta_scan, recur)
LIGHTNING = Rule(_draw_lightning, _lightning_update, _lightning_scan, _lightning)
KDA = Rule(partial(_draw_delta, decays="channel"), _delta_update, _delta_scan, recur)
KDA_BOUNDED = Rule(partial(_draw_delta, decays="bounded"), _delta_update, _delta_scan, recur)
