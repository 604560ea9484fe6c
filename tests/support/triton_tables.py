"""Every table of Triton kernel cases in one: `python -m tests.support.triton_tables` runs them all."""

from __future__ import annotations

from tests.support import (
    triton_arenas,
    triton_bench,
    triton_checkpoint_io,
    triton_conv_update,
    triton_delta_update,
    triton_paged_conv,
    triton_paged_delta_scan,
    triton_paged_scan,
    triton_row_fill,
    triton_state_update,
)
from tests.support.interpreted import Check, main

TABLES = {
    "state_update": triton_state_update,
    "delta_update": triton_delta_update,
    "conv_update": triton_conv_update,
    "paged_conv": triton_paged_conv,
    "paged_scan": triton_paged_scan,
    "paged_delta_scan": triton_paged_delta_scan,
    "checkpoint_io": triton_checkpoint_io,
    "row_fill": triton_row_fill,
    "arenas": triton_arenas,
    "bench": triton_bench,
}


def cases() -> dict[str, Check]:
    """All cases by "table: name"."""
    return {f"{key}: {name}": case for key, table in TABLES.items() for name, case in table.cases().items()}


if __name__ == "__main__":
    main(cases())
