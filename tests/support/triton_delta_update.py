"""Cases of the Triton decode step of the gated delta rule; `python -m tests.support.triton_delta_update`."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.support.interpreted import LONG, Check, main
from tests.support.paged_state import Case
from tests.support.rules import DELTA, KDA, KDA_BOUNDED
from tests.support.triton_state_update import BASE, cases_of

BF16 = torch.bfloat16
TABLE = {
    "base: two members of two heads": BASE,
    "batch 1": replace(BASE, batch=1),
    "batch 33": replace(BASE, batch=33, heads=2, groups=1, rows_per_page=8),
    "three heads": replace(BASE, heads=3, groups=1),
    "a group a head": replace(BASE, groups=4),
    "dim 1": replace(BASE, dim=1),
    "dim 6, no power of two": replace(BASE, dim=6, rows_per_page=12),
    "dim 80 in blocks": replace(BASE, dim=80, size=128, heads=2, rows_per_page=80, batch=1),
    "key size 33, odd": replace(BASE, size=33),
    "key size 96, masked": replace(BASE, size=96),
    "key size 256": replace(BASE, size=256),
    "one member": replace(BASE, rows_per_page=32),
    "three members": replace(BASE, rows_per_page=12),
    "four members": replace(BASE, rows_per_page=8),
    "five members": replace(BASE, rows_per_page=7),
    "one member with rows to spare": replace(BASE, rows_per_page=100),
    "heads cut by members": replace(BASE, rows_per_page=11),
    "second stripe, aligned": replace(BASE, first_row=32),
    "second stripe, unaligned": replace(BASE, first_row=35, rows_per_page=10),
    "stripes before and behind": replace(BASE, first_row=5, spare_rows=20),
    "int64 maps": replace(BASE, index=torch.int64),
    "bf16": replace(BASE, stored=BF16),
    "bf16, heads cut by members": replace(BASE, stored=BF16, rows_per_page=11),
    "bf16, key size 33": replace(BASE, stored=BF16, size=33),
}
if LONG:
    TABLE |= {f"{name}; bf16": replace(case, stored=BF16) for name, case in TABLE.items()}
    TABLE |= {f"{name}; batch 33": replace(case, batch=33) for name, case in TABLE.items() if case.size < 100}
    TABLE["Qwen3-Next"] = Case(1, heads=32, groups=16, dim=128, size=128, rows_per_page=2048)


BY_CHANNEL = (
    "base: two members of two heads",
    "batch 33",
    "key size 33, odd",
    "heads cut by members",
    "bf16",
)
"""Those that KDA repeats, as it is and with a lower bound: its decay is a vector along a row of the state."""


def cases() -> dict[str, Check]:
    """All cases by name."""
    found = cases_of(DELTA, TABLE)
    repeated = TABLE if LONG else {name: TABLE[name] for name in BY_CHANNEL}
    for title, rule in (("KDA", KDA), ("KDA with a lower bound", KDA_BOUNDED)):
        found |= {f"{title}: {name}": check for name, check in cases_of(rule, repeated).items()}
    return found


if __name__ == "__main__":
    main(cases())
