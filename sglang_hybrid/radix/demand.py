"""How likely a checkpoint is to be asked for again, learned from what became of earlier ones.

A request leaves checkpoints of three kinds.  Where its prompt ended, and where its answer ended, the
next turn of a conversation begins.  The inner ones that it passed on the way serve only a prompt that
branches off there.  Which of the two ends the next turn asks for depends on the traffic (a client that
strips the reasoning from what it sends back never asks for the end of an answer), so it is counted.
And a conversation that has gone on is likelier to go on again, so its turns are counted.  Both are
counted from the prompts, not from the hits: what had to be evicted is remembered, and missed.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sglang_hybrid.radix.node import Node

HALF_LIFE = 256
"""Requests without a use that halve a checkpoint's chance of one.  The public conversation trace is served
alike with 200 to 800 at every budget; the shorter, the sooner the order follows when traffic changes."""

MOST_USES = 7
"""Uses beyond which a checkpoint is not held to be likelier still, lest it stay when its time is over."""

UNLIKELY = 3
"""Halvings from an end to an inner checkpoint, or to an end of a kind that is not asked for."""

LEAST_COUNTED = 64
"""Ends of a kind from which on it is believed that it is not asked for."""

FORGET_AT = 1024
"""Ends of a kind after which its counts are halved, so that they follow the traffic."""

LEAST_REMEMBERED = 1024
"""Ends that are remembered at least; otherwise as many as the pool has pages, far more than fit in it."""


class Kind(IntEnum):
    """How a boundary came about."""

    PROMPT_END = 0
    ANSWER_END = 1
    INNER = 2


class End(NamedTuple):
    """What is remembered of an end, evicted or not."""

    kind: Kind
    uses: int
    """Turns that the conversation had taken."""


class Demand:
    """Counts ends and what was asked of them.  Deterministic: ranks that serve the same requests agree."""

    def __init__(self, pages: int) -> None:
        self._most = max(LEAST_REMEMBERED, pages)
        self._made = [0, 0]
        self._asked = [0, 0]
        self._ends: dict[int, End] = {}
        """By the path's fingerprint, the one that was passed longest ago first."""

    def worth(self, kind: Kind, uses: int) -> int:
        """Requests without a use after which a checkpoint is as likely as a fresh, unused end was."""
        worth = round(HALF_LIFE * math.log2(1 + min(uses, MOST_USES))) if uses else 0
        if kind is Kind.INNER or not self._is_asked_for(kind):
            worth -= HALF_LIFE * UNLIKELY
        return worth

    def _is_asked_for(self, kind: Kind) -> bool:
        """Not when the other kind of end is, at least 2 to the UNLIKELY times as often."""
        if self._made[kind] < LEAST_COUNTED:
            return True
        other = 1 - kind
        return self._asked[kind] * self._made[other] << UNLIKELY >= self._asked[other] * self._made[kind]

    def uses(self, node: Node) -> int:
        """Uses that a path ending here inherits: one more than the last end that it passes."""
        passed = self._last_end(node)
        return 0 if passed is None else self._ends[passed].uses + 1

    def finished(self, prompt_end: Node, answer_end: Node | None) -> None:
        """A request's path: count the last earlier end that its prompt passed, remember its own."""
        passed = self._last_end(prompt_end)
        uses = 0
        if passed is not None:
            end = self._ends.pop(passed)
            self._ends[passed] = end  # the youngest now
            self._asked[end.kind] += 1
            uses = end.uses + 1
        self._remember(prompt_end, End(Kind.PROMPT_END, uses))
        if answer_end is not None:
            self._remember(answer_end, End(Kind.ANSWER_END, uses))

    def _last_end(self, node: Node) -> int | None:
        """Fingerprint of the deepest end on the path; None when it passes none."""
        run: Node | None = node
        while run is not None and run.parent is not None:
            for one in reversed(run.fingerprints()):
                if one in self._ends:
                    return one
            run = run.parent
        return None

    def _remember(self, node: Node, end: End) -> None:
        fingerprint = node.fingerprints()[-1]
        known = self._ends.pop(fingerprint, None)
        self._ends[fingerprint] = known or end
        if len(self._ends) > self._most:
            del self._ends[next(iter(self._ends))]
        self._made[end.kind] += 1
        if self._made[end.kind] >= FORGET_AT:
            self._made[end.kind] //= 2
            self._asked[end.kind] //= 2
