"""A request through all its lives."""

from __future__ import annotations

from collections.abc import Hashable

from sglang_hybrid.radix.history import Lookup, Reuse
from sglang_hybrid.radix.live_state import Lease, LiveState
from sglang_hybrid.simulator.keys import key_of
from sglang_hybrid.simulator.request import Request

Chunk = tuple["Job", int]
"""A job, and the token depth to which a step prefills it."""


class Job:
    """`known` tokens are prefilled in the present life; the forward after them gives the next token.

    The token generated last is never computed: `end` is the depth at which the request ends.
    """

    __slots__ = (
        "_key",
        "admitted_at",
        "end",
        "first_token",
        "index",
        "is_exact",
        "known",
        "lease",
        "limit",
        "lives",
        "lookup",
        "namespace",
        "position",
        "prompt",
        "request",
        "reuse",
        "running",
        "state",
        "stops",
        "zero",
    )

    lease: Lease
    state: LiveState
    reuse: Reuse
    """Of the first admission."""

    def __init__(self, index: int, request: Request, *, isolate: bool) -> None:
        self.index = index
        self.request = request
        self.namespace: Hashable = ("request", index) if isolate else request.salt
        self.prompt = request.prompt
        self.known = self.prompt
        self.end = self.prompt + request.new - 1
        self.is_exact = request.limit is None
        self.limit = request.new if request.limit is None else request.limit
        self.stops = request.new < self.limit
        """Its answer ends by itself: that it has is known when its last token is."""
        self.lives = 0
        self.running = False
        self.position = 0
        """Tokens whose state is computed, while it prefills."""
        self.zero: int | None = None
        """Decode step at which its position would have been 0; None while it prefills."""
        self.admitted_at = self.first_token = 0.0
        self.lookup: Lookup | None = None
        """The last one while it waited."""
        self._key: bytes | None = None

    def key(self, grid: int) -> bytes:
        """Of prompt and answer; made when it is first asked for."""
        if self._key is None:
            request = self.request
            answer = ("generated", self.index) if request.answer is None else request.answer
            self._key = key_of((*request.segments, (answer, request.new)), grid)
        return self._key
