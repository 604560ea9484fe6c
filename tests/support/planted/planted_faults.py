"""A SGLang plugin of the engine tests: takes guards out of a running server, and plants faults.

A fault is in while the file of its name lies in the folder that the environment variable names.
"""

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
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
NO_DOOR = "no-door"
"""What the door's rules say is passed over where it matches the regular expression in the file."""
CURSED = "cursed-"
"""How the id of a request begins that fails where a file `raise-STAGE` says."""
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
    _plant_in_requests(folder)
    exact_recurrence.round_state = round_state
    segments.piece_bounds = piece_bounds


def _plant_in_requests(folder: Path) -> None:
    """Guards and exceptions on a request's way."""
    from sglang_hybrid.engine import door, door_rules

    honest_body_fault = door_rules.body_fault

    def passed_over(sentence: str) -> bool:
        return (folder / NO_DOOR).exists() and bool(re.search((folder / NO_DOOR).read_text(), sentence))

    def fault(request: Any, limits: Any) -> str | None:
        return next((said for said in door_rules._faults(request, limits) if not passed_over(said)), None)

    def body_fault(body: Any) -> str | None:
        said = honest_body_fault(body)
        return None if said is None or passed_over(said) else said

    def curse(owner: Any, name: str, stage: str, requests_of: Any, after: bool = False) -> None:
        """`owner.name` raises while `raise-STAGE` exists and one of its requests is cursed; `after`: having
        done its work."""
        honest_call = getattr(owner, name)

        def cursed(*args: Any, **kwargs: Any) -> Any:
            is_cursed = (folder / f"raise-{stage}").exists() and any(
                req.rid.startswith(CURSED) for req in requests_of(*args, **kwargs)
            )
            done = honest_call(*args, **kwargs) if after or not is_cursed else None
            if is_cursed:
                raise RuntimeError(f"planted at {stage}")
            return done

        setattr(owner, name, cursed)

    door.fault, door.body_fault = fault, body_fault  # type: ignore[attr-defined]
    if SCHEDULER not in sys.modules:
        return
    from sglang_hybrid.engine.cache import GridPrefixCache
    from sglang_hybrid.engine.page_maps import PageMapMetadata
    from sglang_hybrid.engine.requests import GridRequests
    from sglang_hybrid.engine.tokens import GridTokens
    from sglang_hybrid.radix.live import LiveStates

    def in_rows(self: Any, rows: Any, *rest: Any) -> Any:
        return [self._request(row) for row in rows.tolist()]

    def in_forward(self: Any, batch: Any, *rest: Any) -> Any:
        return in_rows(self.requests, batch.req_pool_indices_cpu)

    def whose(self: Any, state: Any, *rest: Any) -> Any:
        return [SimpleNamespace(rid=state.key)]

    scheduler = sys.modules[SCHEDULER].Scheduler
    curse(scheduler, "init_req_max_new_tokens", "arrival", lambda self, req: [req])
    curse(GridPrefixCache, "_match", "match", lambda self, params: [params.req] if params.req else [])
    curse(GridPrefixCache, "awaits", "asking", lambda self, req, promised: [req])
    curse(GridPrefixCache, "expect", "expecting", lambda self, req, promised: [req])
    curse(GridPrefixCache, "admitted", "binding", lambda self, req: [req])
    curse(GridTokens, "_extend", "units", lambda self, *rest: self.requests.batch)
    curse(GridRequests, "_prepare_extend", "prefill", lambda self, reqs, ends: reqs)
    curse(GridPrefixCache, "begun", "begun", lambda self, req: [req])
    curse(LiveStates, "publish", "publish", whose)
    curse(LiveStates, "publish", "published", whose, after=True)
    curse(GridRequests, "_prepare_decode", "decode", in_rows)
    curse(PageMapMetadata, "_extend_maps", "maps", in_forward)
