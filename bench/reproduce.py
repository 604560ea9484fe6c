"""`python -m bench.reproduce`: the source's 29 comparisons, simulated on the core that serves.

The constants were fitted to absolute figures on other seeds and frozen (`bench.calibrate`,
`bench/calibration.json`); nothing is tuned for a comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from multiprocessing import Pool
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from bench.arms import ASSUMPTIONS, Arm, Constants, Figures
from bench.calibrate import WORKERS, frozen, run_one
from bench.claims import COMPARISONS, UNREPRODUCED, Comparison, arms
from bench.effects import BUDGETS, Part, Runs, at, contrasts
from bench.statistics import bootstrap_interval, holm, sign_flip_p, sign_test_p, t_interval
from bench.table import parser, report, table

QUICK_SEEDS = 3
FACTOR = 1.5
"""A magnitude is met within this factor."""


class Results:
    """Figures by arm, one a seed: the `Runs` that effects are taken from."""

    def __init__(self, figures: Mapping[Arm, Sequence[Figures]]) -> None:
        self.figures = figures

    def __call__(self, arm: Arm, figure: str = "throughput") -> list[float]:
        return [getattr(one, figure) for one in self.figures[arm]]


def simulate_all(constants: Constants, seeds: Sequence[int], workers: int = WORKERS) -> Results:
    """Every arm of every comparison on every seed."""
    jobs = [(arm, constants, seed) for arm in arms() for seed in seeds]
    with Pool(workers) as pool:
        progress = tqdm(pool.imap(run_one, jobs, chunksize=4), total=len(jobs), unit=" runs", disable=None)
        found = list(progress)
    return Results({arm: found[k * len(seeds) : (k + 1) * len(seeds)] for k, arm in enumerate(arms())})


# -- one row a comparison ------------------------------------------------------------------------


def deviation(part: Part) -> float | None:
    """Factor between the published effect and ours; None when there is none, or when the signs differ."""
    found = fmean(part.effect)
    if part.published is None or found * part.published <= 0:
        return None
    return max(found / part.published, part.published / found)


def part_row(part: Part) -> dict[str, Any]:
    found, interval = fmean(part.effect), t_interval(part.effect)
    return {
        "label": part.label,
        "published": part.published,
        "simulated": found,
        "interval": list(interval),
        "bootstrap": list(bootstrap_interval(part.effect)),
        "sign_test_p": sign_test_p(part.effect),
        "holds": part.low < found < part.high,
        "inside": part.low < interval.low and interval.high < part.high,
        "factor": deviation(part),
    }


def row(comparison: Comparison, runs: Runs) -> dict[str, Any]:
    """The first part stands for the comparison; its factor is the largest of all parts."""
    parts = [part_row(part) for part in comparison.parts(runs)]
    expected = [part for part in parts if part["published"] is not None]
    factors = [part["factor"] for part in expected]
    reproduced = all(part["holds"] for part in parts)
    return {
        "id": comparison.id,
        "claim": comparison.claim,
        "published": comparison.published,
        "published_effect": parts[0]["published"],
        "unit": comparison.unit,
        "simulated": parts[0]["simulated"],
        "interval": parts[0]["interval"],
        "reproduced": reproduced,
        "calibrated": comparison.calibrated is not None,
        "calibrated_on": comparison.calibrated,
        "trivial": comparison.trivial,
        "weak": not all(part["inside"] for part in parts),
        "margin": comparison.margin,
        "factor": max(factors) if factors and None not in factors else None,
        "reason": None if reproduced else _reason(comparison, parts),
        "parts": parts,
    }


def _reason(comparison: Comparison, parts: Sequence[Mapping[str, Any]]) -> str:
    failed = "; ".join(f"{part['label']}: {part['simulated']:+.2f}" for part in parts if not part["holds"])
    why = UNREPRODUCED.get(comparison.id)
    return f"{failed} {comparison.unit}" + (f". {why}" if why else "")


def is_met(one: Mapping[str, Any]) -> bool:
    """Whether the magnitude counts: the sign holds, within the factor, and nothing of it was calibrated."""
    known = one["factor"] is not None and one["factor"] <= FACTOR
    return known and one["reproduced"] and not one["calibrated"]


# -- beside the rows -----------------------------------------------------------------------------


def family(runs: Runs) -> list[dict[str, Any]]:
    """C2's contrasts, the p of sign flips adjusted by Holm.

    The source's p values are multiples of 1 / 1024, as exact sign flips of ten seeds or more give them.
    """
    found = contrasts(runs)
    adjusted = holm({name: sign_flip_p(effect) for name, effect in found.items()})
    return [
        {
            "contrast": name,
            "points": fmean(effect),
            "interval": list(t_interval(effect)),
            "p_holm": adjusted[name],
        }
        for name, effect in found.items()
    ]


def hot_share(runs: Runs, constants: Constants) -> list[dict[str, Any]]:
    """The cache is bistable: the part of seeds in which S2 adopts over half of what can be shared."""

    def hot(budget: int, headroom: float) -> float:
        depths = runs(at("S2", budget, headroom), "j_adopt")
        return fmean(2 * depth > constants.context_tokens for depth in depths)

    return [
        {"budget": f"b{budget}", "headroom": f, "hot": hot(budget, f)}
        for budget in BUDGETS
        for f in (0.0, 0.19)
    ]


def levels(results: Results) -> list[dict[str, Any]]:
    """Means of every arm."""
    return [
        {
            **arm._asdict(),
            **{figure: fmean(results(arm, figure)) for figure in Figures._fields},
        }
        for arm in results.figures
    ]


def answer_of(
    runs: Results, calibration: Mapping[str, Any], seeds: Sequence[int], quick: bool
) -> dict[str, Any]:
    rows = [row(comparison, runs) for comparison in COMPARISONS]
    met = [one["id"] for one in rows if is_met(one)]
    holding = [one for one in rows if one["reproduced"]]
    return {
        "comparisons": len(rows),
        "reproduced": len(holding),
        "within_factor_1_5": len(met),
        "magnitudes_published": sum(
            one["published_effect"] is not None and not one["calibrated"] for one in rows
        ),
        "within": met,
        "not_reproduced": {one["id"]: one["reason"] for one in rows if not one["reproduced"]},
        "trivial": {one["id"]: one["trivial"] for one in holding if one["trivial"]},
        "weak": [one["id"] for one in holding if one["weak"]],
        "calibrated": {one["id"]: one["calibrated_on"] for one in rows if one["calibrated"]},
        "quick": quick,
        "seeds": list(seeds),
        "rows": rows,
        "contrasts": family(runs),
        "hot_share": hot_share(runs, calibration["constants"]),
        "arms": levels(runs),
        "assumptions": ASSUMPTIONS,
        "calibration": {**calibration, "constants": asdict(calibration["constants"])},
    }


# -- for people ----------------------------------------------------------------------------------


def tables(answer: Mapping[str, Any]) -> None:
    seeds = answer["seeds"]
    few = " (--quick: too few to judge by)" if answer["quick"] else ""
    table(
        f"{answer['comparisons']} comparisons, seeds {seeds[0]} to {seeds[-1]}{few}; t intervals of 95 %",
        ("id", "published", "simulated", "interval", "unit", "holds", "factor", ""),
        [
            (
                one["id"],
                one["published"],
                f"{one['simulated']:+.2f}",
                _interval(one),
                one["unit"],
                "yes" if one["reproduced"] else "NO",
                "" if one["factor"] is None else f"{one['factor']:.2f}",
                ", ".join(name for name in ("calibrated", "trivial", "weak") if one[name]),
            )
            for one in answer["rows"]
        ],
    )
    print(
        f"\n{answer['reproduced']} of {answer['comparisons']} hold.  {answer['within_factor_1_5']} of "
        f"{answer['magnitudes_published']} published magnitudes that nothing was calibrated on are met "
        f"within a factor of {FACTOR}: {', '.join(answer['within'])}."
    )
    print(
        "calibrated: all levels that it compares were fitted; trivial: holds anyway; weak: the interval "
        "leaves the range that the mean must lie in."
    )
    for name, reason in answer["not_reproduced"].items():
        print(f"Not reproduced: {name}.  {reason}")
    table(
        "What sharing adds, points (Holm over the six, by sign flips)",
        ("contrast", "points", "interval", "p"),
        [
            (
                one["contrast"],
                f"{one['points']:+.2f}",
                _interval(one),
                one["p_holm"],
            )
            for one in answer["contrasts"]
        ],
    )
    table(
        "Part of the seeds in which S2's cache is hot (more than half of a context adopted on average)",
        ("budget", "f", "hot"),
        [(one["budget"], one["headroom"], one["hot"]) for one in answer["hot_share"]],
    )
    print("\nHow it was calibrated")
    for text in answer["calibration"]["history"]:
        print(f"  {text}")
    print("\nAssumptions")
    for name, text in answer["assumptions"].items():
        print(f"  {name}: {text}")


def _interval(one: Mapping[str, Any]) -> str:
    return "[{:+.1f}, {:+.1f}]".format(*one["interval"])


def main() -> None:
    options = parser("reproduce", __doc__)
    options.add_argument("--quick", action="store_true", help=f"{QUICK_SEEDS} seeds, under a minute")
    options.add_argument("--seeds", type=int, help="how many of the evaluation seeds (default: all)")
    options.add_argument(
        "--plots", type=Path, metavar="DIR", help="draw the figures into DIR (needs matplotlib)"
    )
    options.add_argument("--workers", type=int, default=WORKERS, help="processes (default 2)")
    chosen = options.parse_args()
    calibration = frozen()
    seeds = calibration["evaluation_seeds"][: QUICK_SEEDS if chosen.quick else chosen.seeds]
    if len(seeds) < 2:
        options.error(f"--seeds {chosen.seeds} gives no interval: use 2 or more")
    runs = simulate_all(calibration["constants"], seeds, chosen.workers)
    answer = answer_of(runs, calibration, seeds, chosen.quick)
    report(answer, chosen.json, lambda: tables(answer))
    if chosen.plots is not None:
        from bench.plots import draw

        draw(runs, seeds, chosen.plots)


if __name__ == "__main__":
    main()
