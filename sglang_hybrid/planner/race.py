"""Simulations of candidates on the same requests: paired seeds, successive halving.

A run's figure is the mean time of a request, from its arrival to its last token, queueing included: with
too much traffic it follows throughput, with little it tells what throughput cannot.  A candidate is judged
by the mean over seeds of the logarithm of its figure against another's on the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

from sglang_hybrid.planner.candidates import Candidate, Machine
from sglang_hybrid.simulator.outcome import Outcome
from sglang_hybrid.simulator.request import Request
from sglang_hybrid.simulator.run import simulate
from sglang_hybrid.simulator.traffic import Traffic

REFUSED_SECONDS = 3600.0
"""What a request counts that an empty memory cannot hold."""

NOISE = 0.01
"""Relative difference below which two candidates are as good as each other."""


class Run(NamedTuple):
    """One candidate on one seed."""

    latency: float
    """Mean seconds of a request, refused ones included."""
    throughput: float
    """Output tokens a second."""
    first_token: float
    """Mean seconds to the first token, of those served."""
    hit_rate: float
    """Prompt tokens served from the cache, of all."""
    running: float
    waiting: float
    preemptions: int
    refused: int

    @classmethod
    def of(cls, outcome: Outcome) -> Run:
        records = outcome.records or []
        served = sum(one.finished - one.at for one in records)
        requests = max(1, len(records) + outcome.refused)
        return cls(
            (served + REFUSED_SECONDS * outcome.refused) / requests,
            outcome.throughput,
            sum(one.first_token - one.at for one in records) / max(1, len(records)),
            outcome.adopted_tokens / max(1, outcome.prompt_tokens),
            outcome.running_median,
            outcome.waiting_median,
            outcome.preemptions,
            outcome.refused,
        )


class Interval(NamedTuple):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


def interval(values: Sequence[float]) -> Interval:
    """By Student's t; a single value has no width, which is to be said where it is shown."""
    mean = fmean(values)
    if len(values) < 2:
        return Interval(mean, mean, mean)
    half = student(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def student(freedom: int) -> float:
    """97.5 % quantile of Student's t, by the Cornish-Fisher expansion; exact where it is poor, below 3."""
    if freedom < 3:
        return (12.7062, 4.3027)[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    a = (z**3 + z) / 4
    b = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    c = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    d = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + a / freedom + b / freedom**2 + c / freedom**3 + d / freedom**4


class Race:
    """Runs of candidates, each made once; seed k gives all of them the same requests."""

    def __init__(self, machine: Machine, traffic: Traffic, count: int, workers: int = 1) -> None:
        """`workers` processes share the runs of a ranking."""
        self.machine = machine
        self.traffic = traffic
        self.count = count
        self.workers = workers
        self._requests: dict[int, list[Request]] = {}
        self._runs: dict[tuple[Candidate, int], Run] = {}

    def run(self, candidate: Candidate, seed: int) -> Run:
        if (candidate, seed) not in self._runs:
            self._runs[candidate, seed] = self._simulate(candidate, seed)
        return self._runs[candidate, seed]

    def _simulate(self, candidate: Candidate, seed: int) -> Run:
        requests = self._of_seed(seed)
        return Run.of(simulate(self.machine.setting(candidate), requests, records=True))

    def _of_seed(self, seed: int) -> list[Request]:
        if seed not in self._requests:
            self._requests[seed] = self.traffic.requests(seed, self.count)
        return self._requests[seed]

    def prepare(self, candidates: Iterable[Candidate], seeds: Iterable[int]) -> None:
        """Make the runs that are missing, by all workers."""
        seeds = list(seeds)
        missing = [(one, seed) for one in candidates for seed in seeds if (one, seed) not in self._runs]
        workers = min(self.workers, len(missing))
        if workers < 2:
            return
        for seed in seeds:
            self._of_seed(seed)  # before the children are made, which then have them too
        context = get_context("fork")
        children = []
        for part in (missing[start::workers] for start in range(workers)):
            receiver, sender = context.Pipe(duplex=False)
            child = context.Process(target=self._work, args=(part, sender), daemon=True)
            child.start()
            sender.close()
            children.append((part, receiver, child))
        for part, receiver, child in children:
            self._runs |= zip(part, receiver.recv())
            child.join()

    def _work(self, part: Sequence[tuple[Candidate, int]], sender: Connection) -> None:
        """In a child: no pool, whose threads and forks do not go together."""
        sender.send([self._simulate(candidate, seed) for candidate, seed in part])

    def sample(self) -> list[Request]:
        """Requests of the first seed."""
        return self._of_seed(0)

    def tried(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Those of which there is a run."""
        return [one for one in candidates if (one, 0) in self._runs]

    @property
    def runs(self) -> int:
        """Simulations so far."""
        return len(self._runs)

    def score(self, candidate: Candidate, seeds: Iterable[int]) -> float:
        """Mean logarithm of the latency: less is better."""
        return fmean(math.log(self.run(candidate, seed).latency) for seed in seeds)

    def ranked(self, candidates: Iterable[Candidate], seeds: Sequence[int]) -> list[Candidate]:
        """The best one first; equal ones in the order in which they came."""
        candidates = list(dict.fromkeys(candidates))
        self.prepare(candidates, seeds)
        return sorted(candidates, key=lambda one: self.score(one, seeds))

    def excess(self, candidate: Candidate, other: Candidate, seeds: Sequence[int]) -> Interval:
        """By what part a request takes longer than with the other: 0.1 for 10 %."""
        logs = [
            math.log(self.run(candidate, seed).latency / self.run(other, seed).latency) for seed in seeds
        ]
        return Interval(*(math.expm1(one) for one in interval(logs)))

    def of(self, candidate: Candidate, seeds: Sequence[int], field: str) -> Interval:
        """A figure of a candidate's runs."""
        return interval([float(getattr(self.run(candidate, seed), field)) for seed in seeds])
