"""`python -m bench.calibrate`: fit what the source leaves open to its absolute figures, and to nothing else.

Coordinate descent on a fixed grid: each constant in turn goes from value to value as long as the error falls,
until a whole round changes nothing.  The error is over 11 figures: throughput of S0 in C1, inputs and medians
in C3 and C4.  Then the slowness of C9 to C11, on the two levels of C11 without retention.  No run of D0, no
gain of anything over anything is looked at.  `--freeze` writes `bench/calibration.json`, which
`bench.reproduce` reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from multiprocessing import Pool
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from bench.arms import Arm, Constants, Figures, run
from bench.effects import crowded, retained, shared, unshared
from bench.table import parser, report, table

CALIBRATION = Path(__file__).with_name("calibration.json")
SEEDS = tuple(range(4))
WORKERS = 2

GRID: dict[str, Sequence[float]] = {
    "headroom": (0.10, 0.19, 0.27, 0.35),
    "context_tokens": (2568, 2600, 2664, 2728, 2792),
    "requests": (260, 270, 280, 290, 300),
    "mean_new": (220, 230, 240, 250, 260, 270),
    "flops": (140e12, 150e12, 160e12, 170e12, 180e12, 190e12),
    "overhead": (1e-3, 2e-3, 3e-3, 4e-3),
}
"""What is fitted, and the values that it may take: few, as eleven figures cannot tell more apart.  The
headroom is one of the source's own.  The other constants stay as the prototype left them."""


SLOWNESS = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6)

START = replace(Constants(), headroom=0.27, context_tokens=2728, mean_new=270, flops=190e12, overhead=1e-3)
"""Where the descent from set X ended (30 settings, error 1.77) under an earlier model of the scheduler."""


class Target(NamedTuple):
    """An absolute figure of the source; `scale` is a deviation that counts 1."""

    claim: str
    arm: Arm
    figure: str
    published: float
    scale: float


def _targets() -> Iterator[Target]:
    yield Target("C1", unshared("S0"), "throughput", 293.836, 0.03 * 293.836)
    for claim, arm, figure, values in (
        ("C3", shared, "input", (766e3, 612e3)),
        ("C3", shared, "waiting", (78.8, 25.7)),
        ("C3", shared, "running", (6.7, 17.0)),
        ("C4", crowded, "input", (698e3, 430e3)),
        ("C4", crowded, "waiting", (67.7, 8.5)),
    ):
        for organization, published in zip(("S0", "S2"), values):
            scale = {"input": 0.04 * published, "waiting": 4.0, "running": 0.05 * published}[figure]
            yield Target(claim, arm(organization), figure, published, scale)


TARGETS = tuple(_targets())
SLOW_TARGETS = tuple(
    Target("C11", retained(isolate, retention=False), "throughput", published, 0.03 * published)
    for isolate, published in ((True, 371.42), (False, 513.70))
)

Simulate = Callable[[Sequence[tuple[Arm, Constants, int]]], list[Figures]]


def levels(
    constants: Constants, seeds: Sequence[int], simulate: Simulate, targets: Sequence[Target] = TARGETS
) -> list[float]:
    """Means over seeds, in the order of the targets."""
    arms = tuple(dict.fromkeys(target.arm for target in targets))
    found = simulate([(arm, constants, seed) for arm in arms for seed in seeds])
    runs = {arm: found[place * len(seeds) : (place + 1) * len(seeds)] for place, arm in enumerate(arms)}
    return [fmean(getattr(one, target.figure) for one in runs[target.arm]) for target in targets]


def error(simulated: Sequence[float], targets: Sequence[Target] = TARGETS) -> float:
    """Mean square of the deviations, each in its target's scale."""
    return fmean(((one - target.published) / target.scale) ** 2 for one, target in zip(simulated, targets))


class Fit(NamedTuple):
    constants: Constants
    levels: list[float]
    tried: int
    """Settings that were simulated."""


