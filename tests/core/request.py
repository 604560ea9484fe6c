"""A request of the shadow scheduler, and its part of a batch."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field

from sglang_hybrid.radix.history import Lookup, Reuse
from sglang_hybrid.radix.live_state import Lease, LiveState
from sglang_hybrid.radix.tree import Node
from tests.core.content import Place, next_tag, root_tag


@dataclass(eq=False)
class Request:
    """`tokens` are the device's truth; the host knows the first `known` of them."""

    rid: int
    namespace: Hashable
    private: bool
    tokens: list[int]
    limit: int
    prompt: int = 0
    known: int = 0
    tags: list[int] = field(default_factory=list)
    state: LiveState | None = None
    lease: Lease | None = None
    lookup: Lookup | None = None
    """The last one while it waited."""
    hit: int = 0
    reuses: list[Reuse] = field(default_factory=list)
    """What each of its admissions found."""
    end: int = 0
    """Tokens covered by prepared forwards: SGLang's `kv_committed_len`."""
    pending: bool = False
    """A forward is prepared and not launched."""
    lives: int = 0
    """How often it was admitted; results of an earlier life are of no use."""

    def __post_init__(self) -> None:
        self.tags = [root_tag(self.namespace)]
        self.restart()

    def restart(self) -> None:
        """What is known becomes the prompt; SGLang's `reset_for_retract`."""
        self.prompt = self.known = self.known or len(self.tokens)
        del self.tokens[self.known :]
        del self.tags[self.known + 1 :]
        self.extend_tags()
        self.end, self.state, self.lease, self.lookup = 0, None, None, None

    def extend_tags(self) -> None:
        for token in self.tokens[len(self.tags) - 1 :]:
            self.tags.append(next_tag(self.tags[-1], token))

    def known_bytes(self) -> bytes:
        return array("q", self.tokens[: self.known]).tobytes()

    @property
    def live(self) -> LiveState:
        assert self.state is not None
        return self.state

    @property
    def lent(self) -> Lease:
        assert self.lease is not None
        return self.lease

    @property
    def found(self) -> Lookup:
        assert self.lookup is not None
        return self.lookup

    @property
    def lock(self) -> Node:
        return self.lent.node

    @property
    def prefilled(self) -> bool:
        return self.end >= self.prompt


@dataclass(eq=False)
class Forward:
    """One request's part of a batch, as its maps stand when the batch has been prepared."""

    request: Request
    start: int
    end: int
    units: list[int]
    source: Place
    target: Place
    boundaries: list[tuple[int, Place]]
    life: int
