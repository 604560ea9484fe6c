"""What is simulated: a memory, a device, a scheduler, a policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from sglang_hybrid.pools.organization import Organization
from sglang_hybrid.radix.interfaces import EvictionPolicy, Placement
from sglang_hybrid.radix.policy import DEFAULT_POLICY, Policy
from sglang_hybrid.radix.tree import GridTree
from sglang_hybrid.simulator.cost import StepCost


class Need(StrEnum):
    """What a waiting request must find beside a live state and, while others run, the headroom."""

    CHUNK = "chunk"
    """KV of its first chunk."""
    ANSWER = "answer"
    """What SGLang with the plugin asks: KV of its prompt and of answers, its own and those of the running, as
    far as they are expected, and room for the checkpoints that the coming forward leaves.  Who finds none
    keeps the queue waiting until a request leaves; under the other, also until one publishes."""


class Victim(StrEnum):
    """Who is preempted when the next step does not fit."""

    LAST = "last"
    """Who was admitted last; it returns to the head of the queue."""
    LEAST = "least"
    """Who has generated least, of these the longest prompt; it returns to the end of the queue."""


class Serving(NamedTuple):
    """How a scheduler goes about it: every point in which known ones differ."""

    mixed: bool
    """A step decodes first and prefills with the tokens left; otherwise a prefill has the step to itself."""
    aligned: bool
    """Chunks end on boundaries, the last whole block's end among them, and only chunk ends leave checkpoints;
    otherwise chunks take the whole budget and every boundary inside that the placement wants leaves one."""
    need: Need
    victim: Victim
    insists: bool
    """Who leaves a boundary takes a new state, and preempts for it; otherwise it goes on in place, and leaves
    no checkpoint, where memory is short."""
    overlaps: bool = False
    """The next step is prepared before the last one's results are known: who has ended, what is published."""
    waits: bool = False
    """Where the policy says so, a waiting request lets a running prefill compute what they share."""


SOURCE = Serving(mixed=True, aligned=True, need=Need.CHUNK, victim=Victim.LAST, insists=True)
"""vLLM V1 with checkpoints where chunks end, as the source changed it."""

ENGINE = Serving(
    mixed=False,
    aligned=False,
    need=Need.ANSWER,
    victim=Victim.LEAST,
    insists=False,
    overlaps=True,
    waits=True,
)
"""SGLang 0.5.23 with the plugin, its scheduler's defaults."""


@dataclass(frozen=True)
class Setting:
    """Everything but the requests.  `eviction` and `placement` replace those that the policy names."""

    organization: Callable[[], Organization]
    """A fresh, empty memory."""
    cost: StepCost
    policy: Policy = DEFAULT_POLICY
    serving: Serving = SOURCE
    most_running: int = 63
    prefill_tokens: int = 8192
    """Budget of a step: tokens of chunks, and of decodes where steps are mixed."""
    isolate: bool = False
    """Every request under a key of its own; it still resumes from its own checkpoints."""
    eviction: Callable[[GridTree], EvictionPolicy] | None = None
    placement: Callable[[Organization], Placement] | None = None

    def __post_init__(self) -> None:
        if self.most_running < 1 or self.prefill_tokens < 1:
            raise ValueError(
                f"{self.most_running} running requests, {self.prefill_tokens} tokens a step: use at least 1"
            )
