"""`python -m bench.peers`: policies of others on the public trace, against ours at equal bytes.

Falcon-H1-7B on S2, the trimmed Mooncake conversation trace, one request at a time and 16 at once.  The figure
is the token hit rate: prompt tokens served from the cache, of all prompt tokens.  Marconi's alpha is tuned as
its paper says, by replay of a bootstrap window.  How many checkpoints sparse prefix caching may give a
prompt, SGLang's cap of states a path, and the placement (`all` or `branch`) of plain LRU and of quick
demotion are those that serve most of the whole trace, which nobody could know beforehand.  Ours has defaults.
The clairvoyant arm knows the trace; the bound is what no order of eviction can exceed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from bench.falcon import CONFIG, MODEL, organization, queued
from bench.policies.clairvoyant import Clairvoyant, Future
from bench.policies.few_states import LastStates, PathCap
from bench.policies.marconi import MarconiAdmission, MarconiEviction, PrefixFlops
from bench.policies.quick_demotion import QuickDemotion
from bench.policies.recency import NodeRecency
from bench.policies.sparse_prefix import SparsePlacement
from bench.table import parser, report, table
from bench.trace import DEFAULT_TRACE, Request, clairvoyant, load, reuse
from sglang_hybrid.pools.organization import Organization
from sglang_hybrid.radix.eviction import DemandEviction, Lru
from sglang_hybrid.radix.interfaces import EvictionPolicy, Placement
from sglang_hybrid.radix.placement import PLACEMENTS
from sglang_hybrid.radix.tree import GridTree
from sglang_hybrid.simulator.scheduler import Scheduler

BUDGETS = (254, 1000, 3000, 10_000)
CONCURRENCY = (1, 16)

ALPHAS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
WINDOW = 5
"""Requests recorded for each one before the first eviction, the least of the paper's 5 to 15."""

COUNTS = (1, 2, 4)
"""Checkpoints a prompt, for sparse prefix caching."""

CAPS = (2, 4, 8)
"""States a path, for SGLang's cap."""

LAST_STATES = 4
"""States a conversation."""

WIDTH = 3072
"""Falcon-H1-7B's hidden size, which the ledger's figures leave out."""


class Policy(NamedTuple):
    """Order of eviction, and where checkpoints are taken."""

    eviction: Callable[[GridTree], EvictionPolicy]
    placement: Callable[[Organization], Placement] = Placement


def flops() -> PrefixFlops:
    """Every layer of the model has an attention, a recurrent and an MLP part."""
    layers = CONFIG["num_hidden_layers"]
    return PrefixFlops(WIDTH, CONFIG["mamba_d_state"], layers, layers, layers)


def marconi(alpha: float) -> Policy:
    return Policy(partial(MarconiEviction, flops=flops(), alpha=alpha), MarconiAdmission)


def sparse_prefix(count: int) -> Policy:
    return Policy(NodeRecency, partial(SparsePlacement, count=count))


def served(
    policy: Policy,
    pages: int,
    running: int,
    requests: Sequence[Request],
    begun: Callable[[Scheduler, int], bool] = lambda scheduler, count: True,
) -> Scheduler:
    """All of them, or until `begun`, which sees after each step how many have left the queue, says no."""
    scheduler = queued(requests, "S2", pages, running, policy.eviction, policy.placement)
    while scheduler.step() and begun(scheduler, len(requests) - len(scheduler.waiting)):
        pass
    scheduler.core.check_integrity()
    return scheduler


def tokens(policy: Policy, pages: int, running: int, requests: Sequence[Request]) -> int:
    """Prompt tokens from the cache."""
    return served(policy, pages, running, requests).outcome.adopted_tokens


def first_eviction(pages: int, running: int, requests: Sequence[Request]) -> int:
    """Requests until Marconi first evicts a checkpoint; all of them when it never does."""
    found = served(
        marconi(0.0),
        pages,
        running,
        requests,
        lambda scheduler, count: not scheduler.core.memory.lifetime.checkpoints_evicted,
    )
    return len(requests) - len(found.waiting)


def serve_marconi(pages: int, running: int, requests: Sequence[Request]) -> dict[str, Any]:
    """Section 4.2: alpha 0 until the window has been recorded, then the best of its replay."""
    window = (1 + WINDOW) * first_eviction(pages, running, requests)
    recorded = requests[:window]
    tried = {alpha: tokens(marconi(alpha), pages, running, recorded) for alpha in ALPHAS}
    alpha = max(ALPHAS, key=lambda one: tried[one])

    def adopt(scheduler: Scheduler, count: int) -> bool:
        if count >= window:
            policy = scheduler.core.memory.lifetime.policy
            assert isinstance(policy, MarconiEviction)
            policy.alpha = alpha
        return True

    outcome = served(marconi(0.0), pages, running, requests, adopt).outcome
    return {"tokens": outcome.adopted_tokens, "alpha": alpha, "window": min(window, len(requests))}


def serve_sparse_prefix(pages: int, running: int, requests: Sequence[Request]) -> dict[str, Any]:
    tried = {count: tokens(sparse_prefix(count), pages, running, requests) for count in COUNTS}
    count = max(COUNTS, key=lambda one: tried[one])
    return {"tokens": tried[count], "checkpoints": count}


