"""Placements that a server may be started with: `--hybrid-checkpoints` (docs/architecture.md).

Whatever the placement, the deepest boundary of a prompt has a checkpoint, and so has the place where it
leaves what the tree knew already: there the next prompt is likely to begin.  Of an answer, the deepest
boundary has one; those that it passes on the way stay only where the placement says so, or where paths
part or distinct requests came to by then.  Depths are counted in grid steps from the root, so that all
prompts over a common prefix agree on where its checkpoints are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from sglang_hybrid.pools.organization import Need, Organization
from sglang_hybrid.radix.choices import Choices
from sglang_hybrid.radix.interfaces import Placement

MANY = 1 << 10
"""Checkpoints over which one's share of a slab is averaged."""


class Branch(Placement):
    """branch: none beside the ends, the places where paths part, and those that several requests came to."""

    def keeps(self, depth: int) -> bool:
        return False


class Sparse(Placement):
    """sparse: multiples of a spacing that grows with the depth and with the price of a checkpoint.

    A path of n blocks, checkpoints s blocks apart, takes n + w n / s blocks of memory when a checkpoint
    takes as much as w blocks.  While memory is short, the paths that stay, and with them the chance of a
    hit, are as 1 / (1 + w / s); and a prompt that leaves the path anywhere recomputes (s - 1) / 2 blocks.
    The tokens saved, s / (s + w) (n - (s - 1) / 2), are the most at s = sqrt(w^2 + w (2 n + 1)) - w.
    """

    def __init__(self, organization: Organization) -> None:
        super().__init__(organization)
        self.weight = checkpoint_weight(organization)

    def spacing(self, depth: int) -> int:
        """Grid steps between two checkpoints at this depth: a power of two, so that spacings nest."""
        weight = self.weight
        best = math.sqrt(weight * weight + weight * (2 * depth + 1)) - weight
        return 1 << max(0, int(math.log2(max(best, 1.0))))

    def keeps(self, depth: int) -> bool:
        return depth % self.spacing(depth) == 0


def checkpoint_weight(organization: Organization) -> float:
    """Blocks of memory that a checkpoint takes; from two pools, blocks a checkpoint that they hold."""
    displaced: Need = organization.displaced(MANY)
    if displaced.units:
        return displaced.units / MANY / organization.units_per_block
    return organization.unit_pool.size / organization.units_per_block / organization.state_pool.size


PLACEMENTS: Choices[Callable[[Organization], Placement]] = Choices(
    "sglang_hybrid.placements", {"all": Placement, "branch": Branch, "sparse": Sparse}
)
"""By their names in `--hybrid-checkpoints`."""
