"""What is wanted together, and which evictions bring it closer."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple


class Need(NamedTuple):
    """Pieces wanted together."""

    units: int = 0
    checkpoints: int = 0

    def plus(self, other: Need) -> Need:
        """Both together."""
        return Need(self.units + other.units, self.checkpoints + other.checkpoints)


ONE_CHECKPOINT = Need(checkpoints=1)


def part_of(part: float, count: int) -> int:
    """floor(part x count), of the decimal number as it is written: 0.29 of 100 are 29."""
    return int(Fraction(str(part)) * count)


class Relief(NamedTuple):
    """Which evictions bring a need closer: of attention KV, of checkpoints."""

    units: bool
    checkpoints: bool


EITHER = Relief(units=True, checkpoints=True)
"""Where both kinds share one pool."""
