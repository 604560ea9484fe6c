"""Cases of the Triton prefill of the gated delta rule; `python -m tests.support.triton_paged_delta_scan`."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.support.interpreted import LONG, Check, main
from tests.support.rules import DELTA, KDA, KDA_BOUNDED
from tests.support.triton_paged_scan import BASE, STATE, World, cases_of

BF16 = torch.bfloat16
TABLE = {
    "base: two sequences, four emissions": BASE,
    "one token each": replace(BASE, lengths=(1, 1, 1), begins=(0, 7, 8)),
    "begins and ends on boundaries": replace(BASE, lengths=(16, 8), begins=(8, 16)),
    "chunks of 64": replace(BASE, lengths=(150,), begins=(40,), grid=128),
    "no grid": replace(BASE, grid=None),
    "grid 1": replace(BASE, lengths=(5, 3), grid=1),
    "grid 24, chunk no power of two": replace(BASE, lengths=(40,), begins=(5,), grid=24),
    "three heads": replace(BASE, state=replace(STATE, heads=3)),
    "a group a head": replace(BASE, state=replace(STATE, groups=2)),
    "dim 6": replace(BASE, state=replace(STATE, dim=6)),
    "dim 80 in blocks": replace(BASE, state=replace(STATE, dim=80, heads=1, rows_per_page=80)),
    "key size 33": replace(BASE, state=replace(STATE, size=33)),
    "key size 256": replace(BASE, state=replace(STATE, size=256)),
    "rows cut by members": replace(BASE, state=replace(STATE, rows_per_page=7)),
    "second stripe, unaligned": replace(BASE, state=replace(STATE, first_row=19, rows_per_page=10)),
    "int64 maps": replace(BASE, state=replace(STATE, index=torch.int64)),
    "bf16": replace(BASE, state=replace(STATE, stored=BF16)),
    "bf16, chunks of 64": replace(
        BASE, lengths=(150,), begins=(40,), grid=128, state=replace(STATE, stored=BF16)
    ),
    "bf16, key size 256": replace(BASE, state=replace(STATE, stored=BF16, size=256)),
    "bf16 inputs, fp32 state": replace(BASE, inputs=BF16),
}
if LONG:
    TABLE |= {f"{k}; bf16": replace(c, state=replace(c.state, stored=BF16)) for k, c in TABLE.items()}
    TABLE |= {
        f"{name}; 33 sequences": replace(case, lengths=(9,) * 33, begins=tuple(range(33)), grid=8)
        for name, case in TABLE.items()
        if case.state.size < 100
    }


def equal_keys(device: str) -> None:
    """All tokens write to one key: a series in the system would lose all digits, its inverse does not."""
    world = World(DELTA, replace(BASE, lengths=(64,), begins=(0,), grid=64))
    world.inputs.k[:] = world.inputs.k[:1]
    world.inputs.a[:] = -20.0
    world.inputs.b[:] = 9.0
    world.expect(world.run(device), set(range(world.count)))


BY_CHANNEL = (
    "base: two sequences, four emissions",
    "chunks of 64",
    "grid 24, chunk no power of two",
    "key size 33",
    "rows cut by members",
    "bf16",
)
"""Those that KDA repeats; with a lower bound, the first."""


def forgets_at_once(device: str) -> None:
    """A decay of exp(-400) a token in half of the channels: no exp inverts a sum of them in fp32."""
    world = World(KDA, replace(BASE, lengths=(40,), begins=(0,), grid=64))
    world.inputs.a_log[:], world.inputs.a[:, :, ::2] = 3.0, 20.0
    world.expect(world.run(device), set(range(world.count)))


def cases() -> dict[str, Check]:
    """All cases by name."""
    found = cases_of(DELTA, TABLE) | {"equal keys": equal_keys, "KDA: a state that forgets": forgets_at_once}
    for title, rule, names in (
        ("KDA", KDA, BY_CHANNEL),
        ("KDA with a lower bound", KDA_BOUNDED, BY_CHANNEL[:1]),
    ):
        repeated = TABLE if LONG else {name: TABLE[name] for name in names}
        found |= {f"{title}: {name}": check for name, check in cases_of(rule, repeated).items()}
    return found


if __name__ == "__main__":
    main(cases())
