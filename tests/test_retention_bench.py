"""`python -m bench.retention`: what it says of runs, and what must hold on a window of the public trace."""

from collections import defaultdict

import pytest

from bench.retention import (
    BUDGETS,
    Figures,
    Run,
    all_runs,
    falls,
    headroom,
    held_back,
    placement,
    retained,
    retention,
    run_one,
)
from bench.trace import load
from sglang_hybrid.pools.factory import ORGANIZATIONS


def test_equal_counts_fall_and_a_rise_does_not() -> None:
    assert falls([5, 3, 3, 0]) and falls([0, 0])
    assert not falls([5, 3, 4, 0])


def test_effects_are_those_of_pairs() -> None:
    results: dict[Run, list[Figures]] = defaultdict(lambda: [Figures(0, 0, 1.0), Figures(0, 0, 2.0)])
    off, on = retained("source", BUDGETS[1], 0.0, False)
    results[off] = [Figures(100.0, 4, 1.0), Figures(200.0, 2, 1.0)]
    results[on] = [Figures(110.0, 3, 1.0), Figures(190.0, 2, 1.0)]
    first, second = held_back("source", "S1")[:2]
    results[first] = [Figures(5.0, 4, 1.0), Figures(6.0, 2, 1.0)]
    results[second] = [Figures(5.0, 1, 1.0), Figures(7.0, 3, 1.0)]
    rows = retention(results, (0, 3))
    (changed,) = [row for row in rows if row["share_changed"]]
    assert changed["share"] == {
        "0": {"off": 100.0, "on": 110.0, "gain": 10.0},
        "3": {"off": 200.0, "on": 190.0, "gain": -10.0},
    }
    assert changed["share_mean_gain"] == 0 and not changed["isolate_changed"]
    found = headroom(results, "source")
    assert found["preemptions"]["S1"] == {"0.0": 6, "0.05": 4, "0.1": 0, "0.19": 0, "0.27": 0, "0.35": 0}
    assert found["monotone"]["S1"] and found["monotone_seeds"] == {"S0": 2, "S1": 1, "S2": 2, "D0": 2}
    assert found["adopted"]["S1"]["0.05"] == 6.0 and found["seconds"]["S0"]["0.0"] == 3.0
    assert placement(results)["D0"]["1000"] == {"all": 0, "branch": 0, "sparse": 0}
    assert set(results) <= set(all_runs()) and len(all_runs()) == len(set(all_runs()))


@pytest.mark.parametrize("name", ORGANIZATIONS)
def test_every_organization_preempts_and_headroom_ends_it(name: str) -> None:
    runs, window = held_back("source", name), load(most=250)
    without, most = run_one((runs[0], window)), run_one((runs[-1], window))
    assert without.preemptions > 0 == most.preemptions


def test_retention_changes_something_if_texts_are_shared() -> None:
    window = load(most=250)
    for isolate in (False, True):
        off, on = (run_one((run, window)) for run in retained("source", BUDGETS[0], 0.0, isolate))
        assert (off == on) == isolate
