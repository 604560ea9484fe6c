"""Continuous batching under a simulated clock: FCFS, chunked prefill, preemption with recompute."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_hybrid.radix.coming import MOST_PASSED_OVER
from sglang_hybrid.simulator.core import Core
from sglang_hybrid.simulator.decoding import Decoding
from sglang_hybrid.simulator.flight import InFlight
from sglang_hybrid.simulator.job import Chunk, Job
from sglang_hybrid.simulator.line import Line
from sglang_hybrid.simulator.outcome import Outcome, record
from sglang_hybrid.simulator.passes import EnginePass, Expectation, SourcePass
from sglang_hybrid.simulator.request import Request
from sglang_hybrid.simulator.setting import Need, Setting, Victim


class Scheduler:
    """Serves requests that come in order of arrival; `outcome` holds what it has seen so far."""

    def __init__(self, setting: Setting, requests: Iterable[Request], *, records: bool = False) -> None:
        self.setting = setting
        self.cost = setting.cost
        self.serving = setting.serving
        self.core = Core(setting)
        if self.serving.aligned and setting.prefill_tokens < self.core.grid:
            raise ValueError(
                f"{setting.prefill_tokens} prefill tokens a step hold no chunk that ends on a boundary: "
                f"use {self.core.grid} or more"
            )
        self.outcome = Outcome(records=[] if records else None)
        self.line = Line(requests, self.outcome, self.core.ever_fits, isolate=setting.isolate)
        self.waiting = self.line.waiting
        self.running: dict[Job, None] = {}
        """In order of admission."""
        self.prefilling: dict[Job, None] = {}
        """Of these, the ones whose prompt is not computed yet."""
        self.decoding = Decoding(self.core, in_order=self.serving.overlaps)
        self.flight = InFlight(self.decoding)
        self.expectation = Expectation()
        self._blocked = False
        """The head of the queue found no memory, and nothing has been given back since."""

    def run(self) -> Outcome:
        """Serve them all."""
        while self.step():
            pass
        return self.outcome

    def step(self) -> bool:
        """One step, or as many decode steps as nothing happens in; False when all have been served."""
        line = self.line
        line.arrive()
        if not self.running and not self.waiting:
            if line.next_at is None:
                self.outcome.gave_up = self.core.memory.lifetime.pins_given_up
                return False
            line.advance(line.next_at, 0)
            line.arrive()
            self.expectation = Expectation()  # SGLang's starts anew after an idle moment
        if not self.running:
            self._blocked = False
        preempted = self.serving.mixed and self._prepare_decode()
        chunks = self._schedule(admits=not preempted)
        if chunks:
            self._prefill(chunks)
        elif self.decoding:
            self._decode()
        elif self.flight:
            self._results(0)
        elif not self.running and self.waiting:
            self.waiting.popleft()  # alone, and it does not fit
            self.outcome.refused += 1
        return True

    def _spend(self, seconds: float) -> None:
        self.line.advance(self.line.now + seconds, len(self.running))

    # -- prefill ----------------------------------------------------------------------------

    def _schedule(self, *, admits: bool) -> list[Chunk]:
        """Chunks of the coming step: prompts that go on, then waiting requests while they may begin."""
        most = self.setting.most_running
        admits = admits and bool(self.waiting) and not self._blocked and len(self.running) < most
        if not admits and not self.prefilling:
            return []
        rules: SourcePass | EnginePass
        if self.serving.need is Need.ANSWER:
            rules = EnginePass(self.core, self.flight.batch(), self.expectation.ratio)
        else:
            rules = SourcePass(self.core, self.running)
        chunks = self._go_on(rules)
        going_on = len(chunks)
        left = self._tokens_left(chunks)
        passed_over = 0
        while admits and len(self.waiting) > passed_over and left > 0 and len(self.running) < most:
            job = self.waiting[passed_over]
            start = self.core.look_up(job)
            if rules.awaits(job):
                passed_over += 1
                if passed_over == MOST_PASSED_OVER:
                    break
                continue
            tokens = self._adopt(job, start, left, rules)
            if tokens is None:
                self._blocked = True
                break
            if not tokens:
                break  # its first chunk needs more tokens than this step has left
            del self.waiting[passed_over]
            self.running[job] = self.prefilling[job] = None
            chunks.append((job, job.position + tokens))
            left -= tokens
            rules.admitted(job, tokens)
            if not rules.is_open:
                self._blocked = True
                break
        for job, _ in chunks[going_on:]:
            self._begin(job)
        granted = self.core.take([job for job, _ in chunks], [end for _, end in chunks])
        assert granted, "what fits was promised"
        return chunks

    def _tokens_left(self, chunks: list[Chunk]) -> int:
        left = self.setting.prefill_tokens - sum(end - job.position for job, end in chunks)
        return left - len(self.decoding) if self.serving.mixed else left

    def _go_on(self, rules: SourcePass | EnginePass) -> list[Chunk]:
        """Next chunks of prompts that are being computed, in order of admission."""
        chunks: list[Chunk] = []
        for job in list(self.prefilling):
            if not job.running:
                continue  # preempted for one before it
            tokens = self.core.chunk(job.position, job.known, self._tokens_left(chunks))
            tokens = rules.goes_on(job, tokens) if tokens > 0 else 0
            if not tokens:
                break
            end = job.position + tokens
            while rules.preempts and not self.core.take_chunk(job, end):
                victim = self._victim()
                self._preempt(victim)
                chunks = [chunk for chunk in chunks if chunk[0] is not victim]
                if victim is job:
                    return chunks
            chunks.append((job, end))
        return chunks

    def _adopt(self, job: Job, start: int, left: int, rules: SourcePass | EnginePass) -> int | None:
        """Tokens of a job's first chunk; 0 when the step has too few left, None when memory has."""
        core = self.core
        tokens = core.chunk(start, job.known, left)
        if not tokens:
            return 0
        if not rules.fits(job, start, tokens):
            return None
        core.adopt(job)
        if not rules.fits(job, start, tokens):  # what it adopts is not evictable any more
            core.abandon(job)
            return None
        return tokens

    def _begin(self, job: Job) -> None:
        self.core.admit(job)
        if job.lives == 1:
            job.admitted_at = self.line.now
            self.outcome.admitted(job.reuse)
        else:
            self.outcome.resumed_tokens += job.position

    def _prefill(self, chunks: list[Chunk]) -> None:
        outcome = self.outcome
        self.core.prefill(chunks)
        self._results(0)
        alone = not self.decoding
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
        self._spend(self.cost.step(tokens, rows, context, pairs))
        for job, end in chunks:
            outcome.prefilled(job.lives, end - job.position)
            job.position = end
        if self.serving.mixed:
            self._advance(1)
        for job, end in chunks:
            self._prefilled(job, end)
        self._published()
        if alone or self.prefilling:
            self._blocked = False  # SGLang has its flag on a batch: this one is another, or one is taken out

    def _prefilled(self, job: Job, end: int) -> None:
        if end < job.known:
            self.core.publish(job, end)
            return
        del self.prefilling[job]
        if job.known == job.prompt:
            job.first_token = self.line.now
        if self.serving.overlaps:
            self.flight.add(job)
            if end < job.end or job.stops:
                self.decoding.join(job)
        elif end == job.end:
            self._finish(job, end)
        else:
            self.core.publish(job, end)
            self.decoding.join(job)

    def _results(self, prepared: int) -> None:
        """What the last step has led to; so many tokens of those that decode are prepared in the meantime."""
        for job in self.flight.land():
            position = self.decoding.position(job)
            if position < job.end:
                self.core.publish(job, position + prepared, job.known)
                continue
            if job.zero is not None:  # nobody knew that it had come to its end
                self.decoding.remove(job)
                position += prepared
            self._finish(job, position)

    def _published(self) -> None:
        """There is more to match, and more to evict: the source tries the queue's head again, SGLang waits
        until somebody leaves."""
        if self.serving.need is not Need.ANSWER:
            self._blocked = False

    # -- decode -----------------------------------------------------------------------------

    def _prepare_decode(self) -> bool:
        """Make room for the coming decode step, and prepare it; says whether anybody was preempted for it."""
        preempted = False
        while self.decoding and not self.decoding.fits():
            self._preempt(self._victim())
            preempted = True
        if preempted:
            self.expectation.preempted((self.flight.generated(job), job.limit) for job in self.decoding)
            if self.serving.overlaps:
                self.decoding.reorder(sorted(self.decoding, key=self.flight.progress, reverse=True))
        if self.decoding.leave_boundaries():
            self._published()
        self._results(1)
        return preempted

    def _decode(self) -> None:
        """Steps until something happens: a boundary, an end, or an arrival that could begin."""
        decoding = self.decoding
        if self.flight.ended() and not decoding.fits():
            self._results(0)  # who has ended leaves first
            return
        preempted = not self.serving.mixed and self._prepare_decode()
        if not decoding:
            return
        steps = self._undisturbed()
        while steps > 1 and not decoding.take(steps):
            steps = (steps + 1) // 2
        self.outcome.steps += steps
        if not preempted:
            self.expectation.decoded(steps)
        self._spend(self.cost.decode(len(decoding), decoding.context, steps))
        self._advance(steps)

    def _undisturbed(self) -> int:
        """Decode steps in which nothing happens."""
        decoding = self.decoding
        if decoding.forked:
            return 1  # what this step reads is let go with the next
        steps = decoding.steps_to_due()
        if self.waiting and not self._blocked and len(self.running) < self.setting.most_running:
            return 1  # the head waits for tokens of a step
        is_open = not self.waiting and len(self.running) < self.setting.most_running
        if steps == 1 or self.line.next_at is None or not is_open:
            return steps
        left = self.line.next_at - self.line.now
        return min(steps, self.cost.steps_until(len(decoding), decoding.context, left))

    def _advance(self, steps: int) -> None:
        overlaps = self.flight.decoded = self.serving.overlaps
        for job in self.decoding.advance(steps):
            if overlaps:
                self.flight.add(job)
            if not overlaps or not job.stops:
                self.decoding.remove(job)
            if not overlaps:
                self._finish(job, job.end)

    def _finish(self, job: Job, position: int) -> None:
        self.core.release(job, position)
        self._left(job)
        outcome = self.outcome
        outcome.served += 1
        outcome.output_tokens += job.request.new
        outcome.seconds = self.line.now
        if outcome.records is not None:
            outcome.records.append(record(job, self.line.now))

    def _left(self, job: Job) -> None:
        del self.running[job]
        self.flight.drop(job)
        self._blocked = False

    def _victim(self) -> Job:
        if self.serving.victim is Victim.LAST:
            return next(reversed(self.running))
        return min(reversed(self.decoding), key=self.flight.progress)

    def _preempt(self, job: Job) -> None:
        if len(self.running) == 1:
            raise AssertionError(f"request {job.index} runs alone and finds no memory")
        if job.zero is not None:
            job.known = job.prompt + self.flight.generated(job)
            self.decoding.remove(job)
        self.prefilling.pop(job, None)
        self.core.preempt(job, job.position)
        self._left(job)
        self.outcome.preemptions += 1
        if self.serving.victim is Victim.LAST:
            self.waiting.appendleft(job)
        else:
            self.waiting.append(job)
