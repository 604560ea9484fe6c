"""What one pass over the queue may admit: the source's rule, and the real engine's."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from functools import partial

from sglang_hybrid.geometry import ceil_div
from sglang_hybrid.pools.organization import Need
from sglang_hybrid.simulator.core import Core
from sglang_hybrid.simulator.job import Job

MOST_EXPECTED = 4096
"""New tokens that SGLang expects at most (`SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION`)."""


class SourcePass:
    """Own need, one live state and, while others run, the headroom beside what pins and retention keep."""

    is_open = True
    preempts = True
    """A prompt that goes on and finds no memory preempts; otherwise it waits."""

    def __init__(self, core: Core, running: Collection[Job]) -> None:
        self.core = core
        self.running = running
        self._units = self._states = 0
        """Promised in this pass."""

    def awaits(self, job: Job) -> bool:
        """The source computes a shared prefix as often as it is asked for at once."""
        return False

    def fits(self, job: Job, start: int, tokens: int) -> bool:
        """Whether a job that starts at depth `start` with a chunk of `tokens` may begin."""
        memory, unit = self.core.memory, self.core.unit_tokens
        units = ceil_div(start + tokens, unit) - start // unit
        need = Need(units + self._units, 1 + self._states + memory.live.due)
        if self.running:
            need = need.plus(memory.admission.beside(0))
        return memory.could_fit(need)

    def admitted(self, job: Job, tokens: int) -> None:
        """It will take its units and its state after the pass."""
        self._units += self.core.units_to(job, job.position + tokens)
        self._states += 1

    def goes_on(self, job: Job, tokens: int) -> int:
        """Tokens of the next chunk of a job that prefills already; who finds no memory preempts."""
        self._states += self.core.insists
        return tokens


class EnginePass:
    """`engine.admission` over `radix.admission.Pass`.  Answers are expected as long as they may become, or as
    the ratio says, and room is kept for the checkpoints that the coming forward leaves."""

    preempts = False

    def __init__(self, core: Core, running: Iterable[tuple[Job, int, int]], ratio: float) -> None:
        """`running` decode, each with the depth that is computed and the tokens it has generated."""
        self.core = core
        self.rules = core.memory.begin_pass()
        self.is_open = True
        self._total, self._current = self._expected(running, ratio), 0
        """Tokens that are promised: whatever may come of them, and in the coming forward."""

    def _expected(self, running: Iterable[tuple[Job, int, int]], ratio: float) -> int:
        """Tokens of the units that those that decode are expected to take."""
        unit, units = self.core.unit_tokens, 0
        for job, position, generated in running:
            left = min(job.limit - generated, MOST_EXPECTED)
            if not job.is_exact:
                left = math.ceil(left * ratio)
            if left > 0:
                units += (position + left - 1) // unit - (position - 1) // unit
        return units * unit

    def awaits(self, job: Job) -> bool:
        """As `GridPrefillAdder.add_one_req`."""
        assert job.lookup is not None
        return self.rules.should_wait(job.lookup, partial(job.key, self.core.grid))

    def fits(self, job: Job, start: int, tokens: int) -> bool:
        """As `GridPrefillBudget.check_prefill`."""
        if not self.is_open:
            return False  # a prompt that goes on waits: nobody may take what it waits for
        unit = self.core.unit_tokens
        units = ceil_div(job.known - start + _answer(job), unit) + ceil_div(self._total, unit)
        return self.rules.missing(units, start, start + tokens) is None

    def admitted(self, job: Job, tokens: int) -> None:
        """As `GridPrefillBudget.reserve`."""
        self._reserve(job, tokens)
        self.rules.admitted()
        assert job.lookup is not None
        self.rules.promise(job.lookup, job.lease, partial(job.key, self.core.grid), job.known)
        left = self.rules.units_left() * self.core.unit_tokens
        self.is_open = left > self._total and left > self._current

    def goes_on(self, job: Job, tokens: int) -> int:
        """As `available_chunk_tokens` and `fit_chunk`: what memory has for the chunk, 0 to wait."""
        unit = self.core.unit_tokens
        begun = -job.position % unit
        units = self.rules.chunk_units(ceil_div(max(0, tokens - begun), unit))
        if not units + begun:
            self.is_open = False
            return 0
        tokens = min(tokens, begun + units * unit)
        rest = job.known - job.position - tokens
        if rest:
            self._total += rest + _answer(job)
        self._reserve(job, tokens)
        return tokens

    def _reserve(self, job: Job, tokens: int) -> None:
        unit = self.core.unit_tokens
        now = (ceil_div(tokens, unit) + 1) * unit
        ends = job.position + tokens == job.known
        self._current += now
        self._total += now + (min(job.limit, MOST_EXPECTED) if ends else 0)


def _answer(job: Job) -> int:
    """Tokens that a request which waits or prefills may still generate, as far as they are expected."""
    return min(max(job.limit - (job.known - job.prompt), 0), MOST_EXPECTED)


class Expectation:
    """Part of what an answer may become that SGLang expects of it (its new-token ratio)."""

    FIRST, LEAST, STEPS, BEYOND = 0.7, 0.7 * 0.14, 600, 20
    """At first; at least; decode steps from one to the other; steps that are hoped for after a preemption."""

    def __init__(self) -> None:
        self.ratio = self.FIRST

    def decoded(self, steps: int) -> None:
        """So many decode steps without a preemption."""
        self.ratio = max(self.ratio - steps * (self.FIRST - self.LEAST) / self.STEPS, self.LEAST)

    def preempted(self, left: Iterable[tuple[int, int]]) -> None:
        """Who is left: tokens that each has generated, and those it may."""
        jobs = list(left)
        generated = sum(done for done, _ in jobs) + self.BEYOND * len(jobs)
        self.ratio = min(1.0, generated / (sum(most for _, most in jobs) + 1))
