"""The clock and the queue: who arrives when, who waits, and for how long how many did."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from sglang_hybrid.simulator.job import Job
from sglang_hybrid.simulator.outcome import Outcome
from sglang_hybrid.simulator.request import Request


class Line:
    """Requests join the queue at the moment they arrive, however far the clock jumps."""

    def __init__(
        self, requests: Iterable[Request], outcome: Outcome, fits: Callable[[Job], bool], *, isolate: bool
    ) -> None:
        """`fits` says whether an empty memory can serve a job; others are refused."""
        self.now = 0.0
        self.waiting: deque[Job] = deque()
        self._outcome = outcome
        self._fits = fits
        self._isolate = isolate
        self._requests = _in_order(requests)
        self._next: Request | None = next(self._requests, None)
        self._count = 0

    @property
    def next_at(self) -> float | None:
        """When the next request arrives; None when all have."""
        return None if self._next is None else self._next.at

    def arrive(self) -> None:
        """Let in who has arrived by now."""
        while self._next is not None and self._next.at <= self.now:
            job = Job(self._count, self._next, isolate=self._isolate)
            self._count += 1
            self._next = next(self._requests, None)
            if self._fits(job):
                self.waiting.append(job)
            else:
                self._outcome.refused += 1

    def advance(self, end: float, running: int) -> None:
        """The clock goes on to `end` while so many run; who arrives just then is let in by `arrive`."""
        waited = self._outcome.waiting_seconds
        self._outcome.running_seconds[running] += end - self.now
        while self._next is not None and self._next.at < end:
            at = max(self._next.at, self.now)
            waited[len(self.waiting)] += at - self.now
            self.now = at
            self.arrive()
        waited[len(self.waiting)] += end - self.now
        self.now = end


def _in_order(requests: Iterable[Request]) -> Iterator[Request]:
    """The requests; raises `ValueError` where one arrives before the one ahead of it."""
    last = 0.0
    for index, request in enumerate(requests):
        if request.at < last:
            raise ValueError(f"request {index} arrives at {request.at}, after one at {last}: sort them")
        last = request.at
        yield request
