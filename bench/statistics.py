"""The source's statistics: paired seeds, effects of each seed first and their mean after.

An *effect* is one number a seed.  Its interval is Student's t over seeds; the bootstrap's stands beside it,
since the effects of a cache that is hot or cold by chance are not normal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import comb, sqrt
from random import Random
from statistics import fmean, stdev
from typing import NamedTuple

from scipy.stats import t as student

CONFIDENCE = 0.95
RESAMPLES = 4000


class Interval(NamedTuple):
    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


def relative(treated: Sequence[float], base: Sequence[float]) -> list[float]:
    """Per seed, the part by which `treated` exceeds `base`; raises `ValueError` unless they are paired."""
    if len(treated) != len(base):
        raise ValueError(f"{len(treated)} and {len(base)} runs are not paired")
    return [one / other - 1 for one, other in zip(treated, base)]


def t_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Of the mean.  One value says nothing about its spread: the interval is the whole line."""
    mean = fmean(values)
    if len(values) < 2:
        return Interval(float("-inf"), float("inf"))
    half = float(student.ppf((1 + confidence) / 2, len(values) - 1)) * stdev(values) / sqrt(len(values))
    return Interval(mean - half, mean + half)


def bootstrap_interval(
    values: Sequence[float], confidence: float = CONFIDENCE, resamples: int = RESAMPLES
) -> Interval:
    """Percentiles of the means of resamples, which are the same on every machine."""
    chance, count = Random("bootstrap"), len(values)
    means = sorted(
        fmean([values[int(chance.random() * count)] for _ in range(count)]) for _ in range(resamples)
    )
    tail = round((1 - confidence) / 2 * resamples)
    return Interval(means[tail], means[resamples - 1 - tail])


def sign_flip_p(values: Sequence[float]) -> float:
    """Exact two-sided p of a mean this far from 0, were the sign of each seed's effect a coin's."""
    observed = abs(sum(values)) * (1 - 1e-12)
    flips = product((1, -1), repeat=max(len(values) - 1, 0))  # the last sign stays: halves are mirrored
    rest, last = values[:-1], values[-1]
    hits = [abs(last + sum(sign * one for sign, one in zip(signs, rest))) >= observed for signs in flips]
    return sum(hits) / len(hits)


def sign_test_p(values: Sequence[float]) -> float:
    """Exact two-sided p of the sign test; zeros are left out."""
    above, below = sum(value > 0 for value in values), sum(value < 0 for value in values)
    count = above + below
    tail = sum(comb(count, k) for k in range(min(above, below) + 1))
    return min(1.0, 2 * tail / 2**count)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p over a family."""
    adjusted: dict[str, float] = {}
    highest = 0.0
    for done, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        highest = max(highest, min(1.0, (len(p_values) - done) * p_values[name]))
        adjusted[name] = highest
    return adjusted
