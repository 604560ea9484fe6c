"""`python -m bench.retention`: what retention, headroom and placement do at a fixed budget of memory.

Falcon-H1-7B and the trimmed Mooncake trace through the simulator: the real tree, eviction, admission, pools.
A seed is a window of the trace, all of which waits from the start; windows do not overlap.  Each effect is
given seed by seed, with and without, under two schedulers: SGLang's with the plugin, which expects whole
answers and hardly ever preempts, and the source's, which admits by the first chunk and preempts where memory
is short.  The source's takes checkpoints where its chunks end: placements differ under SGLang's alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing import Pool
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from tqdm import tqdm

from bench.calibrate import WORKERS
from bench.falcon import organization, step_cost
from bench.table import Cell, parser, report, table
from bench.trace import DEFAULT_TRACE, Request, load
from bench.workloads import of_trace
from sglang_hybrid.pools.factory import ORGANIZATIONS
from sglang_hybrid.radix.placement import PLACEMENTS
from sglang_hybrid.radix.policy import Policy
from sglang_hybrid.simulator.run import simulate
from sglang_hybrid.simulator.setting import ENGINE, SOURCE, Setting

WINDOW = 1500
"""Requests of a seed."""
SEEDS = (0, 1, 2, 3)
SERVING = {"source": SOURCE, "engine": ENGINE}
HEADROOM = (0.0, 0.05, 0.1, 0.19, 0.27, 0.35)
SOURCE_BUDGET = (254, 63)
"""The source's b83 in S2 pages, and its cap on running requests."""
BUDGETS = (SOURCE_BUDGET, (1000, 200), (3000, 400))
"""With more requests at once a checkpoint is wanted more often while its producer runs."""
RETAINED_AT = 1
RETENTION_HEADROOM = (0.0, 0.19)
PLACED_PAGES, PLACED_RUNNING = (254, 1000, 3000), 16


class Run(NamedTuple):
    """One simulation of a window."""

    serving: str
    organization: str
    pages: int
    running: int
    policy: Policy = Policy()
    isolate: bool = False


class Figures(NamedTuple):
    """Of one run on one seed."""

    adopted: float
    """Mean J_adopt of first admissions, in tokens."""
    preemptions: int
    seconds: float
    """Of the simulated device."""


Results = Mapping[Run, Sequence[Figures]]
"""Figures of each seed."""


def run_one(job: tuple[Run, Sequence[Request]]) -> Figures:
    run, window = job
    setting = Setting(
        partial(organization, run.organization, run.pages),
        step_cost("H100"),
        run.policy,
        SERVING[run.serving],
        run.running,
        isolate=run.isolate,
    )
    outcome = simulate(setting, of_trace(window, 0))
    if outcome.refused:
        raise ValueError(f"{run.pages} pages of {run.organization} cannot hold {outcome.refused} requests")
    return Figures(outcome.adopted_tokens / len(window), outcome.preemptions, outcome.seconds)


def retained(serving: str, budget: tuple[int, int], f: float, isolate: bool) -> tuple[Run, Run]:
    """Without and with retention."""
    off = Run(serving, "S2", *budget, Policy(f), isolate)
    return off, off._replace(policy=Policy(f, RETAINED_AT))


def held_back(serving: str, name: str) -> list[Run]:
    """By f."""
    return [Run(serving, name, *SOURCE_BUDGET, Policy(f)) for f in HEADROOM]


def placed(name: str, pages: int) -> dict[str, Run]:
    return {one: Run("engine", name, pages, PLACED_RUNNING, Policy(checkpoints=one)) for one in PLACEMENTS}


def all_runs() -> list[Run]:
    """Each one once."""
    runs: list[Run] = []
    for serving in SERVING:
        for budget in BUDGETS:
            for f in RETENTION_HEADROOM:
                runs += retained(serving, budget, f, False) + retained(serving, budget, f, True)
        for name in ORGANIZATIONS:
            runs += held_back(serving, name)
    for name in ORGANIZATIONS:
        for pages in PLACED_PAGES:
            runs += placed(name, pages).values()
    return list(dict.fromkeys(runs))


