"""When a waiting request may begin: its own need, what is kept for others, and the headroom (docs/paper.md).

The need that must be met is what a lone request cannot do without.  While others run, more is asked: room
for the checkpoints that its prefill leaves, for the step that leaves a boundary, for what retention and
pins keep, and the headroom.  None of that is asked when nothing runs, so none of it can wedge admission.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sglang_hybrid.pools.organization import Need, Organization
from sglang_hybrid.radix.coming import Coming
from sglang_hybrid.radix.history import Lookup
from sglang_hybrid.radix.lifetime import Lifetime
from sglang_hybrid.radix.live import LiveStates
from sglang_hybrid.radix.live_state import Lease, LiveState


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
        return self.beside(leaves + 1)

    def beside(self, checkpoints: int) -> Need:
        """Room for so many checkpoints, for what pins and retention keep, and the headroom."""
        kept = self.lifetime.kept()
        room = self.organization.displaced(checkpoints + kept.checkpoints)
        return self.headroom.plus(room).plus(Need(units=kept.units))


class Pass:
    """One pass over the queue: what those admitted in it have been promised and do not have yet."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.live = admission.live
        self.organization = admission.organization
        self.due = self.live.due
        """Live states that may have to be found whatever happens (`LiveStates.due`)."""
        self.promised = Coming(self.live.history)
        """Checkpoints that prefills admitted in this pass will leave."""
        self.states = 0
        """Live states of requests admitted in this pass, not allocated yet."""
        self.leaves = self._asked = 0
        """Checkpoints that they will leave; with those of the request that was asked for last."""

    # -- waiting for a prefix ---------------------------------------------------------------

    def should_wait(self, lookup: Lookup, text: Callable[[], bytes]) -> bool:
        """Whether the request, just looked up, should let a prefill that computes its prefix go ahead."""
        live = self.live
        if not (live.waits and (live.coming or self.promised)):
            return False
        trail = live.history.follow(lookup, text, lookup.usable)
        last = lookup.usable // self.organization.grid
        return live.awaits(trail, lookup.match.depth, last, self.promised)

    def promise(self, lookup: Lookup, lease: Lease, text: Callable[[], bytes], prompt: int) -> None:
        """The request is admitted in this pass and may publish: others may wait for its prefix."""
        if self.live.waits:
            trail = self.live.history.follow(lookup, text, prompt)
            self.live.expect(self.promised, trail, lease.node.depth, prompt)

    # -- room -------------------------------------------------------------------------------

    def missing(self, units: int, start: int, end: int) -> Need | None:
        """`Admission.missing` for a request whose first forward computes tokens `start` to `end`."""
        self._asked = self.leaves + len(self.live.placement.planned(start, end))
        return self.admission.missing(units, self.states, self._asked)

    def missing_after(
        self, units: int, start: int, end: int, preempted: Iterable[LiveState]
    ) -> Need | None:
        """`missing` for a request that others are, or would be, preempted for.

        `preempted` are those that still run.  Only what it cannot do without is asked: nobody is preempted
        for a request that then waits for headroom.
        """
        self._asked = self.leaves + len(self.live.placement.planned(start, end))
        need = Need(units, self.live.due + self.states + 1)
        fits = self.organization.could_fit(need) or self.organization.could_fit_after(
            need, self.live.returned(preempted)
        )
        return None if fits else need

    def admitted(self) -> None:
        """The request that was asked for last begins; its state is allocated after the pass."""
        self.states += 1
        self.leaves = self._asked

    def units_left(self) -> int:
        """Units beside the live states that are promised or due."""
        return self.organization.units_reclaimable() - self.organization.unit_equivalent(
            self.states + self.due
        )

    def chunk_need(self, units: int) -> Need:
        """What a prompt that goes on needs for so many units.

        Its live state goes on in place unless somebody has adopted it.
        """
        return Need(units, self.states + self.live.forced)

    def chunk_units(self, most: int, beside: int = 0) -> int:
        """Units, up to `most`, that a prompt that goes on may take; `beside` more are taken with them.

        A prompt that is alone must never wait for more than it takes.
        """
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.organization.could_fit(self.chunk_need(middle + beside)):
                low = middle
            else:
                high = middle - 1
        return low
