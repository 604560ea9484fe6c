"""What the plugin knows about hybrid models; the only place that names an architecture.

Ledger, planner, rules, hooks, kernel dispatch, demo models and tests ask these two tables.  Plain Python:
adapters, layers and demo builders are dotted names, imported by whoever needs them.

To add a family:
1. Its recurrent layers are of a kind in `kinds.py`?  Nothing to do.  Else add a row there, an adapter (a
   subclass of SGLang's backend, as `engine/mixer.py`), and the recurrence: `kernels/STEP.py` and `SCAN.py`
   with functions of these names, and `triton_STEP.py`, `triton_SCAN.py` with the same signatures.
2. `families.py`: one row.  Its reader turns config.json into a `HybridShape` (`readers.py`).
3. A demo builder (`cli/demo_families.py`), which makes the family tested: end-to-end configurations in
   `tests/support/configs.py` serve it, and the start warns no longer.
4. What the CPU lacks goes into `platforms/`.
5. From outside the package `add_kind` and `add_family` do the same.
"""

from __future__ import annotations

from sglang_hybrid.models.families import (
    FAMILIES,
    Family,
    add_family,
    hybrid_shape,
    tested,
)
from sglang_hybrid.models.fields import ConfigError, Fields
from sglang_hybrid.models.kinds import KINDS, RecurrentKind, StateDims, add_kind
from sglang_hybrid.models.shape import HybridShape

__all__ = [
    "FAMILIES",
    "KINDS",
    "ConfigError",
    "Family",
    "Fields",
    "HybridShape",
    "RecurrentKind",
    "StateDims",
    "add_family",
    "add_kind",
    "hybrid_shape",
    "tested",
]
