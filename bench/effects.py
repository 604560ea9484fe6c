"""Effects in the source's claims: from runs, one number a seed, to what must hold of their mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from statistics import fmean
from typing import NamedTuple, Protocol

from bench.arms import Arm
from bench.statistics import relative

Effect = Sequence[float]
"""One number a seed."""


class Runs(Protocol):
    """Figures of runs, one a seed, the same seeds for every arm."""

    def __call__(self, arm: Arm, figure: str = "throughput") -> list[float]: ...


class Part(NamedTuple):
    """The mean of `effect` must lie strictly between `low` and `high`; `published` is the source's."""

    label: str
    effect: Effect
    low: float
    high: float = inf
    published: float | None = None


HEADROOMS = (0.0, 0.10, 0.19, 0.27, 0.35)
SMALL = HEADROOMS[:3]
BUDGETS = (63, 83, 108)
LOW_RATE, HIGH_RATE = 1.5, 4.5
NONE = 1e-9
"""Of a count: not one."""


def percent(treated: Effect, base: Effect) -> list[float]:
    return [100 * one for one in relative(treated, base)]


def minus(one: Effect, other: Effect) -> list[float]:
    return [a - b for a, b in zip(one, other)]


def mean(values: Effect) -> float:
    return fmean(values)


# -- C1 to C4: organizations ---------------------------------------------------------------------


def unshared(organization: str) -> Arm:
    return shared(organization)._replace(sharing=0.0)


def shared(organization: str) -> Arm:
    return Arm(organization, 63, headroom=None)


def crowded(organization: str) -> Arm:
    return Arm(organization, 108, 4.5, headroom=None)


def pages_beat_coarse(runs: Runs) -> list[Part]:
    effect = percent(runs(unshared("S1")), runs(unshared("S0")))
    return [Part("S1 over S0", effect, 0, published=100 * (405.376 / 293.836 - 1))]


def packing_beats_pages(runs: Runs) -> list[Part]:
    by_pages = percent(runs(unshared("S1")), runs(unshared("S0")))
    by_packing = percent(runs(unshared("S2")), runs(unshared("S1")))
    return [
        Part("S2 over S1", by_packing, 0, published=100 * (415.862 / 405.376 - 1)),
        Part("S1 over S0, more than that", minus(by_pages, by_packing), 0),
    ]


def interaction(better: str, base: str, runs: Runs, load: Callable[[str], Arm] = shared) -> list[float]:
    """Points by which sharing raises the gain of one organization over another."""

    def gain(sharing: float) -> list[float]:
        treated, plain = (runs(load(name)._replace(sharing=sharing)) for name in (better, base))
        return percent(treated, plain)

    return minus(gain(1.0), gain(0.0))


def interacts(better: str, base: str, published: float) -> Callable[[Runs], list[Part]]:
    label = f"{better} over {base}, q = 1 less q = 0"
    return lambda runs: [Part(label, interaction(better, base, runs), 0, published=published)]


def changes(
    arm: Callable[[str], Arm], figure: str, rises: bool, before: float, after: float
) -> Callable[[Runs], list[Part]]:
    """From S0 to S2."""

    def parts(runs: Runs) -> list[Part]:
        effect = percent(runs(arm("S2"), figure), runs(arm("S0"), figure))
        low, high = (0, inf) if rises else (-inf, 0)
        return [Part(f"S2 over S0, {figure}", effect, low, high, 100 * (after / before - 1))]

    return parts


# -- C5 to C8: D0, headroom, load ----------------------------------------------------------------


def at(organization: str, budget: int, headroom: float = 0.0, rate: float = 3.0, cap: int = 63) -> Arm:
    return Arm(organization, budget, rate, headroom, most_running=cap)


def under_load(runs: Runs, arm: Arm) -> list[float]:
    """C5 to C8: what is completed while requests arrive."""
    return runs(arm, "window")


def lead_of_d0(
    runs: Runs, budget: int, headroom: float = 0.0, rate: float = 3.0, cap: int = 63
) -> list[float]:
    """Percent by which D0 is ahead of S2."""
    arms = [at(name, budget, headroom, rate, cap) for name in ("D0", "S2")]
    return percent(under_load(runs, arms[0]), under_load(runs, arms[1]))


def gains(runs: Runs, organization: str, budget: int) -> dict[float, list[float]]:
    """Percent over f = 0, by f."""
    base = under_load(runs, at(organization, budget))
    return {f: percent(under_load(runs, at(organization, budget, f)), base) for f in HEADROOMS}


def best(runs: Runs, organization: str, budget: int, among: Sequence[float] = HEADROOMS) -> float:
    """The f whose mean gain is the largest; of equals the smallest."""
    found = gains(runs, organization, budget)
    return max(among, key=lambda f: (mean(found[f]), -f))


def best_gain(
    organization: str, budget: int, low: float, high: float, published: float | None
) -> Callable[[Runs], list[Part]]:
    def parts(runs: Runs) -> list[Part]:
        f = best(runs, organization, budget)
        effect = gains(runs, organization, budget)[f]
        return [Part(f"{organization} at b{budget}, f = {f} over 0", effect, low, high, published)]

    return parts


