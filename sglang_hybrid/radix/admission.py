"""When a waiting request may begin: its own need, what is kept for others, and the headroom (docs/paper.md).

The need that must be met is what a lone request cannot do without.  While others run, more is asked: room
for the checkpoints that its prefill leaves, for the step that leaves a boundary, for what retention and
pins keep, and the headroom.  None of that is asked when nothing runs, so none of it can wedge admission.
"""

from __future__ import annotations

from sglang_hybrid.pools.organization import Need, Organization
from sglang_hybrid.radix.lifetime import Lifetime
from sglang_hybrid.radix.live import LiveStates


class Admission:
    """Asked for waiting and preempted requests alike, before anything is allocated for them."""

    def __init__(self, live: LiveStates, lifetime: Lifetime, headroom: float = 0.0) -> None:
        """`headroom` is the source's f: a part of all blocks that stays free beyond a request's need."""
        if not 0.0 <= headroom < 1.0:
            raise ValueError(f"a headroom of {headroom} is not in 0 <= f < 1")
        self.live = live
        self.lifetime = lifetime
        self.organization: Organization = live.organization
        self.headroom = self.organization.share(headroom)
        self.waits = 0
        """Checks that only what is asked while others run has refused."""

    def missing(self, units: int, admitted: int, leaves: int) -> Need | None:
        """What does not fit if one more request begins; None when it may.

        `units` are all that it, those that run and those admitted before it in this pass may still take;
        `admitted` counts the last, and `leaves` the checkpoints that the coming forward would leave.
        """
        need = Need(units, self.live.due + admitted + 1)
        if not self.organization.could_fit(need):
            return need
        if not self.live.running and not admitted:
            return None
        beside = need.plus(self.reserve(leaves))
        if self.organization.could_fit(beside):
            return None
        self.waits += 1
        return beside

    def reserve(self, leaves: int) -> Need:
        """What is asked beside the need while others run; `leaves` and one for a boundary's fork."""
        kept = self.lifetime.kept()
        room = self.organization.displaced(leaves + 1 + kept.checkpoints)
        return self.headroom.plus(room).plus(Need(units=kept.units))
