"""A replay that runs out of memory: units as they are needed, preemption, pins, headroom and retention."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from bench.replay import STEP_TOKENS, Replay, Running
from bench.trace import Request
from sglang_hybrid.geometry import ceil_div
from sglang_hybrid.pools.organization import Checkpoint, Need, Organization
from sglang_hybrid.radix.lifetime import Lifetime
from sglang_hybrid.radix.live import LiveState
from sglang_hybrid.radix.node import Node
from sglang_hybrid.radix.policy import Policy


class Job(Running):
    """A request through all its lives; `known` tokens are prefilled in the present one."""

    def __init__(self, rid: int, request: Request, key: bytes) -> None:
        self.rid = rid
        self.request = request
        self.key = key
        self.known = request.prompt
        self.lives = 0

    def begin(self, node: Node) -> None:
        self.node = node
        self.adopted = node.checkpoint
        self.state = LiveState(newcomer=not self.lives)
        self.state.units = [unit for run in node.path() for unit in run.units]
        self.position = 0


class Pressure(Replay):
    """One scheduler without overlap, in the order of SGLang's: admit, prefill whole prompts, decode a step.

    Admission expects nothing of the answers, as the source's does: so it admits more than fits, and who
    has generated least is preempted.
    """

    def __init__(
        self, organization: Organization, policy: Policy, most_running: int, *, isolate: bool = False
    ) -> None:
        """`isolate` puts every request under a key of its own."""
        super().__init__(organization, Lifetime, most_running)
        self.isolate = isolate
        self.live = policy.live_states(self.tree, self.lifetime)
        self.admission = policy.admission(self.live)
        self.jobs: list[Job] = []
        """Those that run, in order of admission."""
        self.pins: dict[int, Checkpoint] = {}
        self.preemptions = 0
        self.served = 0
        self.steps = 0
        self.computed_tokens = 0
        """By prefills, first and later lives together."""
        self.attention_tokens = 0
        """Prompt tokens whose KV was there at first admission, with a state or without."""

    def serve(self, requests: Sequence[Request]) -> None:
        """All of them, waiting from the start, in their order; the preempted join the end of the queue."""
        waiting = deque(Job(rid, request, self._key(request)) for rid, request in enumerate(requests))
        while waiting or self.jobs:
            batch = self._admit_jobs(waiting)
            if not batch and not self.jobs:
                waiting.popleft()
                self.refused += 1
            self._prefill_jobs(batch)
            self._step(waiting)
            self.steps += 1

    # -- admission --------------------------------------------------------------------------

    def _admit_jobs(self, waiting: deque[Job]) -> list[Job]:
        batch: list[Job] = []
        promised = promised_leaves = 0
        while waiting and len(self.jobs) + len(batch) < self.most_running:
            job = waiting[0]
            self._adopt_job(job)
            units = ceil_div(job.known, self.organization.unit_tokens) - len(job.state.units)
            leaves = len(self.live.planned(job.position, job.known))
            if not self.admission.fits(promised + units, 0, promised_leaves + leaves):
                self._let_go(job)
                self.tree.unlock(job.node)
                break
            waiting.popleft()
            batch.append(job)
            promised += units
            promised_leaves += leaves
            if not job.lives:
                self.adopted_tokens += job.position
                self.attention_tokens += job.state.branch
                self.prompt_tokens += job.request.prompt
            job.lives += 1
            self.live.running += 1
            self._unpin(job)
        return batch

    def _adopt_job(self, job: Job) -> None:
        grid = self.organization.grid
        key = job.rid if self.isolate else None
        match = self.tree.match(key, job.key, (job.known - 1) // grid)
        job.begin(self.tree.lock(match.node))
        if job.adopted is not None:
            self.organization.hold(job.adopted)
        job.position = match.depth * grid
        job.state.branch = match.attention_depth * grid
        parted = self.tree.parted(match.node, job.key, match.attention_depth)
        job.state.parted = [depth * grid for depth in parted]

    # -- forwards ---------------------------------------------------------------------------

    def _take(self, jobs: Sequence[Job], ends: Sequence[int]) -> None:
        """Units up to these token depths; `could_fit` has promised them."""
        counts = [
            ceil_div(end, self.organization.unit_tokens) - len(job.state.units)
            for job, end in zip(jobs, ends, strict=True)
        ]
        total = sum(counts)
        assert self.lifetime.make_room(Need(units=total)), f"could_fit promised {total} units"
        units = self.organization.allocate_units(total)
        assert units is not None
        for job, count in zip(jobs, counts, strict=True):
            job.state.units += units[:count]
            del units[:count]

    def _prefill_jobs(self, batch: Sequence[Job]) -> None:
        for job in batch:
            if job.adopted is not None:
                self.lifetime.touch(job.adopted)
        self._take(batch, [job.known for job in batch])
        for job in batch:
            self.live.begin(job.state, job.position, job.adopted)
            self._let_go(job)
        for job in batch:
            self.live.extend(job.state, job.position, job.known)
            self.computed_tokens += job.known - job.position
            job.position = job.known
            self.jobs.append(job)
        for job in batch:
            self._publish(job)

    def _step(self, waiting: deque[Job]) -> None:
        """Up to STEP_TOKENS more tokens for everybody, no further than the next boundary."""
        while not self._step_fits():
            victim = min(self.jobs, key=lambda job: (job.position - job.request.prompt, -job.request.prompt))
            self._preempt(victim)
            waiting.append(victim)
        grid = self.organization.grid
        ends = [
            min(job.end, job.position + STEP_TOKENS, (job.position // grid + 1) * grid) for job in self.jobs
        ]
        self._take(self.jobs, ends)
        for job, end in zip(list(self.jobs), ends, strict=True):
            if job.position % grid == 0:
                self._publish(job)
                self.live.begin(job.state, job.position, None)
            job.position = end
            self.live.settle(job.state)
            if job.position == job.end:
                self._publish(job)
                self._release(job)
                self.served += 1

    def _step_fits(self) -> bool:
        size, grid = self.organization.unit_tokens, self.organization.grid
        units = 0
        for job in self.jobs:
            end = min(job.end, job.position + STEP_TOKENS, (job.position // grid + 1) * grid)
            units += ceil_div(end, size) - len(job.state.units)
        return self.organization.could_fit(Need(units, self.live.forced))

    def _preempt(self, job: Job) -> None:
        assert len(self.jobs) > 1, "the last running request does not fit"
        self.preemptions += 1
        job.known = job.position
        self._publish(job)
        node: Node | None = job.node
        while node is not None and node.checkpoint is None:
            node = node.parent
        if node is not None and node.checkpoint is not None:
            self.lifetime.pin(node.checkpoint)
            self.pins[job.rid] = node.checkpoint
        self._release(job)

    def _unpin(self, job: Job) -> None:
        checkpoint = self.pins.pop(job.rid, None)
        if checkpoint is not None:
            self.lifetime.unpin(checkpoint)

    def _release(self, job: Job) -> None:
        own = job.node.depth * self.organization.units_per_block
        self.organization.release_units(job.state.units[own:])
        self.tree.unlock(job.node)
        self.live.release(job.state)
        self.live.running -= 1
        self.jobs.remove(job)
