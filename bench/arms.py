"""The source's runs under the simulator: Falcon-H1-7B on an A100-40GB, an organization, a budget, a load.

`Constants` are what the source does not say.  `bench.calibrate` fits some of them to absolute figures, once;
the others were chosen beforehand, with the reasons in `ASSUMPTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from bench.falcon import geometry, weights
from bench.release_order import ReleaseOrder
from bench.workloads import SharedContexts
from sglang_hybrid.geometry import (
    DEFAULT_GRID,
    SCAN_CHUNK,
    UNIT_TOKENS,
    block_bytes,
    whole_rows_bytes,
)
from sglang_hybrid.pools.factory import ORGANIZATIONS, make_organization
from sglang_hybrid.pools.organization import Organization
from sglang_hybrid.radix.interfaces import EvictionPolicy
from sglang_hybrid.radix.policy import Policy
from sglang_hybrid.radix.tree import GridTree
from sglang_hybrid.simulator.cost import StepCost
from sglang_hybrid.simulator.outcome import Outcome
from sglang_hybrid.simulator.run import simulate
from sglang_hybrid.simulator.setting import Setting

BUDGET_UNIT = 1568 * 1024
"""Bytes a layer of the source's budgets: a checkpoint of 1557 KiB in whole units of 16 tokens."""

RETENTION_THRESHOLD = 2
MEAN_INPUT = 3332


@dataclass(frozen=True)
class Constants:
    """What the source leaves open; the defaults were fitted by a prototype, but for the step's budget."""

    requests: int = 280
    """Requests a run."""
    context_tokens: int = 2600
    zipf: float = 0.8
    question_sigma: float = 1.4
    mean_new: float = 250.0
    new_sigma: float = 0.9
    prefill_tokens: int = 2048
    """Tokens of a step: what vLLM V1 gives a server on an A100 by default."""
    flops: float = 170e12
    bandwidth: float = 1.4e12
    overhead: float = 2e-3
    headroom: float = 0.19
    """f of the runs of C1 to C4."""
    slowness: float = 1.0
    """Factor on the seconds of a step in C9 to C11."""

    @property
    def attention_share(self) -> float:
        """D0's split: KV of a mean request, half of its answer generated, beside two states, the live one
        and a checkpoint."""
        tokens = MEAN_INPUT + self.mean_new / 2
        model = geometry()
        attention = tokens * model.kv_row_bytes
        return attention / (attention + 2 * model.checkpoint_bytes)


ASSUMPTIONS = {
    "D0's split": "no absolute figure of D0 is known, so nothing pins it: it is sized by what a mean request "
    "has, KV of its input and half its answer, a live state and a checkpoint (attention share about .53)",
    "headroom": "that of C1 to C4 is one of the source's own values, fitted; C5, C8, C10 and C11 have f = 0",
    "slowness": "published levels of C11 (371, 514 tok/s) are below what the constants of C1 to C4 give; one "
    "factor on the seconds of a step, fitted to the two, holds for C9 to C11, which ran on the same memory",
    "prefill": "2,048 tokens a step, vLLM V1's default for a server on an A100",
    "byte budgets": "1568 KiB a layer and unit: b63, b83 and b108 are 192, 254 and 330 S2 pages",
    "throughput": "output tokens of completed requests over the whole run, as C10's ledger time and request "
    "span are; in C5 to C8, which compare under a load, of those completed by the last arrival: the drain "
    "after it is no load of so many requests a second",
    "retention": "threshold 2, f = 0, 3 req/s",
    "order of eviction": "what was released longest ago, blank pages and dead KV waiting for their turn too",
    "checkpoints": "where chunks of a prefill end (the last whole block among them) and where a decode "
    "leaves a boundary; a running request holds one, and who finds no memory for the next is preempted",
    "device": "one A100-40GB, by a roofline; the scheduler costs nothing but the overhead of a step",
}


class Arm(NamedTuple):
    """One setting of the source; `headroom` None is that of C1 to C4."""

    organization: str
    budget: int
    """In the source's units: 63, 83, 108."""
    rate: float = 3.0
    headroom: float | None = 0.0
    sharing: float = 1.0
    retention: bool = False
    isolate: bool = False
    most_running: int = 63
    slow: bool = False
    """One of the runs of C9 to C11, whose published levels are lower than those of C1 to C4 allow."""


