"""A SGLang plugin of the engine tests: takes guards out of a running server, and back in.

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
TAIL_SKIPPED = "tail-skipped"
"""What a unit holds of a state is not cleared."""
TAIL_ELSEWHERE = "tail-elsewhere"
"""Another unit is cleared."""
TAIL_LATE = "tail-late"
"""A unit is cleared after the forward that reads it."""
TAILS = (TAIL_SKIPPED, TAIL_ELSEWHERE, TAIL_LATE)
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
    """Wrap the guards, where a folder is named.  Found by SGLang in every server process."""
    if FOLDER not in os.environ:
        return
    from sglang_hybrid.kernels import exact_recurrence, segments
    from sglang_hybrid.pools.leftovers import Leftovers

    folder = Path(os.environ[FOLDER])
    honest_take, late = Leftovers.take, dict[int, int]()

    def take(self: Leftovers) -> dict[int, int]:
        due = honest_take(self)
        if (folder / TAIL_SKIPPED).exists():
            return {}
        if (folder / TAIL_ELSEWHERE).exists():
            return {max(unit - 1, 1): first for unit, first in due.items()}
        before = dict(late)
        late.clear()
        if (folder / TAIL_LATE).exists():
            late.update(due)
            return before
        return due

    Leftovers.take = take  # type: ignore[method-assign]
    honest_round, honest_bounds = exact_recurrence.round_state, segments.piece_bounds

    def round_state(state: Any, dtype: Any) -> Any:
        return state if (folder / NO_ROUNDING).exists() else honest_round(state, dtype)

    def piece_bounds(begin: int, length: int, grid: int | None, chunk: int) -> list[tuple[int, int]]:
        if (folder / STRADDLE).exists():
            return [(begin, begin + length)]
        return honest_bounds(begin, length, grid, chunk)

    if SCHEDULER in sys.modules:
        from tests.support.graphs import faults

        sys.modules[SCHEDULER].TEST_RETRACT = Switch(folder / PREEMPT)  # type: ignore[attr-defined]
        faults.plant(folder)
    exact_recurrence.round_state = round_state
    segments.piece_bounds = piece_bounds
