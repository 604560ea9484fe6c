"""A SGLang plugin of the engine tests: takes guards of exact mode out of a running server, and back in.

A fault is in while the file of its name lies in the folder that the environment variable names.
"""

import os
import sys
from pathlib import Path
from typing import Any

FOLDER = "SGLANG_HYBRID_TEST_FAULTS"

NO_ROUNDING = "no-rounding"
"""The state is carried on as computed, while its stored copy is rounded."""
STRADDLE = "straddle"
"""An extend is one piece: it straddles its boundaries, and leaves no state there."""
PREEMPT = "preempt"
"""No fault: SGLang's own test switch, every third forward preempts what decodes (`SGLANG_TEST_RETRACT`)."""
SCHEDULER = "sglang.srt.managers.scheduler"


class Switch:
    """True while the file exists."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __bool__(self) -> bool:
        return self.path.exists()


def plant() -> None:
    """Wrap the guards.  Found by SGLang in every server process."""
    from sglang_hybrid.kernels import exact_recurrence, segments

    folder = Path(os.environ[FOLDER])
    honest_round, honest_bounds = exact_recurrence.round_state, segments.piece_bounds

    def round_state(state: Any, dtype: Any) -> Any:
        return state if (folder / NO_ROUNDING).exists() else honest_round(state, dtype)

    def piece_bounds(begin: int, length: int, grid: int | None, chunk: int) -> list[tuple[int, int]]:
        if (folder / STRADDLE).exists():
            return [(begin, begin + length)]
        return honest_bounds(begin, length, grid, chunk)

    if SCHEDULER in sys.modules:
        sys.modules[SCHEDULER].TEST_RETRACT = Switch(folder / PREEMPT)  # type: ignore[attr-defined]
    exact_recurrence.round_state = round_state
    segments.piece_bounds = piece_bounds
