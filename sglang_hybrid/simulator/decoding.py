"""Requests that decode in lockstep: nobody is touched in a step in which nothing happens to it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from sglang_hybrid.pools.organization import Need
from sglang_hybrid.simulator.core import Core
from sglang_hybrid.simulator.job import Job


class Decoding:
    """`steps` decode steps have been made; a job that joined at depth p has its `zero` p steps before."""

    def __init__(self, core: Core, *, in_order: bool) -> None:
        """`in_order`: what happens to several in a step happens in the order of the batch."""
        self.core = core
        self._in_order = in_order
        self.grid = core.grid
        self.steps = 0
        self.context = 0
        """Tokens of all of them."""
        self.leaving: dict[Job, None] = {}
        """Those on a boundary that they leave with the next step."""
        self.forked: dict[Job, None] = {}
        """Those whose last forward reads another state than it writes, until the next one is prepared."""
        self._jobs: dict[Job, int] = {}
        """In the order of the batch: the numbers rise."""
        self._joined = 0
        self._due: list[tuple[int, int, int, Job]] = []
        """Step at which a job comes to its end or to a boundary; left-over entries have another life."""
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def __reversed__(self) -> Iterator[Job]:
        return reversed(self._jobs)

    def reorder(self, jobs: Iterable[Job]) -> None:
        """The same in another order."""
        self._jobs = {job: number for number, job in enumerate(jobs, self._joined)}
        self._joined += len(self._jobs)

    def _ordered(self, jobs: Iterable[Job]) -> list[Job]:
        return sorted(jobs, key=self._jobs.__getitem__) if self._in_order else list(jobs)

    def position(self, job: Job) -> int:
        """Tokens whose state is computed."""
        return job.position if job.zero is None else self.steps - job.zero

    def join(self, job: Job) -> None:
        """Its prompt is prefilled."""
        job.zero = self.steps - job.position
        self._jobs[job] = self._joined
        self._joined += 1
        self.context += job.position
        self.forked[job] = None
        blocks, beyond = divmod(job.position, self.grid)
        if beyond:
            self._push(job, blocks + 1)
        else:
            self.leaving[job] = None

    def remove(self, job: Job) -> None:
        """It has ended, or is preempted; `job.position` is valid again."""
        job.position = self.position(job)
        self.context -= job.position
        job.zero = None
        del self._jobs[job]
        self.leaving.pop(job, None)
        self.forked.pop(job, None)

    # -- the coming step --------------------------------------------------------------------

    def fits(self) -> bool:
        """Whether the coming step finds its units, and pages for live states that others have adopted."""
        core, jobs = self.core, self._crossing
        units = sum(core.units_to(job, self.position(job) + 1) for job in jobs)
        if core.insists:
            return core.memory.could_fit(Need(units, len(self.leaving)))
        return core.memory.missing_for_step(units) is None

    def take(self, steps: int) -> bool:
        """Units for so many steps, no further than anybody's next boundary; all or nothing."""
        jobs = self._crossing
        return self.core.take(jobs, [self.position(job) + steps for job in jobs])

    @property
    def _crossing(self) -> list[Job]:
        """Those that may lack a unit: where a unit is a block, only those on a boundary do."""
        return list(self.leaving if self.core.unit_tokens == self.grid else self._jobs)

    def leave_boundaries(self) -> bool:
        """Prepare the step: let go what the last forwards read, publish and fork on boundaries.

        Says whether anything was given back or published.
        """
        granted = self.take(1)
        assert granted, "the decode step was checked"
        changed = bool(self.forked or self.leaving)
        settling = [job for job in self._ordered(self.forked) if job not in self.leaving]
        leaving = [(job, self.position(job)) for job in self._ordered(self.leaving)]
        self.core.leave(settling, leaving)
        self.forked.clear()
        for job, position in leaving:
            if job.state.source is not None:
                self.forked[job] = None
            self._push(job, position // self.grid + 1)
        self.leaving.clear()
        return changed

    # -- time -------------------------------------------------------------------------------

    def _push(self, job: Job, blocks: int) -> None:
        assert job.zero is not None
        self._sequence += 1
        due = job.zero + min(job.end, blocks * self.grid)
        heapq.heappush(self._due, (due, self._sequence, job.lives, job))

    def steps_to_due(self) -> int:
        """Decode steps until somebody ends or comes to a boundary; nobody stands on one."""
        while not self._is_valid():
            heapq.heappop(self._due)
        return self._due[0][0] - self.steps

    def _is_valid(self) -> bool:
        _, _, lives, job = self._due[0]
        return job.lives == lives and job.zero is not None

    def advance(self, steps: int) -> list[Job]:
        """So many steps later, no more than `steps_to_due`: those that have come to their end."""
        self.steps += steps
        self.context += steps * len(self._jobs)
        ended = []
        while self._due and self._due[0][0] <= self.steps:
            valid, job = self._is_valid(), heapq.heappop(self._due)[3]
            if not valid:
                continue
            if self.position(job) == job.end:
                ended.append(job)
            if self.position(job) < job.end or (job.stops and self._in_order and not job.end % self.grid):
                self.leaving[job] = None  # who ends unexpectedly goes on into the next step
        return self._ordered(ended)
