"""Cases of the Triton decode step; `python -m tests.support.triton_state_update` runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from tests.support.interpreted import LONG, Check, main, norm_error, poisoned_outputs, same_bytes, tolerance
from tests.support.paged_state import Case, Pages, state_of
from tests.support.recurrence import scan
from tests.support.rules import LIGHTNING, MAMBA2, Inputs, Rule, on

BASE = Case(batch=2, heads=4, groups=2, dim=8, size=16, rows_per_page=16)
BF16 = torch.bfloat16
TABLE = {
    "base: two members of two heads": BASE,
    "batch 1": replace(BASE, batch=1),
    "batch 7": replace(BASE, batch=7),
    "batch 33": replace(BASE, batch=33, heads=2, groups=1, rows_per_page=8),
    "one head": replace(BASE, heads=1, groups=1),
    "three heads": replace(BASE, heads=3, groups=1),
    "eight heads": replace(BASE, heads=8),
    "one group": replace(BASE, groups=1),
    "a group a head": replace(BASE, groups=4),
    "dim 1": replace(BASE, dim=1),
    "dim 6, no power of two": replace(BASE, dim=6, rows_per_page=12),
    "dim 80 in blocks": replace(BASE, dim=80, size=256, heads=2, rows_per_page=80, batch=1),
    "state size 32": replace(BASE, size=32),
    "state size 64": replace(BASE, size=64),
    "state size 96, masked": replace(BASE, size=96),
    "state size 128": replace(BASE, size=128),
    "state size 256": replace(BASE, size=256),
    "state size 600, walked": replace(BASE, size=600),
    "state size 33, odd": replace(BASE, size=33),
    "one member": replace(BASE, rows_per_page=32),
    "three members": replace(BASE, rows_per_page=12),
    "four members": replace(BASE, rows_per_page=8),
    "five members": replace(BASE, rows_per_page=7),
    "one member with rows to spare": replace(BASE, rows_per_page=100),
    "a member a row": replace(BASE, rows_per_page=1, batch=1),
    "heads cut by members": replace(BASE, rows_per_page=11),
    "second stripe, aligned": replace(BASE, first_row=32),
    "second stripe, unaligned": replace(BASE, first_row=35, rows_per_page=10),
    "begins in the last row of a page": replace(BASE, first_row=15),
    "stripes before and behind": replace(BASE, first_row=5, spare_rows=20),
    "int64 maps": replace(BASE, index=torch.int64),
    "bare": replace(BASE, extras=False),
    "bf16": replace(BASE, stored=BF16),
    "bf16, state size 256": replace(BASE, stored=BF16, size=256),
    "bf16, heads cut by members": replace(BASE, stored=BF16, rows_per_page=11),
    "bf16, state size 33": replace(BASE, stored=BF16, size=33),
    "fp16": replace(BASE, stored=torch.float16),
}
if LONG:
    TABLE |= {f"{name}; bf16": replace(case, stored=BF16) for name, case in TABLE.items()}
    TABLE |= {f"{name}; batch 33": replace(case, batch=33) for name, case in TABLE.items() if case.size < 100}
    TABLE["Falcon-H1-7B"] = Case(1, heads=24, groups=1, dim=128, size=256, rows_per_page=1024, stored=BF16)


def inputs_of(case: Case, device: str, rule: Rule = MAMBA2) -> Inputs:
    """A token a row, 16-bit where the pages are."""
    return on(device, rule.draw(case, case.batch, case.stored))


def step(
    pages: Pages, source: torch.Tensor, target: torch.Tensor, inputs: Inputs, rule: Rule = MAMBA2
) -> torch.Tensor:
    """The kernel over poisoned memory; pages and maps go to the device of `inputs` and back."""
    device = inputs.a.device
    arena = pages.arena.to(device)
    view = pages.view._replace(rows=arena[:, : pages.case.rows_per_page])
    with poisoned_outputs():
        y = rule.update(view, source.to(device), target.to(device), inputs)
    pages.arena.copy_(arena)
    return y.cpu()


def untouched(pages: Pages, before: torch.Tensor, maps: list[torch.Tensor]) -> bool:
    """Every byte outside the states of `maps` is as before, the sink page's too."""
    free = torch.ones(pages.arena.shape[:2], dtype=torch.bool)
    for page_map in maps:
        for page, row in pages.cells(page_map):
            free[page, row] = False
    return same_bytes(pages.arena[free], before[free])


def equals_the_recurrence(rule: Rule, case: Case, device: str) -> None:
    """Even rows forked, odd rows in place: y and the new state are the recurrence's, nothing else changes."""
    pages = Pages(case)
    inputs = inputs_of(case, device, rule)
    states = [state_of(case) for _ in range(case.batch)]
    source = pages.maps[: case.batch]
    target = source.clone()
    target[::2] = pages.maps[case.batch :: 2][: len(target[::2])]
    for page_map, state in zip(source, states, strict=True):
        pages.put(page_map, state)
    before = pages.arena.clone()
    y = step(pages, source, target, inputs, rule)
    limit = tolerance(case.stored)
    for row, state in enumerate(states):
        want_y, want = rule.recur(on("cpu", inputs).part(row, row + 1), state, case.stored)
        assert norm_error(y[row], want_y[0]) < limit, f"y of row {row}"
        assert norm_error(pages.get(target[row]), want[0]) < limit, f"state of row {row}"
    assert untouched(pages, before, list(target)), "bytes outside the destinations changed"


