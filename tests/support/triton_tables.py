"""Every table of Triton kernel cases in one: `python -m tests.support.triton_tables` runs them all."""

from __future__ import annotations

from tests.support import (
    triton_arenas,
    triton_bench,
    triton_checkpoints,
    triton_conv,
    triton_paged_conv,
    triton_scan,
    triton_state,
)
from tests.support.interpreted import Check, main

TABLES = {
    "state": triton_state,
    "conv": triton_conv,
    "prefill conv": triton_paged_conv,
    "scan": triton_scan,
    "checkpoints": triton_checkpoints,
    "arenas": triton_arenas,
    "bench": triton_bench,
}


def cases() -> dict[str, Check]:
    """All cases by "table: name"."""
    return {f"{key}: {name}": case for key, table in TABLES.items() for name, case in table.cases().items()}


if __name__ == "__main__":
    main(cases())
