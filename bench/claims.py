"""The 29 comparisons of sign and order in the source's claims C1 to C11 (docs/paper.md), as data.

A comparison is one or several *parts*: an effect, one number a seed, and the range that its mean must lie in.
It holds when all do.  It is *weak* when the interval of one is not inside its range, and *trivial* when it
would hold whatever the memory did.  What was calibrated on is never counted as a magnitude.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple

from bench.arms import Arm
from bench.effects import (
    LOW_RATE,
    Part,
    Runs,
    ahead_under_load,
    at_one_f,
    best_gain,
    changes,
    checkpoints_rise,
    contrasts,
    crowded,
    depth_rises,
    each_at_its_best,
    equal_at_low_load,
    falls_beyond_its_peak,
    gap_shrinks,
    interacts,
    isolated_gains_nothing,
    lead_of_d0,
    no_gap,
    packing_beats_pages,
    pages_beat_coarse,
    retention_pays,
    shared,
    sharing_makes_it_pay,
)


class Comparison(NamedTuple):
    id: str
    claim: str
    published: str
    unit: str
    """Of its effects."""
    parts: Callable[[Runs], list[Part]]
    calibrated: str | None = None
    """Which of its levels the constants were fitted to: all that it compares.  One level of C1 (S0) and two
    of C11 (without retention) were fitted too; what is compared with them was not."""
    trivial: str | None = None
    """Why it would hold anyway."""
    margin: str | None = None
    """The margin, where the source names none and it is ours."""


C3 = "levels of input, waiting and running"
C4 = "levels of input and waiting"
TWO_OF_THREE = "ahead at two of f 0, .10 and .19"

COMPARISONS: tuple[Comparison, ...] = (
    Comparison("C1a", "no sharing: S1 serves more than S0", "293.8 -> 405.4 tok/s", "%", pages_beat_coarse),
    Comparison(
        "C1b", "no sharing: S2 more than S1, by less", "405.4 -> 415.9 tok/s", "%", packing_beats_pages
    ),
    Comparison(
        "C2a", "sharing raises S1's gain over S0", "+9.623 (p .01074)", "points", interacts("S1", "S0", 9.623)
    ),
    Comparison(
        "C2b",
        "sharing raises S2's gain over S1",
        "+10.043 (p .0391)",
        "points",
        interacts("S2", "S1", 10.043),
    ),
    Comparison(
        "C3a",
        "b63, 3 req/s: input falls, S0 to S2",
        "766k -> 612k",
        "%",
        changes(shared, "input", False, 766, 612),
        C3,
    ),
    Comparison(
        "C3b", "waiting falls", "78.8 -> 25.7", "%", changes(shared, "waiting", False, 78.8, 25.7), C3
    ),
    Comparison("C3c", "running rises", "6.7 -> 17.0", "%", changes(shared, "running", True, 6.7, 17.0), C3),
    Comparison(
        "C4a",
        "b108, 4.5 req/s: input falls",
        "698k -> 430k",
        "%",
        changes(crowded, "input", False, 698, 430),
        C4,
    ),
    Comparison("C4b", "waiting falls", "67.7 -> 8.5", "%", changes(crowded, "waiting", False, 67.7, 8.5), C4),
    Comparison(
        "C5a",
        "f = 0: D0 ahead at b63",
        "+4.978 %",
        "%",
        lambda runs: [Part("D0 over S2", lead_of_d0(runs, 63), 0, published=4.978)],
    ),
    Comparison(
        "C5b",
        "S2 ahead at b108",
        "-12.556 %",
        "%",
        lambda runs: [Part("D0 over S2", lead_of_d0(runs, 108), -inf, 0, -12.556)],
    ),
    Comparison(
        "C6a",
        "S2 gains from headroom at b63",
        "+13.61 %",
        "%",
        best_gain("S2", 63, 5, inf, 13.61),
        margin="over 5 %",
    ),
    Comparison("C6b", "and at b83", "+18.81 %", "%", best_gain("S2", 83, 5, inf, 18.81), margin="over 5 %"),
    Comparison(
        "C6c", "S2 is flat at b108", "flat", "%", best_gain("S2", 108, -3, 3, None), margin="within 3 %"
    ),
    Comparison(
        "C6d", "D0 gains little at b83", "+2.86 %", "%", best_gain("D0", 83, 0, 5, 2.86), margin="0 to 5 %"
    ),
    Comparison("C6e", "and at b108", "+2.50 %", "%", best_gain("D0", 108, 0, 5, 2.50), margin="0 to 5 %"),
    Comparison(
        "C6f",
        "D0 falls beyond a peak at a small f",
        "peak, then falling",
        "points",
        falls_beyond_its_peak,
        margin="peak at f <= .19, more than 1 point down at .35, at b83 and b108",
    ),
    Comparison("C7a", "one f: D0 ahead at b63", "ahead", "%", at_one_f(63, 1), margin=TWO_OF_THREE),
    Comparison("C7b", "one f: S2 ahead at b108", "ahead", "%", at_one_f(108, -1), margin=TWO_OF_THREE),
    Comparison("C7c", "each at its best f: S2 ahead at all three", "ahead", "%", each_at_its_best),
    Comparison(
        "C8a",
        "b63, low load: equal",
        "equal",
        "%",
        equal_at_low_load,
        trivial="unsaturated: both serve what is offered",
        margin=f"within 2 % at {LOW_RATE} req/s",
    ),
    Comparison(
        "C8b", "b108, cap 109: S2 ahead at 3.0 and 4.5 req/s", "-13.17 %, -4.74 %", "%", ahead_under_load
    ),
    Comparison("C8c", "the gap shrinks with load", "-13.17 -> -4.74 %", "points", gap_shrinks),
    Comparison(
        "C9a",
        "S2, b83: Gap_R = 0 in all cells",
        "0 in 6 of 6",
        "checkpoints",
        no_gap,
        trivial="a checkpoint is released before the KV that it needs, so it goes first",
    ),
    Comparison("C9b", "J_adopt rises with f", "+785, +650, +555", "tokens", depth_rises),
    Comparison(
        "C10a",
        "retention: J_adopt rises by far more than attention depth",
        "J +703, +1439, +1092; attention +51, +123, +72",
        "tokens",
        checkpoints_rise,
        margin="three times",
    ),
    Comparison("C10b", "retention: throughput rises", "+17.8 %", "%", retention_pays),
    Comparison(
        "C11a", "retention gains more under SHARE than under ISOLATE", "+14.3 %", "%", sharing_makes_it_pay
    ),
    Comparison(
        "C11b",
        "under ISOLATE about nothing",
        "+0.8 %",
        "%",
        isolated_gains_nothing,
        trivial="no salted checkpoint is wanted twice, so none is retained",
        margin="within 3 %",
    ),
)


UNREPRODUCED: dict[str, str] = {
    "C6d": "D0 gains more than the source's: over the whole run, drain included, it gained 2 %",
    "C6f": "at b108 few requests wait, and headroom lets D0 keep more checkpoints at no cost",
}
"""What was learnt of comparisons that do not hold: said beside them, should they fail."""


def arms() -> list[Arm]:
    """Every arm that the comparisons and C2's family ask for, once each."""
    asked: dict[Arm, None] = {}

    def listen(arm: Arm, figure: str = "throughput") -> list[float]:
        asked[arm] = None
        return [1.0]

    for comparison in COMPARISONS:
        comparison.parts(listen)
    contrasts(listen)
    return list(asked)