def skips_what_is_nowhere(rule: Rule, stored: torch.dtype, device: str) -> None:
    """Rows: forked, fresh, nowhere to write, padding by sentinel, padding by the sink page (poisoned)."""
    case = replace(BASE, batch=5, stored=stored, rows_per_page=11)
    pages = Pages(case)
    inputs = inputs_of(case, device, rule)
    first, third = state_of(case), state_of(case)
    source, target = pages.maps[:5].clone(), pages.maps[5:].clone()
    pages.put(source[0], first)
    pages.put(source[2], third)
    source[1] = torch.tensor([-1, 3, 3])  # only column 0 decides
    target[2, 0] = -1
    source[3], target[3] = -1, 0
    source[4], target[4] = 0, 0
    before = pages.arena.clone()
    y = step(pages, source, target, inputs, rule)
    zeros = torch.zeros_like(first)
    for row, state in enumerate((first, zeros, third, zeros, zeros)):
        want_y, want = rule.recur(on("cpu", inputs).part(row, row + 1), state, stored)
        assert norm_error(y[row], want_y[0]) < tolerance(stored), f"y of row {row}"
        if row < 2:
            assert norm_error(pages.get(target[row]), want[0]) < tolerance(stored), f"state of row {row}"
    assert untouched(pages, before, [target[0], target[1]]), "a row without a destination wrote"


def equals_the_torch_route(options: dict[str, object], device: str) -> None:
    """Options that the recurrence does not know: limits on the step, no softplus, a D an element."""
    from sglang_hybrid.kernels.state_update import state_update as reference
    from sglang_hybrid.kernels.triton_state_update import state_update

    results = []
    for run in (reference, state_update):
        pages = Pages(BASE)
        inputs = inputs_of(BASE, "cpu")
        for page_map in pages.maps[:2]:
            pages.put(page_map, state_of(BASE))
        given = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        moved = [getattr(inputs, name).to(device) for name in ("x", "dt", "a", "b", "c")]
        arena = pages.arena.to(device)
        view = pages.view._replace(rows=arena[:, : BASE.rows_per_page])
        maps = pages.maps.to(device)
        y = run(view, maps[:2], maps[2:], *moved, **given)  # type: ignore[arg-type]
        results.append((y.cpu(), arena.cpu().nan_to_num(7)))
    assert norm_error(results[1][0], results[0][0]) < 1e-5
    assert norm_error(results[1][1], results[0][1]) < 1e-5


def small_steps_survive(device: str) -> None:
    """softplus far below zero: 1 + exp(x) rounds the step away, a step of 1e-6 must not vanish."""
    case = replace(BASE, extras=False)
    pages = Pages(case)
    drawn = inputs_of(case, device)
    drawn = replace(drawn, dt=torch.linspace(-18, -4, drawn.dt.numel(), device=device).view_as(drawn.dt))
    source = torch.full_like(pages.maps[:2], -1)
    y = step(pages, source, pages.maps[2:], drawn)
    for row in range(2):
        want_y, want = scan(on("cpu", drawn).part(row, row + 1), torch.zeros(4, 8, 16), torch.float32)
        for head in range(4):
            assert norm_error(y[row, head], want_y[0][head]) < 1e-5, (row, head)
            assert norm_error(pages.get(pages.maps[2 + row])[head], want[0][head]) < 1e-5, (row, head)


def an_empty_batch_gives_nothing(rule: Rule, device: str) -> None:
    case = replace(BASE, batch=1)
    pages = Pages(case)
    before = pages.arena.clone()
    inputs = inputs_of(case, device, rule).part(0, 0)
    nothing = torch.zeros(0, case.members, dtype=torch.int32)
    assert step(pages, nothing, nothing, inputs, rule).shape == (0, 4, 8)
    assert same_bytes(pages.arena, before)


OPTIONS: dict[str, dict[str, object]] = {
    "limits on the step": {"dt_limit": (0.2, 0.9), "dt_softplus": True},
    "no softplus": {},
    "D an element": {"d": torch.linspace(-1, 1, 32).view(4, 8), "dt_softplus": True},
}


LIGHTNING_TOO = ("base: two members of two heads", "heads cut by members", "bf16")
"""Those that lightning attention repeats: it is a Mamba2 of one step for all tokens and a group a head."""


def cases_of(rule: Rule, table: Mapping[str, Case]) -> dict[str, Check]:
    """Cases of a decode step by name."""
    checks: dict[str, Callable[[str], None]] = {
        name: partial(equals_the_recurrence, rule, case) for name, case in table.items()
    }
    checks["sentinels and padding"] = partial(skips_what_is_nowhere, rule, torch.float32)
    checks["sentinels and padding, bf16"] = partial(skips_what_is_nowhere, rule, BF16)
    checks["empty batch"] = partial(an_empty_batch_gives_nothing, rule)
    return checks


def cases() -> dict[str, Check]:
    """All cases by name."""
    table = cases_of(MAMBA2, TABLE)
    table |= {name: partial(equals_the_torch_route, options) for name, options in OPTIONS.items()}
    table["small steps"] = small_steps_survive
    repeated = TABLE if LONG else {name: TABLE[name] for name in LIGHTNING_TOO}
    table |= {f"lightning: {name}": check for name, check in cases_of(LIGHTNING, repeated).items()}
    return table


if __name__ == "__main__":
    main(cases())
