"""The simulator's requests in the memory that serves (`radix.memory.Memory`)."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_hybrid.geometry import ceil_div
from sglang_hybrid.pools.organization import ONE_CHECKPOINT, Checkpoint, Need
from sglang_hybrid.radix.live import LiveStates
from sglang_hybrid.radix.live_state import LiveState
from sglang_hybrid.radix.memory import Memory, Prefill, Publication
from sglang_hybrid.radix.order import Limit
from sglang_hybrid.simulator.job import Job
from sglang_hybrid.simulator.keys import DIGEST_BYTES
from sglang_hybrid.simulator.setting import Serving, Setting

STATES = 2
"""States that a lone request may need at once: its live one, and the one that it starts from."""


class InsistentStates(LiveStates):
    """A checkpoint is never skipped as long as anything can be evicted for it."""

    def _take_spare(self, limit: Limit) -> Checkpoint | None:
        if not self.lifetime.make_room(ONE_CHECKPOINT):
            return None
        return self.organization.allocate_checkpoint()


class AlignedStates(LiveStates):
    """Checkpoints stand where chunks end, nowhere between."""

    def extend(self, state: LiveState, start: int, end: int) -> None:
        state.prefilled = end


class SourceStates(InsistentStates, AlignedStates):
    """Both, as in the source."""


def states_of(serving: Serving) -> type[LiveStates]:
    """How this scheduler takes checkpoints."""
    return {
        (False, False): LiveStates,
        (True, False): InsistentStates,
        (False, True): AlignedStates,
        (True, True): SourceStates,
    }[serving.insists, serving.aligned]


class Core:
    """The memory of one setting, and what of a job it must know."""

    def __init__(self, setting: Setting) -> None:
        serving, policy = setting.serving, setting.policy
        self.memory = Memory(
            setting.organization(),
            policy if serving.waits else policy._replace(wait="never"),
            digest_bytes=DIGEST_BYTES,
            eviction=setting.eviction,
            placement=setting.placement,
            states=states_of(serving),
        )
        self.grid = self.memory.grid
        self.unit_tokens = self.memory.unit_tokens
        self.insists = serving.insists
        self.aligned = serving.aligned

    def units_to(self, job: Job, depth: int) -> int:
        """Units that the job lacks for so many tokens; a job that is not admitted has those of its path."""
        held = len(job.state.units) if job.running else job.lease.node.depth * self._units_per_block
        return ceil_div(depth, self.unit_tokens) - held

    @property
    def _units_per_block(self) -> int:
        return self.memory.organization.units_per_block

    def ever_fits(self, job: Job) -> bool:
        """Whether an empty memory can serve it."""
        units = ceil_div(job.prompt + job.request.new, self.unit_tokens)
        return self.memory.organization.capacity_fits(Need(units, STATES))

    # -- admission --------------------------------------------------------------------------

    def look_up(self, job: Job) -> int:
        """The deepest token that it could start from: at least one is left to compute."""
        before = job.lookup
        job.lookup = self.memory.look_up(job.namespace, job.key(self.grid), job.known - 1, before)
        return job.lookup.match.depth * self.grid

    def adopt(self, job: Job) -> None:
        """Protect what it would start from; `abandon` undoes it."""
        assert job.lookup is not None
        job.lease = self.memory.adopt(job.lookup.match.node)
        job.position = job.lookup.match.depth * self.grid

    def abandon(self, job: Job) -> None:
        self.memory.abandon(job.lease)

    def admit(self, job: Job) -> None:
        """It runs from now on."""
        assert job.lookup is not None
        job.state, reuse = self.memory.admit(
            job.lookup, job.lease, job.key(self.grid), job.known, resumed=job.lives > 0, key=job
        )
        if not job.lives:
            job.reuse = reuse
        job.lives += 1
        job.running = True

    # -- forwards ---------------------------------------------------------------------------

    def chunk(self, start: int, known: int, left: int) -> int:
        """Tokens of the chunk that begins at `start`; 0 when the next boundary is too far."""
        if not self.aligned:
            return min(known - start, left)
        last = known // self.grid * self.grid
        if start >= last:
            return known - start if known - start <= left else 0
        return min(last, (start + left) // self.grid * self.grid) - start

    def take(self, jobs: Sequence[Job], ends: Sequence[int]) -> bool:
        """The units that each lacks for so many tokens, all or nothing."""
        return self.memory.take_units([job.state for job in jobs], ends)

    def take_chunk(self, job: Job, end: int) -> bool:
        """Take the units of a further chunk, if there is a state to leave the boundary with too."""
        if not self.memory.could_fit(Need(self.units_to(job, end), int(self.insists))):
            return False
        return self.take([job], [end])

    def prefill(self, chunks: Sequence[tuple[Job, int]]) -> None:
        """Prepare a forward up to these token depths; their units are there."""
        self.memory.prepare_prefill([Prefill(job.state, job.position, end) for job, end in chunks])

    def leave(self, settling: Sequence[Job], leaving: Sequence[tuple[Job, int]]) -> None:
        """Prepare a decode step; those that leave a boundary come with their depth."""
        self.memory.prepare_decode(
            [job.state for job in settling], [self._publication(*one) for one in leaving]
        )

    def publish(self, job: Job, position: int, length: int | None = None) -> None:
        """Hand whole blocks to the tree, up to the depth that launched forwards have written.

        `length` is a lesser depth, where the one of the live state is prepared already.
        """
        self.memory.publish(*self._publication(job, position, length))

    def _publication(self, job: Job, position: int, length: int | None = None) -> Publication:
        return Publication(job.state, job.key(self.grid), position if length is None else length, position)

    # -- the end ----------------------------------------------------------------------------

    def release(self, job: Job, position: int) -> None:
        """The request ends; what it computed stays behind."""
        self.publish(job, position)
        self._finish(job)

    def preempt(self, job: Job, position: int) -> None:
        """The same, and its deepest boundary is kept for its return."""
        self.memory.preempt(job, self._publication(job, position))
        self._finish(job)

    def _finish(self, job: Job) -> None:
        self.memory.finish(job.state)
        job.running = False

    def check_integrity(self) -> None:
        self.memory.check_integrity()