def retention(results: Results, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """J_adopt by seed without and with retention, under SHARE and under ISOLATE."""
    rows = []
    for serving in SERVING:
        for budget in BUDGETS:
            for f in RETENTION_HEADROOM:
                row: dict[str, Any] = {"serving": serving, "pages": budget[0], "running": budget[1]}
                row |= {"headroom": f, "threshold": RETAINED_AT}
                for arm, isolate in (("share", False), ("isolate", True)):
                    off, on = (results[run] for run in retained(serving, budget, f, isolate))
                    pairs = [(round(one.adopted, 1), round(other.adopted, 1)) for one, other in zip(off, on)]
                    gains = [round(after - before, 1) for before, after in pairs]
                    row[arm] = {
                        str(seed): {"off": before, "on": after, "gain": gain}
                        for seed, (before, after), gain in zip(seeds, pairs, gains)
                    }
                    row[f"{arm}_mean_gain"] = round(fmean(gains), 2)
                    row[f"{arm}_changed"] = list(on) != list(off)
                rows.append(row)
    return rows


def headroom(results: Results, serving: str) -> dict[str, Any]:
    """Preemptions by organization and f, summed over the seeds; J_adopt and seconds beside them."""
    answer: dict[str, Any] = {"pages": SOURCE_BUDGET[0], "running": SOURCE_BUDGET[1]}
    answer |= {field: {} for field in ("preemptions", "adopted", "seconds", "monotone", "monotone_seeds")}
    for name in ORGANIZATIONS:
        cells = {str(run.policy.headroom): results[run] for run in held_back(serving, name)}
        answer["preemptions"][name] = {f: sum(one.preemptions for one in cell) for f, cell in cells.items()}
        answer["adopted"][name] = {
            f: round(fmean(one.adopted for one in cell), 1) for f, cell in cells.items()
        }
        answer["seconds"][name] = {f: round(sum(one.seconds for one in cell), 1) for f, cell in cells.items()}
        answer["monotone"][name] = falls(list(answer["preemptions"][name].values()))
        answer["monotone_seeds"][name] = sum(
            falls([one.preemptions for one in by_f]) for by_f in zip(*cells.values())
        )
    return answer


def falls(counts: Sequence[int]) -> bool:
    """Never rises, that is."""
    return all(later <= one for one, later in zip(counts, counts[1:]))


def placement(results: Results) -> dict[str, Any]:
    """Mean J_adopt of each placement at equal bytes, by organization and budget."""
    return {
        name: {
            str(pages): {
                checkpoints: round(fmean(one.adopted for one in results[run]), 1)
                for checkpoints, run in placed(name, pages).items()
            }
            for pages in PLACED_PAGES
        }
        for name in ORGANIZATIONS
    }


def measure(trace: Sequence[Request], seeds: Sequence[int], window: int, workers: int) -> dict[str, Any]:
    """Everything the bench reports."""
    windows, runs = [trace[seed * window : (seed + 1) * window] for seed in seeds], all_runs()
    jobs = [(run, one) for run in runs for one in windows]
    with Pool(workers) as pool:
        figures = list(tqdm(pool.imap(run_one, jobs), total=len(jobs), unit=" runs", disable=None))
    results = {run: figures[k * len(seeds) : (k + 1) * len(seeds)] for k, run in enumerate(runs)}
    return {
        "seeds": list(seeds),
        "requests": window,
        "retention": retention(results, seeds),
        "headroom": {serving: headroom(results, serving) for serving in SERVING},
        "placement": {"running": PLACED_RUNNING, **placement(results)},
    }


def tables(answer: dict[str, Any]) -> None:
    seeds = [str(seed) for seed in answer["seeds"]]
    rows: list[Sequence[Cell]] = [
        (
            f"{row['serving']} {row['pages']:,} {row['running']} {row['headroom']}",
            fmean(row["share"][seed]["off"] for seed in seeds),
            *(row["share"][seed]["gain"] for seed in seeds),
            row["share_mean_gain"],
            "changed" if row["isolate_changed"] else "same",
        )
        for row in answer["retention"]
    ]
    table(
        f"Mean J_adopt in tokens, S2, and what --hybrid-retention {RETAINED_AT} adds to it",
        ("scheduler, pages, running, f", "off", *(f"seed {seed}" for seed in seeds), "mean", "isolated"),
        rows,
    )
    for serving, found in answer["headroom"].items():
        for field in ("preemptions", "adopted", "seconds"):
            table(
                f"{field} by --hybrid-headroom, {serving}, {found['pages']} S2 pages, "
                f"at most {found['running']} running",
                ("", *map(str, HEADROOM)),
                [(name, *cells.values()) for name, cells in found[field].items()],
            )
    table(
        f"Mean J_adopt by --hybrid-checkpoints, engine, at most {answer['placement']['running']} running",
        ("organization, S2 pages", *PLACEMENTS),
        [
            (f"{name} {pages}", *row.values())
            for name in ORGANIZATIONS
            for pages, row in answer["placement"][name].items()
        ],
    )


def main() -> None:
    options = parser("retention", __doc__)
    options.add_argument("--trace", type=Path, default=DEFAULT_TRACE, help="Mooncake trace (JSON lines)")
    options.add_argument("--requests", type=int, default=WINDOW, help=f"of a seed (default {WINDOW})")
    options.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="windows of the trace")
    options.add_argument("--workers", type=int, default=WORKERS, help=f"processes (default {WORKERS})")
    chosen = options.parse_args()
    if not chosen.trace.is_file():
        options.error(f"there is no trace at {chosen.trace}: name one with --trace")
    trace, seeds = load(chosen.trace), [int(seed) for seed in chosen.seeds.split(",")]
    if any((seed + 1) * chosen.requests > len(trace) for seed in seeds):
        options.error(f"the trace has {len(trace)} requests: fewer --seeds, or fewer --requests")
    answer = measure(trace, seeds, chosen.requests, chosen.workers)
    report(answer, chosen.json, lambda: tables(answer))


if __name__ == "__main__":
    main()