class Figures(NamedTuple):
    """Of one run.  Depths are tokens a request at its first admission."""

    throughput: float
    """Output tokens a second, the drain included."""
    window: float
    """Output tokens a second of requests that were completed by the last arrival."""
    input: float
    """Tokens left to compute at first admissions."""
    waiting: float
    running: float
    """Time-weighted medians of requests."""
    j_adopt: float
    attention: float
    broken: float
    """Checkpoints that left the lookup because their KV went first: without one, Gap_R is 0 throughout."""
    preemptions: float
    p99: float
    """Seconds from arrival to the last token."""


def memory(name: str, budget: int, attention_share: float) -> Organization:
    """An empty organization of so many of the source's units, sink pages on top."""
    model = geometry()
    layer = budget * BUDGET_UNIT
    kind = ORGANIZATIONS[name]
    if any(option.splits for option in kind.options):
        unit, state = block_bytes(model, UNIT_TOKENS), whole_rows_bytes(model, model.checkpoint_bytes)
        total = layer + unit + state
        units = int(attention_share * layer) // unit + 1
        # Half a unit more, so that rounding down gives this very number.
        share = (units + 0.5) * unit / total
        grid = kind.default_grid(model, SCAN_CHUNK)
        return make_organization(name, model, grid, total * model.arenas, attention_share=share)
    page = kind.prices(model, DEFAULT_GRID).page_bytes
    return make_organization(name, model, DEFAULT_GRID, (layer + page) * model.arenas)


def workload(arm: Arm, constants: Constants) -> SharedContexts:
    return SharedContexts(
        count=constants.requests,
        rate=arm.rate,
        sharing=arm.sharing,
        context_tokens=constants.context_tokens,
        zipf=constants.zipf,
        question_sigma=constants.question_sigma,
        mean_new=constants.mean_new,
        new_sigma=constants.new_sigma,
    )


def setting(arm: Arm, constants: Constants, eviction: Callable[[GridTree], EvictionPolicy] = ReleaseOrder
) -> Setting:
    model = geometry()
    slowness = constants.slowness if arm.slow else 1.0
    cost = StepCost(
        constants.flops / slowness,
        constants.bandwidth / slowness,
        weights(),
        model.kv_row_bytes * model.arenas,
        model.checkpoint_bytes * model.arenas,
        constants.overhead * slowness,
    )
    headroom = constants.headroom if arm.headroom is None else arm.headroom
    return Setting(
        partial(memory, arm.organization, arm.budget, constants.attention_share),
        cost,
        Policy(headroom, RETENTION_THRESHOLD if arm.retention else None),
        most_running=arm.most_running,
        prefill_tokens=constants.prefill_tokens,
        isolate=arm.isolate,
        eviction=eviction,
    )


def run(arm: Arm, constants: Constants, seed: int) -> Figures:
    """Simulate one arm; equal arguments give equal figures on every machine."""
    orders: list[ReleaseOrder] = []

    def order(tree: GridTree) -> EvictionPolicy:
        orders.append(ReleaseOrder(tree))
        return orders[-1]

    requests = workload(arm, constants).requests(seed)
    outcome = simulate(setting(arm, constants, order), requests, records=True)
    if outcome.refused:
        raise ValueError(f"{arm} cannot hold {outcome.refused} of its requests")
    return _figures(outcome, requests[-1].at, orders[-1].broken)


def _figures(outcome: Outcome, last: float, broken: int) -> Figures:
    records = outcome.records or []
    latencies = sorted(record.finished - record.at for record in records)
    return Figures(
        throughput=outcome.throughput,
        window=sum(record.new for record in records if record.finished <= last) / last,
        input=float(outcome.prompt_tokens - outcome.adopted_tokens),
        waiting=outcome.waiting_median,
        running=outcome.running_median,
        j_adopt=outcome.j_adopt,
        attention=outcome.attention_tokens / outcome.served,
        broken=float(broken),
        preemptions=float(outcome.preemptions),
        p99=latencies[int(0.99 * (len(latencies) - 1))],
    )
