"""What an operator chooses about the life of a checkpoint, and the parts that it governs."""

from __future__ import annotations

from typing import NamedTuple

from sglang_hybrid.radix.admission import Admission
from sglang_hybrid.radix.lifetime import Lifetime
from sglang_hybrid.radix.live import LiveStates
from sglang_hybrid.radix.placement import PLACEMENTS
from sglang_hybrid.radix.retention import Retention
from sglang_hybrid.radix.tree import GridTree

WAITS = ("prefix", "never")
"""Whether a waiting request lets a running prefill that computes what it shares get there first."""


class Policy(NamedTuple):
    """`--hybrid-headroom`, `--hybrid-retention`, `--hybrid-checkpoints` and `--hybrid-wait`."""

    headroom: float = 0.0
    retention: int | None = None
    checkpoints: str = "all"
    wait: str = WAITS[0]

    def live_states(
        self, tree: GridTree, lifetime: Lifetime, kind: type[LiveStates] = LiveStates
    ) -> LiveStates:
        placement = PLACEMENTS[self.checkpoints](tree.organization)
        return kind(tree, lifetime, placement, Retention(lifetime, self.retention), self.waits)

    @property
    def waits(self) -> bool:
        return self.wait == WAITS[0]

    def admission(self, live: LiveStates) -> Admission:
        return Admission(live, live.lifetime, self.headroom)


DEFAULT_POLICY = Policy()
