"""What a simulated run reports."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_hybrid.radix.history import Cause, Reuse
from sglang_hybrid.simulator.job import Job


class Record(NamedTuple):
    """One request that was served.  Seconds are those of the run's clock, depths are tokens."""

    arrival: int
    """Place in the order of arrival, from 0."""
    at: float
    admitted: float
    """First admission."""
    first_token: float
    finished: float
    prompt: int
    new: int
    r_max: int
    attention: int
    j_adopt: int
    cause: Cause | None
    preemptions: int

    @property
    def gap_r(self) -> int:
        return self.r_max - self.j_adopt


def record(job: Job, now: float) -> Record:
    """Of a job that has just ended."""
    reuse, new = job.reuse, job.request.new
    return Record(
        job.index,
        job.request.at,
        job.admitted_at,
        job.first_token,
        now,
        job.prompt,
        new,
        reuse.r_max,
        reuse.attention,
        reuse.j_adopt,
        reuse.cause,
        job.lives - 1,
    )


@dataclass
class Outcome:
    """Figures of a whole run.  Tokens that a preempted request computes or adopts again stand apart."""

    seconds: float = 0.0
    """From the clock's zero to the last request's end."""
    steps: int = 0
    served: int = 0
    refused: int = 0
    """Requests that an empty memory cannot hold."""
    preemptions: int = 0
    gave_up: int = 0
    """Pinned checkpoints that nothing else could make room for."""
    prompt_tokens: int = 0
    """Of first admissions."""
    adopted_tokens: int = 0
    """J_adopt of first admissions, summed."""
    attention_tokens: int = 0
    """Attention depth of first admissions, summed."""
    r_max_tokens: int = 0
    """R_max of first admissions, summed."""
    prefilled_tokens: int = 0
    """Computed by prefills of first lives."""
    resumed_tokens: int = 0
    """Adopted by requests that came back."""
    prefilled_again_tokens: int = 0
    output_tokens: int = 0
    """Of completed requests."""
    records: list[Record] | None = None
    """In the order of their ends, when asked for."""
    waiting_seconds: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds with so many requests waiting."""
    running_seconds: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def admitted(self, reuse: Reuse) -> None:
        """A request's first admission."""
        self.prompt_tokens += reuse.prompt
        self.adopted_tokens += reuse.j_adopt
        self.attention_tokens += reuse.attention
        self.r_max_tokens += reuse.r_max

    def prefilled(self, lives: int, tokens: int) -> None:
        """A request in this of its lives has computed so many tokens of its prompt."""
        if lives == 1:
            self.prefilled_tokens += tokens
        else:
            self.prefilled_again_tokens += tokens

    @property
    def waiting_median(self) -> float:
        """Time-weighted median of the requests waiting."""
        return weighted_median(self.waiting_seconds)

    @property
    def running_median(self) -> float:
        return weighted_median(self.running_seconds)

    @property
    def throughput(self) -> float:
        """Output tokens of completed requests a second of the run."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def j_adopt(self) -> float:
        """Mean of a served or running request's first admission, in tokens."""
        return self.adopted_tokens / max(self.served, 1)


def weighted_median(weights: Mapping[int, float]) -> float:
    """The least value at or below which half of the weight lies; 0 for no weight."""
    half, passed = sum(weights.values()) / 2, 0.0
    for value in sorted(weights):
        passed += weights[value]
        if passed >= half:
            return float(value)
    return 0.0