def serve_placed(
    eviction: Callable[[GridTree], EvictionPolicy], pages: int, running: int, requests: Sequence[Request]
) -> dict[str, Any]:
    """An order that leaves it open where checkpoints are."""
    tried = {
        name: tokens(Policy(eviction, PLACEMENTS[name]), pages, running, requests)
        for name in ("all", "branch")
    }
    name = max(tried, key=lambda one: tried[one])
    return {"tokens": tried[name], "placement": name}


def serve_path_cap(pages: int, running: int, requests: Sequence[Request]) -> dict[str, Any]:
    tried = {
        cap: tokens(Policy(NodeRecency, partial(PathCap, most=cap)), pages, running, requests) for cap in CAPS
    }
    cap = max(CAPS, key=lambda one: tried[one])
    return {"tokens": tried[cap], "cap": cap}


def serve_clairvoyant(pages: int, running: int, requests: Sequence[Request]) -> dict[str, Any]:
    future = Future(requests)

    def look(scheduler: Scheduler, count: int) -> bool:
        future.now = scheduler.waiting[0].index if scheduler.waiting else len(requests)
        return True

    policy = Policy(partial(Clairvoyant, future=future))
    return {"tokens": served(policy, pages, running, requests, look).outcome.adopted_tokens}


def serve_plain(policy: Policy, pages: int, running: int, requests: Sequence[Request]) -> dict[str, Any]:
    return {"tokens": tokens(policy, pages, running, requests)}


POLICIES: dict[str, Callable[[int, int, Sequence[Request]], dict[str, Any]]] = {
    "lru": partial(serve_placed, Lru),
    "quick_demotion": partial(serve_placed, QuickDemotion),
    "last_states": partial(serve_plain, Policy(NodeRecency, partial(LastStates, most=LAST_STATES))),
    "path_cap": serve_path_cap,
    "marconi": serve_marconi,
    "sparse_prefix": serve_sparse_prefix,
    "ours": partial(serve_plain, Policy(DemandEviction)),
    "clairvoyant": serve_clairvoyant,
}
KNOWS_THE_FUTURE = "clairvoyant"
BOUND = "bound"


def measure(
    requests: Sequence[Request], budgets: Sequence[int], concurrency: Sequence[int] = CONCURRENCY
) -> dict[str, Any]:
    """Hit rates by concurrency, budget and policy, and where ours is not at least every other that serves."""
    prompts = sum(request.prompt for request in requests)
    answer: dict[str, Any] = {
        "model": MODEL,
        "organization": "S2",
        "requests": len(requests),
        "prompt_tokens": prompts,
        "endless_cache": round(reuse(requests).tokens / prompts, 4),
        "running": {},
    }
    progress = tqdm(total=len(concurrency) * len(budgets) * len(POLICIES), disable=None)
    behind: list[dict[str, Any]] = []
    for running in concurrency:
        rows: dict[str, Any] = {}
        answer["running"][str(running)] = rows
        for pages in budgets:
            row: dict[str, Any] = {}
            rows[str(pages)] = row
            for name, serve in POLICIES.items():
                progress.set_description(f"{running} running, {pages} pages, {name}")
                found = serve(pages, running, requests)
                row[name] = {"hit_rate": round(found["tokens"] / prompts, 4), **found}
                progress.update()
            behind += [
                {"running": running, "pages": pages, "policy": name}
                for name, one in row.items()
                if name != KNOWS_THE_FUTURE and one["tokens"] > row["ours"]["tokens"]
            ]
            bound = clairvoyant(requests, pages, organization("S2", pages).members)
            row[BOUND] = {"hit_rate": round(bound / prompts, 4), "tokens": bound}
    progress.close()
    answer["ours_is_behind"] = behind
    answer["ours_at_least_every_peer"] = not behind
    return answer


def tables(answer: dict[str, Any]) -> None:
    names = (*POLICIES, BOUND)
    for running, rows in answer["running"].items():
        table(
            f"Prompt tokens served from the cache, {running} running, {answer['requests']:,} requests "
            f"(an endless cache: {100 * answer['endless_cache']:.1f} %)",
            (
                "S2 pages",
                *(name.replace("_", " ") for name in names),
                *("alpha", "checkpoints a prompt", "states a path"),
            ),
            [
                (
                    f"{int(pages):,}",
                    *(f"{100 * row[name]['hit_rate']:.1f} %" for name in names),
                    row["marconi"]["alpha"],
                    row["sparse_prefix"]["checkpoints"],
                    row["path_cap"]["cap"],
                )
                for pages, row in rows.items()
            ],
        )


def main() -> None:
    options = parser("peers", __doc__)
    options.add_argument("--trace", type=Path, default=DEFAULT_TRACE, help="Mooncake trace (JSON lines)")
    options.add_argument("--requests", type=int, help="only the first requests of the trace")
    options.add_argument("--budgets", default=",".join(map(str, BUDGETS)), help="S2 pages")
    chosen = options.parse_args()
    if not chosen.trace.is_file():
        options.error(f"there is no trace at {chosen.trace}: name one with --trace")
    budgets = [int(pages) for pages in chosen.budgets.split(",")]
    answer = measure(load(chosen.trace, chosen.requests), budgets)
    report(answer, chosen.json, lambda: tables(answer))


if __name__ == "__main__":
    main()
