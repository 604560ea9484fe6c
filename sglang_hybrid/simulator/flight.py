"""Results of the last step: where steps overlap, they are known once the next one is prepared."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_hybrid.simulator.decoding import Decoding
from sglang_hybrid.simulator.job import Job


class InFlight:
    """What the last step has computed and nobody has looked at; nothing, where steps do not overlap."""

    def __init__(self, decoding: Decoding) -> None:
        self.decoding = decoding
        self.decoded = False
        """It was a decode: the last token of everybody that decodes is not known."""
        self._jobs: dict[Job, None] = {}

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def add(self, job: Job) -> None:
        """Its prompt is computed, or it has come to its end."""
        self._jobs[job] = None

    def drop(self, job: Job) -> None:
        """It is gone before that is known."""
        self._jobs.pop(job, None)

    def land(self) -> list[Job]:
        """Everything is known now; those to which something has happened, in the order of the batch."""
        landed, self._jobs, self.decoded = list(self._jobs), {}, False
        return landed

    def ended(self) -> list[Job]:
        """Those that take no further step: their length was known beforehand."""
        return [job for job in self._jobs if job.zero is None]

    def generated(self, job: Job) -> int:
        """Tokens of its answer that are known."""
        unknown = self.decoded or job in self._jobs
        return self.decoding.position(job) - job.prompt + 1 - unknown

    def progress(self, job: Job) -> tuple[int, int]:
        """Who has least of it is preempted first."""
        return self.generated(job), -job.prompt

    def batch(self) -> Iterator[tuple[Job, int, int]]:
        """Who decodes, as far as is known: with the depth that is computed, and the tokens generated."""
        for job in (*self.decoding, *self.ended()):
            yield job, self.decoding.position(job), self.generated(job)
