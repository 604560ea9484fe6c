"""Requests that decode in lockstep: nobody is touched in a step in which nothing happens to it."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from sglang_hybrid.simulator.job import Job


class Decoding:
    """`steps` decode steps have been made; a job that joined at depth p has its `zero` p steps before."""

    def __init__(self, grid: int) -> None:
        self.grid = grid
        self.steps = 0
        self.context = 0
        """Tokens of all of them."""
        self.leaving: dict[Job, None] = {}
        """Those on a boundary that they leave with the next step."""
        self._jobs: dict[Job, None] = {}
        self._due: list[tuple[int, int, int, Job]] = []
        """Step at which a job comes to its end or to a boundary; left-over entries have another life."""
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def position(self, job: Job) -> int:
        """Tokens whose state is computed."""
        return job.position if job.zero is None else self.steps - job.zero

    def join(self, job: Job) -> None:
        """Its prompt is prefilled."""
        job.zero = self.steps - job.position
        self._jobs[job] = None
        self.context += job.position
        self._file(job)

    def remove(self, job: Job) -> None:
        """It has ended, or is preempted; `job.position` is valid again."""
        job.position = self.position(job)
        self.context -= job.position
        job.zero = None
        del self._jobs[job]
        self.leaving.pop(job, None)

    def depart(self) -> list[Job]:
        """Take those that stand on a boundary: they leave it now."""
        jobs = list(self.leaving)
        self.leaving.clear()
        for job in jobs:
            self._push(job, self.position(job) // self.grid + 1)
        return jobs

    def _file(self, job: Job) -> None:
        blocks, beyond = divmod(self.position(job), self.grid)
        if beyond:
            self._push(job, blocks + 1)
        else:
            self.leaving[job] = None

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
            else:
                self.leaving[job] = None
        return ended