def falls_beyond_its_peak(runs: Runs) -> list[Part]:
    parts = []
    for budget in (83, 108):
        found, peak = gains(runs, "D0", budget), best(runs, "D0", budget, SMALL)
        fall = minus(found[HEADROOMS[-1]], found[peak])
        parts.append(Part(f"b{budget}: f = .35 less f = {peak}", fall, -inf, -1))
        rest = [minus(found[peak], found[f]) for f in HEADROOMS if f not in SMALL]
        parts.append(Part(f"b{budget}: f = {peak} ahead of every f over .19", min(rest, key=mean), 0))
    return parts


def at_one_f(budget: int, sign: int) -> Callable[[Runs], list[Part]]:
    def parts(runs: Runs) -> list[Part]:
        leads = [[sign * one for one in lead_of_d0(runs, budget, f)] for f in SMALL]
        deciding = sorted(leads, key=mean)[1]
        ahead, behind = ("D0", "S2") if sign > 0 else ("S2", "D0")
        return [Part(f"{ahead} over {behind} at b{budget}, the median of f 0, .10, .19", deciding, 0)]

    return parts


def each_at_its_best(runs: Runs) -> list[Part]:
    parts = []
    for budget in BUDGETS:
        fs = {name: best(runs, name, budget) for name in ("S2", "D0")}
        lead = percent(*(under_load(runs, at(name, budget, f)) for name, f in fs.items()))
        parts.append(Part(f"S2 (f = {fs['S2']}) over D0 (f = {fs['D0']}) at b{budget}", lead, 0))
    return parts


def equal_at_low_load(runs: Runs) -> list[Part]:
    return [Part(f"D0 over S2 at b63, {LOW_RATE} req/s", lead_of_d0(runs, 63, rate=LOW_RATE), -2, 2)]


def ahead_under_load(runs: Runs) -> list[Part]:
    return [
        Part(
            f"D0 over S2 at b108, cap 109, {rate} req/s",
            lead_of_d0(runs, 108, 0.0, rate, 109),
            -inf,
            0,
            known,
        )
        for rate, known in ((3.0, -13.17), (HIGH_RATE, -4.74))
    ]


def gap_shrinks(runs: Runs) -> list[Part]:
    leads = [lead_of_d0(runs, 108, 0.0, rate, 109) for rate in (HIGH_RATE, 3.0)]
    return [
        Part(f"D0 over S2 at b108, cap 109, {HIGH_RATE} less 3.0 req/s", minus(*leads), 0, published=8.43)
    ]


# -- C9 to C11: depth and retention --------------------------------------------------------------


def retained(isolate: bool = False, retention: bool = True) -> Arm:
    return Arm("S2", 83, retention=retention, isolate=isolate, slow=True)


def deep(headroom: float, figure: str, runs: Runs) -> list[float]:
    """Of C9's cells."""
    return runs(Arm("S2", 83, headroom=headroom, slow=True), figure)


def no_gap(runs: Runs) -> list[Part]:
    label = "checkpoints that lost their KV, f = "
    return [Part(f"{label}{f}", deep(f, "broken", runs), -NONE, NONE) for f in (0.0, 0.19)]


def depth_rises(runs: Runs) -> list[Part]:
    rise = minus(deep(0.19, "j_adopt", runs), deep(0.0, "j_adopt", runs))
    return [Part("J_adopt, f = .19 less 0", rise, 0, published=fmean((785.1, 650.2, 554.7)))]


def checkpoints_rise(runs: Runs) -> list[Part]:
    rises = {
        figure: minus(runs(retained(), figure), runs(retained(retention=False), figure))
        for figure in ("j_adopt", "attention")
    }
    beyond = [j - 3 * attention for j, attention in zip(*rises.values())]
    return [
        Part("J_adopt, with less without", rises["j_adopt"], 0, published=fmean((703, 1439, 1092))),
        Part("more than three times the rise of attention depth", beyond, 0),
    ]


def retention_gain(runs: Runs, isolate: bool = False) -> list[float]:
    return percent(runs(retained(isolate)), runs(retained(isolate, retention=False)))


def retention_pays(runs: Runs) -> list[Part]:
    return [Part("throughput, with over without", retention_gain(runs), 0, published=17.8)]


def sharing_makes_it_pay(runs: Runs) -> list[Part]:
    factors = [[1 + one / 100 for one in retention_gain(runs, isolate)] for isolate in (False, True)]
    return [Part("gain under SHARE over gain under ISOLATE", percent(*factors), 0, published=14.3)]


def isolated_gains_nothing(runs: Runs) -> list[Part]:
    return [Part("gain under ISOLATE", retention_gain(runs, isolate=True), -3, 3)]


# -- C2's family ---------------------------------------------------------------------------------

PAIRS = (("S1", "S0"), ("S2", "S1"), ("S2", "S0"))
LOADS = {"b63, 3 req/s": shared, "b108, 4.5 req/s": crowded}


def contrasts(runs: Runs) -> dict[str, list[float]]:
    """Six interactions.  The source does not name its six: ours are three pairs under the loads of C3, C4."""
    return {
        f"{better} over {base}, {name}": interaction(better, base, runs, load)
        for name, load in LOADS.items()
        for better, base in PAIRS
    }
