"""`python -m bench.plan`: the planner's recommendations against all candidates simulated in full.

Ten traffic profiles that the planner was not built on, frozen before they were first run.  For each, every
candidate is simulated on two seeds that the planner never sees, the 30 best and the recommended one
on six, and the best of these is what the recommendation is held against.  It counts as the best when a
request takes no more than 2 % longer with it on average, or when the 95 % interval of that excess over
the paired seeds holds 0; `within_2_percent` counts the former alone.
"""

from __future__ import annotations

import os
import time
from typing import Any

from tqdm import tqdm

from bench.table import Cell, parser, report, table
from sglang_hybrid.cli.plan import machine_of
from sglang_hybrid.cli.plan_report import words
from sglang_hybrid.planner.candidates import Candidate, Machine, choices
from sglang_hybrid.planner.plan import REQUESTS, TURN_REQUESTS, recommend
from sglang_hybrid.planner.race import Race
from sglang_hybrid.simulator.traffic import Profile

MODEL, MEMORY = "falcon-h1-7b", "40GiB"

HELD_OUT = (
    Profile("reviews", 3, 5400, 220, contexts=10, context=4200, sharing=0.85, limit=16384),
    Profile("help desk", 10, 1500, 110, contexts=4, context=1000),
    Profile("code assistant", 4, 3800, 400, contexts=20, context=1500, sharing=0.7, turns=5, limit=16384),
    Profile("tutor", 3, 2600, 500, contexts=2, context=400, turns=4, limit=16384),
    Profile("summaries", 1.5, 7000, 350, contexts=0, context=0, sharing=0, limit=16384),
    Profile("classification", 20, 900, 16, contexts=5, context=700),
    Profile("half shared", 4, 3000, 250, contexts=16, context=2000, sharing=0.5),
    Profile("tool loops", 8, 5200, 80, contexts=3, context=3000, turns=12, limit=24576),
    Profile("stories", 2, 1600, 1200, contexts=1, context=200, turns=2),
    Profile("many contexts", 5, 4100, 200, contexts=60, context=3300),
)
"""Not to be changed: the planner is judged by them."""

FULL_SEEDS = range(1000, 1002)
BEST_SEEDS = range(1000, 1006)
BEST = 30

TOLERANCE = 0.02


def judge(machine: Machine, profile: Profile, workers: int) -> dict[str, Any]:
    """The recommendation for a profile, and how it fares among all candidates."""
    count = TURN_REQUESTS if profile.turns > 1 else REQUESTS
    candidates = choices(machine).candidates
    began = time.monotonic()
    planner = Race(machine, profile, count, workers)
    recommended = recommend(planner, candidates).best
    took = time.monotonic() - began
    race = Race(machine, profile, count, workers)
    ranked = race.ranked(candidates, FULL_SEEDS)
    best = race.ranked([*ranked[:BEST], recommended], BEST_SEEDS)[0]
    excess = race.excess(recommended, best, BEST_SEEDS)
    return {
        "recommended": recommended.report(),
        "best": best.report(),
        "place": ranked.index(recommended) + 1,
        "candidates": len(candidates),
        "excess": round(excess.mean, 4),
        "interval": [round(excess.low, 4), round(excess.high, 4)],
        "latency": round(race.of(recommended, BEST_SEEDS, "latency").mean, 3),
        "worst_excess": round(race.excess(ranked[-1], best, FULL_SEEDS).mean, 3),
        "default_excess": round(race.excess(Candidate("S1", 512), best, FULL_SEEDS).mean, 3),
        "search_seconds": round(took, 1),
        "search_simulations": planner.runs,
        "within_2_percent": excess.mean <= TOLERANCE,
        "is_best": excess.mean <= TOLERANCE or excess.low <= 0,
    }


def measure(count: int, workers: int) -> dict[str, Any]:
    """The first `count` profiles."""
    machine, _ = machine_of(MODEL, memory=MEMORY)
    answer: dict[str, Any] = {"model": MODEL, "memory": MEMORY, "profiles": {}}
    for profile in tqdm(HELD_OUT[:count], unit=" profiles", disable=None):
        answer["profiles"][profile.name] = judge(machine, profile, workers)
    rows = answer["profiles"].values()
    answer["best"] = sum(row["is_best"] for row in rows)
    answer["within_2_percent"] = sum(row["within_2_percent"] for row in rows)
    answer["of"] = len(rows)
    return answer


def tables(answer: dict[str, Any]) -> None:
    rows: list[list[Cell]] = [
        [
            name,
            words(Candidate.of(**row["recommended"])),
            words(Candidate.of(**row["best"])),
            f"{100 * row['excess']:+.1f} %",
            f"{100 * row['interval'][0]:+.1f} to {100 * row['interval'][1]:+.1f}",
            f"{100 * row['default_excess']:+.0f} %",
            f"{100 * row['worst_excess']:+.0f} %",
            row["search_seconds"],
        ]
        for name, row in answer["profiles"].items()
    ]
    table(
        f"{answer['model']}, {answer['memory']}: as good as the best of all candidates on {answer['best']} "
        f"of {answer['of']} profiles ({answer['within_2_percent']} within 2 %); a request takes longer by",
        ("traffic", "recommended", "best of all", "mean", "95 %", "S1 defaults", "worst", "search, s"),
        rows,
    )


def main() -> None:
    options = parser("plan", __doc__)
    options.add_argument("--profiles", type=int, default=len(HELD_OUT), help="only the first ones")
    options.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    chosen = options.parse_args()
    answer = measure(chosen.profiles, chosen.workers)
    report(answer, chosen.json, lambda: tables(answer))


if __name__ == "__main__":
    main()