def fit(
    start: Constants,
    seeds: Sequence[int],
    simulate: Simulate,
    grid: Mapping[str, Sequence[float]] = GRID,
    targets: Sequence[Target] = TARGETS,
    tell: Callable[[str], None] = lambda line: None,
) -> Fit:
    """The end of the descent; deterministic."""
    known: dict[Constants, list[float]] = {}

    def of(constants: Constants) -> float:
        if constants not in known:
            known[constants] = levels(constants, seeds, simulate, targets)
        return error(known[constants], targets)

    best = start
    while True:
        before = best
        for name, values in grid.items():
            for way in (1, -1):
                best = _along(best, name, list(values)[::way], of)
            tell(f"{name} = {getattr(best, name):g}: error {of(best):.3f} after {len(known)} settings")
        if best == before:
            return Fit(best, known[best], len(known))


def _along(
    best: Constants, name: str, values: Sequence[float], of: Callable[[Constants], float]
) -> Constants:
    """From value to next value, as long as the error falls."""
    for value in values[values.index(getattr(best, name)) + 1 :]:
        tried = replace(best, **{name: value})  # type: ignore[arg-type]
        if of(tried) >= of(best):
            break
        best = tried
    return best


def run_one(job: tuple[Arm, Constants, int]) -> Figures:
    return run(*job)


def frozen(path: Path = CALIBRATION) -> dict[str, Any]:
    """What was frozen; `constants` are a `Constants`."""
    answer = json.loads(path.read_text(encoding="utf-8"))
    answer["constants"] = Constants(**answer["constants"])
    return answer


def result(found: Fit, slow: Fit, seeds: Sequence[int]) -> dict[str, Any]:
    return {
        "constants": asdict(slow.constants),
        "calibration_seeds": list(seeds),
        "settings_tried": found.tried + slow.tried,
        "error": round(error(found.levels), 4),
        "error_slowness": round(error(slow.levels, SLOW_TARGETS), 4),
        "levels": [
            {
                "claim": target.claim,
                "arm": f"{target.arm.organization}{' isolated' * target.arm.isolate}",
                "figure": target.figure,
                "published": target.published,
                "simulated": round(level, 1),
            }
            for target, level in zip((*TARGETS, *SLOW_TARGETS), (*found.levels, *slow.levels))
        ],
    }


def tables(answer: Mapping[str, Any]) -> None:
    table(
        f"Levels on seeds {answer['calibration_seeds']}, error {answer['error']}",
        ("", "figure", "published", "simulated"),
        [
            (f"{one['claim']} {one['arm']}", one["figure"], one["published"], one["simulated"])
            for one in answer["levels"]
        ],
    )
    table("Constants", ("", "value"), [(name, f"{one:g}") for name, one in answer["constants"].items()])


def main() -> None:
    options = parser("calibrate", __doc__)
    options.add_argument("--freeze", action="store_true", help="write the result to bench/calibration.json")
    chosen = options.parse_args()
    tell = (lambda line: None) if chosen.json else lambda line: print(line, flush=True)
    with Pool(WORKERS) as pool:

        def simulate(jobs: Sequence[tuple[Arm, Constants, int]]) -> list[Figures]:
            return pool.map(run_one, jobs, chunksize=4)

        found = fit(START, SEEDS, simulate, tell=tell)
        grid = {"slowness": SLOWNESS}
        slow = fit(found.constants, SEEDS, simulate, grid, SLOW_TARGETS, tell=tell)
    answer = result(found, slow, SEEDS)
    if chosen.freeze:
        before = json.loads(CALIBRATION.read_text(encoding="utf-8")) if CALIBRATION.is_file() else {}
        kept = {name: before[name] for name in ("evaluation_seeds", "history") if name in before}
        CALIBRATION.write_text(json.dumps({**answer, **kept}, indent=1) + "\n", encoding="utf-8")
    report(answer, chosen.json, lambda: tables(answer))


if __name__ == "__main__":
    main()
