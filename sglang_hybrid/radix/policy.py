"""What an operator chooses about the life of a checkpoint."""

from __future__ import annotations

from typing import NamedTuple

WAITS = ("prefix", "never")
"""Whether a waiting request lets a running prefill that computes what it shares get there first."""


class Policy(NamedTuple):
    """`--hybrid-headroom`, `-retention`, `-checkpoints`, `-wait` and `-eviction`.

    Names are those of `placement.PLACEMENTS` and `eviction.EVICTIONS`.
    """

    headroom: float = 0.0
    retention: int | None = None
    checkpoints: str = "all"
    wait: str = WAITS[0]
    eviction: str = "demand"

    @property
    def waits(self) -> bool:
        return self.wait == WAITS[0]


DEFAULT_POLICY = Policy()
