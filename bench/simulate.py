"""`python -m bench.simulate`: the public Mooncake conversation trace through the simulator, whole.

Every request with its own length, arrival and answer, on Falcon-H1-7B, by the scheduling of SGLang with the
plugin or of the source.  A budget is the bytes of so many S2 pages.  Requests are made as they come, so that
memory is that of the cache and of the queue.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.falcon import organization, step_cost
from bench.table import parser, report, table
from bench.trace import DEFAULT_TRACE
from bench.workloads import mooncake
from sglang_hybrid.pools.factory import ORGANIZATIONS
from sglang_hybrid.radix.eviction import EVICTIONS
from sglang_hybrid.radix.placement import PLACEMENTS
from sglang_hybrid.radix.policy import Policy
from sglang_hybrid.simulator.devices import DEVICES
from sglang_hybrid.simulator.outcome import Outcome
from sglang_hybrid.simulator.request import Request
from sglang_hybrid.simulator.scheduler import Scheduler
from sglang_hybrid.simulator.setting import ENGINE, SOURCE, Setting

PAGES = (254, 1000, 10_000)
SERVING = {"engine": ENGINE, "source": SOURCE}


def run(requests: Iterable[Request], name: str, pages: int, base: Setting) -> dict[str, Any]:
    """One simulation, how fast it was and what it took."""
    setting = Setting(
        lambda: organization(name, pages), base.cost, base.policy, base.serving, base.most_running
    )
    started = time.perf_counter(), time.process_time()
    scheduler = Scheduler(setting, requests)
    outcome = scheduler.run()
    wall, cpu = time.perf_counter() - started[0], time.process_time() - started[1]
    count = outcome.served + outcome.refused
    speed = {
        "wall_seconds": round(wall, 2),
        "cpu_seconds": round(cpu, 2),
        "requests_per_wall_second": round(count / wall, 1),
        "requests_per_cpu_second": round(count / cpu, 1),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "cached_blocks": scheduler.core.memory.tree.blocks,
    }
    return {"organization": name, "pages": pages, **speed, **figures(outcome)}


def figures(outcome: Outcome) -> dict[str, Any]:
    """What the simulated device did."""
    return {
        "simulated_seconds": round(outcome.seconds, 1),
        "served": outcome.served,
        "refused": outcome.refused,
        "preemptions": outcome.preemptions,
        "prompt_tokens": outcome.prompt_tokens,
        "adopted_tokens": outcome.adopted_tokens,
        "hit_rate": round(outcome.adopted_tokens / max(outcome.prompt_tokens, 1), 4),
        "prefilled_tokens": outcome.prefilled_tokens,
        "prefilled_again_tokens": outcome.prefilled_again_tokens,
        "output_tokens_per_second": round(outcome.throughput, 1),
        "waiting_median": outcome.waiting_median,
        "running_median": outcome.running_median,
    }


def tables(rows: Sequence[dict[str, Any]]) -> None:
    shown = (
        ("requests/s", "requests_per_wall_second"),
        ("of CPU", "requests_per_cpu_second"),
        ("MiB", "peak_mib"),
        ("blocks", "cached_blocks"),
        ("served", "served"),
        ("refused", "refused"),
        ("hit rate", "hit_rate"),
        ("preempted", "preemptions"),
        ("running", "running_median"),
        ("waiting", "waiting_median"),
        ("hours", "simulated_seconds"),
    )
    table(
        "Requests simulated a second, the process's peak so far, attention blocks cached at the end; tokens "
        "adopted of prompt tokens, medians over time",
        ("organization, S2 pages", *(head for head, _ in shown)),
        [
            (
                f"{row['organization']} {row['pages']}",
                *(row[key] / 3600 if head == "hours" else row[key] for head, key in shown),
            )
            for row in rows
        ],
    )


def main() -> None:
    options = parser("simulate", __doc__)
    options.add_argument("--trace", type=Path, default=DEFAULT_TRACE, help="Mooncake trace (JSON lines)")
    options.add_argument(
        "--requests", type=int, help="so many; beyond the trace's it repeats, with fresh blocks each time"
    )
    options.add_argument("--rate", type=float, help="requests a second on average (default: the trace's)")
    options.add_argument("--pages", default=",".join(map(str, PAGES)), help="budgets in S2 pages")
    options.add_argument("--organization", default="S2", help=f"of {','.join(ORGANIZATIONS)}, or several")
    options.add_argument("--serving", choices=SERVING, default="engine", help="whose scheduling")
    options.add_argument("--device", choices=DEVICES, default="H100")
    options.add_argument("--running", type=int, default=64, help="most running requests")
    options.add_argument("--headroom", type=float, default=0.0)
    options.add_argument("--retention", type=int)
    options.add_argument("--checkpoints", choices=PLACEMENTS, default="all")
    options.add_argument("--eviction", choices=EVICTIONS, default="demand")
    chosen = options.parse_args()
    if not chosen.trace.is_file():
        options.error(f"there is no trace at {chosen.trace}: name one with --trace")
    names = chosen.organization.split(",")
    unknown = [name for name in names if name not in ORGANIZATIONS]
    if unknown:
        options.error(f"--organization {unknown[0]} is not known: use {', '.join(ORGANIZATIONS)}")
    policy = Policy(chosen.headroom, chosen.retention, chosen.checkpoints, eviction=chosen.eviction)
    cost, serving = step_cost(chosen.device), SERVING[chosen.serving]
    base = Setting(lambda: organization("S2", 1000), cost, policy, serving, chosen.running)
    cases = [(name, int(pages)) for name in names for pages in chosen.pages.split(",")]
    rows = []
    for name, pages in tqdm(cases, disable=None):
        requests = mooncake(chosen.trace, chosen.requests, chosen.rate, capped=False)
        rows.append(run(requests, name, pages, base))
    answer = {
        "trace": chosen.trace.name,
        "requests": rows[0]["served"] + rows[0]["refused"],
        "rate": chosen.rate,
        "serving": chosen.serving,
        "device": chosen.device,
        "policy": policy._asdict(),
        "most_running": chosen.running,
        "rows": rows,
    }
    report(answer, chosen.json, lambda: tables(rows))


if __name__ == "__main__":
    main()
