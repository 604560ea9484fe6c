"""Random quantities of a workload, each from a stream of its own: seeds decide everything.

`random.Random(f"{seed}/{name}")` is seeded from the SHA-512 of that text, and its bits are the same on every
machine and in every version.  Another rate or another sharing changes nothing else, so that runs of one
seed are paired.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate
from random import Random
from statistics import NormalDist

STANDARD = NormalDist()


def stream(seed: int, name: str) -> Random:
    return Random(f"{seed}/{name}")


def uniform(chance: Random) -> float:
    """Strictly between 0 and 1."""
    return (chance.getrandbits(52) + 0.5) / (1 << 52)


def exponential(chance: Random) -> float:
    """With mean 1."""
    return -math.log(uniform(chance))


def arrivals(seed: int, rate: float, count: int) -> list[float]:
    """Seconds of a Poisson process; another rate stretches the same arrivals."""
    chance = stream(seed, "arrivals")
    return list(accumulate(exponential(chance) / rate for _ in range(count)))


class Lognormal:
    """Whole numbers from 1 to `most`.  Their mean is `mean` after the cut at `most`, before rounding."""

    def __init__(self, mean: float, sigma: float, most: int) -> None:
        if not 0 < mean < most:
            raise ValueError(f"a mean of {mean} is not between 0 and the cut at {most}")
        self.sigma, self.most = sigma, most
        low, high = -10.0, math.log(most) + 10.0
        for _ in range(60):
            self._mu = (low + high) / 2
            low, high = (self._mu, high) if self._cut_mean() < mean else (low, self._mu)

    def _cut_mean(self) -> float:
        z = (math.log(self.most) - self._mu) / self.sigma
        below = math.exp(self._mu + self.sigma**2 / 2) * STANDARD.cdf(z - self.sigma)
        return below + self.most * (1 - STANDARD.cdf(z))

    def draw(self, chance: Random) -> int:
        value = math.exp(self._mu + self.sigma * STANDARD.inv_cdf(uniform(chance)))
        return max(1, round(min(value, self.most)))


class Zipf:
    """0 to `count` - 1, the k-th with weight (k + 1) ** -exponent."""

    def __init__(self, count: int, exponent: float) -> None:
        self._sums = list(accumulate((k + 1) ** -exponent for k in range(count)))

    def draw(self, chance: Random) -> int:
        return bisect_left(self._sums, uniform(chance) * self._sums[-1])
