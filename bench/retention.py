"""`python -m bench.retention`: what retention, headroom and placement do at a fixed budget of memory.

The trimmed Mooncake trace through the real tree, eviction, admission and pools, without tensors, on a
scheduler that admits by the prompt alone and preempts.  A seed is a window of the trace: windows do not
overlap.  Each effect is given seed by seed, with and without.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.capacity import organization
from bench.pressure import Pressure
from bench.table import Cell, parser, report, table
from bench.trace import DEFAULT_TRACE, Request, load
from sglang_hybrid.pools.factory import ORGANIZATIONS
from sglang_hybrid.radix.placement import PLACEMENTS
from sglang_hybrid.radix.policy import Policy

WINDOW = 1500
"""Requests of a seed."""
SEEDS = (0, 1, 2, 3)
HEADROOM = (0.0, 0.05, 0.1, 0.19, 0.27, 0.35)
SOURCE_PAGES, SOURCE_RUNNING = 254, 63
"""The source's b83 in S2 pages, and its cap."""
WIDE_PAGES, WIDE_RUNNING = 3000, 400
"""Enough running requests that a checkpoint is wanted while its producer runs."""
RETAINED_AT = 1
RETENTION_HEADROOM = 0.0
PLACED_PAGES = (254, 1000, 3000)


class Bench:
    """Runs, behind a progress bar on a terminal."""

    def __init__(self, trace: Sequence[Request], seeds: Sequence[int], window: int, total: int) -> None:
        self.windows = {seed: trace[seed * window : (seed + 1) * window] for seed in seeds}
        self.progress = tqdm(total=total, disable=None)

    def run(
        self, seed: int, name: str, pages: int, running: int, policy: Policy, *, isolate: bool = False
    ) -> Pressure:
        one = Pressure(organization(name, pages), policy, running, isolate=isolate)
        one.serve(self.windows[seed])
        assert not one.pins and one.served + one.refused == len(self.windows[seed])
        one.organization.check_integrity()
        self.progress.update()
        return one

    def adopted(self, one: Pressure, seed: int) -> float:
        """Mean J_adopt of a request's first admission, in tokens."""
        return round(one.adopted_tokens / len(self.windows[seed]), 1)


def retention(bench: Bench, pages: int, running: int) -> dict[str, Any]:
    """J_adopt by seed without and with retention, under SHARE and under ISOLATE."""
    answer: dict[str, Any] = {"pages": pages, "running": running, "threshold": RETAINED_AT}
    off = Policy(headroom=RETENTION_HEADROOM)
    on = off._replace(retention=RETAINED_AT)
    for arm, isolate in (("share", False), ("isolate", True)):
        rows = {}
        for seed in bench.windows:
            runs = [bench.run(seed, "S2", pages, running, policy, isolate=isolate) for policy in (off, on)]
            before, after = (bench.adopted(one, seed) for one in runs)
            rows[str(seed)] = {
                "off": before,
                "on": after,
                "gain": round(after - before, 1),
                "retained": runs[1].live.retention.retained_ever,
                "same_steps": runs[0].steps == runs[1].steps,
            }
        answer[arm] = rows
        answer[f"{arm}_mean_gain"] = round(sum(row["gain"] for row in rows.values()) / len(rows), 2)
    return answer


def headroom(bench: Bench, pages: int, running: int) -> dict[str, Any]:
    """Preemptions by organization and f, summed over the seeds; J_adopt and steps beside them."""
    answer: dict[str, Any] = {"pages": pages, "running": running}
    answer |= {"preemptions": {}, "adopted": {}, "steps": {}, "monotone": {}}
    for name in ORGANIZATIONS:
        cells: dict[str, tuple[int, float, int]] = {}
        for f in HEADROOM:
            runs = {seed: bench.run(seed, name, pages, running, Policy(headroom=f)) for seed in bench.windows}
            cells[str(f)] = (
                sum(one.preemptions for one in runs.values()),
                round(sum(bench.adopted(one, seed) for seed, one in runs.items()) / len(runs), 1),
                sum(one.steps for one in runs.values()),
            )
        for field, index in (("preemptions", 0), ("adopted", 1), ("steps", 2)):
            answer[field][name] = {f: cell[index] for f, cell in cells.items()}
        counts = [cell[0] for cell in cells.values()]
        answer["monotone"][name] = counts == sorted(counts, reverse=True)
    return answer


def placement(bench: Bench, running: int) -> dict[str, Any]:
    """Mean J_adopt of each placement at equal bytes, by organization and budget."""
    answer: dict[str, Any] = {"running": running}
    for name in ORGANIZATIONS:
        for pages in PLACED_PAGES:
            row: dict[str, float] = {}
            for checkpoints in PLACEMENTS:
                policy = Policy(checkpoints=checkpoints)
                runs = {seed: bench.run(seed, name, pages, running, policy) for seed in bench.windows}
                found = [bench.adopted(one, seed) for seed, one in runs.items()]
                row[checkpoints] = round(sum(found) / len(found), 1)
            answer.setdefault(name, {})[str(pages)] = row
    return answer


def measure(trace: Sequence[Request], seeds: Sequence[int], window: int) -> dict[str, Any]:
    """Everything the bench reports."""
    runs = 8 + len(ORGANIZATIONS) * (len(HEADROOM) + len(PLACED_PAGES) * len(PLACEMENTS))
    bench = Bench(trace, seeds, window, runs * len(seeds))
    return {
        "seeds": list(seeds),
        "requests": window,
        "retention": retention(bench, WIDE_PAGES, WIDE_RUNNING),
        "retention_at_the_source_budget": retention(bench, SOURCE_PAGES, SOURCE_RUNNING),
        "headroom": headroom(bench, SOURCE_PAGES, SOURCE_RUNNING),
        "placement": placement(bench, 16),
    }


def tables(answer: dict[str, Any]) -> None:
    for field in ("retention", "retention_at_the_source_budget"):
        found = answer[field]
        rows: list[Sequence[Cell]] = [
            (f"{arm} seed {seed}", row["off"], row["on"], row["gain"], row["retained"])
            for arm in ("share", "isolate")
            for seed, row in found[arm].items()
        ]
        table(
            f"Mean J_adopt in tokens, S2, {found['pages']} pages, at most {found['running']} running, "
            f"--hybrid-headroom {RETENTION_HEADROOM}",
            ("", "off", f"--hybrid-retention {found['threshold']}", "gain", "retained"),
            rows,
        )
    found = answer["headroom"]
    for field in ("preemptions", "adopted", "steps"):
        table(
            f"{field} by --hybrid-headroom, {found['pages']} S2 pages, at most {found['running']} running",
            ("", *map(str, HEADROOM)),
            [(name, *cells.values()) for name, cells in found[field].items()],
        )
    table(
        f"Mean J_adopt by --hybrid-checkpoints, at most {answer['placement']['running']} running",
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
    chosen = options.parse_args()
    if not chosen.trace.is_file():
        options.error(f"there is no trace at {chosen.trace}: name one with --trace")
    trace, seeds = load(chosen.trace), [int(seed) for seed in chosen.seeds.split(",")]
    if any((seed + 1) * chosen.requests > len(trace) for seed in seeds):
        options.error(f"the trace has {len(trace)} requests: fewer --seeds, or fewer --requests")
    answer = measure(trace, seeds, chosen.requests)
    report(answer, chosen.json, lambda: tables(answer))


if __name__ == "__main__":
    main()
