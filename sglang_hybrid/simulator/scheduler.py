"""Continuous batching under a simulated clock: FCFS, chunked prefill, preemption with recompute."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from sglang_hybrid.geometry import ceil_div
from sglang_hybrid.pools.organization import Need as Pieces
from sglang_hybrid.simulator.core import Core
from sglang_hybrid.simulator.decoding import Decoding
from sglang_hybrid.simulator.job import Job
from sglang_hybrid.simulator.outcome import Outcome, Record
from sglang_hybrid.simulator.request import Request
from sglang_hybrid.simulator.setting import Need, Setting, Victim

Chunk = tuple[Job, int]
"""A job, and the token depth to which a step prefills it."""


class Scheduler:
    """Serves requests that come in order of arrival; `outcome` holds what it has seen so far."""

    def __init__(self, setting: Setting, requests: Iterable[Request], *, records: bool = False) -> None:
        self.setting = setting
        self.cost = setting.cost
        self.serving = setting.serving
        self.core = Core(setting)
        self.now = 0.0
        self.outcome = Outcome(records=[] if records else None)
        self.waiting: deque[Job] = deque()
        self.running: dict[Job, None] = {}
        """In order of admission."""
        self.prefilling: dict[Job, None] = {}
        """Of these, the ones whose prompt is not computed yet."""
        self.decoding = Decoding(self.core.grid)
        self._forked: dict[Job, None] = {}
        """Jobs whose forward reads another state than it writes; settled when the next one is prepared."""
        self._blocked = False
        """The head of the queue found no memory, and nothing has been given back since."""
        self._preemptions: dict[Job, int] = {}
        self._arrivals = _in_order(requests)
        self._count = 0
        self._next: Request | None = next(self._arrivals, None)
        if self.serving.aligned and setting.prefill_tokens < self.core.grid:
            raise ValueError(
                f"{setting.prefill_tokens} prefill tokens a step hold no chunk that ends on a boundary: "
                f"use {self.core.grid} or more"
            )

    def run(self) -> Outcome:
        """Serve them all."""
        while self.step():
            pass
        return self.outcome

    def step(self) -> bool:
        """One step, or as many decode steps as nothing happens in; False when all have been served."""
        self._arrive(self.now)
        if not self.running and not self.waiting:
            if self._next is None:
                self.outcome.gave_up = self.core.lifetime.pins_given_up
                return False
            self._wait_until(self._next.at)
            self._arrive(self.now)
        preempted = self._prepare_decode()
        chunks = self._continue_prefills()
        if not preempted:
            self._admit(chunks)
        if chunks:
            self._prefill(chunks)
        elif self.decoding:
            self._decode()
        elif self.waiting and not self.running:
            # Alone, with everything else evictable: it never fits, whatever `ever_fits` promised.
            self._refuse(self.waiting.popleft())
        return True

    # -- clock and queue --------------------------------------------------------------------

    def _wait_until(self, end: float) -> None:
        """The clock goes on; who arrives meanwhile joins the queue at its moment."""
        outcome, running = self.outcome, len(self.running)
        while self._next is not None and self._next.at < end:
            at = max(self._next.at, self.now)
            outcome.waiting_seconds[len(self.waiting)] += at - self.now
            outcome.running_seconds[running] += at - self.now
            self.now = at
            self._arrive(at)
        outcome.waiting_seconds[len(self.waiting)] += end - self.now
        outcome.running_seconds[running] += end - self.now
        self.now = end

    def _arrive(self, now: float) -> None:
        while self._next is not None and self._next.at <= now:
            job = Job(self._count, self._next, isolate=self.setting.isolate)
            self._count += 1
            self._next = next(self._arrivals, None)
            if self.core.ever_fits(job):
                self.waiting.append(job)
            else:
                self._refuse(job)

    def _refuse(self, job: Job) -> None:
        self.outcome.refused += 1

    # -- admission --------------------------------------------------------------------------

    def _admit(self, chunks: list[Chunk]) -> None:
        """Begin waiting requests, in order, while this step has tokens left and memory lets them."""
        left, most = self._tokens_left(chunks), self.setting.most_running
        while self.waiting and left > 0 and not self._blocked and len(self.running) < most:
            job = self.waiting[0]
            taken = self._try(job, left)
            if taken is None:
                self._blocked = True
                return
            if not taken:
                return  # its first chunk needs more tokens than this step has left
            self.waiting.popleft()
            self.running[job] = self.prefilling[job] = None
            chunks.append((job, job.position + taken))
            left -= taken

    def _tokens_left(self, chunks: list[Chunk]) -> int:
        left = self.setting.prefill_tokens - sum(end - job.position for job, end in chunks)
        return left - len(self.decoding) if self.serving.mixed else left

    def _try(self, job: Job, left: int) -> int | None:
        """Admit a job: tokens of its first chunk, 0 when the step has too few left, None without memory."""
        core = self.core
        match = core.match(job)
        start = match.depth * core.grid
        tokens = self._chunk(start, job.known, left)
        if not tokens:
            return 0
        end = start + tokens if self.serving.need is Need.CHUNK else job.known
        missing = ceil_div(end, core.unit_tokens) - match.depth * core.organization.units_per_block
        if not self._fits(missing):
            return None
        core.adopt(job, match)
        if not self._fits(missing):  # what it adopts is not evictable any more
            core.abandon(job)
            return None
        core.admit(job, match)
        if job.lives == 1:
            self._first_admission(job)
        else:
            self.outcome.resumed_tokens += job.position
        granted = core.take([job], [core.units_to(job, start + tokens)])
        assert granted, "what fits was promised"
        return tokens

    def _first_admission(self, job: Job) -> None:
        outcome, reuse = self.outcome, job.reuse
        job.admitted_at = self.now
        outcome.prompt_tokens += job.prompt
        outcome.adopted_tokens += reuse.j_adopt
        outcome.attention_tokens += reuse.attention
        outcome.r_max_tokens += reuse.r_max

    def _fits(self, units: int) -> bool:
        """Whether a request that lacks so many units may begin."""
        core = self.core
        if self.serving.need is Need.PROMPT:
            units += sum(core.units_to(job, job.known) for job in self.prefilling)
        need = Pieces(units, 1 + core.live.due)
        if self.running:
            need = need.plus(core.admission.headroom)
        return core.organization.could_fit(need)

    # -- prefill ----------------------------------------------------------------------------

    def _chunk(self, start: int, known: int, left: int) -> int:
        """Tokens of the chunk that begins at `start`; 0 when the next boundary is too far."""
        if not self.serving.aligned:
            return min(known - start, left)
        grid = self.core.grid
        last = known // grid * grid
        if start >= last:
            return known - start if known - start <= left else 0
        return min(last, (start + left) // grid * grid) - start

    def _continue_prefills(self) -> list[Chunk]:
        """Next chunks of prompts that are being computed, in order of admission."""
        chunks: list[Chunk] = []
        for job in list(self.prefilling):
            if not job.running:
                continue  # preempted for one before it
            tokens = self._chunk(job.position, job.known, self._tokens_left(chunks))
            if tokens <= 0:
                break
            end = job.position + tokens
            while not self.core.take([job], [self.core.units_to(job, end)]):
                victim = self._victim()
                self._preempt(victim)
                chunks = [chunk for chunk in chunks if chunk[0] is not victim]
                if victim is job:
                    return chunks
            chunks.append((job, end))
        return chunks

    def _prefill(self, chunks: list[Chunk]) -> None:
        outcome = self.outcome
        self.core.prefill(chunks)
        tokens = sum(end - job.position for job, end in chunks)
        context = sum(end for _, end in chunks)
        pairs = sum((end - job.position) * (job.position + end + 1) / 2 for job, end in chunks)
        rows = len(chunks)
        if self.serving.mixed:
            rows += len(self.decoding)
            tokens += len(self.decoding)
            context += self.decoding.context
            pairs += self.decoding.context
        outcome.steps += 1
        self._wait_until(self.now + self.cost.step(tokens, rows, context, pairs))
        for job, end in chunks:
            if job.lives == 1:
                outcome.prefilled_tokens += end - job.position
            else:
                outcome.prefilled_again_tokens += end - job.position
            job.position = end
        if self.serving.mixed:
            self._advance(1)
        for job, end in chunks:
            self._prefilled(job, end)
        self._blocked = False

    def _prefilled(self, job: Job, end: int) -> None:
        if end < job.known:
            self.core.publish(job, end)
            return
        del self.prefilling[job]
        if job.lives == 1:
            job.first_token = self.now
        if end == job.end:
            self._finish(job)
            return
        self.core.publish(job, end)
        self._forked[job] = None
        self.decoding.join(job)

    # -- decode -----------------------------------------------------------------------------

    def _prepare_decode(self) -> bool:
        """Make room for the coming decode step, and take it; says whether anybody was preempted for it."""
        preempted = False
        while self.decoding and not self._fits_decode():
            self._preempt(self._victim())
            preempted = True
        if self.serving.mixed:
            self._leave_boundaries()
        return preempted

    def _fits_decode(self) -> bool:
        _, counts = self._wanted(1)
        return self.core.organization.could_fit(Pieces(sum(counts), self.core.live.forced))

    def _wanted(self, steps: int) -> tuple[list[Job], list[int]]:
        """Units that so many decode steps take, no further than anybody's next boundary."""
        core, decoding = self.core, self.decoding
        # Where a unit is a block, only those on a boundary lack one.
        jobs = list(decoding.leaving) if core.unit_tokens == core.grid else list(decoding)
        return jobs, [core.units_to(job, decoding.position(job) + steps) for job in jobs]

    def _take(self, steps: int) -> bool:
        return self.core.take(*self._wanted(steps))

    def _leave_boundaries(self) -> None:
        """Prepare the decode step: publish and fork on boundaries, let go what the last forwards read."""
        core, decoding = self.core, self.decoding
        granted = self._take(1)
        assert granted, "the decode step was checked"
        for job in self._forked:
            if job not in decoding.leaving:
                core.live.settle(job.state)
        if self._forked or decoding.leaving:
            self._blocked = False
        self._forked.clear()
        for job in decoding.depart():
            position = decoding.position(job)
            core.publish(job, position)
            core.live.begin(job.state, position, None)
            if job.state.source is not None:
                self._forked[job] = None

    def _decode(self) -> None:
        """Steps until something happens: a boundary, an end, or an arrival that could begin."""
        decoding = self.decoding
        if not self.serving.mixed:
            self._leave_boundaries()
        steps = self._undisturbed()
        while steps > 1 and not self._take(steps):
            steps = (steps + 1) // 2
        self.outcome.steps += steps
        self._wait_until(self.now + self.cost.decode(len(decoding), decoding.context, steps))
        self._advance(steps)

    def _undisturbed(self) -> int:
        """Decode steps in which nothing happens."""
        decoding = self.decoding
        if self._forked:
            return 1  # what this step reads is let go with the next
        steps = decoding.steps_to_due()
        is_open = not self.waiting and len(self.running) < self.setting.most_running
        if steps > 1 and self._next is not None and is_open:
            left = self._next.at - self.now
            steps = min(steps, self.cost.steps_until(len(decoding), decoding.context, left))
        return steps

    def _advance(self, steps: int) -> None:
        for job in self.decoding.advance(steps):
            self.decoding.remove(job)
            self._finish(job)

    # -- the end ----------------------------------------------------------------------------

    def _finish(self, job: Job) -> None:
        self.core.release(job, job.end)
        del self.running[job]
        self._forked.pop(job, None)
        job.forget_key()
        self._blocked = False
        outcome = self.outcome
        outcome.served += 1
        outcome.output_tokens += job.request.new
        outcome.seconds = self.now
        preemptions = self._preemptions.pop(job, 0)
        if outcome.records is not None:
            reuse = job.reuse
            outcome.records.append(
                Record(
                    job.index,
                    job.request.at,
                    job.admitted_at,
                    job.first_token,
                    self.now,
                    job.prompt,
                    job.request.new,
                    reuse.r_max,
                    reuse.attention,
                    reuse.j_adopt,
                    reuse.cause,
                    preemptions,
                )
            )

    def _victim(self) -> Job:
        if self.serving.victim is Victim.LAST:
            return next(reversed(self.running))
        return min(self.decoding, key=lambda job: (self.decoding.position(job) - job.prompt, -job.prompt))

    def _preempt(self, job: Job) -> None:
        if len(self.running) == 1:
            raise AssertionError(f"request {job.index} runs alone and finds no memory")
        if job.zero is not None:
            self.decoding.remove(job)
            job.known = job.position + 1
        self.prefilling.pop(job, None)
        self._forked.pop(job, None)
        del self.running[job]
        self.core.preempt(job, job.position)
        self._blocked = False
        self.outcome.preemptions += 1
        self._preemptions[job] = self._preemptions.get(job, 0) + 1
        if self.serving.victim is Victim.LAST:
            self.waiting.appendleft(job)
        else:
            self.waiting.append(job)


def _in_order(requests: Iterable[Request]) -> Iterator[Request]:
    """The requests; raises `ValueError` where one arrives before the one ahead of it."""
    last = 0.0
    for index, request in enumerate(requests):
        if request.at < last:
            raise ValueError(f"request {index} arrives at {request.at}, after one at {last}: sort them")
        last = request.at
        yield request
