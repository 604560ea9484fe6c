"""Traffic by a profile of few numbers: conversations over shared contexts.

Requests are turns of conversations.  Each conversation begins with a context, shared with others
or of its own, and each turn repeats all that was said before it, answers included; one turn is a question
behind a context.  A turn comes when its user has read and thought, however long the answer took to compute.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from sglang_hybrid.simulator.draws import Lognormal, Zipf, exponential, stream, uniform
from sglang_hybrid.simulator.request import Request, Segment

ASKED_SIGMA, NEW_SIGMA = 1.2, 0.9
"""Spread of the logarithms of questions and of answers, as public chat traces have it."""

POPULARITY = 0.8
"""Zipf exponent of the shared contexts."""

THINK, PACE = 10.0, 0.03
"""Mean seconds between an answer and the next turn; seconds allowed for each token of the answer."""


class TrafficError(ValueError):
    """Traffic that cannot be read or served; the message names the value and a legal choice."""


class Traffic(Protocol):
    """What can be asked for requests, again and again."""

    @property
    def rate(self) -> float:
        """Requests a second."""
        ...

    def requests(self, seed: int, count: int) -> list[Request]:
        """`count` of them in order of arrival; seeds are independent, or nearly so."""
        ...

    def at_rate(self, rate: float) -> Traffic:
        """The same, faster or slower."""
        ...

    def unshared(self) -> Traffic | None:
        """The same with nothing in common between users; None where that is so already, or cannot be told."""
        ...

    def describe(self) -> str:
        """In one line."""
        ...


@dataclass(frozen=True)
class Profile:
    """Mean figures.  `input` is the whole prompt's, over all turns, its context included."""

    name: str = "profile"
    rate: float = 3.0
    input: float = 3332.0
    output: float = 250.0
    contexts: int = 8
    """Shared contexts."""
    context: int = 2600
    """Tokens of a context, shared or not."""
    sharing: float = 1.0
    """Part of the conversations that begin with a shared one."""
    turns: float = 1.0
    limit: int = 8192
    """Tokens of a prompt and its answer; where a conversation would pass it, it ends."""

    def __post_init__(self) -> None:
        for name, least, most in LIMITS:
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and least <= value <= most):
                raise TrafficError(f"{name}={value} is not between {least:g} and {most:g}")
        if self.asked < 1:
            raise TrafficError(
                f"input={self.input:g} leaves no room for questions in {self.turns:g} turns behind a context "
                f"of {self.context} with answers of {self.output:g}: use "
                f"input={math.ceil(self._repeated + self.turns)} or more"
            )
        if self.context + self.asked + self.output > self.limit:
            raise TrafficError(
                f"limit={self.limit} is less than a first turn of {self.context} + {self.asked:.0f} + "
                f"{self.output:.0f} tokens"
            )

    @property
    def _repeated(self) -> float:
        """Tokens of a prompt, on average, that are no question: its context and the answers before."""
        return self.context + (self.turns - 1) * self.output

    @property
    def asked(self) -> float:
        """Mean tokens of a question, so that prompts of all turns have the mean `input`.

        Turns are geometric, so a request has turns - 1 before it on average.
        """
        return (self.input - self._repeated) / self.turns

    def at_rate(self, rate: float) -> Profile:
        return replace(self, rate=rate)

    def unshared(self) -> Profile | None:
        return replace(self, sharing=0.0) if self.sharing else None

    def describe(self) -> str:
        shared = (
            f"{100 * self.sharing:.0f} % behind {self.contexts} shared contexts of {self.context} tokens"
            if self.sharing
            else "nothing shared between users"
        )
        turns = f", {self.turns:g} turns a conversation" if self.turns > 1 else ""
        return (
            f"{self.name}: {self.rate:g} requests/s, {self.input:.0f} tokens in, {self.output:.0f} out, "
            f"{shared}{turns}"
        )

    def requests(self, seed: int, count: int) -> list[Request]:
        """They begin when conversations of every age are under way; earlier turns left nothing behind."""
        settled = SETTLE * (self.turns - 1) * (THINK + PACE * self.output)
        heap: list[tuple[float, int, int, Request, Iterator[Request]]] = []
        requests: list[Request] = []
        begun = self._conversations(seed)
        number, (start, turns) = 0, next(begun)
        while len(requests) < count:
            while not heap or start <= heap[0][0]:
                first = next(turns, None)
                if first is not None:
                    heapq.heappush(heap, (first.at, number, 0, first, turns))
                number += 1
                start, turns = next(begun)
            _, one, turn, request, rest = heapq.heappop(heap)
            if request.at >= settled:
                requests.append(replace(request, at=request.at - settled))
            following = next(rest, None)
            if following is not None:
                heapq.heappush(heap, (following.at, one, turn + 1, following, rest))
        return requests

    def _conversations(self, seed: int) -> Iterator[tuple[float, Iterator[Request]]]:
        names = ("arrivals", "sharing", "contexts", "turns", "questions", "answers", "thinking")
        arrive, share, which, length, ask, answer, think = (stream(seed, name) for name in names)
        popularity = Zipf(max(self.contexts, 1), POPULARITY)
        asked = Lognormal(self.asked, ASKED_SIGMA, self.limit)
        new = Lognormal(self.output, NEW_SIGMA, self.limit)
        goes_on = 1 - 1 / self.turns
        at, number = 0.0, 0
        while True:
            at += exponential(arrive) * self.turns / self.rate
            context: Hashable = ("context", popularity.draw(which))
            if uniform(share) >= self.sharing:
                context = ("own context", number)
            turns = 1 + (int(math.log(uniform(length)) / math.log(goes_on)) if goes_on else 0)
            said = [(asked.draw(ask), new.draw(answer), THINK * exponential(think)) for _ in range(turns)]
            yield at, self._turns(number, at, context, said)
            number += 1

    def _turns(
        self, number: int, at: float, context: Hashable, said: Sequence[tuple[int, int, float]]
    ) -> Iterator[Request]:
        segments: tuple[Segment, ...] = ((context, self.context),) if self.context else ()
        length = self.context
        for turn, (asked, new, pause) in enumerate(said):
            if not turn:  # a first turn is cut to the limit, so that every conversation has one
                new = min(new, max(1, self.limit - length - 1))
                asked = max(1, min(asked, self.limit - length - new))
            length += asked + new
            if length > self.limit:
                return
            reply: Hashable = ("answer", number, turn)
            segments = (*segments, (("asked", number, turn), asked))
            yield Request(at=at, segments=segments, new=new, answer=reply)
            segments = (*segments, (reply, new))
            at += new * PACE + pause


SETTLE = 5
"""Lengths of a mean conversation until as many end as begin."""

LIMITS = (
    ("rate", 1e-3, 1e4),
    ("input", 1, 1e6),
    ("output", 1, 1e5),
    ("contexts", 0, 1e6),
    ("context", 0, 1e6),
    ("sharing", 0, 1),
    ("turns", 1, 1e3),
    ("limit", 2, 1e6),
)
"""Least and largest value of each figure."""

PROFILES = {
    profile.name: profile
    for profile in (
        Profile("rag", 4, 3332, 250, contexts=8, context=2600),
        Profile("chat", 6, 2200, 300, contexts=1, context=400, turns=4, limit=16384),
        Profile("agents", 6, 4200, 120, contexts=6, context=1800, sharing=0.9, turns=8, limit=16384),
        Profile("no-sharing", 3, 2400, 300, contexts=0, context=0, sharing=0.0),
    )
}
"""rag: questions behind a few long documents (the source's workload).  chat: conversations behind one system
prompt.  agents: long conversations of short answers behind a few tool descriptions.  no-sharing: nothing to
reuse."""
