"""SGLang's overlap in the simulator: a step is prepared before what the last one led to is known.

That the rules are SGLang's is what `tests/engine/test_simulator.py` proves; here each stands alone.
"""

import pytest

from sglang_hybrid.simulator import passes
from sglang_hybrid.simulator.outcome import Record
from sglang_hybrid.simulator.request import Request
from sglang_hybrid.simulator.scheduler import Scheduler
from sglang_hybrid.simulator.setting import ENGINE, Setting
from tests.core.worlds import GRID
from tests.test_simulator import COST, setting


def records(setting: Setting, requests: list[Request]) -> list[Record]:
    """In the order of arrival."""
    found = Scheduler(setting, requests, records=True).run().records
    assert found is not None
    return sorted(found)


def request(index: int, new: int, prompt: int = GRID, limit: int | None = None) -> Request:
    return Request(0.0, ((index, prompt),), new, answer=("answer", index), limit=limit)


@pytest.mark.parametrize("overlaps", [True, False])
def test_who_waits_begins_a_step_after_an_end(overlaps: bool) -> None:
    serving = ENGINE._replace(overlaps=overlaps)
    requests = [request(0, 2), request(1, 7), request(2, 1)]
    ended, _, began = records(setting("S1", serving, pages=400, most_running=2), requests)
    # The other decodes alone meanwhile.
    step = COST.step(1, 1, GRID + 1, GRID + 1) if overlaps else 0.0
    assert began.admitted - ended.finished == pytest.approx(step)


def test_an_end_that_nobody_foresees_takes_one_more_step() -> None:
    """So the last token is computed as well, and with it a block."""
    later = Request(1e6, ((0, GRID), (("answer", 0), GRID), (1, 1)), 1)
    reused = [
        records(setting("S1", ENGINE), [request(0, GRID, limit=limit), later])[1].j_adopt
        for limit in (None, GRID + 1)
    ]
    assert reused == [GRID, 2 * GRID]


def test_of_equals_the_last_of_the_batch_is_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "MOST_EXPECTED", 1)
    served = records(setting("S1", ENGINE, pages=44), [request(index, 8 * GRID) for index in range(5)])
    preempted = [one.preemptions for one in served]
    assert preempted[0] == 0 and preempted == sorted(preempted) and sum(preempted) > 1


def test_what_is_in_flight_is_lost_with_a_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token that was not known yet is generated again: one position less is prefilled."""
    monkeypatch.setattr(passes, "MOST_EXPECTED", 1)
    preempted, kept = [], []
    for overlaps in (True, False):
        one = Scheduler(
            setting("S1", ENGINE._replace(overlaps=overlaps), pages=44),
            [request(index, 8 * GRID, prompt=GRID + 1) for index in range(5)],
        )
        outcome = one.run()
        preempted.append(outcome.preemptions)
        kept.append(outcome.resumed_tokens + outcome.prefilled_again_tokens)
    assert preempted[0] == preempted[1] > 1
    assert kept[1] - kept[0] == preempted[0]


def test_what_is_expected_starts_anew_after_an_idle_moment() -> None:
    """Decode steps lower SGLang's new-token ratio; only until nothing runs and nothing waits."""
    one = Scheduler(setting("S1", ENGINE), [request(0, 5), Request(1e6, (("later", 1),), 1)])
    ratios = []
    while one.step():
        ratios.append(one.expectation.ratio)
    assert min(ratios) < ratios[-1] == one.expectation.FIRST
