"""Order of the arms, and ratios between them, paired by repetition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from bench.statistics import relative, t_interval


def rotated(arms: Sequence[str], repetition: int) -> list[str]:
    """The arms in the order of a repetition: in as many repetitions as arms each has every place once."""
    first = repetition % len(arms)
    return [*arms[first:], *arms[:first]]


class Ratio(NamedTuple):
    """Mean of the ratios of all repetitions and its t interval, which one repetition does not have."""

    ratio: float
    low: float | None
    high: float | None


def paired_ratio(values: Sequence[float], reference: Sequence[float]) -> Ratio | None:
    """`values` over `reference`, pair by pair; None where the reference has a zero."""
    if not all(reference):
        return None
    effects = relative(values, reference)
    if len(effects) == 1:
        return Ratio(1 + effects[0], None, None)
    low, high = t_interval(effects)
    return Ratio(1 + fmean(effects), 1 + low, 1 + high)


def mean_figures(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of every figure over repetitions."""
    return {name: round(fmean(run[name] for run in runs), 3) for name in runs[0]}
